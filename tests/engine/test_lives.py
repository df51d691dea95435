"""What the dashboard is told of a request's life."""

import itertools
from pathlib import Path

import pytest

from lamina.core.outputs import FinishReason
from lamina.core.sampling import SamplingParams
from lamina.core.steps import Admission, DecodeRows, SequenceStep, StepPlan, Switch
from lamina.core.types import Segment
from lamina.engine import lives
from lamina.engine.lives import Event, Lives
from lamina.launch import launch
from tests.support.prepared_checkpoints import write_prepared
from tests.support.random_models import served
from tests.support.running import config, run_all


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def plan(step: int, **deltas: object) -> StepPlan:
    empty = {"forks": [], "released": [], "admitted": [], "chunks": [], "decoding": DecodeRows([], [], [])}
    return StepPlan(step=step, lane=1, turn=0, **{**empty, **deltas})  # type: ignore[arg-type]


def admission(sequence: int, request: str, worker: str) -> Admission:
    segment = Segment(sequence, worker, (0, 4), (0, None))
    return Admission(sequence, 1, 64, [segment], SamplingParams(), 0, request=request)


def events(told: list[Event]) -> list[tuple[float, str, str]]:
    return [(event.at_s, event.what, event.detail) for event in told]


def test_a_life_has_its_queue_chunks_moves_and_end() -> None:
    clock = Clock()
    kept = Lives(clock)
    kept.note_queued("a", 64)
    clock.now += 2
    kept.note_plan(plan(1, admitted=[admission(7, "a", "memory0")], chunks=[SequenceStep(7, 0, list(range(40)), [])]))
    clock.now += 0.25
    kept.note_done(1)
    kept.note_plan(plan(2, chunks=[SequenceStep(7, 40, list(range(24)), [7])]))
    clock.now += 0.25
    kept.note_done(2)
    kept.note_plan(
        plan(3, switches=[Switch(9, [Segment(7, "memory1", (0, 4), (0, 32)), Segment(99, "x", (0, 4), (0, 1))])])
    )
    kept.note_done(3)
    (life,) = kept.newest({"a": 3})
    assert (life.request, life.prompt_tokens, life.generated, life.ended) == ("a", 64, 3, "")
    clock.now += 1
    kept.note_end("a", [FinishReason.STOP, FinishReason.STOP], 9, None)
    kept.note_end("a", [FinishReason.ABORT], 9, None)  # it has ended
    (life,) = kept.newest({})
    assert (life.generated, life.ended) == (9, "stop")
    assert events(life.events) == [
        (0.0, "queued", ""),
        (2.0, "admitted", "lane 1, KV on memory0"),
        (2.25, "chunk", "tokens 0 to 40, 250.0 ms after it was planned"),
        (2.5, "chunk", "tokens 40 to 64, 250.0 ms after it was planned"),
        (2.5, "first token", ""),
        (2.5, "moved", "tokens 0 to 32, to memory1"),
        (3.5, "ended", "stop, 9 tokens"),
    ]


def test_a_request_whose_kv_was_lost_is_admitted_again() -> None:
    kept = Lives(Clock())
    kept.note_queued("a", 64)
    kept.note_plan(plan(1, admitted=[admission(7, "a", "memory0")], chunks=[SequenceStep(7, 0, [1] * 40, [])]))
    kept.drop_steps()
    kept.note_done(1)  # never answered in its epoch
    kept.note_plan(plan(2, admitted=[admission(8, "a", "memory1")], chunks=[SequenceStep(8, 16, [1] * 48, [8])]))
    kept.note_done(2)
    kept.note_end("a", [FinishReason.ERROR], 0, "worker memory1 is gone")
    (life,) = kept.newest({})
    what = ["queued", "admitted", "admitted", "cached", "chunk", "first token", "ended"]
    assert [event.what for event in life.events] == what
    assert life.events[3].detail == "tokens 0 to 16 were in the prefix cache"
    assert life.events[2].detail == "again, its KV was dropped: lane 1, KV on memory1"
    assert life.events[-1].detail == "error, 0 tokens: worker memory1 is gone"


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lives, "MOST_EVENTS", 10)
    kept = Lives(Clock())
    for number in range(lives.MOST_ENDED + 5):
        kept.note_queued(str(number), 10_000)
        kept.note_plan(plan(number, admitted=[admission(number, str(number), "memory0")]))
        for step in range(50):
            kept.note_plan(plan(1000 + step, chunks=[SequenceStep(number, step, [1], [])]))
            kept.note_done(1000 + step)
        kept.note_end(str(number), [FinishReason.LENGTH], 1, None)
    told = kept.newest({})
    assert [life.request for life in told] == [str(number) for number in range(lives.MOST_ENDED + 4, 4, -1)]
    assert {len(life.events) for life in told} == {10}
    first, *_, last = told[0].events
    assert (first.what, last.what) == ("queued", "ended")
    assert not kept._of and not kept._running and not kept._chunks


def test_an_engine_tells_the_lives_of_its_requests(tmp_path: Path) -> None:
    """Prompts of 70 tokens take three chunks of 32 tokens at most."""
    write_prepared(served("llama"), tmp_path)
    engine = launch(config(tmp_path, 1, 1))
    try:
        run_all(engine, [[5] * 70, [6] * 3], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
        told = {life.prompt_tokens: life for life in engine.lives()}
    finally:
        engine.close()
    assert {life.ended for life in told.values()} == {"length"} and told[70].generated == told[3].generated == 4
    assert [event.what for event in told[70].events][:2] == ["queued", "admitted"]
    chunks = [event.detail for event in told[70].events if event.what == "chunk"]
    bounds = [tuple(map(int, detail.split(",")[0].removeprefix("tokens ").split(" to "))) for detail in chunks]
    assert bounds[0][0] == 0 and bounds[-1][1] == 70 and len(bounds) >= 3
    assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(bounds))
    times = [event.at_s for event in told[70].events]
    assert times == sorted(times) and told[70].events[-2].what == "first token"
