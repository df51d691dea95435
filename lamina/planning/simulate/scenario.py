"""Describes what to simulate: arriving requests, a deployment of a model on pools, failures and slowdowns."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lamina.cluster.degrees import degrees_text
from lamina.cluster.pool import CPU, LOCAL
from lamina.cluster.refusals import require_allowed
from lamina.cluster.sizing import uses_scratch
from lamina.config.engine_config import EngineConfig
from lamina.core.errors import ConfigError
from lamina.core.pipeline import ONE, Pipeline, Shape
from lamina.core.types import Balance, Pipelining, PromptAttention
from lamina.planning.plan.closed_form import scratch_tokens
from lamina.planning.plan.cost import CostModel, Fits
from lamina.planning.plan.fit_store import ProfileStore
from lamina.planning.plan.hardware import Hardware
from lamina.planning.plan.kernel_times import Floats
from lamina.planning.plan.model_shapes import ModelShape
from lamina.planning.plan.overheads import AS_PUBLISHED, NO_OVERHEAD, Engine
from lamina.planning.plan.prices import Prices
from lamina.planning.plan.stages import kv_tokens
from lamina.planning.plan.workload import Content, TracedRequest

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Arrivals:
    """Requests in the order in which they arrive: arrays of one length.

    Attributes:
        arrival_s: Seconds since the first arrival, non-decreasing.
        prompt: Prompt tokens, at least 1.
        output: Output tokens, at least 1.
        max_tokens: ``max_tokens`` of every request; a request with a longer output asks for this output's length.
        contents: Contents of prompts as in ``TracedRequest``; empty if no prompts share prefixes.
        answers: Ids of outputs as in ``TracedRequest``; empty like ``contents``.
        concurrency: Requests in the system at once: each further request arrives when one ends, and the run writes its
            time into ``arrival_s``. 0: requests arrive at their times.
    """

    arrival_s: Floats
    prompt: Ints
    output: Ints
    max_tokens: int = 1
    contents: Sequence[Content] = ()
    answers: Sequence[int | None] = ()
    concurrency: int = 0

    @property
    def asked(self) -> Ints:
        """``max_tokens`` of each request, at least its output."""
        return np.maximum(self.output, self.max_tokens)

    def __len__(self) -> int:
        return len(self.arrival_s)


def replay(trace: Iterable[TracedRequest], rate_scale: float = 1.0, max_tokens: int = 1) -> Arrivals:
    """Return the requests of a trace at ``rate_scale`` times its rate. Raises ConfigError for a scale not above 0."""
    _check(rate_scale)
    requests = sorted(trace, key=lambda request: request.arrival_s)
    alike = any(request.content for request in requests)
    return Arrivals(
        np.array([request.arrival_s for request in requests], np.float64) / rate_scale,
        np.array([request.prompt for request in requests], np.int64),
        np.array([request.output for request in requests], np.int64),
        max_tokens,
        [request.content for request in requests] if alike else (),
        [request.answer for request in requests] if alike else (),
    )


def draw(
    trace: Iterable[TracedRequest], count: int, seed: int, rate_scale: float = 1.0, max_tokens: int = 1
) -> Arrivals:
    """Draw ``count`` requests with pairs of lengths (prompt, output) from a trace, without shared prefixes.

    They arrive in a Poisson process at ``rate_scale`` times the trace's mean rate. Raises ConfigError for a scale not
    above 0, or a trace without a rate.
    """
    _check(rate_scale)
    requests = list(trace)
    first, last = (pick(request.arrival_s for request in requests) for pick in (min, max))
    if last <= first:
        raise ConfigError(
            "all requests of the trace arrive at the same time, so it has no rate for --draw; leave --draw out"
        )
    # Each has random numbers of its own, so that a longer run begins with the requests of a shorter one.
    lengths, times = np.random.default_rng([seed, 0]), np.random.default_rng([seed, 1])
    chosen = lengths.integers(len(requests), size=count)
    gaps = times.exponential((last - first) / (len(requests) - 1) / rate_scale, size=count)
    prompts, outputs = (np.array([getattr(r, name) for r in requests], np.int64) for name in ("prompt", "output"))
    return Arrivals(np.cumsum(gaps) - gaps[0], prompts[chosen], outputs[chosen], max_tokens)


def _check(rate_scale: float) -> None:
    if not 0 < rate_scale < float("inf"):
        raise ConfigError(f"the rate scale is {rate_scale}; give a number above 0, 1 for the trace's own rate")


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """A model on pools, with its settings.

    Attributes that ``lamina.config.engine_config.EngineConfig`` has too are described there; systems other than Lamina
    use only ``max_num_seqs``, ``max_num_batched_tokens`` and ``prefix_cache`` of them.

    Attributes:
        model: The model.
        compute: Hardware of the compute pool.
        compute_workers: Devices of the compute pool.
        memory: Hardware of the second pool; None without one.
        memory_workers: Devices of the second pool.
        prefill: Hardware of workers that only run prompts, so that ``compute`` only decodes; None: compute does both.
        prefill_workers: Number of these workers.
        prefill_bounds: The least and the most workers that only run prompts, if replicas change their role by
            ``slo_ttft_ms`` and ``slo_tbt_ms``, as with ``--autoscale prefill=LEAST:MOST``.
        local: KV is beside the weights, as with ``--memory local``, without memory workers.
        shape: Ranks and stages of each copy of the weights in the compute pool.
        prefill_shape: Ranks and stages of each copy in the prefill pool; None: ``shape``.
        profile: Measured fits, which replace the package's.
        prices: The market; None: no costs.
        engine: The engine that serves, with its overheads unless ``profile`` includes them.
    """

    model: ModelShape
    compute: Hardware
    compute_workers: int
    memory: Hardware | None = None
    memory_workers: int = 0
    prefill: Hardware | None = None
    prefill_workers: int = 0
    prefill_bounds: tuple[int, int] | None = None
    local: bool = False
    shape: Shape = ONE
    prefill_shape: Shape | None = None
    lanes: int | None = None
    pipelining: Pipelining = "auto"
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    slo_tbt_ms: int | None = None
    kv_tokens_per_worker: int | None = None
    prompt_attention: PromptAttention = "auto"
    prefix_cache: bool = True
    balance: Balance = "off"
    policy: str = "fifo"
    slo_ttft_ms: int | None = None
    profile: ProfileStore | None = None
    prices: Prices | None = None
    engine: Engine = NO_OVERHEAD

    def __post_init__(self) -> None:
        for name in ("compute_workers", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; give at least 1")
        if self.kv_tokens_per_worker is not None and self.kv_tokens_per_worker < 1:
            raise ConfigError(f"kv_tokens_per_worker is {self.kv_tokens_per_worker}; give at least 1")
        if self.local and self.memory is not None:
            raise ConfigError(
                f"local memory beside {self.memory_workers} memory workers is not simulated; give one of them"
            )
        early, late = self.shapes
        if self.local and self.prefill is not None and max(early.stages, late.stages) > 1:
            raise ConfigError(
                "prefill with local memory of stages is not simulated; give memory workers, or one stage per copy of "
                "the weights"
            )
        for workers, shape in ((self.compute_workers, late), (self.prefill_workers, early)):
            if workers % shape.workers:
                raise ConfigError(
                    f"{workers} compute workers do not divide into groups of {shape.workers}; give a "
                    "multiple or another degree of parallelism"
                )
            if self.model.kv_heads % shape.ranks:
                raise ConfigError(
                    f"tensor parallelism of {shape.ranks} does not divide the {self.model.kv_heads} key/value "
                    f"heads of {self.model.name}; give a degree that does"
                )

    @property
    def shapes(self) -> tuple[Shape, Shape]:
        """The shapes of copies in the prefill pool, and of those in the compute pool."""
        return self.prefill_shape or self.shape, self.shape

    @property
    def replicas(self) -> int:
        """Copies of the weights in the compute pool."""
        return self.compute_workers // self.shape.workers

    @property
    def prefill_replicas(self) -> int:
        """Copies of the weights in the prefill pool."""
        return self.prefill_workers // self.shapes[0].workers

    @property
    def lends(self) -> bool:
        """Whether replicas attend for each other to KV in their local memory (``Pipeline.lends``). Those of stages do
        not here, though they do in the runtime."""
        several = self.replicas + self.prefill_replicas > 1 and self.shape.stages == 1
        return self.local and several and (not self._ranks_on_gpus or self.prefill is not None)

    @property
    def one_way(self) -> bool:
        """Whether they do so only for replicas that only run prompts, which hold no KV (``Pipeline.one_way``)."""
        return self.lends and self._ranks_on_gpus

    @property
    def _ranks_on_gpus(self) -> bool:
        kinds = {kind.kind for kind in (self.compute, self.prefill) if kind is not None}
        return max(each.ranks for each in self.shapes) > 1 and kinds != {CPU}

    @property
    def prompts_alone(self) -> "Deployment":
        """Return the deployment whose compute pool is the prefill pool, which must exist."""
        assert self.prefill is not None
        return replace(
            self,
            compute=self.prefill,
            compute_workers=self.prefill_workers,
            shape=self.shapes[0],
            prefill_shape=None,
            prefill=None,
            prefill_workers=0,
            prefill_bounds=None,
        )

    @cached_property
    def compute_cost(self) -> CostModel:
        """The cost model of one compute worker."""
        return self._cost_model(self.compute)

    @cached_property
    def memory_cost(self) -> CostModel:
        """The cost model of one memory worker. Raises ConfigError without a memory pool."""
        if self.memory is None or self.memory_workers < 1:
            raise ConfigError(
                "this system has two pools; give --memory KIND:COUNT too, or --memory local for KV beside the weights"
            )
        return self._cost_model(self.memory)

    def _cost_model(self, hardware: Hardware) -> CostModel:
        model = _cost_model(self.model, hardware, self.profile, self.engine.marlin)
        return model if self.engine.multiplies_fp8 else model.widened

    @property
    def kv_tokens(self) -> int:
        """Tokens of KV of each memory worker or, with local memory, of each copy of the weights."""
        if not self.local:
            return self.memory_cost.kv_tokens
        usable = self.shape.ranks * (self.compute_cost.usable_bytes - self.reserved_bytes)
        return int(kv_tokens(self.model, self.shape.stages, usable))

    @property
    def reserved_bytes(self) -> float:
        """Bytes of a device with local memory that steps need."""
        return self.host.reserved(self.max_num_batched_tokens)

    @property
    def host(self) -> Engine:
        """Overheads of Lamina's engine."""
        return self.engine if self.compute_cost.fits.runtime is AS_PUBLISHED else NO_OVERHEAD

    @property
    def usd_per_hour(self) -> float | None:
        """Cost of all pools and of the network between them, in the market of ``prices``; None without one."""
        if self.prices is None:
            return None
        pools = [(self.compute, self.compute_workers), (self.memory, self.memory_workers)]
        given = [(kind, count) for kind, count in (*pools, (self.prefill, self.prefill_workers)) if kind is not None]
        return sum(self.prices.usd_per_hour(kind, networked=len(given) > 1) * count for kind, count in given)

    def require_weights(self, cost: CostModel) -> None:
        """Raise ConfigError if a copy of the weights does not fit its tensor-parallel group."""
        tp = self.shape.workers
        if not cost.weights_fit(tp):
            degrees = (2**power for power in range(1, self.model.kv_heads.bit_length()))
            fits = next((n for n in degrees if self.model.kv_heads % n == 0 and cost.weights_fit(n)), None)
            remedy = (
                f"give --tensor-parallel {fits} with a multiple of {fits} workers" if fits else "give other hardware"
            )
            raise ConfigError(
                f"{self.model.name} has {self.model.weight_bytes / 1e9:.0f} GB of weights; {tp} {cost.hardware.kind} "
                f"hold {tp * cost.usable_bytes / 1e9:.0f} GB; {remedy}"
            )


