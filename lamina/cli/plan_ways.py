"""Output of `lamina plan` for whole requests: ways to serve, simulated at their highest load within the SLOs."""

import json
import math
import re
from datetime import date
from functools import partial
from typing import TYPE_CHECKING, Any

from lamina.cli import plan_refusals
from lamina.cli.plan_commands import Asked, launching, obstacle, simulate_line, untried, warn_of_prices

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from lamina.planning.plan.model_shapes import ModelShape
    from lamina.planning.plan.serving import Server
    from lamina.planning.plan.ways import Capacity, Way
    from lamina.planning.simulate.trial import Course, Trial

HEADINGS = ("requests /s", "TTFT p99", "stall p99", "TBT p99", "tokens /s", "$/h", "$/M in", "$/M out", "busy", "model")
MODEL_ERROR = 0.11
"""90th percentile of the errors of predicted throughput, on the worst of four files (bench.cost.measured)."""

UNSTARTED = "lamina launch cannot start:"

TERMS = (
    "TTFT: time to the first token. TBT: time between tokens. p99: 99 of 100 are shorter. stall: TTFT and a request's "
    "longest later wait. M: a million tokens. busy: share of the time that each pool works. model: requests/s by the "
    "closed form alone. 2 x TP4: two copies of the weights, on four devices each. TP2 x 3 stages: two devices share "
    "each of three parts of the layers. local memory: KV is beside the weights. prefill, decode: devices for prompts "
    "and for answers. memory, lanes: workers that hold KV and attend to "
    "it, for so many batches. More: docs/cost-model.md, docs/concepts.md."
)
"""Explains the table of ways."""

_WIDE = 152  # columns that a table with one line per way needs


def show(server: "Server", course: "Course", candidates: "Sequence[Way]", asked: Asked, as_json: bool) -> None:
    """Rank all candidates by the closed form, simulate the best few, and print them with a recommendation.

    Raises ConfigError if no candidate fits, or none keeps the SLOs.
    """
    from lamina.observe.progress import waiting
    from lamina.planning.plan.ways import shortlist

    with waiting(f"Ranking {len(candidates)} ways to serve by the closed form"):
        found = [one for way in candidates if (one := server.evaluate(way)) is not None]
    if not found:
        raise plan_refusals.unfound(server, candidates)
    chosen = shortlist(found)
    trials = _simulated(server.shape, course, chosen, asked.model)
    if not trials:
        raise plan_refusals.unkept(server.slo, course, chosen)
    trials = course.ranked(trials)
    notes, given_up = _left_out(server, candidates), _given_up(chosen, trials)
    if as_json:
        offloads = _offloads(candidates)
        print(json.dumps(_as_dict(server, course, trials, notes, given_up, asked, offloads), indent=2))
    else:
        _print(server, course, trials, notes, given_up, asked, len(found), candidates)


def _simulated(shape: "ModelShape", course: "Course", chosen: "Sequence[Capacity]", model: str) -> "list[Trial]":
    """Simulate the cheapest ways by the closed form, one that `lamina launch` starts at least, then their rivals."""
    from lamina.cli.plan_map import in_processes
    from lamina.planning.plan.ways import RIVAL, rivals
    from lamina.planning.simulate.trial import WORSE

    launched = [one for one in chosen if obstacle(one.way, shape, model) is None]
    most_usd = WORSE * chosen[0].usd_per_request
    now = [one for one in chosen if one in (*chosen[:2], *launched[:1])]
    left = list(chosen)
    trials: list[Trial] = []
    with in_processes("Ways simulated") as run:
        while now:
            search = partial(course.highest_load, most_usd=most_usd)
            trials += [trial for trial in run(search, now) if trial is not None]
            left = [one for one in left if one not in now]
            best_usd = min((trial.usd_per_request for trial in trials), default=math.inf)
            if any(obstacle(trial.way, shape, model) is None for trial in trials):
                now, most_usd = rivals(left, best_usd), min(most_usd, RIVAL * best_usd)
            else:
                now = [one for one in left if one in launched][:2] or rivals(left, best_usd)
    return trials


