"""From started worker processes to a cluster that can run steps, over the control plane alone."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from lamina import errors
from lamina.engine.pipeline import Pipeline
from lamina.errors import ConfigError, DeadlineError, WorkerError
from lamina.transport.channel import Layout
from lamina.transport.control import ControlServer
from lamina.transport.messages import (
    ComputeSetup,
    Connect,
    Connected,
    Failed,
    Hello,
    LoadProgress,
    MemorySetup,
    ModelLoaded,
    Register,
    Registered,
    SlabReady,
    ToEngine,
)
from lamina.transport.wire import reply_nbytes, request_nbytes
from lamina.types import AttentionSpec, DType

START_TIMEOUT_S = 120.0
LOAD_TIMEOUT_S = 1800.0
CONNECT_TIMEOUT_S = 60.0
POLL_S = 0.2

MessageT = TypeVar("MessageT", Hello, ModelLoaded, SlabReady, Registered, Connected)


class Workers(Protocol):
    """Worker processes, wherever they run."""

    def ended(self) -> Mapping[str, str]:
        """Workers that are gone, with what is known of why."""
        ...

    def close(self) -> None:
        """End all workers. Idempotent."""
        ...


@dataclass(frozen=True)
class ClusterPlan:
    """Who takes part and with what: decided before any worker starts, except what the model tells."""

    computes: tuple[str, ...]
    memories: tuple[str, ...]
    compute_setup: ComputeSetup
    memory_threads: int
    kv_bytes_per_worker: Callable[[], int]  # asked once the weights are loaded
    most_useful_tokens: int  # more slots than this in one worker could never be used
    pipeline: Pipeline
    cores: Mapping[str, frozenset[int]]  # of each worker
    shared_cores: bool  # both pools run on the same


@dataclass(frozen=True)
class Cluster:
    """What the engine must know of a cluster that is up."""

    computes: tuple[str, ...]
    capacities: Mapping[str, int]  # token slots by memory worker
    attentions: tuple[AttentionSpec, ...]
    dtype: DType
    parameters: int
    pipeline: Pipeline


def bring_up(
    control: ControlServer, workers: Workers, plan: ClusterPlan, on_progress: Callable[[LoadProgress], None]
) -> Cluster:
    """Load the model, make slabs and arenas, connect every compute worker with every memory worker.

    Raises the worker's own UserError if a user can mend it, else WorkerError or DeadlineError.
    """
    gather = _Gather(control, workers, on_progress)
    everyone = (*plan.computes, *plan.memories)
    gather.all(Hello, everyone, START_TIMEOUT_S)
    control.send(plan.computes, plan.compute_setup)
    loaded = gather.all(ModelLoaded, plan.computes, LOAD_TIMEOUT_S)[plan.computes[0]]
    capacity = _capacity(plan, loaded)
    asked = plan.compute_setup
    setup = MemorySetup(loaded.attentions, loaded.dtype, capacity, plan.memory_threads, asked.overlap, asked.trace)
    control.send(plan.memories, setup)
    ready = gather.all(SlabReady, plan.memories, LOAD_TIMEOUT_S)
    _connect(control, gather, plan, loaded)
    return Cluster(
        plan.computes,
        {name: message.capacity for name, message in ready.items()},
        tuple(loaded.attentions),
        loaded.dtype,
        loaded.parameters,
        plan.pipeline,
    )


def _capacity(plan: ClusterPlan, loaded: ModelLoaded) -> int:
    per_token = sum(spec.kv_bytes_per_token(loaded.dtype) for spec in loaded.attentions)
    nbytes = plan.kv_bytes_per_worker()
    capacity = nbytes // per_token
    if capacity < 2:
        raise ConfigError(
            f"each memory worker has {nbytes} bytes for KV; one token of this model needs {per_token} and a request at "
            f"least two. Give more with kv_cache_memory_bytes"
        )
    return min(capacity, plan.most_useful_tokens)


def _connect(control: ControlServer, gather: "_Gather", plan: ClusterPlan, loaded: ModelLoaded) -> None:
    rows = plan.compute_setup.rows
    layout = Layout(
        lanes=plan.pipeline.lanes,
        memories=len(plan.memories),
        request_nbytes=request_nbytes(loaded.attentions, loaded.dtype, rows),
        reply_nbytes=reply_nbytes(loaded.attentions, rows),
        context_nbytes=loaded.context_nbytes if plan.pipeline.moves else 0,
    )
    descriptors: dict[str, bytes] = {}
    for group, arena in ((plan.computes, layout.compute_arena), (plan.memories, layout.memory_arena)):
        control.send(group, Register(*arena))
        registered = gather.all(Registered, group, CONNECT_TIMEOUT_S)
        descriptors |= {name: message.descriptor for name, message in registered.items()}
    computes, memories = list(plan.computes), list(plan.memories)
    for name in (*computes, *memories):
        named = computes if name in memories else [*memories, *(computes if plan.pipeline.moves else [])]
        peers = {peer: descriptors[peer] for peer in named if peer != name}
        control.send([name], Connect(computes, memories, peers, layout, plan.pipeline.rotates))
    gather.all(Connected, (*computes, *memories), CONNECT_TIMEOUT_S)


class _Gather:
    """Collects one answer from each of several workers, noticing failures and deaths meanwhile."""

    def __init__(self, control: ControlServer, workers: Workers, on_progress: Callable[[LoadProgress], None]) -> None:
        self._control = control
        self._workers = workers
        self._on_progress = on_progress

    def all(self, kind: type[MessageT], names: Sequence[str], timeout_s: float) -> dict[str, MessageT]:
        answers: dict[str, MessageT] = {}
        deadline = time.monotonic() + timeout_s
        while len(answers) < len(names):
            for worker, message in self._control.receive(POLL_S):
                if isinstance(message, kind):
                    answers[worker] = message
                else:
                    self._handle(worker, message)
            missing = [name for name in names if name not in answers]
            if ended := self._workers.ended():
                self._drain()
                raise WorkerError(*next(iter(ended.items())))
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"no {kind.__name__} from {', '.join(missing)} within {timeout_s:.0f} s; "
                    f"is the machine overloaded, or out of memory? LAMINA_LOG_LEVEL=INFO shows what workers do"
                )
        return answers

    def _drain(self) -> None:
        """A worker that ended may have said why just before."""
        for worker, message in self._control.receive(POLL_S):
            self._handle(worker, message)

    def _handle(self, worker: str, message: ToEngine) -> None:
        if isinstance(message, Failed):
            raise failure(worker, message)
        if isinstance(message, LoadProgress):
            self._on_progress(message)


def failure(worker: str, message: Failed) -> errors.LaminaError:
    """The exception a worker's last words stand for: its own UserError, else a WorkerError."""
    kind = getattr(errors, message.kind, None)
    if message.user and isinstance(kind, type) and issubclass(kind, errors.UserError):
        return kind(message.message)
    return WorkerError(worker, f"{message.kind}: {message.message}\n{message.traceback}")