def require_simulated(deployment: Deployment) -> None:
    """Raise ConfigError if the runtime refuses a deployment's settings, or the simulator has no model of them."""
    bounds, own = deployment.prefill_bounds, deployment
    if bounds is not None and (own.local or own.prefill not in (None, own.compute)):
        raise ConfigError(
            "changing roles are simulated only with KV in memory workers, and one kind of compute workers; give "
            "--memory KIND:COUNT, and --prefill and --compute the same kind"
        )
    early, late = ("", "") if own.prefill_shape is None else map(degrees_text, own.shapes)
    default = own.shape if own.prefill_shape is None else ONE
    config = EngineConfig(
        prefill=None if own.prefill is None else f"{own.prefill.kind}:{own.prefill_workers}{early}",
        compute=f"{own.compute.kind}:{own.compute_workers}{late}",
        tensor_parallel=default.ranks,
        pipeline_parallel=default.stages,
        lanes=own.lanes,
        pipelining=own.pipelining,
        slo_tbt_ms=own.slo_tbt_ms,
        slo_ttft_ms=own.slo_ttft_ms,
        policy=own.policy,
        kv_tokens_per_worker=own.kv_tokens_per_worker,
        prompt_attention=own.prompt_attention,
        balance=own.balance,
        autoscale=None if bounds is None else f"prefill={bounds[0]}:{bounds[1]}",
    )
    pools = [(own.prefill, own.prefill_workers), (own.compute, own.compute_workers)]
    computes = [pool.kind for pool, count in pools if pool is not None for _ in range(count)]
    memories = [LOCAL] if own.local else [] if own.memory is None else [own.memory.kind] * own.memory_workers
    require_allowed(config, computes, memories)


