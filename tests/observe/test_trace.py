"""Shares of time against sums made by hand; the timeline as Perfetto reads it."""

import json
from pathlib import Path

import pytest

from lamina.control.timeline import MOST_SPANS, Span, Timeline
from lamina.observe.timing import bottleneck, shares, turnarounds, write_trace

SPANS = {
    "compute0": [Span("slice", 0, 0, 400), Span("wait", 0, 400, 700), Span("slice", 1, 700, 1200)],
    "memory0": [Span("attention", 1, 500, 900)],
}


def test_only_what_lies_inside_counts_and_the_rest_is_other() -> None:
    parts = {(part.worker, part.stage): part.share for part in shares(SPANS, 200, 1000)}
    assert parts == pytest.approx(
        {
            ("compute0", "slice"): 0.625,  # 200 and 300 of 800
            ("compute0", "wait"): 0.375,
            ("compute0", "other"): 0.0,
            ("memory0", "attention"): 0.5,
            ("memory0", "other"): 0.5,
        }
    )


def test_the_bottleneck_is_the_longest_work_not_the_longest_wait() -> None:
    spans = {"compute0": [Span("wait", 0, 0, 900), Span("slice", 0, 900, 1000)], "memory0": SPANS["memory0"]}
    assert (bottleneck(shares(spans, 0, 1000)).worker, bottleneck(shares(spans, 0, 1000)).stage) == (
        "memory0",
        "attention",
    )


def test_a_parked_message_is_no_work_and_takes_no_time_from_other_stages() -> None:
    spans = {"memory0": [Span("parked", 0, 0, 900), Span("attention", 1, 500, 900)]}
    parts = {part.stage: part.share for part in shares(spans, 0, 1000)}
    assert parts == pytest.approx({"parked": 0.9, "attention": 0.4, "other": 0.6})
    assert bottleneck(shares(spans, 0, 1000)).stage == "attention"


def test_a_turnaround_goes_from_a_draw_to_the_next_slice_of_the_same_lane_on_any_worker() -> None:
    spans = {
        "compute0": [Span("slice", 0, 0, 100), Span("draw", 0, 100, 130), Span("slice", 1, 140, 200)],
        "compute1": [Span("draw", 1, 210, 220), Span("slice", 0, 230, 300), Span("slice", 1, 310, 400)],
    }
    assert turnarounds(spans, 0, 1000) == [100, 90]
    assert turnarounds(spans, 200, 1000) == [90], "only draws inside the window"


def test_the_file_has_one_process_a_worker_and_one_row_a_lane(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json", SPANS)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {(e["pid"], e.get("tid")): e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names == {(0, None): "compute0", (0, 1): "lane 0", (0, 2): "lane 1", (1, None): "memory0", (1, 2): "lane 1"}
    drawn = [(e["pid"], e["tid"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert drawn == [
        (0, 1, "slice", 0.0, 0.4),
        (0, 1, "wait", 0.4, 0.3),
        (0, 2, "slice", 0.7, 0.5),
        (1, 2, "attention", 0.5, 0.4),
    ]


def test_a_timeline_records_only_when_asked_and_keeps_the_latest() -> None:
    silent, kept = Timeline(), Timeline(enabled=True)
    for timeline in (silent, kept):
        timeline.record_span("slice", 0, timeline.now())
    assert not silent.spans and kept.spans[0].begin_ns <= kept.spans[0].end_ns
    assert kept.spans.maxlen == MOST_SPANS
