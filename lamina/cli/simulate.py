"""`lamina simulate`: a trace on pools nobody has rented yet, under the runtime's own scheduler and a virtual clock."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from lamina.cli import options
from lamina.errors import ConfigError, LaminaError

if TYPE_CHECKING:
    from rich.table import Table

    from lamina.plan.hardware import Catalogue, Hardware
    from lamina.simulate import Arrivals, Deployment, Result

OVERLOADED = 0.9
"""Share of the time: requests that wait for more, and have all arrived before so much of it, come too fast."""

SystemName = Literal["lamina", "tensor-parallel", "chunked-prefill", "disaggregated"]


def simulate(
    model: Annotated[str, typer.Option(help="Model directory, config.json, or a name such as Llama-2-13B.")],
    compute: Annotated[str, typer.Option(help="Compute workers, kind:count; with --system disaggregated: prefill.")],
    trace: Annotated[Path, typer.Option(help="Azure CSV or Mooncake .jsonl: what arrives when.")],
    memory: Annotated[
        str | None, typer.Option(help="Memory workers, kind:count; with --system disaggregated: decode.")
    ] = None,
    system: Annotated[SystemName, typer.Option(help="What serves.")] = "lamina",
    tensor_parallel: Annotated[int, typer.Option(min=1, help="Devices that hold one copy of the weights.")] = 1,
    lanes: options.Lanes = "auto",
    pipelining: options.PipeliningName = "auto",
    max_num_seqs: Annotated[int, typer.Option(help="Sequences that a copy of the weights decodes at once.")] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Rows of one step.")] = 2048,
    rate_scale: Annotated[float, typer.Option(help="Requests arrive so many times as fast as in the trace.")] = 1.0,
    draw: Annotated[
        int | None, typer.Option(min=1, help="Draw so many requests from the trace's lengths, arriving at random.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of --draw.")] = 0,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens that every request asks for, if it draws fewer in the trace.")
    ] = 1,
    fail: Annotated[list[str] | None, typer.Option(help="Lose a worker, as memory:3@120s. Repeatable.")] = None,
    slow: Annotated[list[str] | None, typer.Option(help="Slow a worker, as compute:0@60s:2x. Repeatable.")] = None,
    hardware: Annotated[Path | None, typer.Option(help="TOML file of kinds and prices of your own.")] = None,
    requests: Annotated[Path | None, typer.Option(help="Write metrics of every request: .csv or .parquet.")] = None,
    trace_out: Annotated[Path | None, typer.Option(help="Write the last spans of workers, for Perfetto.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Serve a trace on pools nobody has rented yet."""
    from lamina import simulate as sim
    from lamina.config import check_writable
    from lamina.observe.progress import counting_progress
    from lamina.observe.trace import write_trace
    from lamina.plan import hardware as catalogue_of
    from lamina.plan import models
    from lamina.plan.store import ProfileStore
    from lamina.protocol.timeline import MOST_SPANS

    if requests is not None:
        sim.check_requests_file(requests)
    for option, file in (("--requests", requests), ("--trace-out", trace_out)):
        if file is not None:
            check_writable(option, file)
    if trace_out is not None and system != "lamina":
        raise ConfigError(f"--trace-out shows what Lamina's workers do; there are none in --system {system}")
    catalogue = catalogue_of.load(hardware)
    kind, workers = _pool("--compute", compute, catalogue)
    memory_kind, memory_workers = _pool("--memory", memory, catalogue) if memory else (None, 0)
    deployment = sim.Deployment(
        model=models.find(model),
        compute=kind,
        compute_workers=workers,
        memory=memory_kind,
        memory_workers=memory_workers,
        tensor_parallel=tensor_parallel,
        lanes=options.as_lanes(lanes),
        pipelining=pipelining,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        profile=ProfileStore.beside(hardware),
    )
    arrivals = _arrivals(trace, rate_scale, draw, seed, max_tokens)
    faults = [*map(sim.parse_failure, fail or ()), *map(sim.parse_slowdown, slow or ())]
    with counting_progress("Requests", len(arrivals)) as on_progress:
        result = sim.simulate(
            deployment, arrivals, sim.System(system), faults, MOST_SPANS if trace_out else 0, on_progress
        )
    _print(result, deployment, trace, any(fault.factor is None for fault in faults), as_json)
    try:
        if requests is not None:
            sim.write_requests(requests, result.log)
        if trace_out is not None:
            write_trace(trace_out, result.spans)
    except OSError as error:  # a full disk, say
        raise LaminaError(f"not all of the simulation could be written: {error}") from error


