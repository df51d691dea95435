"""The engine: one thread that plans steps, sends them, takes in what was drawn, and tells callers."""

import collections
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lamina.config import EngineConfig
from lamina.engine.answers import Answers
from lamina.engine.bringup import Cluster
from lamina.engine.gather import Workers, failure
from lamina.engine.lanes import chooser
from lamina.engine.placement import Placement
from lamina.engine.scheduler import Limits, Scheduler
from lamina.engine.tracking import OnOutput, TrackedRequest
from lamina.engine.waiting import Places
from lamina.errors import EngineDeadError, LaminaError, PeerLostError, RequestError, TransportError
from lamina.models.directory import ModelDirectory
from lamina.models.tokenizer import Tokenizer
from lamina.transport.control import ControlServer
from lamina.transport.messages import Failed, Migrated, SlabUsage, Step, StepDone, Stop, ToEngine, Traced
from lamina.transport.timeline import Span, Timeline
from lamina.types import NOBODY, Client, FinishReason, Migration, Request, SamplingParams, StepPlan

log = logging.getLogger(__name__)

OnTrace = Callable[[Mapping[str, list[Span]]], None]

STEP_TIMEOUT_S = 600.0
MIGRATION_TIMEOUT_S = 600.0
POLL_S = 0.1
CLOSE_TIMEOUT_S = 60.0
MAX_WAITING = 16384  # requests of one client, besides those that run
TRACE_TIMEOUT_S = 10.0
LAST_WORDS_S = 2.0  # from a worker's end until its process and what it said can be seen


@dataclass(frozen=True)
class MemoryStats:
    """Token slots of one memory worker, as it reported them last."""

    used: int
    capacity: int
    sequences: int


@dataclass(frozen=True)
class EngineStats:
    """A look at the engine. ``steps`` counts those that have completed, ``moved`` sequences that went from one memory
    worker to another; ``dead`` says why it has stopped, if it has."""

    running: int
    waiting: int
    steps: int
    moved: int
    memory: Mapping[str, MemoryStats]
    dead: str | None


