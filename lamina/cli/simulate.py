"""`lamina simulate`: replays a trace on simulated pools, with the runtime's own scheduler and a virtual clock."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from lamina.cli import options
from lamina.cli.plan import DEFAULT_OUTPUT, DEFAULT_PROMPT
from lamina.core.errors import ConfigError, LaminaError
from lamina.core.types import KvCacheDType, PromptAttention

if TYPE_CHECKING:
    from rich.table import Table

    from lamina.core.pipeline import Shape
    from lamina.planning.plan.hardware import Catalogue, Hardware
    from lamina.planning.plan.prices import Prices
    from lamina.planning.plan.workload import TracedRequest
    from lamina.planning.simulate import Arrivals, Deployment, Result

WITHOUT_TRACE = 400
"""Requests to simulate where neither a trace nor --draw gives a number."""

OVERLOADED = 0.9
"""The load is too high if requests are queued for more than this share of the time, and all arrived before it."""

PRICES_HELP = "The market that prices everything: pods, aws, gcp, runpod, paper, own, or a TOML file. Default: pods."

TERMS = (
    "TTFT: time to the first token. TBT: time between tokens. p99: 99 of 100 are shorter. sustained: while requests "
    "arrive; whole run: with its start and end. NIC: network card."
)

SystemName = Literal["lamina", "tensor-parallel", "chunked-prefill", "disaggregated"]


def simulate(
    model: Annotated[str, typer.Option(help="Model directory, config.json, or a name such as Llama-2-13B.")],
    compute: Annotated[
        str,
        typer.Option(
            help="Compute workers, kind:count; with --system disaggregated, those that prefill. /tp2/pp2 after the "
            "count replaces --tensor-parallel and --pipeline-parallel for this pool."
        ),
    ],
    trace: Annotated[
        Path | None, typer.Option(help="Arrival times and lengths: an Azure CSV or Mooncake .jsonl.")
    ] = None,
    prompt: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Without --trace: prompt tokens of every request. Requests arrive at random, --rate-scale a second. "
            f"Default: {DEFAULT_PROMPT}.",
        ),
    ] = None,
    output: Annotated[
        int | None, typer.Option(min=1, help=f"The same for output tokens. Default: {DEFAULT_OUTPUT}.")
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            help="Memory workers, kind:count, or local: KV beside the weights. With --system disaggregated, "
            "those that decode."
        ),
    ] = None,
    prefill: Annotated[
        str | None,
        typer.Option(help="Workers that only run prompts, kind:count/tp2/pp2, so that --compute only decodes."),
    ] = None,
    autoscale: Annotated[
        str | None,
        typer.Option(
            help="prefill=1:3: the least and the most workers that only run prompts; workers change their role when "
            "--slo-ttft-ms or --slo-tbt-ms is missed."
        ),
    ] = None,
    system: Annotated[SystemName, typer.Option(help="The serving system to simulate.")] = "lamina",
    tensor_parallel: Annotated[
        int, typer.Option(min=1, help="Devices that hold one copy of the weights, or one stage of it.")
    ] = 1,
    pipeline_parallel: Annotated[int, typer.Option(min=1, help="Stages of each copy of the weights.")] = 1,
    lanes: options.Lanes = "auto",
    pipelining: options.PipeliningName = "auto",
    max_num_seqs: Annotated[int, typer.Option(help="Sequences that each copy of the weights decodes at once.")] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Token rows of one step.")] = 2048,
    slo_tbt_ms: Annotated[
        int | None, typer.Option(min=1, help="Target of the time between tokens while prompts are computed.")
    ] = None,
    slo_ttft_ms: Annotated[
        int | None, typer.Option(min=1, help="Target of the time to the first token, for --policy slo and --autoscale.")
    ] = None,
    policy: Annotated[
        str,
        typer.Option(help="Order of requests: fifo, shortest, priority, slo, loongserve, or an installed entry point."),
    ] = "fifo",
    rate_scale: Annotated[float, typer.Option(help="Multiply the trace's request rate by this factor.")] = 1.0,
    draw: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Simulate this many requests with lengths sampled from the trace, arriving at random. "
            f"Without --trace: {WITHOUT_TRACE} by default.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of --draw.")] = 0,
    first: Annotated[int | None, typer.Option(min=1, help="Replay only the first requests of the trace.")] = None,
    max_tokens: Annotated[
        int,
        typer.Option(
            min=1, help="max_tokens of every request; requests with longer outputs in the trace get these lengths."
        ),
    ] = 1,
    fail: Annotated[list[str] | None, typer.Option(help="Lose a worker, such as memory:3@120s. Repeatable.")] = None,
    slow: Annotated[
        list[str] | None, typer.Option(help="Slow a worker down, such as compute:0@60s:2x. Repeatable.")
    ] = None,
    hardware: Annotated[Path | None, typer.Option(help="TOML file with hardware of your own.")] = None,
    kv_cache_dtype: Annotated[
        KvCacheDType, typer.Option(help="Element type of cached K and V, of every system; auto is the model's own.")
    ] = "auto",
    weight_dtype: options.WeightDTypeName = "auto",
    kv_tokens_per_worker: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of one sequence on one memory worker, if several have room.")
    ] = None,
    prompt_attention: Annotated[
        PromptAttention, typer.Option(help="Workers that attend to a prompt's earlier chunks, as in lamina launch.")
    ] = "auto",
    prefix_cache: Annotated[
        bool,
        typer.Option(help="Keep KV for requests that begin with the same tokens, if the trace has this information."),
    ] = True,
    prices: Annotated[str | None, typer.Option(help=PRICES_HELP)] = None,
    requests: Annotated[
        Path | None, typer.Option(help="Write metrics of every request to a .csv or .parquet file.")
    ] = None,
    trace_out: Annotated[
        Path | None, typer.Option(help="Write a timeline of the workers' last steps for Perfetto.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Simulate serving a trace on given pools."""
    from lamina.cluster.pool import LOCAL
    from lamina.config.engine_config import check_writable
    from lamina.control.timeline import MOST_SPANS
    from lamina.observe.progress import counting_progress
    from lamina.observe.timing import write_trace
    from lamina.planning import simulate as sim
    from lamina.planning.plan import hardware as catalogue_of
    from lamina.planning.plan import model_shapes
    from lamina.planning.plan.fit_store import ProfileStore
    from lamina.planning.plan.overheads import VLLM

    if requests is not None:
        sim.check_requests_file(requests)
    for option, file in (("--requests", requests), ("--trace-out", trace_out)):
        if file is not None:
            check_writable(option, file)
    if trace_out is not None and system != "lamina":
        raise ConfigError(f"--trace-out records Lamina's workers; --system {system} has none. Leave it out")
    catalogue = catalogue_of.load(hardware)
    early, late = _shapes(compute, prefill, tensor_parallel, pipeline_parallel)
    kind, workers = _pool("--compute", compute.partition("/")[0], catalogue)
    local = memory == LOCAL
    memory_kind, memory_workers = _pool("--memory", memory, catalogue) if memory and not local else (None, 0)
    prefill_kind, prefill_workers = _pool("--prefill", prefill.partition("/")[0], catalogue) if prefill else (None, 0)
    deployment = sim.Deployment(
        model=model_shapes.find(model).stored_as(kv_cache_dtype, weight_dtype),
        compute=kind,
        compute_workers=workers,
        memory=memory_kind,
        memory_workers=memory_workers,
        prefill=prefill_kind,
        prefill_workers=prefill_workers,
        prefill_bounds=_prefill_bounds(autoscale),
        local=local,
        shape=late,
        prefill_shape=None if early == late else early,
        lanes=options.parse_lanes(lanes),
        pipelining=pipelining,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        slo_tbt_ms=slo_tbt_ms,
        slo_ttft_ms=slo_ttft_ms,
        policy=policy,
        kv_tokens_per_worker=kv_tokens_per_worker,
        prompt_attention=prompt_attention,
        prefix_cache=prefix_cache,
        profile=ProfileStore.beside(hardware),
        prices=_market(prices, (kind, memory_kind, prefill_kind)),
        engine=VLLM.lamina if system == sim.System.LAMINA.value else VLLM,
    )
    name, traced = _requests(trace, prompt, output, first)
    draw = WITHOUT_TRACE if trace is None and draw is None else draw
    arrivals = _arrivals(traced, rate_scale, draw, seed, first, max_tokens)
    faults = [*map(sim.parse_failure, fail or ()), *map(sim.parse_slowdown, slow or ())]
    with counting_progress("Requests", len(arrivals)) as on_progress:
        result = sim.simulate(
            deployment, arrivals, sim.System(system), faults, MOST_SPANS if trace_out else 0, on_progress
        )
    _print(result, deployment, name, any(fault.factor is None for fault in faults), as_json)
    try:
        if requests is not None:
            sim.write_requests(requests, result.log)
        if trace_out is not None:
            write_trace(trace_out, result.spans)
    except OSError as error:  # a full disk, say
        raise LaminaError(f"the results could not be written completely: {error}") from error


