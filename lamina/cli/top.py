"""`lamina top`: the dashboard of a server in a terminal, as text that rich draws."""

import http.client
import itertools
import json
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lamina.cli.client import LOCAL_URL, Url, not_a_server, open_state, place_words
from lamina.cli.console import output, show_size
from lamina.core.errors import ConfigError, LaminaError

HISTORY = 300
"""States kept, which are those of five minutes at one a second."""

PRINTED_COLUMNS = 120
"""Width of a view that does not go to a terminal."""


def top(
    url: Url = LOCAL_URL,
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks at the server.")] = 1.0,
) -> None:
    """Watch a running server: requests, latencies, lanes, KV by worker, moves, links, and what limits it now.

    Keys: q ends it, space halts the view, arrows and page keys scroll. Where the output is not a terminal, one view is
    printed. A server with LAMINA_METRICS_KEY wants the same key here.
    """
    if not sys.stdout.isatty():
        first, _ = look(url)
        time.sleep(every)  # rates are differences between two states
        state, lanes = look(url)
        console = output()
        console.width = PRINTED_COLUMNS
        console.print(draw([first, state], lanes, PRINTED_COLUMNS))
        return
    try:
        from lamina.cli.top_screen import TopScreen
    except ImportError as error:
        raise ConfigError(f'lamina top needs textual ({error}): pip install "lamina[top]"') from error
    look(url)  # an address without a server is an error, not a screen
    TopScreen(partial(look, url), draw, deque(maxlen=HISTORY), every).run()


