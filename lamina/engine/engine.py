"""The engine: one thread that receives workers' messages, plans and sends steps, and calls callers back."""

import collections
import dataclasses
import logging
import math
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from lamina.cluster.bringup import Cluster
from lamina.cluster.conversations import Workers
from lamina.cluster.pool import parse_bounds, pool_change
from lamina.config.engine_config import EngineConfig, overcommit, served_names
from lamina.control.messages import Observed, Release, Step, StepDone, ToEngine
from lamina.control.sockets import ControlServer
from lamina.control.timeline import Span, Timeline
from lamina.core.errors import ConfigError, EngineDeadError, LaminaError, RequestError
from lamina.core.outputs import FinishReason
from lamina.core.requests import Completion, Drawn, Group, Owner
from lamina.core.sampling import SamplingParams
from lamina.core.steps import StepPlan
from lamina.core.topology import Pool, Topology
from lamina.core.types import NOBODY, Client, KvElement, Request
from lamina.dataplane.wire import check_placements
from lamina.engine.changes import tell_to_stop
from lamina.engine.lives import Life, Lives
from lamina.engine.losses import POLL_S, poisonous
from lamina.engine.members import Members, Save
from lamina.engine.pools import Resize
from lamina.engine.scaling import Scaling
from lamina.engine.stats import EngineStats, PlacementView
from lamina.engine.streams import Submission
from lamina.engine.timelines import LiveTimeline, OnTrace, collect_spans, hand_over, read_clocks
from lamina.engine.tracking import TrackedRequest, Unfinished
from lamina.engine.updates import OnTokens, OnUpdate, PlainTokens, RequestText, engine_request
from lamina.kv.balancing import policy_for
from lamina.kv.stripes import placement
from lamina.models.directory import ModelDirectory, sampling_defaults
from lamina.schedule.beam_search import check_beams
from lamina.schedule.limits import MAX_WAITING, Limits, Places
from lamina.schedule.policy import find_policy
from lamina.schedule.roles import Targets
from lamina.schedule.turn import Turn
from lamina.text.grammars import require_grammar
from lamina.text.prompts import check_token_params, check_tokens, prompt_tokens
from lamina.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 60.0
RECALL_S = 30.0  # requests of an earlier engine must come again within this time, or their KV is released
MOST_COMMANDS = 256  # run in one turn, so that one client's many requests do not delay the others' tokens


def _new_thread(run: Callable[[], None]) -> threading.Thread:
    return threading.Thread(target=run, name="lamina-engine", daemon=True)


