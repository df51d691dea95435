"""What workers do, as people see it who watch: slices and attention of a lane take turns; nothing without a watcher."""

import itertools
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from lamina.control.messages import Observe, Observed, ToWorker
from lamina.control.timeline import MOST_OBSERVED, Span, Timeline
from lamina.core.pipeline import Pipeline
from lamina.core.sampling import SamplingParams
from lamina.core.topology import FIRST, Member, Topology
from lamina.engine.engine import Engine
from lamina.engine.timelines import LiveTimeline
from lamina.launch import launch
from lamina.transport.shm import host
from tests.support.running import Streams, config
from tests.support.waiting import wait_until


def stages(spans: dict[str, list[Span]], worker: str) -> set[str]:
    return {span.stage for span in spans.get(worker, ())}


def watch(engine: Engine) -> dict[str, list[Span]]:
    """Return the windows of busy workers, which are shown only while somebody asks for them."""
    requests = [([5], SamplingParams(max_tokens=900, ignore_eos=True, temperature=0.0))]
    streams, found = Streams(engine, requests), dict[str, list[Span]]()

    def is_busy() -> bool:
        nonlocal streams, found
        if streams.outputs:
            streams = Streams(engine, requests)
        found = engine.timeline()
        return "slice" in stages(found, "compute0") and "attention" in stages(found, "memory0")

    wait_until(is_busy, "no slices and attention are shown")
    streams.wait()
    return found


def test_a_running_engine_shows_slices_and_attention(checkpoint: Path) -> None:
    engine = launch(config(checkpoint, 1, 1, kv_cache_memory_bytes=8_000_000))
    try:
        assert not any(engine.timeline().values()), "workers record although nobody has asked"
        found = watch(engine)
        assert "wait" not in stages(found, "compute0") | stages(found, "memory0")
        lane = [span for span in found["compute0"] if span.stage == "slice"]
        assert all(one.end_ns <= other.begin_ns for one, other in itertools.pairwise(lane))
        assert lane[-1].end_ns - lane[0].begin_ns < 10**9
        wait_until(lambda: engine.timeline().get("compute0") == [], "an idle worker is shown as busy")
    finally:
        engine.close()


def test_a_timeline_records_while_somebody_watches() -> None:
    timeline = Timeline()
    timeline.record_span("slice", 0, timeline.now())
    before = timeline.now()
    assert timeline.observe() == []
    timeline.record_span("begun before", 0, before)
    for stage in ("slice", "wait", "attention"):
        timeline.record_span(stage, 0, timeline.now())
    for _ in range(MOST_OBSERVED):
        timeline.record_span("slice", 1, timeline.now())
    assert timeline.now() == 0, "it records although the window is full"
    window = timeline.observe()
    assert [span.stage for span in window[:3]] == ["slice", "attention", "slice"] and len(window) == MOST_OBSERVED
    timeline.record_span("slice", 0, time.monotonic_ns() + 10**9)
    assert timeline.now() == 0 and timeline.observe() == [] and not timeline.spans
    kept = Timeline(enabled=True)
    kept.observe()
    kept.record_span("wait", 0, kept.now())
    assert kept.observe() == [] and len(kept.spans) == 1


def test_times_of_other_machines_are_moved_and_workers_are_asked_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[tuple[Sequence[str], ToWorker]]()
    live = LiveTimeline(lambda workers, message: told.append((workers, message)))
    members = (Member("compute0", "compute", "cpu", host()), Member("memory0", "memory", "cpu", "elsewhere", 9))
    topology = Topology(FIRST, members, Pipeline(1, 1))
    live.request_windows(topology)
    live.request_windows(topology)
    assert told == [(["compute0", "memory0"], Observe())]
    now = time.monotonic_ns()
    live.keep_window("compute0", Observed(now, [Span("slice", 0, now - 5000, now)]), topology)
    live.keep_window("memory0", Observed(77_000, [Span("attention", 0, 70_000, 77_000)]), topology)
    (slices,), (attention,) = live.spans()["compute0"], live.spans()["memory0"]
    assert slices == Span("slice", 0, now - 5000, now)
    assert attention.end_ns - attention.begin_ns == 7_000 and now <= attention.end_ns <= time.monotonic_ns()
    monkeypatch.setattr("lamina.engine.timelines.SHOWN_NS", 0)
    live.keep_window("compute0", Observed(now, []), topology)
    assert live._latest.keys() == {"compute0"}, "windows of workers that are gone are kept"
