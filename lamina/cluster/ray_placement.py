"""Which of a Ray cluster's resources a worker takes, by the kind of its device, and on which node. Pure."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lamina.cluster.pool import CPU, CUDA, EMULATED, GPUS, RUNNABLE
from lamina.core.errors import ConfigError

Bundle = Mapping[str, float]
"""Amounts of Ray's resources, by name."""

ACCELERATORS = {kind: name.split()[1] for kind, name in GPUS.items() if len(name.split()) == 2}
"""GPU kinds that Ray recognizes by itself, with its names for them: the driver's without NVIDIA."""

_HIDDEN = ("memory", "object_store_memory", "node:")  # of no interest here

PLACE_S = 600.0  # for Ray to find a node for a worker: its autoscaler may have to rent one
A_LITTLE = 0.001  # of an accelerator type, which every GPU of a node shares


@dataclass(frozen=True)
class RayNode:
    """A node of the cluster: its name for people, all that it has, and what is free."""

    name: str
    total: Bundle
    free: Bundle

    def less(self, bundle: Bundle) -> "RayNode":
        """With a bundle taken."""
        left = {name: amount - bundle.get(name, 0.0) for name, amount in self.free.items()}
        return dataclasses.replace(self, free=left)

    def holds(self, bundle: Bundle) -> bool:
        """True if the bundle is free here."""
        return all(self.free.get(name, 0.0) >= amount - 1e-9 for name, amount in bundle.items())


def own_kinds(text: str | None) -> dict[str, str]:
    """Kinds and the resources that they need, from "rtx3090=my_gpu,far=zone:b". Raises ConfigError."""
    kinds: dict[str, str] = {}
    for part in filter(None, (text or "").split(",")):
        kind, equals, resource = (word.strip() for word in part.partition("="))
        if not (kind and equals and resource):
            raise ConfigError(f"kind {part!r} names no resource; give name=resource, such as rtx3090=my_gpu")
        kinds[kind.lower()] = resource
    return kinds


def known_kinds(own: Mapping[str, str]) -> list[str]:
    """Kinds of workers that a Ray cluster can be asked for. ``own``: see ``own_kinds``."""
    return [*RUNNABLE, *own]


def bundle(kind: str, own: Mapping[str, str], threads: int | None) -> dict[str, float]:
    """Return what a worker of this kind takes from Ray: a GPU, or a core per thread, and the resource that names the
    kind.

    ``own``: see ``own_kinds``. A GPU that Ray does not recognize has the kind's name as a resource.
    """
    named = {own[kind]: 1.0} if kind in own else {}
    if kind in GPUS or kind == CUDA:
        if not named and kind in ACCELERATORS:
            named = {f"accelerator_type:{ACCELERATORS[kind]}": A_LITTLE}
        elif not named and kind != CUDA:
            named = {kind: 1.0}
        return {"GPU": 1.0, **named}
    return {"CPU": float(threads or 1), **named}


def device(kind: str) -> str:
    """Return what a worker of this kind runs on, within the GPUs that Ray has given to it."""
    if kind in GPUS or kind == CUDA:
        return "cuda:0"
    return EMULATED if kind == EMULATED else CPU


def place(bundles: Mapping[str, Bundle], nodes: Sequence[RayNode]) -> dict[str, str]:
    """Return the node of each worker, by first fit, the most demanding first. Ray may choose others.

    Raises ConfigError if some have no place, with the resource that is missing and what the cluster has.
    """
    left, placed, missing = list(nodes), {}, []
    for worker, wanted in sorted(bundles.items(), key=lambda item: (-len(item[1]), -sum(item[1].values()))):
        index = next((index for index, node in enumerate(left) if node.holds(wanted)), None)
        if index is None:
            missing.append(worker)
        else:
            placed[worker] = left[index].name
            left[index] = left[index].less(wanted)
    if missing:
        raise ConfigError(_shortage(missing, bundles, nodes, left))
    return {worker: placed[worker] for worker in bundles}


def _shortage(
    missing: Sequence[str], bundles: Mapping[str, Bundle], nodes: Sequence[RayNode], left: Sequence[RayNode]
) -> str:
    wanted = bundles[missing[0]]
    lacking = [name for name, amount in wanted.items() if all(node.total.get(name, 0.0) < amount for node in nodes)]
    alike = [worker for worker in bundles if bundles[worker] == wanted]
    if lacking:
        why = f"no node of the Ray cluster has {_amounts({name: wanted[name] for name in lacking})}"
    else:
        why = f"of {len(alike)} workers that need it, the Ray cluster has room for {len(alike) - len(missing)}"
        why = why if set(missing) <= set(alike) else "the Ray cluster has too little room"
    each = "; ".join(
        f"{node.name} has {_amounts(node.total)}, free before this {_amounts(node.free)}" for node in nodes
    )
    names = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
    return f"{names} need {_amounts(wanted)} each: {why}. {each or 'It has no node'}"


def _amounts(amounts: Bundle) -> str:
    shown = {name: amount for name, amount in sorted(amounts.items()) if amount and not name.startswith(_HIDDEN)}
    return ", ".join(f"{name} {amount:g}" for name, amount in shown.items()) or "nothing"
