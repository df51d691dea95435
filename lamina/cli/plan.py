"""`lamina plan`: finds the pools that serve a model at the least cost per token, before anyone rents a GPU."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lamina.cli import options
from lamina.config.engine_config import check_writable
from lamina.core.errors import ConfigError
from lamina.core.types import KvCacheDType

if TYPE_CHECKING:
    from lamina.planning.plan.cost import CostModel
    from lamina.planning.plan.fit_store import ProfileStore
    from lamina.planning.plan.hardware import Catalogue, Hardware
    from lamina.planning.plan.model_shapes import ModelShape
    from lamina.planning.plan.prices import Prices
    from lamina.planning.plan.workload import TracedRequest, Workload

    _Pool = list[tuple[Hardware, int]]

MOST_COMPUTE, MOST_MEMORY = 8, 16
"""Most workers of a kind given without a count."""

DEFAULT_PROMPT, DEFAULT_OUTPUT = 1155, 211
"""Tokens of requests without a trace: the means of Azure's conversations."""

_DURATION = re.compile(r"(?P<number>\d+(\.\d+)?|\.\d+)\s*(?P<unit>ms|s|us)")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def plan(
    model: Annotated[
        str | None,
        typer.Option(help="Model directory, config.json, or a name such as Llama-3-70B; weights are not needed."),
    ] = None,
    compute: Annotated[
        str | None,
        typer.Option(help=f"Hardware for compute workers; kind:n allows up to n of it (default {MOST_COMPUTE})."),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            help=f"Hardware for memory workers; kind:n allows up to n of it (default {MOST_MEMORY}). "
            "Without it: how one pool serves best."
        ),
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Take lengths from an Azure CSV or Mooncake .jsonl trace.")] = None,
    prompt: Annotated[
        int | None, typer.Option(help=f"Prompt tokens of every request. Default: {DEFAULT_PROMPT}.")
    ] = None,
    output: Annotated[
        int | None, typer.Option(help=f"Output tokens of every request. Default: {DEFAULT_OUTPUT}.")
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            help="Plan for decoding alone, as the papers do: cached tokens per sequence; prompts cost nothing."
        ),
    ] = None,
    slo_tbt: Annotated[
        str | None, typer.Option(help="Longest time between tokens (p99), such as 50ms. Default: 100ms.")
    ] = None,
    slo_ttft: Annotated[
        str | None, typer.Option(help="Longest time to the first token (p99), such as 5s. Default: 2s.")
    ] = None,
    budget: Annotated[float | None, typer.Option(min=0, help="Most dollars per hour for both pools together.")] = None,
    prices: Annotated[
        str,
        typer.Option(help="The market that prices everything: pods, aws, gcp, runpod, paper, own, or a TOML file."),
    ] = "pods",
    hardware: Annotated[Path | None, typer.Option(help="TOML file with hardware of your own.")] = None,
    kv_cache_dtype: Annotated[
        KvCacheDType, typer.Option(help="Element type of cached K and V, of every way; auto is the model's own.")
    ] = "auto",
    weight_dtype: options.WeightDTypeName = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print all plans of the Pareto front as JSON.")] = False,
    map_file: Annotated[
        Path | None,
        typer.Option(
            "--map",
            help="Do not plan: show for which prompts and outputs two kinds cost less than one, and draw an SVG.",
        ),
    ] = None,
    measure: Annotated[
        Path | None,
        typer.Option(
            help="Measure this machine, with half of its cores per worker; write kind cpu to a file for --hardware."
        ),
    ] = None,
) -> None:
    """Find the cheapest pools that serve a model.

    With --measure: measure this machine for the cost model.
    """
    if measure is not None:
        _measure(measure)
        return
    from lamina.planning.plan import hardware as catalogue_of
    from lamina.planning.plan import model_shapes
    from lamina.planning.plan.fit_store import ProfileStore
    from lamina.planning.plan.ways import INTERACTIVE, NO_LIMITS

    catalogue = catalogue_of.load(hardware)
    if model is None:
        raise ConfigError("give --model: a model directory, a config.json or a name such as Llama-3-70B")
    if compute is None:
        raise ConfigError("give --compute, and --memory for a second pool, such as --compute h100 --memory rtx4090")
    if memory is None and (context is not None or map_file is not None):
        raise ConfigError("--context and --map are about two pools; give --memory too, such as --memory rtx4090")
    if context is not None and (trace is not None or prompt is not None or output is not None):
        raise ConfigError("--context plans for decoding alone; leave it out, or --trace, --prompt and --output")
    if trace is not None and (prompt is not None or output is not None):
        raise ConfigError("--trace and --prompt or --output both set the lengths of requests; give only one of them")
    if map_file is not None and (
        context is not None or trace is not None or prompt is not None or output is not None or as_json
    ):
        raise ConfigError("--map has a grid of lengths; leave out --context, --trace, --prompt, --output and --json")
    shape = model_shapes.find(model).stored_as(kv_cache_dtype, weight_dtype)
    profile = ProfileStore.beside(hardware)
    pools, costs, market = _priced(shape, compute, memory, catalogue, prices, profile)
    targets = {"tbt_s": _duration("--slo-tbt", slo_tbt), "ttft_s": _duration("--slo-ttft", slo_ttft)}
    given = {name: value for name, value in (targets | {"usd_per_hour": budget}).items() if value is not None}
    if context is not None:
        from lamina.cli import plan_decoding

        limits = replace(NO_LIMITS, **given)
        plan_decoding.show(shape, context, pools, costs, market, limits, model, as_json)
        return
    slo = replace(INTERACTIVE, **given)
    if map_file is not None:
        from lamina.cli import plan_map

        plan_map.show(shape, pools, costs, market, slo, map_file)
        return
    from lamina.cli import plan_ways as table
    from lamina.cli.plan_commands import Asked
    from lamina.planning.plan.overheads import VLLM
    from lamina.planning.plan.serving import Server
    from lamina.planning.plan.ways import segments, ways
    from lamina.planning.simulate.trial import Course

    lengths = DEFAULT_PROMPT if prompt is None else prompt, DEFAULT_OUTPUT if output is None else output
    served, requests = _workload(trace, lengths)
    server = Server(shape, served, costs, market, slo, VLLM)
    course = Course(shape, served, requests, market, slo, profile, engine=VLLM)
    longest = max((one.prompt for one in requests), default=math.ceil(served.prompt))
    candidates = list(
        ways(shape, *pools, segments(served), lambda way: slo.affords(sum(way.usd_per_hour(market))), longest)
    )
    table.show(server, course, candidates, Asked(model, lengths, trace, hardware), as_json)


