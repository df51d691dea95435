"""The time between tokens of running requests while a long prompt arrives, with prompts apart; changes of roles.

    python -m bench.runtime.prefill_apart [--model 60m] [--prompt 8000] [--running 8] [--context 256] [--rounds 3]
                                          [--json FILE] [--picture FILE.svg]

Two compute workers and a memory worker on two cores: one compute worker has a core of its own, the other one shares the
second core with the memory worker. ``together``: both run prompts and decode. ``apart``: the worker with a core of its
own only runs prompts, and keeps K and V of the long prompt in scratch memory until its last chunk. ``apart, no
scratch``: the memory worker attends to the prompt's earlier chunks instead. ``control``: the worker beside the memory
worker decodes alone, while another engine, which shares nothing with it but the machine, computes the same prompt on
the other core. The first 99th percentile is that of requests that decode alone, the second one that beside the prompt;
the last column is their ratio. None of them ends meanwhile, so that no other prompts arrive.

Then, in an engine of its own, a worker that decodes gets the role prefill and back while requests decode. ``change``
is the time until all workers have their roles, ``longest gap`` the longest time between two tokens of any request
meanwhile. ``handover`` is the time from a request's first token, drawn where its prompt ran, to its second one, drawn
where it decodes, and the steps are those that ended for the other requests meanwhile: 2 if it joined the next step that
began, since one was running when its first token was drawn.

Every way runs in turn, ``--rounds`` times, in an engine of its own; figures are medians. ``--picture``
needs matplotlib.
"""

import argparse
import json
import multiprocessing
import os
import random
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.models import MODELS, model_directory
from bench.runtime.long_prompt import ALONE_S, TIMEOUT_S, Running
from lamina.config.engine_config import EngineConfig
from lamina.core.sampling import SamplingParams
from lamina.engine.engine import Engine
from lamina.engine.updates import RequestUpdate
from lamina.launch import launch

TOGETHER, APART, NO_SCRATCH, CONTROL = "together", "apart", "apart, no scratch", "control"
SHARED = {"memory": "cpu:1", "max_num_seqs": 64, "prefix_cache": True}
HANDOVERS = 12  # requests whose first two tokens are timed
PROMPT = 64  # tokens of each
OUTPUT = 16_000  # tokens of a running request: the first of eight ends after 2,000
PERCENTILES = (50, 75, 90, 95, 99, 99.5, 99.9)
TARGET = 1.2  # p99 beside the prompt of ``apart``, over control
CHANGE_MS = 1e3  # target of a role change
P50, P99 = PERCENTILES.index(50), PERCENTILES.index(99)


@dataclass(frozen=True)
class Figures:
    """What one run, or the median of several, measured.

    Attributes:
        alone: Milliseconds between tokens of the running requests before the long prompt arrives, at ``PERCENTILES``.
        beside: The same from its arrival to its first token.
        ttft_s: Seconds from its arrival to its first token.
    """

    alone: Sequence[float]
    beside: Sequence[float]
    ttft_s: float


@dataclass(frozen=True)
class Changes:
    """Milliseconds of a step, of role changes, of the longest gap meanwhile, and from the first token to the second;
    steps of others between these two."""

    step: float
    to_prefill: float
    to_decode: float
    longest_gap: float
    handover_p50: float
    handover_p99: float
    handover_steps: float


def settings(way: str, cores: list[int]) -> dict[str, Any]:
    """Return the pools of a way and their cores: the second compute worker shares its core with the memory worker."""
    own, shared = cores
    if way == CONTROL:
        return {"compute": "cpu:1", "compute_cores": str(shared), "memory_cores": str(shared)} | SHARED
    pools = {"compute": "cpu:2"} if way == TOGETHER else {"prefill": "cpu:1", "compute": "cpu:1"}
    pools["prompt_attention"] = "compute" if way == APART else "memory"
    return pools | {"compute_cores": f"{own},{shared}", "memory_cores": str(shared)} | SHARED


def first_token(engine: Engine, tokens: list[int], requests: Running | None = None) -> None:
    """Compute a prompt and draw one token."""
    computed = threading.Event()

    def on_update(update: RequestUpdate) -> None:
        if requests is not None:
            requests.failures.note(update)
        if update.finished:
            computed.set()

    engine.submit("long", tokens, SamplingParams(temperature=0.0, max_tokens=1), on_update)
    if not computed.wait(TIMEOUT_S):
        raise SystemExit(f"error: the prompt was not computed within {TIMEOUT_S:.0f} s")


