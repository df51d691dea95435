"""Takes over the workers of an engine that has ended: they keep weights and links, and forget all requests.

Whenever the members change, the engine saves the state that its successor needs. Only members that are linked to all
others are saved: a worker that was joining or leaving when the engine ended is ended too.
"""

import dataclasses
import time
from collections.abc import Collection, Mapping

import msgspec

from lamina.cluster.bringup import Cluster, ClusterPlan, fabric_of, with_turns
from lamina.cluster.joining import Fabric
from lamina.cluster.local_workers import SupervisedWorkers
from lamina.control.messages import ComputeSetup, EndEpoch, EpochEnded, Hello, MemorySetup, ModelLoaded
from lamina.control.sockets import ControlServer
from lamina.core.errors import DeadlineError, TransportError, UnreachableError
from lamina.core.topology import Epoch, Role, Topology
from lamina.dataplane.transport_choice import Choice, Offer

REACH_S = 20.0  # for workers to connect to another engine
END_S = 60.0  # for all workers to drop their steps: one may be inside a long slice
POLL_S = 0.01


class Saved(msgspec.Struct, frozen=True):
    """The state of a running cluster that another engine cannot find out from its workers."""

    topology: Topology
    loaded: ModelLoaded
    compute_setup: ComputeSetup
    memory_setup: MemorySetup
    max_model_len: int
    greetings: dict[str, Hello]
    offers: dict[str, Offer]
    links: list[tuple[str, str, Choice]]
    wanted: dict[Role, int]

    @classmethod
    def from_topology(
        cls, fabric: Fabric, topology: Topology, wanted: Mapping[Role, int], max_model_len: int
    ) -> "Saved":
        """Return the state with the members of ``topology``. ``wanted``: target size of each pool."""
        names = topology.names
        links = [(*pair, choice) for pair, choice in fabric.links.items() if names.issuperset(pair)]
        offers = {name: offer for name, offer in fabric.offers.items() if name in names}
        greetings = {name: fabric.greetings[name] for name in names}
        return cls(
            topology,
            fabric.loaded,
            fabric.compute_setup,
            fabric.memory_setup,
            max_model_len,
            greetings,
            offers,
            links,
            dict(wanted),
        )


def take_over(control: ControlServer, workers: SupervisedWorkers, plan: ClusterPlan, saved: Saved) -> Cluster:
    """Return the cluster of the remaining workers, which have forgotten all requests.

    Raises TransportError if a role has no worker any more, or workers do not answer.
    """
    plan = with_turns(plan, len(saved.loaded.attentions) + 1)
    plan = dataclasses.replace(plan, forgets=saved.memory_setup.forgets)
    fabric = fabric_of(workers, plan, saved.loaded, saved.memory_setup)
    before, last = saved.topology, saved.topology.epoch
    before = msgspec.structs.replace(before, epoch=Epoch(last.incarnation + 1, last.number))
    while True:
        lost = before.whole_replicas(before.names & workers.ended().keys())
        if (role := before.lacks(lost)) is not None:
            raise TransportError(f"no {role} worker is left: {dict(workers.ended())}")
        before = before.without(lost)
        control.apply_topology(before)
        workers.kill_workers(workers.processes - before.names)
        if _end_epoch(control, workers, before):
            break
    fabric.offers.update({name: offer for name, offer in saved.offers.items() if name in before.names})
    fabric.links.update({(a, b): choice for a, b, choice in saved.links if {a, b} <= before.names})
    return Cluster.from_members(fabric, before, saved.wanted)


def _end_epoch(control: ControlServer, workers: SupervisedWorkers, topology: Topology) -> bool:
    """Let all members drop the last engine's steps. Returns False if one of them exits meanwhile.

    Raises DeadlineError.
    """
    untold, missing = set(topology.names), dict[str, list[str]]()
    begun = time.monotonic()
    while missing.keys() < topology.names or any(missing.values()):
        untold = _tell(control, untold, EndEpoch(topology))
        for worker, message in control.receive(POLL_S):
            if isinstance(message, EpochEnded) and message.epoch == topology.epoch:
                missing[worker] = message.missing
        if topology.names & workers.ended().keys():
            return False
        waited = time.monotonic() - begun
        if waited > (REACH_S if untold else END_S):
            late = untold or topology.names - missing.keys() or {name for name, left in missing.items() if left}
            raise DeadlineError(f"{', '.join(sorted(late))} have not followed the new engine within {waited:.0f} s")
    return True


def _tell(control: ControlServer, workers: Collection[str], message: EndEpoch) -> set[str]:
    """Returns the workers that have not connected yet."""
    try:
        control.send(sorted(workers), message)
    except UnreachableError as error:
        return set(error.workers)
    return set()