def _shapes(compute: str, prefill: str | None, ranks: int, stages: int) -> "tuple[Shape, Shape]":
    """Return the shapes of copies in the prefill pool, and of those in the compute pool."""
    from lamina.cluster.degrees import shapes
    from lamina.config.engine_config import EngineConfig

    return shapes(EngineConfig(compute=compute, prefill=prefill, tensor_parallel=ranks, pipeline_parallel=stages))


def _pool(flag: str, text: str, catalogue: "Catalogue") -> "tuple[Hardware, int]":
    entries = catalogue.pool(text, 1)
    if len(entries) != 1:
        raise ConfigError(f"{flag} {text!r} names {len(entries)} kinds of hardware; give one, such as a100:2")
    return entries[0]


def _prefill_bounds(autoscale: str | None) -> tuple[int, int] | None:
    """Raises ConfigError for bounds of other pools, whose sizes stay as they are."""
    from lamina.cluster.pool import parse_bounds

    if autoscale is None:
        return None
    bounds = parse_bounds(autoscale)
    if bounds.keys() != {"prefill"}:
        raise ConfigError(f"autoscale is {autoscale!r}; only roles are simulated: give it as prefill=1:3")
    return bounds["prefill"]


def _market(name: str | None, kinds: "Iterable[Hardware | None]") -> "Prices | None":
    """Return the market to price in; None if none was requested and the default one does not have every kind.

    Raises ConfigError if the requested one lacks a kind.
    """
    from lamina.planning.plan import prices

    named = [one.kind for one in kinds if one is not None]
    if name is not None:
        market = prices.load(name)
        market.require(named)
        return market
    market = prices.load(prices.DEFAULT)
    return market if all(map(market.lists, named)) else None


