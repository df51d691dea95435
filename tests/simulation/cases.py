"""Runs in which everything is given, not chosen by a seed: each brings about what one fault of the history needs.

They stay what they are when seeds choose otherwise. ``python -m tests.simulation --case NAME --bug NAME`` shows that a
case finds its fault (``tests.simulation.bugs``).
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from typing_extensions import override

from lamina.config.engine_config import EngineConfig
from lamina.core.sampling import SamplingParams
from tests.simulation.layouts import LONGEST, Layout, Pace
from tests.simulation.model import expected
from tests.simulation.scenario import Asked, Asking, Fault, Scene

ONE, LAST = 0.0, 0.999  # choices of a fault: the first worker that joins or leaves, the last one of all


class Script(Asking):
    """Given requests, again and again, ``each_s`` apart."""

    def __init__(self, requests: Sequence[Asked]) -> None:
        self._requests = itertools.cycle(requests)

    @override
    def ask(self, longest: int, most: int) -> Asked:
        return next(self._requests)


@dataclass(frozen=True)
class Case:
    """A run.

    Attributes:
        faults: What goes wrong, in this order.
        chances: How often rare branches are taken, by point.
    """

    name: str
    layout: Layout
    requests: Sequence[Asked]
    faults: Sequence[Fault]
    steps: int = 120
    chances: Mapping[str, float] = field(default_factory=dict)

    @property
    def scene(self) -> Scene:
        """The run without its faults."""
        return Scene(self.layout, Script(self.requests), self.chances)


USUAL = Pace()
MOVING = {
    ("lamina.schedule.moves", "TOKENS_PER_STEP"): 256,
    ("lamina.schedule.balancing", "LOOK_STEPS"): 2,
    ("lamina.schedule.balancing", "BACK_STEPS"): 4,
    ("lamina.kv.balancing", "LEAST"): 4,
    ("lamina.kv.prefix_tree", "GRAIN"): 8,
}
"""Constants with which KV moves often."""


def _layout(
    computes: int,
    memories: int,
    prefill: int = 0,
    jitter: float = 1.0,
    data: float = 1.0,
    pace: Pace = USUAL,
    knobs: Mapping[tuple[str, str], object] = MappingProxyType({}),
    **settings: Any,
) -> Layout:
    usual: dict[str, Any] = {"kv_cache_memory_bytes": 250_000, "max_num_batched_tokens": 16, "pipelining": "fixed"}
    chosen = usual | settings
    config = EngineConfig(
        compute=f"cpu:{computes}",
        prefill=f"cpu:{prefill}" if prefill else None,
        memory=f"cpu:{memories}" if memories else "local",
        transport="tcp",
        threads=1,
        max_model_len=LONGEST,
        generation_config="none",
        max_restarts=1000,
        max_num_seqs=8,
        **chosen,
    )
    return Layout(computes + prefill, memories, not memories, config, {"control": jitter, "data": data}, pace, knobs)


def _asked(prompt: Sequence[int], tokens: int, n: int = 1, stops: bool = False, abort_at: float | None = None) -> Asked:
    """Return a request.

    Args:
        stops: Its first completion ends with its first token, and no other one does.
        abort_at: When it is aborted, twice.
    """
    params = SamplingParams(n=n, max_tokens=tokens, temperature=1.0, ignore_eos=True)
    if stops:
        first = expected(prompt, SamplingParams(max_tokens=1, temperature=1.0), 7)[0]
        params = SamplingParams(n=n, max_tokens=tokens, temperature=1.0, ignore_eos=True, stop_token_ids=first)
    return Asked([*prompt], params, "client0", 7, abort_at, 0.0, {}, 0.05)


def _faults(*given: tuple[float, str, float, float, Mapping[str, int], Sequence[str]]) -> list[Fault]:
    return [Fault(number, *fault) for number, fault in enumerate(given)]  # type: ignore[arg-type]


CASES = [
    Case(
        "leaves_empty_pool",
        _layout(2, 1),
        [_asked(range(20), 20)],
        _faults(
            (0.3, "wipe", 0.0, LAST, {}, []),
            (0.3, "scale", 0.0, 0.0, {"compute": -1}, ["bare"]),
        ),
    ),
    Case(
        "leaves_while_joining",
        _layout(1, 3),
        [_asked(range(20), 20)],
        _faults(
            (0.2, "scale", 0.0, 0.0, {"compute": 1}, []),
            (0.2, "scale", 0.0, 0.0, {"memory": -1}, ["linking"]),
            (0.2, "stop", 1.0, ONE, {}, ["linking"]),
            (2.2, "scale", 0.0, 0.0, {"memory": 1}, []),  # which is linked with the replica
        ),
        steps=350,
    ),
    Case(
        "ended_before_forks",
        _layout(1, 1, prefill=1),
        [_asked(range(20), 20, n=3, stops=True), _asked(range(40, 60), 40)],
        [],
        chances={"wait": 0.8},
    ),
    Case(
        "grows_unknown",
        _layout(1, 2, prefill=1),
        [_asked(range(20), 20, n=2), _asked(range(40, 60), 40)],
        [],
        chances={"spread": 0.9, "preempt": 0.5},
    ),
    Case(
        # Prompts of several completions share a prefix with decoding requests, by which it moves meanwhile.
        "forgotten_unforked",
        _layout(
            1,
            3,
            pace=Pace(0.02, 5e-3),
            knobs=MOVING,
            balance="bandwidth",
            kv_cache_memory_bytes=500_000,
            max_num_batched_tokens=8,
        ),
        [
            _asked([*range(40), 100 + number], 40) if alone else _asked([*range(40), 150 + number, *range(60)], 10, n=2)
            for number in range(30)
            for alone in (True, False)
        ],
        _faults((0.1, "kill", 0.0, ONE, {}, ["moved"])),
        chances={"look": 0.9, "move": 0.9},
    ),
    Case(
        # A replica dies once it is linked. The other one notices, and then learns that the replica is a member.
        "joins_unlinked",
        _layout(1, 1, pace=Pace(slice_s=0.02), pipelining="rotational", lanes=2),
        [_asked(range(20), 60), _asked(range(20, 40), 60)],
        _faults(
            (0.3, "scale", 0.0, 0.0, {"compute": 1}, []),
            (0.3, "kill", 0.0, ONE, {}, ["linked"]),
        ),
    ),
    Case(
        # Sums are slower than the engine, which releases a sequence in the plan that follows its last token.
        "draws_released",
        _layout(2, 0, jitter=20.0, data=400.0, tensor_parallel=2, lanes=6, max_num_batched_tokens=64),
        [_asked([*range(40), number], 1) for number in range(60)],
        [],
    ),
    Case("aborted_twice", _layout(1, 1), [_asked(range(20), 20, abort_at=0.1)], []),
]