class Engine:
    """Owns requests, tokens and the placement of KV. Its public methods are thread-safe.

    Attributes:
        vocab_size: prompts may hold token ids below it; a tokenizer may know tokens that the embedding has no row for.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ModelDirectory,
        tokenizer: Tokenizer,
        limits: Limits,
        control: ControlServer,
        workers: Workers,
        cluster: Cluster,
        on_trace: Sequence[OnTrace] = (),
    ) -> None:
        """Take over a cluster that is up; ``close`` ends it, and then ``on_trace`` get what every worker did when."""
        self.config = config
        self.model_name = model.name
        self.tokenizer = tokenizer
        self.vocab_size = min(tokenizer.vocab_size, model.vocab_size or tokenizer.vocab_size)
        self._seeds = random.Random(config.seed)  # for requests that bring none
        self.max_model_len = limits.max_model_len
        self.cluster = cluster
        self._control = control
        self._workers = workers
        self._scheduler = Scheduler(
            limits,
            Placement(cluster.capacities),
            cluster.pipeline.lanes,
            attentions=len(cluster.attentions),
            kv_heads=max(spec.kv_heads for spec in cluster.attentions),
        )
        self._on_trace = on_trace
        self._timeline = Timeline(bool(on_trace))
        self._tracked: dict[str, TrackedRequest] = {}
        self._lanes = chooser(config.lanes, cluster.pipeline)
        self._depth = 2 if config.plan_ahead else 1  # steps in flight in one lane
        self._answers = Answers()
        self._in_flight: dict[int, tuple[StepPlan, float]] = {}  # by step, with its deadline
        self._migration: tuple[Migration, float] | None = None  # the latest, with its deadline
        self._usage = {name: MemoryStats(0, capacity, 0) for name, capacity in cluster.capacities.items()}
        self._touched: dict[str, TrackedRequest] = {}  # have news for their callers
        self._steps = 0
        self._moved = 0
        self._commands: collections.deque[Callable[[], None]] = collections.deque()
        self._lock = threading.Lock()  # guards _commands, _accepted and _dead together
        self._accepted = Places(MAX_WAITING + limits.max_num_seqs)
        self._dead: str | None = None
        self._thread = threading.Thread(target=self._run, name="lamina-engine", daemon=True)
        self._thread.start()

    # -- called from any thread ---------------------------------------------------------------------------------

    def submit(
        self,
        request_id: str,
        prompt: str | list[int],
        params: SamplingParams,
        on_output: OnOutput,
        client: Client = NOBODY,
    ) -> None:
        """Queue a request. ``on_output`` is called from the engine's thread with everything so far, every time
        something is added; exactly one call has ``finished`` set. Clients share the runtime fairly.

        Raises RequestError for what can never be served, OverloadedError when this client has its share of the queue,
        EngineDeadError when the engine has stopped.
        """
        text = prompt if isinstance(prompt, str) else None
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        self._check_tokens(tokens)
        self._scheduler.check(len(tokens), params)
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(62)
        tracked = TrackedRequest(Request(request_id, text, tokens, params, seed, client), self.tokenizer, on_output)
        with self._lock:
            self._require_alive()
            if request_id in self._accepted:
                raise RequestError(f"request id {request_id!r} is in use; give each request its own")
            self._accepted.take(request_id, client)
            self._commands.append(lambda: self._add(tracked))
        self._control.wake()

    def _check_tokens(self, tokens: list[int]) -> None:
        for token in tokens:
            if not 0 <= token < self.vocab_size:
                raise RequestError(
                    f"token id {token} is outside the vocabulary of {self.vocab_size} tokens; "
                    f"use ids that the model's tokenizer gives, 0 to {self.vocab_size - 1}"
                )

    def abort(self, request_id: str) -> None:
        """End a request with what it has. Unknown and finished requests are left alone."""
        with self._lock:
            if self._dead is not None:
                return
            self._commands.append(lambda: self._end_request(request_id, FinishReason.ABORT))
        self._control.wake()

    def stats(self) -> EngineStats:
        """Counters as of now."""
        with self._lock:
            accepted, dead = len(self._accepted), self._ended
        running = self._scheduler.running
        return EngineStats(running, max(0, accepted - running), self._steps, self._moved, dict(self._usage), dead)

    def close(self) -> None:
        """End all requests and workers. Idempotent."""
        self._die("the engine was closed")
        self._control.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_TIMEOUT_S)
            if self._thread.is_alive():
                raise EngineDeadError(f"the engine did not end within {CLOSE_TIMEOUT_S:.0f} s; end its process")

    @property
    def _ended(self) -> str | None:
        """Why nothing more is answered here, if so: a fork of the engine's process has none of its threads."""
        if self._dead is None and not self._thread.is_alive():
            return f"process {os.getpid()} does not run its thread; a fork of a process cannot use its engine"
        return self._dead

    def _require_alive(self) -> None:
        if self._ended is not None:
            raise EngineDeadError(f"the engine has stopped: {self._ended}. Start a new one")

    def _die(self, reason: str) -> None:
        with self._lock:
            if self._dead is None:
                self._dead = reason

    # -- the engine's thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._dead is None:
                self._step()
        except LaminaError as error:
            log.error("the engine has stopped: %s", error)
            self._die(str(error))
        except Exception as error:
            log.exception("the engine failed")
            self._die(f"{type(error).__name__}: {error}")
        finally:
            self._end()

    def _step(self) -> None:
        """One turn: what workers said, commands, new plans for free compute workers; callers hear of it last."""
        messages = list(self._control.receive(POLL_S))  # all that can change state wakes this wait
        begun = self._timeline.now()
        for worker, message in messages:
            self._take(worker, message)
        self._run_commands()
        for lane in self._scheduler.plannable(self._depth):
            while self._scheduler.in_flight(lane) < self._depth and self._launch(lane):
                pass
        self._timeline.add("plan", -1, begun)
        begun = self._timeline.now()
        touched, self._touched = self._touched, {}
        for request_id, tracked in touched.items():
            self._publish(request_id, tracked)
        self._timeline.add("tell callers", -1, begun)
        self._watch()

    def _run_commands(self) -> None:
        while self._commands:
            self._commands.popleft()()

    def _add(self, tracked: TrackedRequest) -> None:
        tracked.start(self._scheduler.add(tracked.request))
        self._tracked[tracked.request.request_id] = tracked

    def _end_request(self, request_id: str, reason: FinishReason, error: str | None = None) -> None:
        """Give a request its terminal state now, whatever it was doing; one that has ended is left alone."""
        tracked = self._tracked.get(request_id)
        if tracked is not None:
            self._scheduler.abort(request_id)
            tracked.end(reason, error)
            self._touched.pop(request_id, None)
            self._publish(request_id, tracked)

    def _launch(self, lane: int) -> bool:
        """Send the lane's next plan; False if there is none now."""
        plan = self._scheduler.plan(lane)
        if plan is None:
            return False
        self._answers.expect(plan)
        self._in_flight[plan.step] = plan, time.monotonic() + STEP_TIMEOUT_S
        self._moved += len(plan.moved)
        for migration in plan.migrations:
            self._migration = migration, time.monotonic() + MIGRATION_TIMEOUT_S
        replicas = [self.cluster.computes[replica] for replica in self.cluster.pipeline.replicas_of(lane)]
        try:
            # Memory workers apply deltas of every plan, so that slots are freed and forked in the engine's order.
            self._control.send([*self._scheduler.placement.capacities, *replicas], Step(plan))
        except TransportError as error:
            raise self._why_unreachable(error) from error
        return True

    def _why_unreachable(self, error: TransportError) -> LaminaError:
        """What a worker that cannot be reached said before it ended, or else how it ended."""
        deadline = time.monotonic() + LAST_WORDS_S
        while time.monotonic() < deadline:
            try:
                for worker, message in self._control.receive(POLL_S):
                    self._take(worker, message)
                self._require_workers()
            except LaminaError as cause:
                return cause
        return error

    def _take(self, worker: str, message: ToEngine) -> None:
        if isinstance(message, StepDone):
            plan, _ = self._in_flight[message.step]
            for done in self._answers.take(plan, message):
                self._complete(done)
        elif isinstance(message, SlabUsage):
            capacity = self.cluster.capacities[worker]
            self._usage[worker] = MemoryStats(message.used, capacity, message.sequences)
            if self._lanes is not None:
                self._lanes.note_attention(worker, message.busy_s)
        elif isinstance(message, Migrated):
            self._scheduler.migrated(message.number)
        elif isinstance(message, Failed):
            raise self._root_cause(worker, message)
        else:
            raise TransportError(f"{worker} sent a {type(message).__name__} while serving")

    def _root_cause(self, worker: str, message: Failed) -> LaminaError:
        """Why workers failed: that one lost its peer follows from what the peer says, or from the peer's end."""
        failures = {worker: message}
        failures |= {name: other for name, other in self._control.receive(POLL_S) if isinstance(other, Failed)}
        name, first = min(failures.items(), key=lambda item: item[1].kind == PeerLostError.__name__)
        silent = {gone: reason for gone, reason in self._workers.ended().items() if gone not in failures}
        if first.kind == PeerLostError.__name__ and silent:
            return _gone(*next(iter(silent.items())))
        return failure(name, first)

    def _complete(self, done: StepDone) -> None:
        plan, _ = self._in_flight.pop(done.step)
        self._steps += 1
        drawn = self._scheduler.complete(plan.lane, plan.step)
        if self._lanes is not None and done.rows:
            self._lanes.note_slices(done.rows, done.busy_s)
            self._scheduler.use_lanes(self._lanes.choose(len(drawn) * self._lanes.active))
        for draw in done.draws:
            if draw.sequence not in drawn:  # aborted while the step ran
                continue
            group, completion = drawn[draw.sequence]
            completion.generated.append(draw.token)
            tracked = self._tracked[group.request.request_id]
            self._touched[group.request.request_id] = tracked
            if tracked.append(completion, draw):
                self._scheduler.finish(group, completion)
        for sequence in done.undrawable:
            if sequence in drawn:
                group, _ = drawn[sequence]
                self._end_request(group.request.request_id, FinishReason.ERROR, done.error)

    def _publish(self, request_id: str, tracked: TrackedRequest) -> None:
        if tracked.finished:
            self._forget(request_id)
        try:
            tracked.publish()
        except Exception:
            log.exception("the output callback of request %s failed; the request is aborted", request_id)
            self._scheduler.abort(request_id)
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        self._tracked.pop(request_id, None)
        with self._lock:
            self._accepted.leave(request_id)

    def _require_workers(self) -> None:
        for worker, reason in self._workers.ended().items():
            for sender, message in self._control.receive(POLL_S):  # it may have said why
                self._take(sender, message)
            raise _gone(worker, reason)

    def _watch(self) -> None:
        self._require_workers()
        now = time.monotonic()
        for step, (plan, deadline) in self._in_flight.items():
            if now > deadline:
                raise TransportError(
                    f"step {step} of lane {plan.lane} did not finish within {STEP_TIMEOUT_S:.0f} s; "
                    f"lower max_num_batched_tokens if the compute workers' machines are that slow"
                )
        if self._migration is not None:
            migration, deadline = self._migration
            if migration.number == self._scheduler.migrating and now > deadline:
                raise TransportError(
                    f"{migration.target} did not get tokens {migration.start} to {migration.stop} of sequence "
                    f"{migration.sequence} from {migration.source} within {MIGRATION_TIMEOUT_S:.0f} s; "
                    f"check the network between the two"
                )

    def _end(self) -> None:
        """Every request still here ends with an error, then the workers end."""
        reason = f"the engine has stopped: {self._dead}. Start a new one"
        try:
            self._run_commands()
            for request_id in list(self._tracked):
                self._end_request(request_id, FinishReason.ERROR, reason)
            told = [
                worker for worker in (*self.cluster.computes, *self.cluster.capacities) if self._tell_to_stop(worker)
            ]
            if self._on_trace:
                self._hand_over(self._collect_trace(told))
        finally:
            self._workers.close()
            self._control.close()

    def _tell_to_stop(self, worker: str) -> bool:
        try:
            self._control.send([worker], Stop())
        except TransportError as error:
            log.info("worker %s could not be told to stop: %s", worker, error)
            return False
        return True

    def _collect_trace(self, workers: Sequence[str]) -> dict[str, list[Span]]:
        """Spans by worker, this thread's as those of "engine"; without those of workers that do not answer in time."""
        spans = {"engine": list(self._timeline.spans)}
        deadline = time.monotonic() + TRACE_TIMEOUT_S
        while time.monotonic() < deadline and not spans.keys() | self._workers.ended().keys() >= set(workers):
            for worker, message in self._control.receive(POLL_S):
                if isinstance(message, Traced):
                    spans[worker] = message.spans
        return spans

    def _hand_over(self, spans: Mapping[str, list[Span]]) -> None:
        for receiver in self._on_trace:
            try:
                receiver(spans)
            except OSError as error:
                log.error("the timeline could not be written: %s", error)


def _gone(worker: str, reason: str) -> TransportError:
    return TransportError(
        f"worker {worker} is gone: {reason}. If it was killed for memory, give less to kv_cache_memory_bytes"
    )
