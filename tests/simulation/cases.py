"""Runs in which everything is given, not chosen by a seed: each brings about what one fault of the history needs.

They stay what they are when seeds choose otherwise. ``python -m tests.simulation --case NAME --bug NAME`` shows that a
case finds its fault (``tests.simulation.bugs``).
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from typing_extensions import override

from lamina.config.engine_config import EngineConfig
from lamina.core.sampling import SamplingParams
from tests.simulation.model import expected
from tests.simulation.scenario import LONGEST, Asked, Asking, Fault, Layout, Pace, Scene

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


def _layout(computes: int, memories: int, prefill: int = 0, jitter: float = 1.0, **settings: object) -> Layout:
    config = EngineConfig(
        compute=f"cpu:{computes}",
        prefill=f"cpu:{prefill}" if prefill else None,
        memory=f"cpu:{memories}",
        transport="tcp",
        threads=1,
        kv_cache_memory_bytes=250_000,
        max_model_len=LONGEST,
        generation_config="none",
        max_restarts=1000,
        max_num_seqs=8,
        max_num_batched_tokens=16,
        pipelining="fixed",
        **settings,  # type: ignore[arg-type]
    )
    return Layout(computes + prefill, memories, False, config, {"control": jitter}, Pace(), {})


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
    Case("aborted_twice", _layout(1, 1), [_asked(range(20), 20, abort_at=0.1)], []),
]