def _print(
    server: "Server",
    course: "Course",
    trials: "list[Trial]",
    notes: list[str],
    given_up: list[str],
    asked: Asked,
    found: int,
    candidates: "Sequence[Way]",
) -> None:
    from lamina.cli.console import output, print_sentence, print_table
    from lamina.planning.plan.ways import RIVAL

    slo, best = server.slo, trials[0]
    rent, *why = advice(trials, _offloads(candidates))
    print_sentence(rent, style="bold")
    for line in [*why, *_starting(server.shape, course, trials, asked.model)]:
        print_sentence(line)
    for line in [*_without_rdma(server, best.way), *_too_long(server)]:
        print_sentence(line, style="yellow")
    warn_of_prices(server.prices, server.models)
    title = f"{server.shape.name}, {server.workload.name}: the best of {found} ways that fit, of {len(candidates)}"
    caption = (
        f"Simulated at the highest load with p99 TTFT within {slo.ttft_s:g} s and TBT within {slo.tbt_s * 1e3:g} ms. "
        f"{TERMS}"
    )
    narrow = output().is_terminal and output().width < _WIDE
    rows: dict[bool, list[tuple[str, ...]]] = {True: [], False: []}
    for trial in trials:
        rows[obstacle(trial.way, server.shape, asked.model) is None].append(cells(trial))
    print_table(table_of(rows[True], title, caption, narrow, others=rows[False], best=best.way.describe()))
    reasons = f"Given up, at over {RIVAL:g} times the cheapest way's cost or outside of the targets:"
    for line in [
        f"Prices: {server.prices.brief(server.models)}.",
        server.prices.inclusion,
        agreement(trials),
        *untried(server.shape, best.way.prompts.kind),
        *notes,
        *([f"{reasons} {'; '.join(given_up)}."] if given_up else []),
        "To repeat the simulation:",
        simulate_line(course, best, asked),
    ]:
        print_sentence(line, style="dim")


def _without_rdma(server: "Server", way: "Way") -> list[str]:
    """Return a warning if a way needs two kinds of machines, and those of the market have no RDMA between them."""
    if server.prices.rdma or len(way.kinds) == 1:
        return []
    return [
        f"This needs RDMA between machines of two kinds, and {server.prices.market} have none: without --memory, the "
        "plan is for one pool; --prices FILE names a market with such a network."
    ]


def _too_long(server: "Server") -> list[str]:
    """Return a warning if requests are longer than the model's context."""
    most, longest = server.shape.max_tokens, server.workload.longest
    if most is None or longest <= most:
        return []
    return [
        f"{server.shape.name} supports {most} tokens; the longest request has {longest}, and lamina launch rejects it. "
        "Plan for a model with a longer context, or for shorter requests."
    ]


def _starting(shape: "ModelShape", course: "Course", trials: "list[Trial]", model: str) -> list[str]:
    """Return the recommended way's launch line. A way without a line gets the reason, and the best way with a line."""
    sequences = course.deployment(trials[0].capacity).max_num_seqs
    lines = launching(trials[0], shape, model, sequences)
    if obstacle(trials[0].way, shape, model) is None:
        return ["To start it:", *lines]
    return [*lines, *_best_to_launch(shape, course, trials, model)]


