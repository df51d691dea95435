"""Named points of the product at which a run takes a rare branch at random, as FoundationDB's BUGGIFY does.

Each of them does what the product does by itself once something runs short, or once a policy says so: requests are
preempted, cached prefixes evicted, KV moved. A seed chooses how often. None of them may change a token.
"""

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

from lamina.kv.balancing import MOST_PROPOSALS, ByBandwidth, ByDebt, ByThroughput, Proposal
from lamina.kv.placement import Placement
from lamina.kv.prefix_cache import PrefixCache
from lamina.schedule.balancing import Balancing
from lamina.schedule.dealing import Dealer
from lamina.schedule.growth import Growth
from lamina.schedule.scheduler import Scheduler
from tests.simulation.themes import theme

Method = Callable[..., Any]


class Draw:
    """Decides whether a point's branch is taken.

    Attributes:
        chance: Of the branch, each time that the point is reached.
        off: No branch is taken any more.
    """

    def __init__(self, seed: str, chance: float) -> None:
        self.random = random.Random(seed)
        self.chance, self.off = chance, False

    def __call__(self) -> bool:
        return self.random.random() < self.chance and not self.off


def _preempt(draw: Draw, find_slots: Method) -> Method:
    """Some request is preempted although there are slots."""

    def find(growth: Any, lane: Any) -> Iterator[Any]:
        yield from find_slots(growth, lane)
        running = [group for own in growth._lanes for group in own.running if group.alive]
        if draw() and running:
            yield draw.random.choice(running)

    return find


def _spread(draw: Draw, end_segments: Method) -> Method:
    """A sequence continues on another worker although its own has slots."""

    def end(growth: Any, lane: Any) -> None:
        end_segments(growth, lane)
        if draw():
            for worker in list(lane.decoding.workers):
                growth._spread(lane, worker, 1)

    return end


def _evict(draw: Draw, changes: Method) -> Method:
    """Some idle tokens are evicted although nobody needs their slots."""

    def evict(prefixes: Any) -> Any:
        idle = {place: tokens for place, tokens in prefixes._placement.idle.items() if tokens}
        if draw() and idle:
            place = draw.random.choice([*idle])
            prefixes._evict(place, draw.random.randint(1, idle[place]))
        return changes(prefixes)

    return evict


def _look(draw: Draw, due: property) -> property:
    """The policy that moves KV is asked although hardly any step has completed."""
    assert due.fget is not None
    is_due = due.fget
    return property(lambda balancing: is_due(balancing) or draw())


def _move(draw: Draw, propose: Method) -> Method:
    """A policy moves KV although no worker has more than others."""

    def also(policy: Any, view: Any) -> list[Proposal]:
        open_ones = [worker for worker, load in view.loads.items() if load.accepts]
        proposals = propose(policy, view)
        for one in view.held if draw() else ():
            target = draw.random.choice(open_ones) if open_ones else one.worker
            if one.tokens and target != one.worker:
                proposals.append(Proposal(one.request, one.worker, (target,), draw.random.randint(1, one.tokens)))
        draw.random.shuffle(proposals)
        return proposals[:MOST_PROPOSALS]

    return also


def _refuse(draw: Draw, fitting: Method) -> Method:
    """A request does not fit although there are slots. It is tried again once one that runs has ended."""

    def fit(placement: Any, *given: Any, **named: Any) -> Any:
        runs = any(placement.sequences.values())
        return None if runs and draw() else fitting(placement, *given, **named)

    return fit


def _wait(draw: Draw, fits: Method) -> Method:
    """No lane that decodes takes a request over although one has seats."""
    return lambda *given: False if draw() else fits(*given)


def _pass(draw: Draw, keep_prompt: Method) -> Method:
    """A computed prompt is not cached yet, as if another request had cached some of it."""
    return lambda *given: None if draw() else keep_prompt(*given)


def _deal(draw: Draw, plan: Method) -> Method:
    """Requests are dealt out to lanes again although neither lanes nor replicas have changed."""

    def again(scheduler: Any, lane: int) -> Any:
        scheduler._deals_again = scheduler._deals_again or draw()
        return plan(scheduler, lane)

    return again


@dataclass(frozen=True)
class Point:
    """A rare branch.

    Attributes:
        methods: The methods of the product from which it is taken.
        wrap: Returns what replaces such a method.
        chances: How often it is taken, one of which a seed chooses.
    """

    methods: tuple[tuple[type, str], ...]
    wrap: Callable[[Draw, Any], Any]
    chances: tuple[float, ...] = (0.0, 0.0, 0.02, 0.1, 0.5)


POINTS: Mapping[str, Point] = {
    "preempt": Point(((Growth, "find_slots"),), _preempt, (0.0, 0.0, 0.005, 0.02, 0.05)),  # each repeats many steps
    "spread": Point(((Growth, "end_segments"),), _spread),
    "evict": Point(((PrefixCache, "changes"),), _evict),
    "look": Point(((Balancing, "due"),), _look),
    "move": Point(((ByBandwidth, "propose"), (ByThroughput, "propose"), (ByDebt, "propose")), _move),
    "refuse": Point(((Placement, "fitting"),), _refuse),
    "wait": Point(((Dealer, "_fits_to_decode"),), _wait),
    "deal": Point(((Scheduler, "plan"),), _deal, (0.0, 0.0, 0.005, 0.05)),  # no step may be in flight then
    "pass": Point(((PrefixCache, "_keep_prompt"),), _pass),
}


def chances(seed: int) -> Mapping[str, float]:
    """Return how often a seed takes each branch, by point."""
    chance = random.Random(f"points {seed}")
    return {name: chance.choice(point.chances) for name, point in POINTS.items()} | dict(theme(seed).chances)


class Points:
    """The points of a run. ``chances``: By point, how often its branch is taken; never, if it is not named."""

    def __init__(self, seed: int, chances: Mapping[str, float]) -> None:
        self._draws = {name: Draw(f"{name} {seed}", chance) for name, chance in chances.items() if chance}

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """Let the product reach the points meanwhile."""
        with contextlib.ExitStack() as patches:
            for name, draw in self._draws.items():
                for owner, method in POINTS[name].methods:
                    wrapped = POINTS[name].wrap(draw, vars(owner)[method])
                    patches.enter_context(mock.patch.object(owner, method, wrapped))
            yield

    def end(self) -> None:
        """Take no rare branch any more."""
        for draw in self._draws.values():
            draw.off = True
