"""Derives limits, cores, threads and lanes from the settings and the workers' first messages. Pure."""

import dataclasses
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from lamina.cluster.conversations import START_TIMEOUT_S
from lamina.cluster.degrees import replicas
from lamina.cluster.pool import CPU, PLACE_S, RUNNABLE
from lamina.config.engine_config import EngineConfig, overcommit
from lamina.control.messages import ComputeSetup, Hello, MemorySetup, ModelLoaded
from lamina.core.errors import ConfigError
from lamina.core.pipeline import Arrangement, Pipeline, Shape
from lamina.core.topology import Pool, Role
from lamina.core.types import DType, Overlap
from lamina.dataplane.leases import SLOTS
from lamina.kv.stripes import head_workers
from lamina.models.directory import ModelDirectory
from lamina.schedule.limits import Limits
from lamina.transport.endpoint import spin_s

LANES_PER_STAGE = 3  # most lanes for each stage of each replica where the engine chooses the number of lanes
LEAST_MINI_BATCH = 32  # sequences: sending their q, some 100 KB, takes longer than the overhead of one more message


def limits(config: EngineConfig, model: ModelDirectory, pipeline: Pipeline) -> Limits:
    """Return the bounds of steps and requests before the size of the slabs is known. Raises ConfigError."""
    longest = model.max_model_len
    wanted = longest if config.max_model_len is None else config.max_model_len
    if wanted is None:
        raise ConfigError(f"the config of {model.name} does not state its context length; give max_model_len")
    if wanted < 2:
        raise ConfigError(f"max_model_len is {wanted}; give at least 2, for one prompt token and one output token")
    if (most := model.most_model_len) is not None and wanted > most:
        raise ConfigError(f"max_model_len is {wanted}; {model.name} supports at most {most} tokens")
    return step_limits(config, pipeline, wanted)


def step_limits(config: EngineConfig, pipeline: Pipeline, max_model_len: int) -> Limits:
    """Return the bounds of a runtime whose requests have at most ``max_model_len`` tokens."""
    return Limits(
        config.max_num_seqs,
        config.max_num_batched_tokens,
        max_model_len,
        pipeline.replicas,
        row_lanes=1 if pipeline.interchangeable else pipeline.lanes,
    )


Cores = frozenset[int]