def table_of(
    rows: "Sequence[tuple[str, ...]]",
    title: str,
    caption: str,
    narrow: bool,
    others: "Sequence[tuple[str, ...]]" = (),
    best: str | None = None,
) -> "Table":
    """Return the table of ways.

    Args:
        rows: Results of ``cells`` for ways that ``lamina launch`` starts.
        narrow: Make cells of several lines, some of which hold two figures, for terminals of 80 columns.
        others: Results of ``cells`` for ways that ``lamina launch`` cannot start, ranked apart.
        best: The recommended way.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, caption=caption, caption_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("way to serve", max_width=26 if narrow else None)
    for heading in _stacked(tuple(one.replace(" ", "\n") for one in HEADINGS), ",\n") if narrow else HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for label, group in (("", rows), (UNSTARTED, others)):
        if group and label:
            table.add_section()
            table.add_row(label, style="dim")
        for way, *figures in group:
            shown = _stacked(tuple(map(_broken, figures)), "\n") if narrow else figures
            table.add_row(way, *shown, style="bold green" if way == best else None)
    return table


def _stacked(cells: tuple[str, ...], joint: str) -> list[str]:
    """Return one cell each for requests and tokens per second, TTFT and stall, dollars in and out."""
    requests_s, ttft, stall, tbt, tokens_s, usd, usd_in, usd_out, *others = cells
    pairs = f"{requests_s}{joint}{tokens_s}", f"{ttft}{joint}{stall}", f"{usd_in}{joint}{usd_out}"
    return [pairs[0], pairs[1], tbt, usd, pairs[2], *others]


def cells(trial: "Trial") -> tuple[str, ...]:
    """Return a row of the table: the way, and a figure for each of ``HEADINGS``."""
    from lamina.cli.console import show_rate, show_usd

    result = trial.result
    return (
        trial.way.describe(),
        show_rate(trial.requests_s),
        f"{result.ttft_s.p99:.2f} s",
        f"{result.stalled_s.p99:.2f} s",
        f"{result.tbt_s.p99 * 1e3:.0f} ms",
        f"{trial.requests_s * trial.workload.output:.0f}",
        f"{trial.capacity.usd_per_hour:.2f}",
        show_usd(trial.usd_per_million_in)[1:],
        show_usd(trial.usd_per_million_out)[1:],
        " ".join(f"{pool.busy:.0%}" for pool in result.pools),
        f"{show_rate(trial.capacity.requests_s)} ({trial.capacity.requests_s / trial.requests_s - 1:+.0%})",
    )


def _broken(cell: str) -> str:
    """Break a figure into lines: the use of each pool, and a deviation, below each other."""
    return re.sub(r"(?<=%) | (?=\()", "\n", cell)


def advice(trials: "Sequence[Trial]", offloads: bool) -> list[str]:
    """Return lines with the recommendation: what to rent, what it serves and costs, and why.

    Args:
        trials: Ranked trials; the first is recommended.
        offloads: Whether candidates with offloaded attention existed.
    """
    rent, *why = _rent(trials, offloads)
    return [rent, serves(trials[0]), *_runner_up(trials), *why]


def _offloads(candidates: "Sequence[Way]") -> bool:
    from lamina.planning.plan.ways import Kind

    return any(way.kind is Kind.OFFLOADED for way in candidates)


def serves(trial: "Trial") -> str:
    """Return a sentence with a way's load and cost, and their errors."""
    from lamina.cli.console import show_rate, show_usd

    return (
        f"It serves {show_rate(trial.requests_s)} requests/s for ${trial.capacity.usd_per_hour:.2f}/h: "
        f"{show_usd(1000 * trial.usd_per_request)} for 1,000 requests, {show_usd(trial.usd_per_million_in)} for a "
        f"million tokens in and {show_usd(trial.usd_per_million_out)} out. The load found is within {trial.error:.0%} "
        f"of the simulator's highest; predicted throughput was within {MODEL_ERROR:.0%} of that measured in nine of "
        "ten services."
    )


def _runner_up(trials: "Sequence[Trial]") -> list[str]:
    from lamina.cli.console import show_usd
    from lamina.planning.simulate.trial import is_tie

    if len(trials) < 2:
        return []
    best, second = trials[:2]
    costs = f"Next: {second.way.describe()}, at {show_usd(1000 * second.usd_per_request)} for 1,000 requests"
    if is_tie(second, best):
        waits = second.result.stalled_s.p99, best.result.stalled_s.p99
        return [f"{costs}: a tie in cost, but requests wait longer (p99 {waits[0]:.2f} s instead of {waits[1]:.2f} s)."]
    return [f"{costs}: {_compared(second.usd_per_request / best.usd_per_request)}."]


def _rent(trials: "Sequence[Trial]", offloads: bool) -> list[str]:
    from lamina.planning.plan.ways import Kind

    best = trials[0]
    way = best.way
    offloaded = next((trial for trial in trials if trial.way.kind is Kind.OFFLOADED), None)
    if way.kind is Kind.OFFLOADED:
        other = next((trial for trial in trials if trial.way.kind is not Kind.OFFLOADED), None)
        if other is None:
            return [f"Rent two pools: {way.describe()}. No other way keeps the SLOs."]
        gain = other.usd_per_request / best.usd_per_request - 1
        return [f"Rent two pools: {way.describe()}: {gain:+.0%} requests per dollar over {other.way.describe()}."]
    several = f"Rent {'two' if way.memory is None else 'three'} pools, prefill and decoding apart"
    what = "Rent one pool" if len(way.kinds) == 1 else several
    lines = [f"{what}: {way.describe()}, steps of up to {way.chunk} tokens."]
    if offloaded is None:
        none = offloads and all(trial.way.memory is None for trial in trials)
        lines += ["No way to offload attention is within the targets at a comparable cost."] if none else []
    else:
        lines.append(
            f"The best offloading, {offloaded.way.describe()}, costs "
            f"{_compared(offloaded.usd_per_request / best.usd_per_request)} per request: prompts take "
            f"{offloaded.capacity.prompt_share:.0%} of its compute pool's time, and its memory workers, "
            f"{offloaded.result.pools[-1].busy:.0%} busy, do not compute them."
        )
    return lines