def holders_of(deployment: Deployment) -> list[Deployment]:
    """Return the deployment that holds each replica's weights and local KV. Raises ConfigError if they do not fit."""
    deployment.require_weights(deployment.compute_cost)
    holders = [deployment] * deployment.replicas
    if deployment.prefill_replicas:
        alone = deployment.prompts_alone
        alone.require_weights(alone.compute_cost)
        holders = [*[alone] * deployment.prefill_replicas, *holders]
    return holders


def config_of(deployment: Deployment) -> EngineConfig:
    """Return the settings of the runtime that a deployment stands for; the ranks of a stage are one worker."""
    prefill, (early, late) = deployment.prefill_replicas, deployment.shapes
    return EngineConfig(
        prefill=f"{CPU}:{prefill * early.stages}/pp{early.stages}" if prefill else None,
        pipeline_parallel=late.stages,
        lanes=deployment.lanes,
        pipelining=deployment.pipelining,
        max_num_seqs=deployment.max_num_seqs,
        max_num_batched_tokens=deployment.max_num_batched_tokens,
        prompt_attention=deployment.prompt_attention,
    )


def scratch_of(
    config: EngineConfig, pipeline: Pipeline, deployment: Deployment, holders: Sequence[Deployment], longest: int
) -> list[int]:
    """Return the tokens of each replica's scratch memory; the runtime decides whether there is any.

    Args:
        config: Settings of the runtime.
        pipeline: Its lanes.
        deployment: The pools.
        holders: By replica, the deployment whose compute pool it is in.
        longest: Tokens of the longest request.
    """
    local, memory = deployment.local, deployment.memory
    memories = [] if memory is None else [memory.kind] * deployment.memory_workers
    computes = {f"compute{index}": one.compute.kind for index, one in enumerate(holders)}
    named = {f"memory{index}": kind for index, kind in enumerate(memories)}
    if not uses_scratch(config, pipeline, {"compute": computes, "memory": named}):
        return [0] * len(holders)
    beside_kv = local and not deployment.one_way
    return [
        0  # only decodes, beside KV
        if local and replica >= pipeline.prefill
        else scratch_tokens(
            one.compute_cost, one.shape.workers, longest, beside_kv, one.reserved_bytes if local else 0.0
        )
        for replica, one in enumerate(holders)
    ]