def worker_cores(text: str | None, workers: int, available: Cores) -> list[Cores]:
    """Return the cores of each of a pool's ``workers``, from a CPU list as ``taskset`` takes it ("0-3,8").

    None gives every worker all available cores. Otherwise the listed cores are divided among the workers; with more
    workers than cores, several share one. Raises ConfigError if the list is malformed or names unavailable cores.
    """
    if text is None:
        return [available] * workers
    named = sorted(_parse_cores(text))
    if missing := set(named) - available:
        unusable, usable = (",".join(map(str, sorted(cores))) for cores in (missing, available))
        raise ConfigError(
            f"core list {text!r} names {unusable}, but this process may use only {usable}; name some of these"
        )
    share = max(1, len(named) // workers)
    return [frozenset(named[i * share % len(named) :][:share]) for i in range(workers)]


def _parse_cores(text: str) -> set[int]:
    cores: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not first.strip().isdigit() or not (last or first).strip().isdigit():
            raise ConfigError(
                f"{text!r} is not a core list; give numbers and ranges separated by commas, such as 0-3,8"
            )
        cores.update(range(int(first), int(last or first) + 1))
    if not cores:
        raise ConfigError(f"core list {text!r} names no core")
    return cores


def pipeline(config: EngineConfig, computes: int, shared: bool, local: bool = False) -> Pipeline:
    """Return the lanes of a cluster, see ``_lanes``; those of a prefill pool's replicas only run prompts."""
    pools = replicas(config, computes)
    made = _lanes(config, pools.count, pools.most_stages, shared, local)
    early = None if pools.early == pools.late else pools.early
    return dataclasses.replace(made, shape=pools.late, prefill_shape=early).with_replicas(pools.count, pools.prefill)


def fit_lanes(config: EngineConfig, computes: int) -> EngineConfig:
    """Return settings whose ``lanes`` suit the compute workers that there are now: replicas have joined or been lost
    since ``refusals`` compared ``lanes`` with those of the start."""
    if config.lanes is None:
        return config
    made = replicas(config, computes)
    least = made.count * made.most_stages
    lanes = least + 1 if config.pipelining == "rotational" else max(config.lanes, least)
    return dataclasses.replace(config, lanes=lanes)


def _lanes(config: EngineConfig, count: int, stages: int, shared: bool, local: bool) -> Pipeline:
    """Return the lanes for ``count`` replicas of ``stages``, and their order. The settings must have no ``refusals``.

    ``config.lanes``, if given, is the number of lanes. Otherwise rotational pipelining gives one lane more than
    replicas, also on shared cores. With other pipelining, the engine chooses while it runs: 1 to ``LANES_PER_STAGE``
    lanes per stage in fixed order, or one lane more than replicas in rotational order. It starts with two lanes per
    stage; if devices poll, two is also the most. On shared cores or without memory workers, slices and attention cannot
    overlap, and each stage gets one lane. If ``config.prompt_attention`` is compute, lanes stay on one replica, which
    has the copies of their prompts' KV.

    Args:
        config: The settings.
        count: Number of replicas.
        stages: Stages of those that have most.
        shared: Whether both pools run on the same cores, or there are no memory workers.
        local: Whether compute workers hold KV, so that lanes stay on the replica that has it.
    """
    units = count * stages
    stays = config.prompt_attention == "compute" and count > 1
    may_rotate = stages == 1 and config.pipelining != "fixed" and not local and not stays
    if config.lanes is None and not shared and config.pipelining != "rotational":
        most = SLOTS if config.polling == "device" else LANES_PER_STAGE  # see lamina.memory.device_steps
        choices = [Arrangement(each * units) for each in (2, 1, *range(3, most + 1))]
        if may_rotate and count > 1 and config.polling != "device":
            choices.append(Arrangement(count + 1, rotates=True))
        return Pipeline(most * units, count, choices=tuple(choices))
    default = units + 1 if stages == 1 and config.pipelining == "rotational" else units
    lanes = config.lanes or default
    rotates = may_rotate and (lanes == count + 1 or config.pipelining == "rotational")
    return Pipeline(lanes, count, rotates)


def boot_id(host: str) -> str:
    """Return the boot ID in an identifier of ``transport.shm.host``: equal for all containers of a machine."""
    return host.partition(" ")[0]


@dataclass(frozen=True)
class Machines:
    """The cores that the workers of each machine report."""

    cores: Mapping[Role, Mapping[str, Sequence[Cores]]]  # by role and machine

    @staticmethod
    def from_greetings(roles: Mapping[str, Role], greetings: Mapping[str, Hello]) -> "Machines":
        """Return the machines of all workers, from their first messages."""
        cores: dict[Role, dict[str, list[Cores]]] = {"compute": {}, "memory": {}}
        for name, hello in greetings.items():
            cores[roles[name]].setdefault(boot_id(hello.host), []).append(frozenset(hello.cores))
        return Machines(cores)

    @property
    def shared(self) -> bool:
        """Whether workers of both pools run on the same cores of any machine."""
        computes, memories = self.cores["compute"], self.cores["memory"]
        return any(
            not frozenset.union(*each).isdisjoint(frozenset.union(*memories[machine]))
            for machine, each in computes.items()
            if machine in memories
        )

    def threads(self, role: Role, hello: Hello, wanted: int | None) -> int:
        """Return the threads of a worker: ``wanted`` if the settings give it, else one per core.

        Workers of one role that share cores divide the threads. A worker that joins gets as many threads as other
        workers of its role on its machine.
        """
        each = self.cores[role].get(boot_id(hello.host)) or [frozenset(hello.cores)]
        return wanted or max(1, len(frozenset.union(*each)) // len(each))

    def spins_s(self) -> dict[str, float]:
        """Return, for each machine, the seconds that waits spin before they sleep."""
        computes, memories = self.cores["compute"], self.cores["memory"]
        return {
            machine: spin_s([*computes.get(machine, ()), *memories.get(machine, ())])
            for machine in {*computes, *memories}
        }


def overlap(machines: Machines) -> Overlap:
    """Return how compute workers divide q into messages.

    They send mini-batches if a memory worker is on a machine without compute workers: attention to one mini-batch then
    hides the transfer of the next. Within a machine, a message costs more than it would hide (docs/decisions.md).
    """
    computes, memories = machines.cores["compute"], machines.cores["memory"]
    return Overlap() if memories.keys() <= computes.keys() else Overlap(mini_batches=4, least=LEAST_MINI_BATCH)


@dataclass(frozen=True)
class ClusterPlan:
    """The workers of a runtime and their settings, derived from their first messages, before the model is loaded.

    Attributes:
        config: The settings.
        kinds: The kind of each worker's device, by pool and name.
        greetings: The first message of each worker.
        machines: The cores of the workers.
        compute_setup: The setup message of compute workers; threads, rank and stage differ by worker.
        limits: The bounds of steps and requests.
        pipeline: The lanes.
        is_open: Whether workers on other machines may join.
    """

    config: EngineConfig
    kinds: Mapping[Role, Mapping[str, str]]
    greetings: Mapping[str, Hello]
    machines: Machines
    compute_setup: ComputeSetup
    limits: Limits
    pipeline: Pipeline
    is_open: bool

    @property
    def computes(self) -> list[str]:
        """Names of compute workers, by number."""
        return list(self.kinds["compute"])

    def has_slab(self, pool: Pool) -> bool:
        """Return whether workers of a pool hold the KV of requests."""
        if pool == "memory":
            return True
        return self.compute_setup.local and not (pool == "prefill" and self.pipeline.one_way)

    def has_scratch(self, pool: Pool) -> bool:
        """Return whether compute workers of a pool get scratch memory.

        Workers that only decode would take it from the KV of requests, and get none.
        """
        only_decodes = pool == "compute" and self.pipeline.prefill > 0
        return self.compute_setup.scratch and not (only_decodes and self.has_slab(pool))

    def slab_setup(self, setup: MemorySetup, name: str) -> MemorySetup:
        """Return the setup of the slab of a worker, given that of any memory worker."""
        if name in self.kinds["memory"]:
            return setup
        order, computes = self.pipeline, self.computes
        replica = order.replica_at(computes.index(name))
        own = order.workers_in(replica)
        return local_setup(setup, order.shape_of(replica), computes[own.start : own.stop], name)

    @property
    def pools(self) -> dict[str, Pool]:
        """The pool of each compute worker, by number."""
        prefills = self.pipeline.workers_in(self.pipeline.prefill).start
        return {name: "prefill" if number < prefills else "compute" for number, name in enumerate(self.computes)}

    @property
    def with_slabs(self) -> list[str]:
        """Names of the compute workers that hold the KV of requests."""
        return [name for name, pool in self.pools.items() if self.has_slab(pool)]

    @property
    def memories(self) -> list[str]:
        """Names of memory workers, by number."""
        return list(self.kinds["memory"])

    @property
    def start_s(self) -> float:
        """Seconds within which a started worker must send its first message."""
        return START_TIMEOUT_S + (PLACE_S if self.config.ray is not None else 0.0)

    def threads(self, role: Role, hello: Hello) -> int:
        """Return the threads of a worker, given its greeting."""
        return self.machines.threads(role, hello, self.config.threads)

    def memory_setup(self, loaded: ModelLoaded, shards: int) -> MemorySetup:
        """Return the setup message of workers with a slab; callers then replace its threads and its capacity.

        The capacity is the most tokens that running requests can have together.

        Args:
            loaded: The model.
            shards: Number of shards into which the heads of every attention are divided.
        """
        config, asked = self.config, self.compute_setup
        return MemorySetup(
            attentions=loaded.attentions,
            dtype=loaded.dtype,
            capacity=self.limits.max_sequences * self.limits.max_model_len,
            threads=1,
            overlap=asked.overlap,
            trace=asked.trace,
            kv_cache_dtype=config.kv_cache_dtype,
            head_shards=shards,
            overcommit=overcommit(config),
            spill_dir="" if config.kv_spill_dir is None else os.path.abspath(config.kv_spill_dir),
            ranks=self.pipeline.most_ranks,
            least_ranks=min(shape.ranks for shape in self.pipeline.shapes),
            forgets=overcommit(config) == 1,  # blocks on disks have all tokens of all layers
            polling=config.polling,
            gpu_share=asked.gpu_share,
        )


def local_setup(setup: MemorySetup, shape: Shape, replica: Sequence[str], name: str) -> MemorySetup:
    """Return the setup of a slab in a compute worker's own memory.

    Such a slab receives no messages: it needs no mini-batches, and no device polls. It has no disk, which nothing would
    read between steps. A stage's slab has the layers of the stage.

    Args:
        setup: The setup of a memory worker.
        shape: The shape of the worker's replica, of a model that is loaded.
        replica: All compute workers of the replica, in order.
        name: One of them.
    """
    own = msgspec.structs.replace(setup, overlap=Overlap(), overcommit=1.0, polling="host")
    if shape.stages == 1:
        return own
    stage, rank = divmod(replica.index(name), shape.ranks)
    layers = len(setup.attentions)
    start, stop = (min(each, layers) for each in (*shape.starts, layers)[stage : stage + 2])
    return msgspec.structs.replace(own, home=replica[rank], layers=(start, stop))


def cluster_plan(
    config: EngineConfig,
    model: ModelDirectory,
    eos_token_ids: Sequence[int],
    kinds: Mapping[Role, Mapping[str, str]],
    greetings: Mapping[str, Hello],
    *,
    is_open: bool,
    trace: bool,
    local: bool = False,
) -> ClusterPlan:
    """Return the plan of a cluster of workers, given their first messages. Raises ConfigError.

    Args:
        is_open: Whether workers on other machines may join later.
        trace: Whether workers record spans.
        local: Whether compute workers hold KV too, so that memory workers are not needed.
    """
    roles: dict[str, Role] = {name: role for role, names in kinds.items() for name in names}
    machines = Machines.from_greetings(roles, greetings)
    order = pipeline(config, len(kinds["compute"]), machines.shared or not kinds["memory"], local)
    on = reported_kinds(kinds, greetings)
    order = with_lending(order, on["compute"].values()) if local else order
    bounds = limits(config, model, order)
    setup = ComputeSetup(
        model=str(model.path),
        dtype=None if config.dtype == "auto" else DType(config.dtype),
        load_format=config.load_format,
        seed=config.seed,
        threads=1,
        rows=bounds.max_num_batched_tokens,
        overlap=overlap(machines),
        eos_token_ids=sorted(eos_token_ids),
        trace=trace,
        head_workers=head_workers(config.partition, len(kinds["memory"])),
        local=local,
        degrees=tuple(shape.ranks for shape in order.shapes),
        sequences=bounds.max_sequences,
        quantization=config.quantization,
        activation_dtype=config.activation_dtype,
        gpu_share=config.gpu_memory_utilization,
        scratch=uses_scratch(config, order, on),
    )
    return ClusterPlan(config, kinds, greetings, machines, setup, bounds, order, is_open)


def by_machine(computes: Mapping[str, str], prefills: int, greetings: Mapping[str, Hello]) -> dict[str, str]:
    """Return the kinds of compute workers in an order in which workers of one kind and machine are neighbours.

    Ranks are neighbours, and workers of other machines join in any order.

    Args:
        computes: Kind of each compute worker, those that only run prompts first.
        prefills: Number of those.
        greetings: First message of each worker.
    """
    names = list(computes)
    kinds, hosts = list(computes.values()), [greetings[name].host for name in names]

    def place(number: int) -> tuple[bool, int, int]:
        return number >= prefills, kinds.index(kinds[number]), hosts.index(hosts[number])

    order = [names[number] for number in sorted(range(len(names)), key=place)]
    return {name: computes[name] for name in order}


def reported_kinds(
    kinds: Mapping[Role, Mapping[str, str]], greetings: Mapping[str, Hello]
) -> dict[Role, dict[str, str]]:
    """Return the kinds of devices that workers run on: ``remote`` and the names of ``--kind`` do not say.

    Args:
        kinds: The kinds that the settings name, by role and worker.
        greetings: The first message of each worker, which names its device.
    """
    return {
        role: {
            name: kind if kind in RUNNABLE else greetings[name].device.partition(":")[0] for name, kind in each.items()
        }
        for role, each in kinds.items()
    }


def uses_scratch(config: EngineConfig, pipeline: Pipeline, kinds: Mapping[Role, Mapping[str, str]]) -> bool:
    """Return whether running prompts keep K and V in scratch memory of the compute workers.

    ``auto``: where one replica of one stage runs all prompts, and either does not decode, or is on GPUs while memory
    workers are on CPUs. Without scratch memory, several replicas or stages can run chunks of one prompt at once. Where
    replicas that decode hold all KV, a prompt stays on one replica in any case, which then also attends to it. Where
    replicas hold all KV and run prompts, prompts attend there in any case.
    """
    if not kinds["memory"] and not pipeline.prefill:
        return False
    if config.prompt_attention != "auto":
        return config.prompt_attention == "compute"
    if not kinds["memory"]:
        return True
    alone = (pipeline.prefill or pipeline.replicas) == 1 and pipeline.shape_of(0).stages == 1
    faster = CPU not in kinds["compute"].values() and set(kinds["memory"].values()) == {CPU}
    return alone and (pipeline.prefill > 0 or faster)


def with_lending(order: Pipeline, kinds: Collection[str]) -> Pipeline:
    """Return the pipeline of replicas with local memory, which attend for each other, or one way only.

    The ranks of a replica on GPUs wait for each other in sums, where they serve no request. They may attend for
    replicas that never attend for them.
    """
    both = order.most_ranks == 1 or set(kinds) <= {CPU}
    apart = order.prefill > 0
    return dataclasses.replace(order, lends=both or apart, one_way=apart and not both)


def require_limits(config: EngineConfig, model: ModelDirectory, computes: int) -> None:
    """Raise ConfigError if the model rules out the settings' bounds of steps and requests."""
    limits(config, model, pipeline(config, computes, shared=False))
