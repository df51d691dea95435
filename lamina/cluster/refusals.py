"""Lists combinations of settings that Lamina refuses before any worker starts, with reasons. Pure.

Ranges of single settings are in ``lamina.config.engine_config``; the model's own limits are checked once it is loaded.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lamina.cluster.degrees import Replicas, replicas, shapes
from lamina.cluster.pool import CPU, LOCAL, RUNNABLE, parse_bounds, size
from lamina.config.engine_config import EngineConfig
from lamina.core.errors import ConfigError
from lamina.core.pipeline import Pipeline, Shape
from lamina.core.topology import COMPUTE_POOLS, Pool, Role
from lamina.schedule.limits import Limits


@dataclass(frozen=True)
class Refusal:
    """Settings that do not work together.

    Attributes:
        what: The settings with their values.
        why: The reason.
        remedy: Settings to give instead.
    """

    what: str
    why: str
    remedy: str = "leave out one of them"

    def __str__(self) -> str:
        return f"{self.what}: {self.why}; {self.remedy}"


def require_allowed(config: EngineConfig, computes: Sequence[str], memories: Sequence[str]) -> None:
    """Raise ConfigError for the first refusal of ``refusals``."""
    require_none(refusals(config, computes, memories))


def require_none(found: Iterator[Refusal]) -> None:
    """Raise ConfigError for the first of these refusals."""
    for refusal in found:
        raise ConfigError(str(refusal))


def refusals(config: EngineConfig, computes: Sequence[str], memories: Sequence[str]) -> Iterator[Refusal]:
    """Yield all combinations of settings that keep a runtime from starting.

    Args:
        config: The settings.
        computes: Kind of each compute worker. ``remote`` and the names of ``--kind`` may be any device: ask again
            with ``sizing.reported_kinds`` once the workers have started.
        memories: Kind of each memory worker, with ``local`` for memory of the compute workers.
    """
    yield from _of_replicas(config, computes)
    yield from _of_lanes(config, len(computes))
    yield from _of_placement(config)
    yield from _of_memory(config, computes, memories)
    yield from _of_targets(config)
    yield from _of_prompt_attention(config, len(computes), memories)
    yield from _of_machines(config)
    if config.quantization == "fp8" and CPU in computes:
        yield Refusal(
            f"quantization fp8 and compute {CPU}",
            "compute workers on CPUs have no product of fp8 weights",
            "give quantization int8 or int4",
        )


def _bounds(config: EngineConfig) -> dict[Pool, tuple[int, int]]:
    """Return the bounds of the pools that scale by load."""
    return {} if config.autoscale is None else parse_bounds(config.autoscale)


def _of_replicas(config: EngineConfig, computes: Sequence[str]) -> Iterator[Refusal]:
    (early, late), prefills = shapes(config), size(config.prefill)
    if prefills:
        yield from _of_pool("prefill", early, computes[:prefills])
    yield from _of_pool("compute", late, computes[prefills:])
    bounds = _bounds(config)
    for pool, shape in zip(COMPUTE_POOLS, (early, late), strict=True):
        if any(one % shape.workers for one in bounds.get(pool, ())):
            yield Refusal(
                f"autoscale {config.autoscale} and replicas of {shape.workers} compute workers",
                "a replica joins, leaves or changes its role as a whole",
                f"give multiples of {shape.workers}",
            )


def _of_pool(pool: Pool, shape: Shape, kinds: Sequence[str]) -> Iterator[Refusal]:
    """Yield the refusals of a pool whose replicas have a shape. ``kinds``: Kind of each of its workers."""
    (ranks, stages), count = (shape.ranks, shape.stages), len(kinds)
    if count % shape.workers:
        divided = {f"tensor_parallel {ranks}": ranks, f"pipeline_parallel {stages}": stages}
        given = " and ".join(name for name, of in divided.items() if of > 1)
        product = f"{ranks} x {stages} = " if min(ranks, stages) > 1 else ""
        yield Refusal(
            f"{given} with {count} {pool} worker{'s' * (count > 1)}",
            f"a replica has {product}{shape.workers} compute workers, and {count} is no multiple of that",
            f"give --{pool} a multiple of {shape.workers}",
        )
    for first in range(0, count, ranks):
        found = dict.fromkeys(kinds[first : first + ranks])
        if len(found) > 1:
            yield Refusal(
                f"tensor_parallel {ranks} of {' and '.join(found)}",
                "kinds round differently, so ranks could choose different experts for a token",
                f"give --{pool} a multiple of {ranks} of each kind",
            )


def _of_lanes(config: EngineConfig, computes: int) -> Iterator[Refusal]:
    made, lanes, rotates = replicas(config, computes), config.lanes, config.pipelining == "rotational"
    stages = made.most_stages
    if rotates and stages > 1:
        yield Refusal(
            f"pipelining rotational and pipeline_parallel {stages}",
            "a lane takes turns on the stages already; rotation would only add a transfer of its context per slice",
        )
    elif rotates and lanes not in (None, made.count + 1):
        yield Refusal(
            f"pipelining rotational and lanes {lanes}",
            f"rotation needs one lane more than replicas ({made.count})",
            f"give lanes {made.count + 1}, or leave it out",
        )
    if lanes is not None and lanes < made.count * stages:
        of, place = (f" of {stages} stages", "stage") if stages > 1 else ("", "replica")
        yield Refusal(
            f"lanes {lanes} with {made.count} replicas{of}",
            f"a lane runs on one {place} at a time, so at least one {place} would always be idle",
            f"give lanes at least {made.count * stages}, or fewer compute workers",
        )
    yield from _of_balanced_roles(config, made)
    if config.prefill is not None and rotates:
        yield Refusal(
            f"prefill {config.prefill} and pipelining rotational",
            ROTATES,
            "leave out pipelining",
        )


def _of_balanced_roles(config: EngineConfig, made: Replicas) -> Iterator[Refusal]:
    bounds = _bounds(config)
    if "prefill" not in bounds:
        return
    given, workers = f"autoscale {config.autoscale}", made.late.workers
    if made.early != made.late:
        yield Refusal(
            f"{given}, prefill {config.prefill} and compute {config.compute}",
            "a replica that changes its role keeps its ranks and stages, and those of the two pools differ",
            "give both pools the same degrees, or leave prefill out of autoscale",
        )
    if config.slo_ttft_ms is None or config.slo_tbt_ms is None:
        yield Refusal(
            f"{given} without slo_ttft_ms and slo_tbt_ms",
            "replicas change their role when one of these two SLOs is missed",
            "give both",
        )
    if bounds["prefill"][0] // workers >= made.count:
        yield Refusal(
            f"{given} with {made.count} replicas",
            "replicas change their role, and at least one must always decode",
            f"give --compute {(1 + bounds['prefill'][0] // workers) * workers} compute workers",
        )
    if config.pipelining == "rotational":
        yield Refusal(
            f"{given} and pipelining rotational",
            ROTATES,
            "leave out pipelining",
        )


def _of_placement(config: EngineConfig) -> Iterator[Refusal]:
    partition, balances = config.partition, config.balance not in ("auto", "off")
    if partition == "request" and config.kv_tokens_per_worker is not None:
        yield Refusal(
            f"kv_tokens_per_worker {config.kv_tokens_per_worker} and partition request",
            "the first divides a request over memory workers, the second keeps it on one",
        )
    if balances and partition in ("request", "head"):
        divides = "keeps a request on one worker" if partition == "request" else "gives each worker the same heads"
        yield Refusal(
            f"balance {config.balance} and partition {partition}",
            f"balancing moves ranges of a request's tokens with all heads, and this partition {divides}",
        )


def _of_targets(config: EngineConfig) -> Iterator[Refusal]:
    if config.policy == "slo" and config.slo_ttft_ms is None:
        yield Refusal(
            "policy slo without slo_ttft_ms", "this policy orders requests by their deadlines", "give slo_ttft_ms"
        )
    unaware = config.policy in ("fifo", "shortest", "priority", "loongserve") and "prefill" not in _bounds(config)
    if config.slo_ttft_ms is not None and unaware:
        yield Refusal(
            f"slo_ttft_ms {config.slo_ttft_ms} and policy {config.policy}",
            "this policy does not consider deadlines, so the target would have no effect",
            "give policy slo, or autoscale prefill=1:2, or leave out slo_ttft_ms",
        )


def _of_memory(config: EngineConfig, computes: Sequence[str], memories: Sequence[str]) -> Iterator[Refusal]:
    local, only_local = LOCAL in memories, set(memories) == {LOCAL}
    if local:
        yield from _of_local_memory(config, computes, memories)
    for name, given in (
        ("memory_cores", config.memory_cores is not None),
        ("kv_overcommit", config.kv_overcommit > 1),
        ("polling device", config.polling == "device"),
    ):
        if only_local and given:
            yield Refusal(f"{name} and memory local", "this setting concerns memory workers, and there are none")
    if config.polling == "device" and set(memories) <= {CPU, LOCAL}:
        yield Refusal(
            f"polling device and memory {','.join(memories)}",
            "only GPUs can poll for messages themselves",
            "give polling auto, or memory workers on GPUs, such as --memory cuda:1",
        )
    bounds = _bounds(config)
    if not local and bounds.get("memory", (1, 1))[0] == 0:
        yield Refusal(
            f"autoscale {config.autoscale} without local memory", "one memory worker must stay", "give at least 1"
        )


def _of_prompt_attention(config: EngineConfig, computes: int, memories: Sequence[str]) -> Iterator[Refusal]:
    if config.prompt_attention != "compute":
        return
    if set(memories) == {LOCAL} and not size(config.prefill):
        yield Refusal(
            "prompt_attention compute and memory local",
            "every replica attends to the KV in its own memory, so a copy of a prompt's KV there has no effect",
            "leave out prompt_attention, or use memory workers, such as --memory cpu:1",
        )
    count = computes // shapes(config)[1].ranks
    if config.pipelining == "rotational" and count > 1:
        yield Refusal(
            "prompt_attention compute and pipelining rotational",
            f"lanes rotate over {count} replicas, and a copy of a prompt's KV is on one",
            "leave out pipelining, or prompt_attention",
        )


def _of_machines(config: EngineConfig) -> Iterator[Refusal]:
    if config.advertise is not None and config.listen is None and config.ray is None:
        yield Refusal(
            f"advertise {config.advertise} without listen",
            "no worker of another machine connects to this one",
            "give listen, or leave out advertise",
        )
    if config.ray is not None and config.listen is not None:
        yield Refusal(f"listen {config.listen} and ray {config.ray}", "Ray places and starts all workers")
    for name in ("compute_cores", "memory_cores"):
        if config.ray is not None and (cores := getattr(config, name)) is not None:
            yield Refusal(
                f"{name} {cores} and ray {config.ray}",
                "these are cores of this machine, and Ray places workers on any",
                f"leave out {name}; threads sets the cores that each worker gets",
            )


KEEP_ROLE = (
    "ranks on GPUs serve no requests while they wait for each other in a sum, so that two tensor-parallel replicas "
    "which attend for each other could wait in a circle: with local memory, only those that decode hold KV, and they "
    "keep their role"
)
ROTATES = (
    "rotating lanes visit all replicas, so that memory workers serve one lane at a time: none can be kept for prompts"
)


def _of_local_memory(config: EngineConfig, computes: Sequence[str], memories: Sequence[str]) -> Iterator[Refusal]:
    given, made = f"memory {','.join(memories)}", replicas(config, len(computes))
    ranks = made.most_ranks
    if made.count > 1 and config.pipelining == "rotational":
        yield Refusal(
            f"{given} and pipelining rotational",
            "a lane stays on the replica that has the KV of its requests",
            "leave out pipelining",
        )
    if ranks > 1 and any(kind != CPU and kind in RUNNABLE for kind in computes):
        yield from _of_ranks_on_gpus(config, given, memories, ranks)
    if made.count > 1 and config.partition == "head":
        yield Refusal(
            f"{given} of {len(computes)} compute workers and partition head",
            "the heads of a request stay on one replica, which attends to most KV without messages",
            "give partition auto",
        )


def _of_ranks_on_gpus(config: EngineConfig, given: str, memories: Sequence[str], count: int) -> Iterator[Refusal]:
    """Yield the refusals of tensor-parallel replicas on GPUs that hold KV: they attend for others one way at most
    (``Pipeline.one_way``). ``given``: the memory pool in words. ``count``: Ranks of a replica."""
    ranks, bounds = f"tensor_parallel {count}", _bounds(config)
    if "prefill" in bounds:
        yield Refusal(
            f"{given}, {ranks} and autoscale {config.autoscale}",
            KEEP_ROLE,
            "use memory workers, such as --memory cpu:1",
        )
    if config.prefill is None:
        return
    what = f"{given}, {ranks} and prefill {config.prefill}"
    stays = "ranks on GPUs that decode cannot attend for each other, so that a request's KV stays on one replica"
    if set(memories) != {LOCAL} or "memory" in bounds:
        yield Refusal(
            what if "memory" not in bounds else f"{what} and autoscale {config.autoscale}",
            f"{stays}, and continues on no memory worker",
            "use only local memory, or only memory workers, such as --memory cpu:1",
        )
    if config.kv_tokens_per_worker is not None:
        yield Refusal(
            f"{what} and kv_tokens_per_worker {config.kv_tokens_per_worker}", stays, "leave out kv_tokens_per_worker"
        )


def refusals_of_roles(config: EngineConfig, pipeline: Pipeline, limits: Limits, local: bool) -> Iterator[Refusal]:
    """Yield what keeps a running cluster from having a prefill pool. ``local``: whether compute workers hold KV."""
    if local and not pipeline.spreads:
        yield Refusal(
            "a prefill pool and local memory",
            KEEP_ROLE,
            "start with only memory workers, such as --memory cpu:1, to scale prefill",
        )
    if config.pipelining == "rotational":
        yield Refusal(
            "a prefill pool and pipelining rotational",
            ROTATES,
            "start without --pipelining rotational to scale prefill",
        )
    if not pipeline.interchangeable and limits.max_sequences > limits.max_num_batched_tokens:
        yield Refusal(
            f"a prefill pool and {limits.max_sequences} sequences that may decode at once",
            f"one step has at most {limits.max_num_batched_tokens}, too few for a replica that only decodes",
            f"start with --max-num-seqs {limits.max_num_batched_tokens} at most to scale prefill",
        )


def refusals_of_growth(pipeline: Pipeline, role: Role, kind: str, replicas: int, slices: int) -> Iterator[Refusal]:
    """Yield what keeps workers from joining a running cluster.

    Args:
        pipeline: The pipeline at the start.
        role: Role of the workers.
        kind: Their kind.
        replicas: Number of replicas that there would be.
        slices: Number of slices of the model.
    """
    if role == "memory":
        if pipeline.one_way:
            yield Refusal(
                "memory workers beside local memory of tensor-parallel replicas on GPUs, and prefill",
                "the KV of a request stays on one replica that decodes, and uses no memory workers",
                "let compute workers join",
            )
        return
    if pipeline.spreads and pipeline.most_ranks > 1 and kind != CPU:
        yield Refusal(
            f"tensor-parallel replicas on {kind} and local memory of several replicas",
            "such replicas serve no requests while their ranks wait for each other, and the replicas here attend for "
            "each other",
            f"let replicas of {CPU} join",
        )
    if pipeline.rotates and replicas > slices:
        yield Refusal(
            f"pipelining rotational and {replicas} replicas",
            f"the model has {slices} slices, too few for {replicas} replicas to take turns in every step",
            f"have at most {slices} replicas, or start with --pipelining fixed",
        )
