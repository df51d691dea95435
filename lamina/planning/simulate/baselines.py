"""Simulates the systems that Lamina is compared with, on the same cost model and arrivals.

* Tensor parallel and chunked prefill: every group of ``tensor_parallel`` compute workers is an ``Instance`` for whole
  requests; a request goes to the instance with the fewest requests, or to one with more than half of its prompt
  cached, unless that one has far more requests.
* Disaggregated: instances on the compute pool prefill, those on the memory pool decode. A request's KV stays on the
  prefill instance until a decode instance has room, and then moves over both NICs, as in DistServe.

Instances are independent engines: a lost worker fails the requests of its instance, and the others continue.
"""

import collections
import enum
import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from lamina.core.errors import ConfigError
from lamina.planning.plan.cost import CostModel
from lamina.planning.plan.workload import Content
from lamina.planning.simulate.baseline_instance import BLOCK, Batch, Instance, Running
from lamina.planning.simulate.result import PoolUse, RequestLog, Result, State, Stops
from lamina.planning.simulate.scenario import Arrivals, Deployment, Fault

AFFINITY, SLACK = 1.5, 4
"""A request goes where its prefix is unless so many times as many requests, and so many more, are there."""


class System(enum.Enum):
    """The systems that can be simulated."""

    LAMINA = "lamina"
    TENSOR_PARALLEL = "tensor-parallel"
    CHUNKED_PREFILL = "chunked-prefill"
    DISAGGREGATED = "disaggregated"