def _workload(trace: Path | None, lengths: tuple[int, int]) -> "tuple[Workload, list[TracedRequest]]":
    """Return the workload, and the requests to simulate: a trace's, or none if only lengths are given."""
    from lamina.planning.plan import workload
    from lamina.planning.simulate.trial import MOST_REPLAYED

    if trace is None:
        return workload.of_lengths(*lengths), []
    requests = workload.read_trace(trace)
    if len({request.arrival_s for request in requests}) == 1:
        mean = workload.of_requests(trace.name, requests)
        raise ConfigError(
            f"{trace} has {len(requests)} requests, all at one time, and so no rate that a plan could raise; give a "
            f"trace with several times, or --prompt {mean.prompt:.0f} --output {mean.output:.0f} instead"
        )
    if any(request.content for request in requests):  # replayed in order: what is planned for is what is simulated
        requests = sorted(requests, key=lambda request: request.arrival_s)[:MOST_REPLAYED]
    return workload.of_requests(trace.name, requests), requests


def _priced(
    shape: "ModelShape",
    compute: str,
    memory: str | None,
    catalogue: "Catalogue",
    prices: str,
    profile: "ProfileStore | None",
) -> "tuple[tuple[_Pool, _Pool], dict[str, CostModel], Prices]":
    """Return both pools with the most of each kind, their cost models, and a market that prices them."""
    from lamina.planning.plan.cost import CostModel, Fits
    from lamina.planning.plan.prices import load

    pools = catalogue.pool(compute, MOST_COMPUTE), catalogue.pool(memory, MOST_MEMORY) if memory else []
    costs = {entry.kind: CostModel(shape, entry, Fits.load(entry, profile)) for pool in pools for entry, _ in pool}
    market = load(prices)
    market.require(costs)
    return pools, costs, market


def _duration(flag: str, text: str | None) -> float | None:
    """Return the seconds of "50ms" or "2s". Raises ConfigError for anything else."""
    if text is None:
        return None
    match = _DURATION.fullmatch(text.strip().lower())
    if match is None or float(match["number"]) == 0:
        number = re.sub(r"[^\d.]", "", text)
        hint = f"; did you mean {number}ms?" if number and number.strip(".0") else ""
        raise ConfigError(f"{flag} {text!r} is not a duration; give a number with us, ms or s, such as 50ms{hint}")
    return float(match["number"]) * _SECONDS[match["unit"]]


def _measure(file: Path) -> None:
    """Measure this machine, write kind cpu to ``file`` and a profile beside it, and say if others disturbed it."""
    from lamina.cli.console import print_sentence
    from lamina.observe.progress import waiting
    from lamina.planning.plan import hardware
    from lamina.planning.plan.fit_store import ProfileStore
    from lamina.planning.profiling import measure as machine
    from lamina.planning.profiling import profile
    from lamina.planning.profiling.measure import Watch

    store = ProfileStore(file.with_suffix(".sqlite"))
    if store.file == file:
        raise ConfigError(f"--measure is {file}, where its profile would be written; give a name that ends in .toml")
    for existing in (file, store.file):
        if existing.exists():
            raise ConfigError(f"{existing} already exists; remove it, or give --measure another file")
    check_writable("--measure", file)
    if (before := Watch.sample()).disturbed:
        print_sentence(
            f"Warning: {before}; times measured now will be too long. Wait until the machine is idle.", style="yellow"
        )
    watch = Watch()
    compute, _ = profile.halves()
    with waiting("Measuring the peaks of this machine"), profile.on_cores(compute):
        values = machine.entry()
    file.write_text(machine.as_toml(values))
    with waiting("Measuring slices, attention and the runtime, about a minute"):
        profile.measure("cpu", store)
    entry = hardware.load(file)["cpu"]
    rates = ", ".join(f"{flops / 1e9:.0f} GFLOP/s {dtype.value}" for dtype, flops in entry.flops.items())
    print_sentence(f"{entry.device}: {entry.memory_bytes_s / 1e9:.1f} GB/s, {rates}")
    if (disturbance := watch.so_far()).disturbed:
        print_sentence(
            f"Warning: {disturbance} meanwhile, so all figures are too slow by an unknown factor. Remove {file} and "
            f"{store.file}, and repeat this on an idle machine.",
            style="yellow",
        )
    print_sentence("To plan with it:")
    print_sentence(f"lamina plan --model NAME --hardware {file} --compute cpu:1 --memory cpu:1 --prices FILE")
    print_sentence("FILE has what an hour of it costs you: [kinds.cpu] with usd_per_hour, source and date.")
