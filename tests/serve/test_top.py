"""`lamina top`: what it draws of a server's state, and its screen."""

import io
import math
from collections import deque
from typing import Any

import pytest
from rich.console import Console

from lamina.cli import top
from lamina.cli.top import draw, quantile
from lamina.control.timeline import Span
from lamina.core.errors import ConfigError
from lamina.observe.metrics import Metrics
from lamina.serve.monitoring import lanes_of, state_of
from tests.support.scripted_engine import FakeEngine, Running


def state(generated: float = 0, time: float = 0.0, **changes: Any) -> dict[str, Any]:
    engine: Any = FakeEngine()
    found = state_of(engine.stats(), Metrics(engine).totals(), engine)
    return {**found, "time": time, "tokens": {"generated": generated, "prompt": 0}, **changes}


def shown(states: list[dict[str, Any]], lanes: Any = None, width: int = 130) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(draw(states, lanes or lanes_of({}), width))
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, printed.splitlines())) <= width
    return str(printed)


def test_the_view_has_rates_pools_moves_and_links() -> None:
    text = shown([state(generated=100 * second, time=second) for second in range(5)])
    for part in (
        "100  ",
        "1 running, 2 waiting",
        "memory0",
        "compute0 serving, runs prompts; compute1 serving, stage 0, rank 1 of replica 1, decodes",
        "shm for ",
        "completed",
        "nothing runs",
    ):
        assert part in text
    stages = state()
    stages["placement"]["workers"]["compute1"] = stages["placement"]["workers"]["memory0"]
    assert "…" not in shown([stages], width=120)
    assert "Compute: 2 requests wait" in shown([state(limit={"what": "Compute: 2 requests wait", "remedy": ""})])


def test_lanes_are_bars_of_what_took_most_of_each_part() -> None:
    spans = {
        "compute0": [Span("slice", 0, 0, 40_000_000), Span("draw", 0, 40_000_000, 60_000_000)],
        "memory0": [Span("slice", 1, 0, 1_000), Span("attention", 0, 60_000_000, 120_000_000)],
    }
    lines = shown([state()], lanes_of(spans)).splitlines()
    compute = next(line for line in lines if "compute0" in line and "slices" in line)
    assert compute.count("█") == 75 // 2 and compute.count("·") == 75 // 2 and "33% slices" in compute
    memory = next(line for line in lines if "memory0" in line and "attention" in line)
    assert memory.count("█") == 75 // 2 and "50% attention" in memory


def test_quantiles_are_of_what_has_come_since() -> None:
    then: list[list[Any]] = [[1.0, 5.0], [2.0, 5.0], [None, 5.0]]
    now: list[list[Any]] = [[1.0, 5.0], [2.0, 9.0], [None, 9.0]]
    found = quantile(now, then, 0.5)
    assert found is not None and math.isclose(found, 1.5) and quantile(now, now, 0.5) is None
    beyond: list[list[Any]] = [[1.0, 0.0], [None, 3.0]]
    assert quantile(beyond, [[1.0, 0.0], [None, 0.0]], 0.9) == 1.0


def test_it_is_printed_once_where_the_output_is_no_terminal(
    server: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    top.top(url=server.url, every=0.2)
    assert "memory0" in capsys.readouterr().out


def test_an_address_without_a_server_is_an_error(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="not a Lamina server: 404"):
        top.look(server.url + "/v1")


async def test_the_screen_follows_the_server_and_halts(server: Running) -> None:
    pytest.importorskip("textual", reason="textual is not installed: pip install textual")
    from lamina.cli.top_screen import TopScreen

    states: deque[dict[str, Any]] = deque(maxlen=10)
    screen = TopScreen(lambda: top.look(server.url), draw, states, 0.05)
    async with screen.run_test(size=(130, 50)) as pilot:
        while len(states) < 3:
            await pilot.pause(0.05)
        assert screen.sub_title == "fake"
        await pilot.press("space")
        await pilot.pause()
        assert screen.sub_title == "halted"
        await pilot.press("q")
    assert not screen.is_running


async def test_the_screen_says_that_the_server_does_not_answer() -> None:
    pytest.importorskip("textual", reason="textual is not installed: pip install textual")
    from lamina.cli.top_screen import TopScreen

    screen = TopScreen(lambda: top.look("http://127.0.0.1:9"), draw, deque(maxlen=10), 0.05)
    async with screen.run_test() as pilot:
        while "no server answers" not in screen.sub_title:
            await pilot.pause(0.05)