def _requests(
    trace: Path | None, prompt: int | None, output: int | None, first: int | None
) -> "tuple[str, list[TracedRequest]]":
    """Return the name of the requests, and a trace: of one request a second if only lengths are given."""
    from lamina.planning.plan import workload

    if trace is not None:
        if prompt is not None or output is not None:
            raise ConfigError("--trace and --prompt or --output both set the lengths of requests; give one of them")
        return trace.name, workload.read_trace(trace)
    if first is not None:
        raise ConfigError("--first replays the beginning of a trace; give --trace, or --draw for a number of requests")
    lengths = DEFAULT_PROMPT if prompt is None else prompt, DEFAULT_OUTPUT if output is None else output
    return workload.of_lengths(*lengths).name, workload.one_a_second(*lengths)


def _arrivals(
    requests: "list[TracedRequest]",
    rate_scale: float,
    draw: int | None,
    seed: int,
    first: int | None,
    max_tokens: int,
) -> "Arrivals":
    from lamina.planning import simulate as sim

    if draw is not None and first is not None:
        raise ConfigError("--draw samples the whole trace and --first replays its beginning; give only one of them")
    if draw is None:
        requests.sort(key=lambda request: request.arrival_s)
        return sim.replay(requests[:first], rate_scale, max_tokens)
    return sim.draw(requests, draw, seed, rate_scale, max_tokens)


def _print(result: "Result", deployment: "Deployment", requests: str, lost: bool, as_json: bool) -> None:
    if as_json:
        print(json.dumps(_as_dict(result, deployment, requests), indent=2))
        return
    from lamina.cli.console import print_sentence, print_table
    from lamina.cli.plan_commands import warn_of_prices

    print_table(_summary(result, deployment, requests, lost))
    if result.tokens:
        print_table(_pools(result))
        print_sentence(TERMS, style="dim")
    if (decisions := result.decisions) is not None and decisions.steps:
        step_s = sum(decisions.seconds.values()) / decisions.steps
        print_sentence(
            f"On this machine, the engine's decisions took {step_s * 1e6:.0f} us per step with "
            f"{decisions.rows / decisions.steps:.0f} sequences: {step_s * result.steps / result.seconds:.1%} of one "
            "core for this load.",
            style="dim",
        )
    if deployment.prices is not None:
        kinds = (deployment.prefill, deployment.compute, deployment.memory)
        warn_of_prices(deployment.prices, [kind.kind for kind in kinds if kind is not None])