@lru_cache(maxsize=32)
def _cost_model(shape: ModelShape, hardware: Hardware, profile: ProfileStore | None, marlin: bool) -> CostModel:
    """Return a cost model, cached so that all deployments share its tables."""
    fits = Fits.load(hardware, profile)
    return CostModel(shape, hardware, replace(fits, experts_int4=fits.experts_marlin) if marlin else fits)


Role = Literal["compute", "memory"]

_FAULT = re.compile(
    r"(?P<role>compute|memory):(?P<worker>\d{1,6})@(?P<at>\d+(\.\d+)?)s(:(?P<factor>\d+(\.\d+)?)x)?", re.ASCII
)


@dataclass(frozen=True)
class Fault:
    """A worker takes ``factor`` times as long, or is lost (None), from ``at_s`` seconds after the first arrival."""

    role: Role
    worker: int
    at_s: float
    factor: float | None = None

    def __str__(self) -> str:
        return f"{self.role}:{self.worker}@{self.at_s:g}s" + ("" if self.factor is None else f":{self.factor:g}x")


def parse_failure(text: str) -> Fault:
    """Parse ``memory:3@120s``: memory worker 3 is lost at that time. Raises ConfigError."""
    fault = _parse(text)
    if fault is None or fault.factor is not None:
        raise ConfigError(f"{text!r} is not a failure; give role:worker@seconds, such as memory:3@120s")
    return fault


def parse_slowdown(text: str) -> Fault:
    """Parse ``compute:0@60s:2x``: compute worker 0 takes twice as long from then on. Raises ConfigError."""
    fault = _parse(text)
    if fault is None or fault.factor is None or fault.factor == 0:
        raise ConfigError(f"{text!r} is not a slowdown; give role:worker@seconds:factor, such as compute:0@60s:2x")
    return fault


def check_faults(deployment: Deployment, faults: Sequence[Fault]) -> None:
    """Raise ConfigError for a fault of a worker that does not exist."""
    workers = {"compute": deployment.compute_workers, "memory": deployment.memory_workers}
    for fault in faults:
        if fault.worker >= workers[fault.role]:
            raise ConfigError(
                f"{fault}: {fault.role} worker {fault.worker} does not exist; the pool has "
                f"{workers[fault.role]}, counted from 0"
            )


def _parse(text: str) -> Fault | None:
    match = _FAULT.fullmatch(text.strip().lower())
    if match is None:
        return None
    role: Role = "compute" if match["role"] == "compute" else "memory"
    return Fault(role, int(match["worker"]), float(match["at"]), float(match["factor"]) if match["factor"] else None)