def _compared(ratio: float) -> str:
    return f"{ratio - 1:+.0%}" if ratio < 2 else f"{ratio:.1f} times as much"


def front(trials: "Sequence[Trial]") -> "list[Trial]":
    """Return the Pareto front of dollars per request and p99 time between tokens, cheapest first."""
    kept: list[Trial] = []
    for trial in sorted(trials, key=lambda one: one.usd_per_request):
        if not kept or trial.result.tbt_s.p99 < kept[-1].result.tbt_s.p99:
            kept.append(trial)
    return kept


def agreement(trials: "Sequence[Trial]") -> str:
    """Report the error of the closed form on the front."""
    kept = front(trials)
    off = [one.capacity.requests_s / one.requests_s - 1 for one in kept]
    which = "the way" if len(kept) == 1 else f"each of the {len(kept)} ways"
    return (
        f"The closed form is within {max(map(abs, off)):.0%} of the simulator for {which} that no other beats in both "
        "cost and time between tokens."
    )


def _best_to_launch(shape: "ModelShape", course: "Course", trials: "Sequence[Trial]", model: str) -> list[str]:
    """Compare the cheapest way that `lamina launch` starts to the recommended way, if they differ."""
    best = trials[0]
    if obstacle(best.way, shape, model) is None:
        return []
    if shape.unread:
        return []
    own = next((trial for trial in trials if obstacle(trial.way, shape, model) is None), None)
    if own is None:
        return ["Of the ways that are ranked here, lamina launch starts none."]
    costs = _compared(own.usd_per_request / best.usd_per_request)
    sequences = course.deployment(own.capacity).max_num_seqs
    return [
        f"The cheapest that lamina launch starts: {own.way.describe()}, at {costs} per request:",
        *launching(own, shape, model, sequences),
    ]


def _left_out(server: "Server", candidates: "Sequence[Way]") -> list[str]:
    """Explain why given kinds of devices do not appear: the workload or the weights do not fit them."""
    from lamina.planning.plan.ways import Kind

    notes = []
    groups: dict[str, list[Way]] = {}
    for way in candidates:
        if way.kind is Kind.OFFLOADED and way.memory is not None:
            groups.setdefault(f"memory workers {way.memory.kind}", []).append(way)
        if way.kind is Kind.LOCAL:
            groups.setdefault(f"{way.compute.kind} alone", []).append(way)
    for name, own in groups.items():
        reasons = [server.unfit(way) for way in own]
        if all(reasons):
            notes.append(f"Left out: {name}: {reasons[-1]}.")
    return notes


def _given_up(chosen: "Sequence[Capacity]", trials: "Sequence[Trial]") -> list[str]:
    """Return the ways of the shortlist that are not ranked: too expensive, or within the SLOs at no useful load."""
    kept = [trial.way for trial in trials]  # not the same objects: each was simulated in another process
    return [one.way.describe() for one in chosen if one.way not in kept]


def _as_dict(
    server: "Server",
    course: "Course",
    trials: "Sequence[Trial]",
    notes: list[str],
    given_up: list[str],
    asked: Asked,
    offloads: bool,
) -> dict[str, Any]:
    return {
        "model": server.shape.name,
        "workload": server.workload.summary(),
        "prices": server.prices.describe(server.models),
        "slo": {name: limit if limit < math.inf else None for name, limit in vars(server.slo).items()},
        "recommended": advice(trials, offloads),
        "agreement": agreement(trials),
        "notes": [
            *_without_rdma(server, trials[0].way),
            *_too_long(server),
            *untried(server.shape, trials[0].way.prompts.kind),
            *notes,
        ],
        "price_warnings": server.prices.warnings(server.models, date.today()),
        "given_up": given_up,
        "ways": [
            {
                "way": trial.way.describe(),
                "system": trial.way.kind.value,
                "requests_s": trial.requests_s,
                "error": trial.error,
                "model_requests_s": trial.capacity.requests_s,
                "front": any(trial is one for one in front(trials)),
                "prompt_share": trial.capacity.prompt_share,
                "usd_per_hour": trial.capacity.usd_per_hour,
                "usd_per_request": trial.usd_per_request,
                "usd_per_million_in": trial.usd_per_million_in,
                "usd_per_million_out": trial.usd_per_million_out,
                "simulated": trial.result.summary(),
                "simulate": simulate_line(course, trial, asked),
                "starts_here": obstacle(trial.way, server.shape, asked.model) is None,
                "launch": launching(trial, server.shape, asked.model, course.deployment(trial.capacity).max_num_seqs),
            }
            for trial in trials
        ],
    }