class Engine:
    """Owns requests, tokens and the placement of KV. Its public methods are thread-safe.

    Attributes:
        sampling_defaults: Parameters of requests that give none.
        vocab_size: Rows of the embedding. Token ids of prompts must be below it; the tokenizer may have fewer tokens.
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
        save: Save = lambda topology, wanted: None,
        thread: Callable[[Callable[[], None]], threading.Thread] = _new_thread,
    ) -> None:
        """Start the engine of a running cluster. ``close`` ends both and passes the workers' spans to ``on_trace``.

        ``thread``: makes the engine's thread, which runs the given function.
        """
        self.config = config
        self.model_name, *aliases = served_names(config) or [model.name]
        self.model_aliases = tuple(aliases)
        self.tokenizer = tokenizer
        self.vocab_size = cluster.loaded.vocabulary
        self._seeds = random.Random(config.seed)  # draws the seeds of requests that give none
        self.max_model_len = limits.max_model_len
        self.sampling_defaults = sampling_defaults(model, config.generation_config)
        self.cluster = cluster
        self._control = control
        self._workers = workers
        topology, longest = cluster.topology, config.kv_tokens_per_worker
        balances = config.balance not in ("auto", "off")
        self._turn = Turn(
            limits,
            placement(config.partition, cluster.capacities, cluster.shards, longest, topology, balances),
            topology.pipeline,
            attentions=len(cluster.loaded.attentions),
            kv_heads=cluster.shards.heads,
            plan_ahead=config.plan_ahead,
            policy=find_policy(config.policy, config.slo_ttft_ms, config.slo_tbt_ms),
            prefix_cache=config.prefix_cache,
            overcommit=overcommit(config),
            step_bound_s=None if config.slo_tbt_ms is None else config.slo_tbt_ms / 1e3,
            balance=policy_for(config.balance, topology, config.partition),
            window=cluster.window if config.prefix_cache else 0,
            scratch=topology.scratch,
        )
        self._scheduler = self._turn.scheduler
        self._scheduler.recall(cluster.recalled)
        self._recalls_until = time.monotonic() + RECALL_S
        if cluster.missing:  # memory workers lost with the last engine will be started again
            whole = placement(config.partition, cluster.whole, cluster.shards, longest, topology, balances)
            self._scheduler.placement.promise(whole.total)
        self._on_trace = on_trace
        self._timeline = Timeline(bool(on_trace))
        element = KvElement.from_setting(config.kv_cache_dtype, cluster.loaded.dtype)
        self._placement = PlacementView(self._scheduler, cluster.loaded.attentions, element)
        self._members = Members(control, workers, cluster, self._turn, config.max_restarts, save)
        self._live = LiveTimeline(self._members.tell)
        self._lives = Lives()
        bounds = {} if config.autoscale is None else parse_bounds(config.autoscale)
        targets = Targets((config.slo_ttft_ms or math.inf) / 1e3, (config.slo_tbt_ms or math.inf) / 1e3)
        self._scaling = Scaling(bounds, self._turn, self._members, targets)
        self._touched: dict[TrackedRequest, None] = {}  # requests with unpublished updates
        self._plain: dict[int, Unfinished] = {}  # ``TrackedRequest.plain`` of all requests
        self._lacks_memory = bool(cluster.missing)
        self._steps = 0
        self._commands: collections.deque[Callable[[], None]] = collections.deque()
        self._lock = threading.Lock()  # guards changes of _commands, _tracked, _places and _dead together
        self._tracked: dict[str, TrackedRequest] = {}  # by request id, from submission to the terminal state
        self._places = Places(MAX_WAITING + limits.max_sequences)
        self._dead: str | None = None
        self._turn_observers: list[Callable[[], None]] = []
        self._thread = thread(self._run)
        self._thread.start()

    # -- called from any thread ---------------------------------------------------------------------------------

    def submit(
        self,
        request_id: str,
        prompt: str | list[int],
        params: SamplingParams,
        on_update: OnUpdate,
        client: Client = NOBODY,
    ) -> None:
        """Queue a request. Clients share the runtime fairly.

        ``on_update`` is called from the engine's thread with every update; exactly one update has ``finished`` set.

        Raises RequestError for a request that can never be served, OverloadedError if the client's share of the queue
        is full, EngineDeadError if the engine has stopped.
        """
        require_grammar(params, self.tokenizer.eos_token_ids)
        text = prompt if isinstance(prompt, str) else None
        tokens = prompt_tokens(self.tokenizer, prompt, params, self.max_model_len)
        asked = self._request(request_id, text, tokens, params, client, self.new_seed())
        request = engine_request(asked, self.tokenizer, self.max_model_len)
        if request is not asked:
            self._validate(request.prompt_token_ids, request.params)
        reading = RequestText(asked, self.tokenizer, on_update, self.end_completion)
        self._queue(TrackedRequest(request, self.tokenizer.eos_token_ids, reading.on_update))

    def submit_all(self, submissions: Sequence[Submission], client: Client = NOBODY) -> None:
        """Queue several requests atomically: if one is rejected, none is queued. Errors are those of ``submit``."""
        for count, one in enumerate(submissions):
            try:
                self.submit(one.request_id, one.prompt, one.params, one.on_update, client)
            except BaseException:
                for queued in submissions[:count]:
                    self.abort(queued.request_id)
                raise

    def submit_tokens(
        self,
        request_id: str,
        tokens: list[int],
        params: SamplingParams,
        on_tokens: OnTokens,
        client: Client,
        seed: int,
        drawn: Drawn | None = None,
        again: bool = False,
        plain: PlainTokens | None = None,
    ) -> None:
        """Queue a request whose caller detokenizes and matches stop strings itself.

        The caller ends completions at stop strings by ``end_completion``.

        Args:
            seed: Seed of the draws if the parameters have none.
            drawn: Tokens generated before an engine restart; generation continues after them.
            again: True if an earlier engine accepted the request. The limit on queued requests is then not applied.
            plain: Gets tokens at once if nothing else is new, instead of ``on_tokens``; see ``TrackedRequest``.

        Raises what ``submit`` raises.
        """
        request = self._request(request_id, None, tokens, params, client, seed)
        self._queue(TrackedRequest(request, self.tokenizer.eos_token_ids, on_tokens, drawn, plain), again)

    def new_seed(self) -> int:
        """Return a fresh sampling seed for requests that give none."""
        return self._seeds.getrandbits(62)

    def _request(
        self, request_id: str, text: str | None, tokens: list[int], params: SamplingParams, client: Client, seed: int
    ) -> Request:
        self._validate(tokens, params)
        return Request(request_id, text, tokens, params, seed if params.seed is None else params.seed, client)

    def _validate(self, tokens: list[int], params: SamplingParams) -> None:
        self._scheduler.validate_request(len(tokens), params)
        check_tokens(tokens, self.vocab_size, self.tokenizer)
        check_token_params(params, self.vocab_size, self.tokenizer)
        check_beams(params, self.vocab_size, self.tokenizer.eos_token_ids)

    def _queue(self, tracked: TrackedRequest, again: bool = False) -> None:
        request = tracked.request
        request_id = request.request_id
        with self._lock:
            self._require_alive()
            if request_id in self._tracked:
                raise RequestError(f"request id {request_id!r} is in use; give each request its own")
            self._places.reserve_place(request_id, request.client, again)
            self._tracked[request_id] = tracked
            self._commands.append(lambda: self._add(tracked))
        self._control.wake()

    def end_completion(self, request_id: str, index: int) -> None:
        """End a completion in which the caller found a stop string: free its KV and send no more updates of it.

        Does nothing if the completion has ended or the request is unknown.
        """
        with self._lock:
            if self._dead is not None:
                return
            self._commands.append(lambda: self._finish_completion(request_id, index))
        self._control.wake()

    def abort(self, request_id: str) -> None:
        """Cancel a request, which keeps the tokens it has. Does nothing if it is unknown or has ended."""
        with self._lock:
            if self._dead is not None:
                return
            self._commands.append(lambda: self._end_request(request_id, FinishReason.ABORT))
        self._control.wake()

    def scale(self, *, compute: int | str = 0, memory: int | str = 0, prefill: int | str = 0) -> "Future[list[str]]":
        """Add workers to the pools while requests run, or remove some: 2, -1, or "rtx3090:+2". A text without a sign is
        the size that a pool is to have: "3".

        Before a memory worker leaves, its KV moves to others. If one of ``prefill`` and ``compute`` grows and the
        other one shrinks, replicas change their role instead and keep their weights. The future has the workers' names
        once all have joined, left or changed their role, or an error if one does not; ConfigError if the change is
        impossible.

        Raises ConfigError if all are 0 or one is malformed, EngineDeadError if the engine has stopped.
        """
        pools = self._members.pools
        if pools is None:
            raise ConfigError("this cluster cannot be scaled: launch did not make it")
        wanted: dict[Pool, int | str] = {"compute": compute, "memory": memory, "prefill": prefill}
        changes = {pool: pool_change(pool, one) for pool, one in wanted.items() if one}
        if not changes:
            raise ConfigError(
                "nothing to change: give compute, memory or prefill a number of workers, such as memory=+2"
            )
        resize = Resize()

        def command() -> None:
            try:
                pools.resize(changes, resize)
            except LaminaError as error:
                resize.fail(error)

        with self._lock:
            self._require_alive()
            self._commands.append(command)
        self._control.wake()
        return resize.future

    def stats(self) -> EngineStats:
        """Return counters as of now."""
        with self._lock:
            known, dead = len(self._tracked), self.dead
        running = self._scheduler.running
        if dead is not None:
            known = running = 0
        waiting = max(0, known - running)
        members = self._members
        usage, counted = dict(members.usage), (self._scheduler.dropped, members.recoveries, members.recomputed)
        links = list(collections.Counter(list(self.cluster.links.values())).items())
        prefixes, topology, placement = self._scheduler.prefixes, members.topology, self._placement.stats
        cached = topology.by_slab(prefixes.idle())
        usage = {worker: one.without(*cached[worker]) if worker in cached else one for worker, one in usage.items()}
        counts = (running, waiting, self._steps, *counted)
        disks, scaling = self._scheduler.disks, self._scaling.stats
        placement = dataclasses.replace(placement, held=topology.by_slab(placement.held))
        found = (prefixes.queried, prefixes.hit, placement, disks.spilled, disks.fetched, scaling)
        stats = EngineStats(*counts, usage, dead, members.watch.silent, members.states, links, *found)
        places, scratch = topology.places, self._scheduler.scratch.used
        return dataclasses.replace(stats, places=places, handovers=self._scheduler.handovers, scratch=scratch)

    def timeline(self) -> dict[str, list[Span]]:
        """Return what workers did in a window of the last seconds, by name, and ask them for a new window.

        Spans are recorded only while this is called repeatedly, so that the first call returns nothing.
        """
        with self._lock:
            if self.dead is not None:
                return {}
            self._commands.append(lambda: self._live.request_windows(self.topology))
        self._control.wake()
        return self._live.spans()

    def lives(self) -> list[Life]:
        """Return what has happened to the newest requests, those that run first."""
        return self._lives.newest({name: each.generated for name, each in list(self._tracked.items())})

    def observe_turns(self, observe: Callable[[], None]) -> None:
        """Call ``observe`` in the engine's thread at the end of every turn, after the observers given before."""
        self._turn_observers.append(observe)

    def _tell_observers(self) -> None:
        for observe in self._turn_observers:
            observe()

    def close(self) -> None:
        """End all requests and workers. Idempotent."""
        self._die("the engine was closed")
        self._control.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_TIMEOUT_S)
            if self._thread.is_alive():
                raise EngineDeadError(f"the engine did not end within {CLOSE_TIMEOUT_S:.0f} s; end its process")

    @property
    def topology(self) -> Topology:
        return self._members.topology

    @property
    def dead(self) -> str | None:
        """Why this engine has stopped; None while it runs. In a forked process, the engine's thread is missing."""
        if self._dead is None and not self._thread.is_alive():
            return f"process {os.getpid()} does not run its thread; a fork of a process cannot use its engine"
        return self._dead

    def _require_alive(self) -> None:
        if self.dead is not None:
            raise EngineDeadError(f"the engine has stopped: {self.dead}. Start a new one")

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
            self._die(str(error))
            # Callers get the reason in one line; only the log has the worker's traceback.
            log.log(logging.ERROR if "\n" in str(error) else logging.INFO, "the engine has stopped: %s", error)
        except BaseException as error:  # SystemExit too: whatever ends this thread ends the engine
            self._die(f"{type(error).__name__}: {error}")
            log.exception("the engine failed")
        finally:
            self._end()

    def _step(self) -> None:
        wait_s = min(POLL_S, max(0.0, self._turn.next_plan_at - time.monotonic()))
        messages = list(self._control.receive(wait_s))  # messages and commands end this wait early
        begun = self._timeline.now()
        for worker, message in messages:
            self._take(worker, message)
        self._run_commands()
        self._members.turn()
        now = time.monotonic()
        self._placement.look(now)
        if now > self._recalls_until:
            self._scheduler.drop_recalled()
        for plan in self._turn.plan(now):
            self._send(plan, now)
        self._scaling.look(now)
        for worker, sequences in self._members.recipients.overdue(now if self._turn.in_flight else math.inf):
            self._members.tell([worker], Release(sequences))
        self._timeline.record_span("plan", -1, begun)
        begun = self._timeline.now()
        touched, self._touched = self._touched, {}
        for tracked in touched:
            self._publish(tracked)
        self._tell_observers()
        self._timeline.record_span("tell callers", -1, begun)
        self._check_workers()

    def _take(self, worker: str, message: ToEngine) -> None:
        if isinstance(message, StepDone) and worker in self.topology.names:
            if (plan := self._turn.in_flight.get(message.step)) is not None:
                self._members.watch.progressed([plan.lane], worker)
            for done in self._turn.in_order(message):
                self._complete(done)
        elif isinstance(message, Observed):
            self._live.keep_window(worker, message, self.topology)
        else:
            self._members.handle_message(worker, message)

    def _complete(self, done: StepDone) -> None:
        plan, plain = self._turn.in_flight[done.step], self._plain
        drawn = self._turn.complete(done)
        self._lives.note_done(done.step)
        self._steps += 1
        for sequence, token in done.drawn(plan):
            if sequence not in drawn:  # aborted while the step ran
                continue
            one = plain.get(sequence)
            if one is None or not one.append_plain(token):
                self._append(drawn[sequence], token, done.logprobs.get(sequence, b""))
        for sequence in done.undrawable:
            if sequence in drawn:
                group, _ = drawn[sequence]
                self._end_request(group.request.request_id, FinishReason.ERROR, done.error, suspect=True)

    def _append(self, owner: Owner, token: int, logprobs: bytes) -> None:
        """Add one drawn token to a completion, which may end at it."""
        group, completion = owner
        tracked = self._tracked[group.request.request_id]
        if group.searches:
            self._compare(tracked, group, completion, logprobs)
            return
        completion.generated.append(token)
        tracked.group = group
        if tracked.append(completion, token, logprobs):
            self._scheduler.end_completion(group, completion)
        if tracked.has_news:
            self._touched[tracked] = None

    def _compare(self, tracked: TrackedRequest, group: Group, beam: Completion, logprobs: bytes) -> None:
        choice = tracked.compare(group, beam, logprobs)
        if choice is not None:
            self._scheduler.beams.choose(group, choice)
        if tracked.finished:
            self._touched[tracked] = None
            for one in group.completions:
                self._scheduler.end_completion(group, one)

    def _send(self, plan: StepPlan, now: float) -> None:
        check_placements(plan, self.cluster.shards)
        self._members.watch.began(plan)
        self._lives.note_plan(plan)
        for workers, part in self._members.recipients.select(plan, now):
            self._members.tell(workers, Step(part, self.topology.epoch))

    def _run_commands(self) -> None:
        for _ in range(min(len(self._commands), MOST_COMMANDS)):
            self._commands.popleft()()
        if self._commands:
            self._control.wake()

    def _add(self, tracked: TrackedRequest) -> None:
        self._lives.note_queued(tracked.request.request_id, len(tracked.request.prompt_token_ids))
        try:
            group = self._scheduler.submit(tracked.request, tracked.drawn)
        except RequestError as error:  # a worker has been lost since the request was submitted
            tracked.end_all(FinishReason.ERROR, str(error))
            self._publish(tracked)
        else:
            tracked.start(group)

    def _finish_completion(self, request_id: str, index: int) -> None:
        tracked = self._tracked.get(request_id)
        if tracked is None:
            return
        tracked.end_completion(index)  # its slots are released at its next token
        if tracked.finished:
            self._scheduler.abort(request_id)
            self._touched.pop(tracked, None)
            self._publish(tracked)

    def _end_request(
        self, request_id: str, reason: FinishReason, error: str | None = None, suspect: bool = False
    ) -> None:
        """End a request. Does nothing if it has ended. ``suspect``: its KV must not be cached."""
        tracked = self._tracked.get(request_id)
        if tracked is not None:
            self._scheduler.abort(request_id, suspect)
            tracked.end_all(reason, error)
            self._touched.pop(tracked, None)
            self._publish(tracked)

    def _publish(self, tracked: TrackedRequest) -> None:
        if tracked.finished:
            self._forget(tracked.request.request_id)
            self._lives.note_end(tracked.request.request_id, tracked.reasons, tracked.generated, tracked.error)
        if not _call_back(tracked):
            self._scheduler.abort(tracked.request.request_id)
            self._forget(tracked.request.request_id)
            self._lives.note_end(tracked.request.request_id, [], tracked.generated, "its caller failed")
        elif not tracked.finished:
            self._plain |= tracked.plain

    def _forget(self, request_id: str) -> None:
        with self._lock:
            tracked = self._tracked.pop(request_id, None)
            self._places.free_place(request_id)
        for sequence in () if tracked is None else tracked.plain:
            self._plain.pop(sequence, None)

    def _check_workers(self) -> None:
        """Detect lost workers and lack of progress. Raises LaminaError if the engine cannot continue."""
        members, placement = self._members, self._scheduler.placement
        if members.watch.ended:
            for sender, message in self._control.receive(POLL_S):  # it may have said why
                self._take(sender, message)
        if lost := members.lost():
            self._lacks_memory = True
            self._lives.drop_steps()
            placement.promise(placement.possible)  # requests wait for the successors of those that are lost
            if (poison := members.on_workers_lost(lost)) is not None:
                self._end_request(poison, FinishReason.ERROR, poisonous(lost), suspect=True)
        if placement.promised and not members.memory_starts:  # these have joined, or it may take long
            placement.promise(0)
        if self._lacks_memory and not members.memory_grows:  # they have, or never will
            self._lacks_memory = False
            self._end_stranded()
        members.watch.raise_if_stalled()

    def _end_stranded(self) -> None:
        """End the requests for which the memory workers will never have enough KV."""
        for group in self._scheduler.stranded:
            self._end_request(group.request.request_id, FinishReason.ERROR, _too_long(group, self.topology))

    def _end(self) -> None:
        """End all requests with an error, then all workers. A failure of one part does not prevent the others."""
        for part in (self._end_requests, self._end_workers, self._workers.close, self._control.close):
            try:
                part()
            except BaseException:
                log.exception("a part of the engine's shutdown failed; the rest continues")

    def _end_requests(self) -> None:
        reason = f"the engine has stopped: {self._dead}. Start a new one"
        for request_id, tracked in list(self._tracked.items()):
            tracked.end_all(FinishReason.ERROR, reason)
            self._forget(request_id)
            _call_back(tracked)
        self._tell_observers()

    def _end_workers(self) -> None:
        fabric = self.cluster.fabric
        if self._on_trace and fabric is not None:
            read_clocks(self._control, self._workers, fabric)
        told = tell_to_stop(self._control, sorted(self.topology.names))
        if (pools := self._members.pools) is not None:
            tell_to_stop(self._control, [*pools.strangers])
            pools.close()
        if self._on_trace:
            spans = collect_spans(self._control, self._workers, told, fabric)
            hand_over({"engine": list(self._timeline.spans), **spans}, self._on_trace)


def _too_long(group: Group, topology: Topology) -> str:
    return (
        f"the request may need {group.tokens} KV tokens; the {len(topology.capacities)} memory workers that are left "
        f"hold {sum(topology.capacities.values())}. Send it again once workers have been replaced, or shorten it"
    )


def _call_back(tracked: TrackedRequest) -> bool:
    """Publish a request's updates; return False if its caller raised, which must not affect other requests."""
    try:
        tracked.publish()
    except BaseException:
        log.exception("the output callback of request %s failed", tracked.request.request_id)
        return False
    return True