class BaselineSimulation:
    """One run of a system other than Lamina. ``simulate`` is called once."""

    def __init__(self, system: System, deployment: Deployment, arrivals: Arrivals, faults: Sequence[Fault]) -> None:
        """Raise ConfigError for a deployment that the system cannot use."""
        if system is not System.DISAGGREGATED and (deployment.memory is not None or deployment.local):
            raise ConfigError(f"{system.value} has one pool; leave out --memory and add its devices to --compute")
        for option, given in (("--prefill", deployment.prefill), ("--autoscale", deployment.prefill_bounds)):
            if given is not None:
                raise ConfigError(f"{option} is for pools of Lamina; leave it out with --system {system.value}")
        if deployment.shape.stages > 1:
            raise ConfigError(f"--pipeline-parallel divides Lamina's copies; leave it out with --system {system.value}")
        self._system = system
        self._deployment = deployment
        self._arrivals = arrivals
        chunked = system is System.CHUNKED_PREFILL
        self._first = self._instances(deployment.compute_cost, deployment.replicas, chunked)
        self._decode: list[Instance] = []
        if system is System.DISAGGREGATED:
            groups, rest = divmod(deployment.memory_workers, deployment.shape.ranks)
            if rest:
                raise ConfigError(
                    f"{deployment.memory_workers} memory workers do not divide into groups of "
                    f"{deployment.shape.ranks}, which decoding needs to hold the weights; give a multiple"
                )
            self._decode = self._instances(deployment.memory_cost, groups, chunked)
        self._log = RequestLog(arrivals)
        self._prefilled: collections.deque[tuple[Instance, Running]] = collections.deque()  # waiting for room to decode
        self._moving: dict[Running, tuple[Instance, Instance]] = {}  # KV being moved: from, to
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self._steps = self._arrived = 0
        self._queued_s = 0.0
        for fault in faults:
            self._at(fault.at_s, partial(self._strike, fault))

    def _instances(self, cost: CostModel, count: int, chunked: bool) -> list[Instance]:
        deployment = self._deployment
        deployment.require_weights(cost)
        return [
            Instance(
                cost,
                deployment.shape.ranks,
                deployment.max_num_seqs,
                deployment.max_num_batched_tokens,
                chunked,
                deployment.engine,
                deployment.prefix_cache,
            )
            for _ in range(count)
        ]

    def simulate(self, on_progress: Callable[[int], None] | None = None, stops: Stops | None = None) -> Result:
        """Run the simulation; the arguments are those of ``simulate``."""
        now, turns = 0.0, 0
        while self._log.ended < len(self._arrivals):
            before, waited = (
                now,
                self._prefilled or any(one.queue for one in (*self._first, *self._decode)),
            )
            arrival = self._next_arrival_s(now)
            if self._events and self._events[0][0] < arrival:
                now, _, happen = heapq.heappop(self._events)
                happen(now)
            else:
                assert arrival < math.inf, f"{len(self._arrivals) - self._log.ended} requests wait, but nothing runs"
                now = arrival
                self._arrivals.arrival_s[self._arrived] = now
                self._arrived += 1
                self._arrive(self._arrived - 1, now)
            self._queued_s += now - before if waited else 0.0
            turns += 1
            if turns % 64 == 0:
                if on_progress is not None:
                    on_progress(self._log.ended)
                if stops is not None and stops(self._log, now):
                    break
        return self._result(now)

    def _next_arrival_s(self, now: float) -> float:
        if self._arrived == len(self._arrivals):
            return math.inf
        if not self._arrivals.concurrency:
            return float(self._arrivals.arrival_s[self._arrived])
        return now if self._arrived - self._log.ended < self._arrivals.concurrency else math.inf

    def _at(self, time_s: float, happen: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), happen))

    # -- requests -----------------------------------------------------------------------------------------------

    def _arrive(self, index: int, now: float) -> None:
        prompt, output = int(self._arrivals.prompt[index]), int(self._arrivals.output[index])
        able = [instance for instance in _alive(self._first) if instance.could_hold(self._held(prompt, output))]
        last = _alive(self._decode) if self._decode else able
        if not able or not any(instance.could_hold(prompt + output) for instance in last):
            self._log.end(index, State.REFUSED, now)
            return
        request = Running(index, prompt, self._content(index, output))
        chosen = _chosen(able, request)
        engine = self._deployment.engine
        if not engine.request_s and not engine.prompt_token_s:
            self._enter(chosen, request, now)
            return
        chosen.entering += 1
        chosen.received_until_s = max(now, chosen.received_until_s) + engine.prompt_token_s * prompt
        self._at(chosen.received_until_s + engine.request_s, partial(self._received, chosen, request))

    def _received(self, instance: Instance, request: Running, now: float) -> None:
        instance.entering -= 1
        if instance.lost:
            self._log.end(request.index, State.ERROR, now)
        else:
            self._enter(instance, request, now)

    def _enter(self, instance: Instance, request: Running, now: float) -> None:
        instance.enter(request)
        self._begin(instance, now)

    def _content(self, index: int, output: int) -> Content:
        if not self._deployment.prefix_cache or not len(self._arrivals.contents):
            return ()
        prompt, answer = self._arrivals.contents[index], self._arrivals.answers[index]
        return prompt if answer is None or not prompt else (*prompt, (answer, output))

    def _held(self, prompt: int, output: int) -> int:
        return prompt if self._decode else prompt + output

    # -- steps --------------------------------------------------------------------------------------------------

    def _begin(self, instance: Instance, now: float) -> None:
        if instance.lost or not instance.idle:
            return
        batch = instance.plan()
        if batch is None:
            return
        instance.idle = False
        now, seconds = self._repeat(instance, batch, now)
        self._steps += 1
        self._at(now + seconds, partial(self._end, instance, batch, seconds))

    def _repeat(self, instance: Instance, batch: Batch, now: float) -> tuple[float, float]:
        """Run all but the last of a batch's uninterruptible steps; return the last step's start and length."""
        until = min(self._next_arrival_s(now), self._events[0][0] if self._events else math.inf)
        if until <= now or batch.chunks:
            return now, instance.step_seconds(batch)
        most = min(int(self._arrivals.output[one.index]) - one.drawn for one in batch.decoding)
        if until < math.inf:
            most = min(most, 1 + int((until - now) / instance.least_seconds(batch)))
        steps = instance.steps_alike(batch, most)
        if steps <= 1:
            return now, instance.step_seconds(batch)
        seconds = instance.run_seconds(batch, steps)
        ends = now + np.cumsum(seconds)
        alike = min(steps - 1, int(np.searchsorted(ends, until)))
        requests = np.array([one.index for one in batch.decoding], np.int64)
        for end in ends[:alike].tolist():
            self._log.draw(end, requests)
        instance.complete_steps(batch, alike)
        self._steps += alike
        instance.busy_s += float(seconds[:alike].sum())
        return (float(ends[alike - 1]) if alike else now), float(seconds[alike])

    def _end(self, instance: Instance, batch: Batch, seconds: float, now: float) -> None:
        if instance.lost:
            return
        instance.idle = True
        instance.busy_s += seconds
        drew = instance.complete(batch)
        places = self._log.draw(now, np.array([sequence.index for sequence in drew], np.int64))
        ended = {drew[place] for place in places}
        for sequence in drew:
            if sequence in ended:
                self._log.end(sequence.index, State.FINISHED, now)
                instance.remove_sequence(sequence)
            elif self._decode and instance in self._first:
                instance.running.remove(sequence)  # its blocks stay until its KV has moved
                self._prefilled.append((instance, sequence))
        self._pull(now)
        self._begin(instance, now)

    # -- moving KV from prefill to decode -----------------------------------------------------------------------

    def _pull(self, now: float) -> None:
        """Move finished prompts to decode instances, first come first served, while these have free blocks."""
        while self._prefilled:
            source, sequence = self._prefilled[0]
            able = [
                instance
                for instance in _alive(self._decode)
                if not instance.waiting and instance.has_room(sequence.cached + 1)
            ]
            if not able:
                return
            self._prefilled.popleft()
            self._move(source, max(able, key=lambda instance: instance.free), sequence, now)

    def _move(self, source: Instance, target: Instance, sequence: Running, now: float) -> None:
        deployment = self._deployment
        nbytes = sequence.cached * deployment.model.kv_bytes_per_token / deployment.shape.ranks
        costs = (deployment.compute_cost, deployment.memory_cost)
        seconds = max(float(cost.wire_seconds(nbytes)) for cost in costs)
        end = max(now, source.sent_until_s, target.sent_until_s) + seconds
        for instance in (source, target):
            instance.sent_until_s = end
            instance.sent_s += seconds
        held = source.detach_blocks(sequence)
        target.allocate(sequence)
        target.coming.append(sequence)
        self._moving[sequence] = source, target
        self._at(end + float(costs[0].link_seconds(0.0)), partial(self._moved, sequence, held))

    def _moved(self, sequence: Running, held: tuple[int, list[int]], now: float) -> None:
        if sequence not in self._moving:  # one of its ends was lost
            return
        source, target = self._moving.pop(sequence)
        source.free_detached(*held)
        target.coming.remove(sequence)
        target.running.append(sequence)
        self._begin(source, now)
        self._begin(target, now)

    # -- faults and the end -------------------------------------------------------------------------------------

    def _strike(self, fault: Fault, now: float) -> None:
        instances = self._first if fault.role == "compute" else self._decode
        instance = instances[fault.worker // self._deployment.shape.ranks]
        if fault.factor is not None:
            instance.factor = fault.factor
            return
        instance.lost = True
        ending = [*instance.queue, *instance.running]
        for sequence, (source, target) in list(self._moving.items()):
            if source.lost or target.lost:
                del self._moving[sequence]
                target.coming.remove(sequence)
                target.free_blocks(sequence)
                ending.append(sequence)
        stranded = not _alive(self._decode)
        if self._decode:
            ending += [own for source, own in self._prefilled if source.lost or stranded]
            self._prefilled = collections.deque(pair for pair in self._prefilled if pair[1] not in ending)
            if stranded:
                ending += [own for source in _alive(self._first) for own in (*source.queue, *source.running)]
        for sequence in ending:
            self._log.end(sequence.index, State.ERROR, now)
        if self._decode and stranded:
            for source in self._first:
                source.lost = True

    def _result(self, now: float) -> Result:
        deployment = self._deployment
        kinds = [("prefill" if self._decode else "compute", deployment.compute, self._first)]
        if self._decode:
            kinds.append(("decode", deployment.memory_cost.hardware, self._decode))
        return Result(
            system=self._system.value,
            log=self._log,
            seconds=now,
            pools=tuple(
                _use(name, hardware.kind, deployment.shape.ranks, instances, now) for name, hardware, instances in kinds
            ),
            usd_per_hour=deployment.usd_per_hour,
            queued=self._queued_s / now if now else 0.0,
            refused=self._queued_s / now if now else 0.0,
            steps=self._steps,
            preempted=sum(instance.preempted for instance in (*self._first, *self._decode)),
            prefix_queried=sum(instance.prefixes.queried for instance in self._first),
            prefix_hit=sum(instance.prefixes.hit for instance in self._first),
        )


def _alive(instances: Sequence[Instance]) -> list[Instance]:
    return [instance for instance in instances if not instance.lost]


def _chosen(able: Sequence[Instance], request: Running) -> Instance:
    """Return the instance for a request: like SGLang's router, by cached prefix while loads are balanced."""
    least = min(able, key=lambda instance: instance.load)
    if not request.content:
        return least
    hits = {id(one): BLOCK * one.prefixes.blocks(one.cached_prefix(request)) for one in able}
    best = max(able, key=lambda one: (hits[id(one)], -one.load))
    near = hits[id(best)] > request.prompt / 2 and best.load <= AFFINITY * least.load + SLACK
    return best if near else least


def _use(name: str, kind: str, tensor_parallel: int, instances: list[Instance], seconds: float) -> PoolUse:
    busy = [instance.busy_s / seconds if seconds else 0.0 for instance in instances]
    network = max(instance.sent_s / seconds if seconds else 0.0 for instance in instances)
    return PoolUse(name, kind, tensor_parallel * len(instances), sum(busy) / len(busy), max(busy), network)