def look(url: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a server's state and the window of its lanes.

    Raises:
        TransportError: Nobody answers.
        ConfigError: What answers is not a Lamina server, or wants a key.
    """
    return _ask(url, "/dashboard/state"), _ask(url, "/dashboard/lanes")


def _ask(url: str, path: str) -> dict[str, Any]:
    try:
        with open_state(url, path) as response:
            if response.status != HTTPStatus.OK:
                raise not_a_server(url, f"{response.status} {response.reason}")
            answer = json.load(response)
    except LaminaError:
        raise
    except (http.client.HTTPException, OSError, ValueError) as error:
        raise not_a_server(url, error) from error
    if not isinstance(answer, dict):
        raise not_a_server(url, f"{path} is not an object")
    return answer


Json = Mapping[str, Any]

LATENCY_S = 10.0
"""Seconds that a latency's quantiles look back."""

SPARKS = "▁▂▃▄▅▆▇█"
SLICES, ATTENTION, OTHER, IDLE = "blue", "green", "cyan", "bright_black"
STYLES = {"slice": SLICES, "attention": ATTENTION, "chunk attention": ATTENTION}


def draw(states: Sequence[Json], lanes: Json, width: int) -> RenderableType:
    """Return the view of a server for a terminal of ``width`` columns.

    Args:
        states: Answers of ``/dashboard/state``, oldest first; at least one.
        lanes: The answer of ``/dashboard/lanes``.
    """
    now = states[-1]
    moves = now["placement"]["moves"]
    moving = [f"{move['tokens']:,} tokens {move['source']} → {move['target']}" for move in moves["in_progress"]]
    links = [
        f"{link['transport']} for {link['pairs']} pair{'s' * (link['pairs'] > 1)}: {link['reason']}"
        for link in now["links"]
    ]
    return Group(
        _limit(now),
        Text(),
        _figures(states, max(10, min(100, width - 60))),
        Text(),
        _lanes(lanes, max(10, min(100, width - 55))),
        Text(),
        _memory(now, width),
        Text(),
        _workers(now),
        Text(
            f"Moves     {moves['completed']:,} completed, {moves['refused']:,} refused"
            + "".join(map(", ".__add__, moving))
        ),
        *(Text(f"Links     {link}") for link in links),
    )


def quantile(now: Sequence[Sequence[Any]], then: Sequence[Sequence[Any]], share: float) -> float | None:
    """Return a quantile of the observations between two cumulative histograms, interpolated; None without any.

    Args:
        now: Pairs of an upper bound (None: no bound) and the number of observations up to it.
        then: The earlier histogram.
        share: The quantile, 0 to 1.
    """
    grown = [(bound, total - before) for (bound, total), (_, before) in zip(now, then, strict=True)]
    if not grown or grown[-1][1] <= 0:
        return None
    wanted, low, below = share * grown[-1][1], 0.0, 0.0
    for bound, total in grown:
        if total >= wanted:
            return low if bound is None else low + (bound - low) * (wanted - below) / ((total - below) or 1)
        low, below = bound, total
    return low


def _limit(now: Json) -> Text:
    warns = now["dead"] is not None or now["silent_s"] or now["requests"]["waiting"]
    text = Text(now["limit"]["what"], style="bold yellow" if warns else "bold")
    return text.append(f"  {now['limit']['remedy']}", style="not bold") if now["limit"]["remedy"] else text


def _figures(states: Sequence[Json], cells: int) -> Table:
    now = states[-1]
    since = next((state for state in reversed(states) if state["time"] <= now["time"] - LATENCY_S), states[0])
    rates = [_rate(sooner, later) for sooner, later in itertools.pairwise(states)]
    cache, counts = now["placement"]["prefix_cache"], now["counts"]
    table = Table.grid(padding=(0, 2))
    table.add_row("Tokens per second", f"{rates[-1] if rates else 0:,.0f}", Text(_spark(rates, cells), style=SLICES))
    waiting = [state["requests"]["waiting"] for state in states]
    table.add_row(
        "Requests",
        f"{now['requests']['running']:,} running, {now['requests']['waiting']:,} waiting",
        Text(_spark(waiting, cells), style="yellow"),
    )
    for name, label in (("time_to_first_token", "Time to first token"), ("time_between_tokens", "Time between tokens")):
        middle, high = (quantile(now["latency"][name], since["latency"][name], share) for share in (0.5, 0.99))
        table.add_row(label, f"{_seconds(middle)} median, {_seconds(high)} 99 %", "")
    cached = f"{cache['hit'] / cache['queried']:.0%}" if cache["queried"] else "–"
    table.add_row("Prompt tokens cached", cached, "")
    table.add_row("Preemptions, recoveries", f"{counts['preempted']:,}, {counts['recoveries']:,}", "")
    return table


def _rate(sooner: Json, later: Json) -> float:
    """Return the tokens generated per second between two states; 0 if the counter was reset."""
    tokens: float = later["tokens"]["generated"] - sooner["tokens"]["generated"]
    seconds: float = later["time"] - sooner["time"]
    return max(0.0, tokens / (seconds or 1.0))


def _seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{1000 * value:.1f} ms" if value < 1 else f"{value:.2f} s"


def _spark(values: Sequence[float], cells: int) -> str:
    shown = values[-cells:]
    most = max(shown, default=0)
    return "".join(SPARKS[round((len(SPARKS) - 1) * value / most)] for value in shown) if most else ""


def _lanes(lanes: Json, cells: int) -> Table:
    length = max(lanes["length_us"], 1)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bright_black")
    heading = Text.assemble(("█ slices ", SLICES), ("█ attention ", ATTENTION), ("█ other", OTHER))
    table.add_column("Lane", no_wrap=True)
    table.add_column("Worker", no_wrap=True)
    table.add_column(heading, no_wrap=True)
    table.add_column(f"of {length / 1000:.0f} ms", no_wrap=True)
    for lane, worker, spans in sorted(_rows(lanes), key=lambda row: row[:2]):
        slices, attention = (
            sum(each[3] for each in spans if each[0].endswith(stage)) / length for stage in ("slice", "attention")
        )
        shares = [f"{share:.0%} {name}" for share, name in ((slices, "slices"), (attention, "attention")) if share]
        table.add_row("all" if lane < 0 else str(lane), worker, _bar(spans, length, cells), ", ".join(shares))
    if not table.row_count:
        table.add_row("", "", Text("nothing runs", style=IDLE), "")
    return table


def _rows(lanes: Json) -> Iterator[tuple[int, str, list[list[Any]]]]:
    for worker, spans in lanes["workers"].items():
        for lane in {span[1] for span in spans}:
            yield lane, worker, [span for span in spans if span[1] == lane]


def _bar(spans: Sequence[Sequence[Any]], length: int, count: int) -> Text:
    """Return a bar of cells, each in the colour of what took most of its time."""
    cells: list[dict[str, float]] = [{} for _ in range(count)]
    width = length / count
    for stage, _, begin, took in spans:
        style = STYLES.get(stage, OTHER)
        for cell in range(int(begin / width), min(count, int((begin + took) / width) + 1)):
            inside = min(begin + took, (cell + 1) * width) - max(begin, cell * width)
            cells[cell][style] = cells[cell].get(style, 0.0) + max(inside, 0.0)
    text = Text()
    for shares in cells:
        style, took = max(shares.items(), key=lambda pair: pair[1], default=(IDLE, 0.0))
        text.append("█" if took > width / 2 else "▌" if took else "·", style=style if took else IDLE)
    return text


def _memory(now: Json, width: int) -> Table:
    states = {name: _state(now, name) for name in now["placement"]["workers"]}
    cells = max(6, min(40, width - 73 - max(map(len, states.values()), default=0)))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bright_black")
    for heading in ("Memory worker", "State", "KV", "Used", "Cached", "Slots", "Moved here"):
        table.add_column(heading, justify="right" if heading in ("Used", "Cached", "Slots", "Moved here") else "left")
    for name, worker in now["placement"]["workers"].items():
        capacity = max(worker["capacity"], 1)
        used = -(-cells * worker["used"] // capacity)
        cached = min(cells - used, -(-cells * worker["cached"] // capacity))
        bar = Text.assemble(("█" * used, ATTENTION), ("▒" * cached, ATTENTION), ("·" * (cells - used - cached), IDLE))
        figures = (f"{worker[key]:,}" for key in ("used", "cached", "capacity"))
        table.add_row(name, states[name], bar, *figures, show_size(worker["moved_bytes"]))
    return table


def _workers(now: Json) -> Text:
    text = Text("Compute   ")
    names = [name for name in now["workers"] if name not in now["placement"]["workers"]]
    return text.append(Text("; ").join(Text(f"{name} ").append(_state(now, name)) for name in names))


def _state(now: Json, worker: str) -> Text:
    if (silent := now["silent_s"].get(worker)) is not None:
        return Text(f"no answer for {silent} s", style="bold yellow")
    return Text(now["workers"].get(worker, "serving") + place_words(now["places"].get(worker, {})))