def _summary(result: "Result", deployment: "Deployment", requests: str, lost: bool) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from lamina.cli.console import show_rate
    from lamina.planning.simulate import State

    table = Table(title=f"{result.system}: {deployment.model.name}, {requests}", box=SIMPLE_HEAD, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    ended = ", ".join(f"{result.log.count(state)} {state.value}" for state in State if result.log.count(state))
    table.add_row("requests", f"{ended}, in {result.seconds:.0f} s")
    if lost and result.log.count(State.FINISHED) < len(result.log.arrivals):
        table.add_row("lost", "a lost worker stops its engine: running requests fail, later ones are refused")
    elif result.log.count(State.REFUSED):
        table.add_row("refused", f"prompt and output may need more KV than {_holder(result.system, deployment)}")
    most, lengths = deployment.model.max_tokens, result.log.arrivals.prompt + result.log.arrivals.output
    if most is not None and (longer := int((lengths > most).sum())):
        what = f"{longer} requests have more than the {most} tokens that {deployment.model.name} supports"
        table.add_row("too long", f"{what}; lamina launch would reject them")
    if not result.tokens:
        return table
    table.add_row("sustained", _sustained(result))
    table.add_row(
        "whole run",
        f"{result.tokens_s:.0f} output tokens/s, {show_rate(result.requests_s)} requests/s, its start and end included",
    )
    arrivals = result.log.arrivals.arrival_s
    if result.queued > OVERLOADED and 0 < arrivals[-1] < OVERLOADED * result.seconds:
        table.add_row("overload", "requests arrived faster than they ended, hence TTFT; lower --rate-scale")
    for name, times, unit, scale in (
        ("TTFT", result.ttft_s, "s", 1.0),
        ("TTFT + longest gap", result.stalled_s, "s", 1.0),
        ("TBT", result.tbt_s, "ms", 1e3),
    ):
        shown = (f"{part} {value * scale:.{2 if unit == 's' else 1}f} {unit}" for part, value in vars(times).items())
        table.add_row(name, "no request has two output tokens" if math.isnan(times.p50) else ", ".join(shown))
    table.add_row("cost", _cost(result, deployment))
    table.add_row("bottleneck", f"{result.bottleneck}; requests were queued for {result.queued:.0%} of the time")
    if result.preempted:
        table.add_row("preempted", f"{result.preempted} times: KV dropped and recomputed")
    if deployment.prefill_bounds is not None:
        table.add_row("roles", f"{result.role_changes} times a copy of the weights changed its role")
    if result.prefix_queried:
        share = result.prefix_hit / result.prefix_queried
        table.add_row("prefixes", f"{share:.1%} of {result.prefix_queried} prompt tokens were found in the cache")
    return table


def _sustained(result: "Result") -> str:
    """Return the rate at which requests end while others arrive, and what each costs then, as in `lamina plan`."""
    from lamina.cli.console import show_rate, show_usd

    rate, offered = result.served_requests_s, result.offered_requests_s
    text = f"{show_rate(rate)} requests/s"
    text += ", which arrived at once" if result.at_once else f", of {show_rate(offered)} that arrived"
    if result.usd_per_hour is None or not rate:
        return text
    return f"{text}: {show_usd(result.usd_per_hour / 3.6 / rate)} per 1,000 requests"


def _cost(result: "Result", deployment: "Deployment") -> str:
    from lamina.cli.console import show_usd

    if deployment.prices is None or result.usd_per_million_out is None or result.usd_per_hour is None:
        return "not priced: the market pods does not have every kind; give --prices"
    return (
        f"{show_usd(result.usd_per_million_out)} per million output tokens of the run, ${result.usd_per_hour:.2f} per "
        f"hour (--prices {deployment.prices.name})"
    )


def _holder(system: str, deployment: "Deployment") -> str:
    if system != "lamina" or deployment.memory is None:
        return "fits beside all copies of the weights" if deployment.lends else "fits beside a copy of the weights"
    workers = deployment.memory_workers
    return f"{workers} {deployment.memory.kind} hold ({workers * deployment.memory_cost.kv_tokens} tokens)"


def _pools(result: "Result") -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD)
    table.add_column("pool", no_wrap=True)
    for heading in ("busy, mean", "busiest worker", "busiest NIC"):
        table.add_column(heading, justify="right", no_wrap=True)
    for pool in result.pools:
        shares = (f"{share:.1%}" for share in (pool.busy, pool.busiest, pool.network))
        table.add_row(f"{pool.name} {pool.kind}:{pool.workers}", *shares)
    return table


def _as_dict(result: "Result", deployment: "Deployment", requests: str) -> dict[str, Any]:
    settings = ("lanes", "pipelining", "max_num_seqs", "max_num_batched_tokens")
    early, late = deployment.shapes
    shape = {"tensor_parallel": late.ranks, "pipeline_parallel": late.stages}
    prompts = {"prefill_tensor_parallel": early.ranks, "prefill_pipeline_parallel": early.stages}
    return {
        "model": deployment.model.name,
        "trace": requests,
        **shape,
        **(prompts if deployment.prefill is not None else {}),
        **{name: getattr(deployment, name) for name in settings},
        "prices": deployment.prices.name if deployment.prices else None,
        **result.summary(),
    }