def _serve_elsewhere(model: Path, core: int, line: Connection) -> None:
    """Body of the control's other process: compute each prompt that is sent, on one core."""
    os.sched_setaffinity(0, {core})
    engine = launch(EngineConfig(model, load_format="dummy", compute="cpu:1", memory="local", max_num_seqs=4))
    try:
        first_token(engine, list(range(3, 700)))
        line.send(None)
        while (tokens := line.recv()) is not None:
            first_token(engine, tokens)
            line.send(None)
    finally:
        engine.close()


@contextmanager
def elsewhere(model: Path, core: int) -> Iterator[Connection]:
    """Run an engine in a process of its own, which computes what is sent to it."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve_elsewhere, args=(model, core, there))
    process.start()
    try:
        _receive(here)
        yield here
        here.send(None)
        process.join(TIMEOUT_S)
    finally:
        if process.is_alive():
            process.kill()


def _receive(line: Connection) -> None:
    if not line.poll(TIMEOUT_S):
        raise SystemExit(f"error: the other engine has not answered within {TIMEOUT_S:.0f} s")
    line.recv()


def measured(way: str, model: Path, args: argparse.Namespace, cores: list[int]) -> Figures:
    """Run one way once."""
    draw = random.Random(args.prompt)
    tokens = [draw.randrange(3, 900) for _ in range(args.prompt)]
    if way != CONTROL:
        return _beside(way, model, args, cores, tokens, None)
    with elsewhere(model, cores[0]) as line:
        return _beside(way, model, args, cores, tokens, line)


def _beside(
    way: str, model: Path, args: argparse.Namespace, cores: list[int], tokens: list[int], line: Connection | None
) -> Figures:
    engine = launch(EngineConfig(model, load_format="dummy", **settings(way, cores)))
    try:
        requests = Running(engine, args.running, args.context, random.Random(1), OUTPUT)
        time.sleep(1.0)
        begun = time.monotonic()
        time.sleep(ALONE_S)
        arrived = time.monotonic()
        if line is None:
            first_token(engine, tokens, requests)
        else:
            line.send(tokens)
            _receive(line)
        first = time.monotonic()
        alone, beside = requests.gaps(begun, arrived), requests.gaps(arrived, first)
        requests.failures.check()
        requests.close()
    finally:
        engine.close()
    at_alone, at_beside = (np.percentile(gaps, PERCENTILES).tolist() for gaps in (alone, beside))
    return Figures(at_alone, at_beside, first - arrived)


def changed(model: Path, args: argparse.Namespace, cores: list[int]) -> Changes:
    """Change the role of a worker and back while requests decode, and time what happens."""
    engine = launch(EngineConfig(model, load_format="dummy", **settings(TOGETHER, cores)))
    try:
        requests = Running(engine, args.running, args.context, random.Random(1), OUTPUT)
        time.sleep(1.0)
        step = statistics.median(requests.gaps(time.monotonic() - 1.0, time.monotonic()))
        to_prefill, gap = _timed(engine, requests, prefill=1, compute=-1)
        pauses = [_pause(engine, number, requests) for number in range(HANDOVERS)]
        to_decode, other = _timed(engine, requests, prefill=-1, compute=1)
        requests.failures.check()
        requests.close()
    finally:
        engine.close()
    p50, p99 = np.percentile([ms for ms, _ in pauses], (50, 99)).tolist()
    steps = statistics.median(steps for _, steps in pauses)
    return Changes(step, to_prefill, to_decode, max(gap, other), p50, p99, steps)


def _timed(engine: Engine, requests: Running, **change: int) -> tuple[float, float]:
    """Return milliseconds of a change of roles, and of the longest gap between tokens around it."""
    begun = time.monotonic()
    engine.scale(**change).result(TIMEOUT_S)
    seconds = time.monotonic() - begun
    time.sleep(0.5)
    return 1e3 * seconds, max(requests.gaps(begun, time.monotonic()))


def _pause(engine: Engine, number: int, requests: Running) -> tuple[float, int]:
    """Return milliseconds from the first token of a new request to its second, and steps of the others meanwhile."""
    times: list[float] = []
    ended = threading.Event()

    def on_update(update: RequestUpdate) -> None:
        requests.failures.note(update)
        times.extend([time.monotonic()] * update.tokens)
        if update.finished:
            ended.set()

    prompt = [3 + number] * PROMPT
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=8)
    engine.submit(f"handed over {number}", prompt, params, on_update)
    if not ended.wait(TIMEOUT_S):
        raise SystemExit(f"error: a request has not ended within {TIMEOUT_S:.0f} s")
    return 1e3 * (times[1] - times[0]), requests.steps(times[0], times[1])


def _median(runs: list[Any]) -> Any:
    columns = zip(*(asdict(one).values() for one in runs), strict=True)
    return type(runs[0])(*(np.median(each, axis=0).tolist() for each in columns))


def _print(ways: Mapping[str, Figures], changes: Changes) -> None:
    console = Console()
    table = Table("", "alone p99 ms", "beside p50 ms", "beside p99 ms", "TTFT s", "p99 beside / alone")
    for way, one in ways.items():
        times = (one.alone[P99], one.beside[P50], one.beside[P99])
        ratio = one.beside[P99] / one.alone[P99]
        table.add_row(way, *(f"{value:.1f}" for value in times), f"{one.ttft_s:.1f}", f"{ratio:.2f}")
    console.print(table)
    for way in (APART, NO_SCRATCH):
        share = ways[way].beside[P99] / ways[CONTROL].beside[P99]
        console.print(f"p99 beside a prompt, {way} over control: {share:.2f}")
    for name, value in asdict(changes).items():
        console.print(f"{name.replace('_', ' ')}: {value:.1f}{'' if name.endswith('steps') else ' ms'}")


def draw(ways: Mapping[str, Figures], changes: Changes, file: Path) -> None:
    """Draw the times between tokens by percentile, and those of role changes and of requests handed over."""
    from matplotlib.ticker import LogLocator

    from bench.pictures import axes, legend_above, save

    drawing, (left, right) = axes(2, height=3.6)
    places = [-np.log10(1 - percentile / 100) for percentile in PERCENTILES]  # every further nine is as wide
    for way, one in ways.items():
        left.plot(places, one.beside, "-o", label=f"beside the prompt, {way}")
    left.plot(places, ways[CONTROL].alone, "--", color="C5", label="no prompt")
    left.axhline(TARGET * ways[CONTROL].beside[P99], color="C5", linestyle=":", label=f"{TARGET} of control's p99")
    left.set(xlabel="percentile of the times between tokens", ylabel="ms", yscale="log")
    left.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    left.yaxis.set_major_formatter("{x:g}")
    left.minorticks_off()
    shown = [place for place in range(len(PERCENTILES)) if PERCENTILES[place] in (50, 90, 99, 99.9)]
    left.set_xticks([places[place] for place in shown], [f"{PERCENTILES[place]:g}" for place in shown])
    legend_above(left, 2)
    times = {name.replace("_", " "): value for name, value in asdict(changes).items() if name != "handover_steps"}
    right.barh(list(times), list(times.values()), height=0.55)
    for place, value in enumerate(times.values()):
        right.annotate(f"{value:.1f} ms", (value, place), (4, 0), textcoords="offset points", va="center")
    right.axvline(CHANGE_MS, color="C1", linestyle="--", label="target of a role change: below 1 s")
    right.invert_yaxis()
    right.grid(visible=False, axis="y")
    right.set(xlabel="ms", xscale="log", xlim=(1, 2 * CHANGE_MS))
    right.xaxis.set_major_formatter("{x:g}")
    legend_above(right, 1)
    save(drawing, file)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="60m", help="a random Llama of about this size")
    parser.add_argument("--prompt", type=int, default=8000, help="tokens of the long prompt")
    parser.add_argument("--running", type=int, default=8, help="requests that decode meanwhile")
    parser.add_argument("--context", type=int, default=256, help="tokens of their prompts")
    parser.add_argument("--rounds", type=int, default=3, help="times that every way runs")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--picture", type=Path, help="draw them to this .svg or .png file")
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise SystemExit("error: this process may use one core; the compute workers need one each")
    runs: dict[str, list[Figures]] = {way: [] for way in (TOGETHER, APART, NO_SCRATCH, CONTROL)}
    turned = list[Changes]()
    with model_directory(args.model) as model:
        for _ in range(args.rounds):
            for way, each in runs.items():
                each.append(measured(way, model, args, cores))
            turned.append(changed(model, args, cores))
    ways = {way: _median(each) for way, each in runs.items()}
    _print(ways, _median(turned))
    if args.json:
        about = {"model": args.model, "prompt": args.prompt, "running": args.running, "percentiles": PERCENTILES}
        figures = {"ways": {way: asdict(one) for way, one in ways.items()}, "changes": asdict(_median(turned))}
        args.json.write_text(json.dumps(about | figures, indent=1) + "\n")
    if args.picture:
        draw(ways, _median(turned), args.picture)


if __name__ == "__main__":
    main()