def _pool(flag: str, text: str, catalogue: "Catalogue") -> "tuple[Hardware, int]":
    entries = catalogue.pool(text, 1)
    if len(entries) != 1:
        raise ConfigError(f"{flag} {text!r} names {len(entries)} kinds; a simulated pool has one, such as a100:2")
    return entries[0]


def _arrivals(trace: Path, rate_scale: float, draw: int | None, seed: int, max_tokens: int) -> "Arrivals":
    from lamina import simulate as sim
    from lamina.plan.workload import read_trace

    requests = read_trace(trace)
    if draw is None:
        return sim.replay(requests, rate_scale, max_tokens)
    return sim.draw(requests, draw, seed, rate_scale, max_tokens)


def _print(result: "Result", deployment: "Deployment", trace: Path, lost: bool, as_json: bool) -> None:
    if as_json:
        print(json.dumps(_as_dict(result, deployment, trace), indent=2))
        return
    from lamina.cli.console import output, print_table

    print_table(_summary(result, deployment, trace, lost))
    if result.tokens:
        print_table(_pools(result))
    if (decisions := result.decisions) is not None and decisions.steps:
        seconds = sum(decisions.seconds.values())
        output().print(
            f"The engine's decisions took {seconds / decisions.steps * 1e6:.0f} us a step of "
            f"{decisions.rows / decisions.steps:.0f} sequences on this machine: {seconds / result.seconds:.1%} of one "
            "core, were it to serve this.",
            style="dim",
            soft_wrap=True,
        )


def _summary(result: "Result", deployment: "Deployment", trace: Path, lost: bool) -> "Table":
    """``lost``: a worker was."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from lamina.simulate import State

    table = Table(title=f"{result.system}: {deployment.model.name}, {trace.name}", box=SIMPLE_HEAD, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    ended = ", ".join(f"{result.log.count(state)} {state.value}" for state in State if result.log.count(state))
    table.add_row("requests", f"{ended}, in {result.seconds:.0f} s")
    if lost and result.log.count(State.FINISHED) < len(result.log.arrivals):
        table.add_row("lost", "a lost worker ends its engine: what ran ends with an error, what comes later is refused")
    elif result.log.count(State.REFUSED):
        table.add_row("refused", f"prompt and answer may need more KV than a {_holder(result.system, deployment)}")
    if not result.tokens:
        return table
    table.add_row("throughput", f"{result.tokens_s:.0f} tokens/s drawn, {result.requests_s:.2f} requests/s")
    arrivals = result.log.arrivals.arrival_s
    if result.queued > OVERLOADED and 0 < arrivals[-1] < OVERLOADED * result.seconds:
        rate = len(arrivals) / arrivals[-1]
        table.add_row("overload", f"{rate:.2f} requests/s arrived: TTFT is that of a growing queue; see --rate-scale")
    for name, times, unit, scale in (("TTFT", result.ttft_s, "s", 1.0), ("TBT", result.tbt_s, "ms", 1e3)):
        shown = (f"{part} {value * scale:.{2 if unit == 's' else 1}f} {unit}" for part, value in vars(times).items())
        table.add_row(name, "no request drew two tokens" if math.isnan(times.p50) else ", ".join(shown))
    table.add_row(
        "cost", f"${result.usd_per_million_out:.2f} per million tokens drawn, at ${result.usd_per_hour:.2f} an hour"
    )
    table.add_row(
        "bottleneck", f"{result.bottleneck}; requests waited to be admitted in {result.queued:.0%} of the time"
    )
    if result.preempted:
        table.add_row("preempted", f"{result.preempted} times: KV lost and computed anew")
    return table


def _holder(system: str, deployment: "Deployment") -> str:
    """Who must hold all of a request's KV, and how much that is."""
    if system != "lamina" or deployment.memory is None:
        return "copy of the weights has room for beside them"
    return f"{deployment.memory.kind} holds, {deployment.memory_cost.kv_tokens} tokens"


def _pools(result: "Result") -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD)
    table.add_column("pool", no_wrap=True)
    for heading in ("busy, mean", "busiest worker", "busiest network card"):
        table.add_column(heading, justify="right", no_wrap=True)
    for pool in result.pools:
        shares = (f"{share:.1%}" for share in (pool.busy, pool.busiest, pool.network))
        table.add_row(f"{pool.name} {pool.kind}:{pool.workers}", *shares)
    return table


def _as_dict(result: "Result", deployment: "Deployment", trace: Path) -> dict[str, Any]:
    settings = ("tensor_parallel", "lanes", "pipelining", "max_num_seqs", "max_num_batched_tokens")
    return {
        "model": deployment.model.name,
        "trace": trace.name,
        **{name: getattr(deployment, name) for name in settings},
        **result.summary(),
    }
