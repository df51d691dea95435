"""`lamina plan`: finds the pools that serve a model at the least cost per token, before anyone rents a GPU."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lamina.errors import ConfigError
from lamina.types import KvCacheDType

if TYPE_CHECKING:
    from rich.table import Table

    from lamina.plan.cost import CostModel
    from lamina.plan.hardware import Catalogue, Hardware
    from lamina.plan.models import ModelShape
    from lamina.plan.planner import Plan, Planner, Pools
    from lamina.plan.prices import Prices
    from lamina.plan.serving import Slo
    from lamina.plan.store import ProfileStore

    _Pool = list[tuple[Hardware, int]]

MOST_COMPUTE, MOST_MEMORY = 8, 16
"""Most workers of a kind given without a count."""

SHOWN = 12
"""Plans of the Pareto front that the table shows."""

DEFAULT_PROMPT, DEFAULT_OUTPUT = 1155, 211
"""Tokens of requests without a trace: the means of Azure's conversations."""

_HEADINGS = (
    *("compute", "memory", "split by", "bottleneck"),
    *("lanes", "batch", "TBT ms", "tokens/s", "$/h", "GB/s", "$/M in", "$/M out"),
)
_TEXTS = 4  # so many of the first columns hold text

ONE_LINE_COLUMNS = 120
"""Narrower terminals show each plan on two lines."""

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
        typer.Option(help=f"Hardware for memory workers; kind:n allows up to n of it (default {MOST_MEMORY})."),
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
        str | None, typer.Option(help="Longest time between tokens (p99 in the simulator), such as 50ms.")
    ] = None,
    slo_ttft: Annotated[str | None, typer.Option(help="Longest time to the first token (p99), such as 2s.")] = None,
    budget: Annotated[float | None, typer.Option(min=0, help="Most dollars per hour for both pools together.")] = None,
    prices: Annotated[
        str,
        typer.Option(help="The market that prices everything: aws, gcp, runpod, paper, own, or a TOML file."),
    ] = "own",
    hardware: Annotated[Path | None, typer.Option(help="TOML file with hardware of your own.")] = None,
    kv_cache_dtype: Annotated[
        KvCacheDType, typer.Option(help="Element type of cached K and V, of every way; auto is the model's own.")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print all plans of the Pareto front as JSON.")] = False,
    map_file: Annotated[
        Path | None,
        typer.Option(
            "--map",
            help="Do not plan: show over prompts and outputs where two kinds cost less than one; draw it in an SVG.",
        ),
    ] = None,
    validate: Annotated[
        Path | None, typer.Option(help="Do not plan: print the cost model's errors against a CSV of measurements.")
    ] = None,
    kind: Annotated[str | None, typer.Option(help="With --validate: the hardware that was measured.")] = None,
    measure: Annotated[
        Path | None,
        typer.Option(
            help="Measure this machine, half of its cores per worker, and write kind cpu to a file for --hardware."
        ),
    ] = None,
) -> None:
    """Find the cheapest pools that serve a model.

    With --validate or --measure: check the cost model against measurements, or measure this machine for it.
    """
    from lamina.cli import plan_profile

    if measure is not None:
        plan_profile.measure(measure)
        return
    from lamina.plan import hardware as catalogue_of
    from lamina.plan import models
    from lamina.plan.store import ProfileStore

    catalogue = catalogue_of.load(hardware)
    if validate is not None:
        plan_profile.validate(validate, model, kind, catalogue)
        return
    if model is None:
        raise ConfigError("give --model: a model directory, a config.json or a name such as Llama-3-70B")
    if kind is not None:
        raise ConfigError("--kind is for --validate only; name the hardware to plan for with --compute and --memory")
    if compute is None or memory is None:
        raise ConfigError("give --compute and --memory, such as --compute h100 --memory h20")
    if context is not None and (trace is not None or prompt is not None or output is not None):
        raise ConfigError("--context plans for decoding alone; leave it out, or --trace, --prompt and --output")
    if trace is not None and (prompt is not None or output is not None):
        raise ConfigError("--trace and --prompt or --output both set the lengths of requests; give only one of them")
    if map_file is not None and (
        context is not None or trace is not None or prompt is not None or output is not None or as_json
    ):
        raise ConfigError("--map has a grid of lengths; leave out --context, --trace, --prompt, --output and --json")
    profile = ProfileStore.beside(hardware)
    shape = replace(models.find(model), kv_cache_dtype=kv_cache_dtype)
    if context is not None:
        planner, candidates = _planner(shape, compute, memory, context, catalogue, prices, profile)
        planner.goals = _goals(slo_tbt, slo_ttft, budget)
        _print(planner, candidates, model, as_json)
        return
    slo = _slo(slo_tbt, slo_ttft, budget)
    if map_file is not None:
        _map(shape, compute, memory, catalogue, prices, profile, slo, map_file)
        return
    lengths = DEFAULT_PROMPT if prompt is None else prompt, DEFAULT_OUTPUT if output is None else output
    _requests(model, shape, compute, memory, trace, lengths, catalogue, prices, profile, slo, as_json)


def _requests(
    model: str,
    shape: "ModelShape",
    compute: str,
    memory: str,
    trace: Path | None,
    lengths: tuple[int, int],
    catalogue: "Catalogue",
    prices: str,
    profile: "ProfileStore | None",
    slo: "Slo",
    as_json: bool,
) -> None:
    """Plan for whole requests: prompts and decoding."""
    from lamina.cli import ways as table
    from lamina.plan import workload
    from lamina.plan.serving import Server, ways
    from lamina.simulate.trial import Course

    requests = workload.read_trace(trace) if trace else []
    served = workload.of_requests(trace.name, requests) if trace else workload.of_lengths(*lengths)
    pools, costs, market = _priced(shape, compute, memory, catalogue, prices, profile)
    server = Server(shape, served, costs, market, slo)
    course = Course(shape, served, requests, market, slo, profile)
    table.show(server, course, list(ways(shape, *pools)), model, trace, as_json)


def _map(
    shape: "ModelShape",
    compute: str,
    memory: str,
    catalogue: "Catalogue",
    prices: str,
    profile: "ProfileStore | None",
    slo: "Slo",
    picture: Path,
) -> None:
    from lamina.cli import plan_map

    pools, costs, market = _priced(shape, compute, memory, catalogue, prices, profile)
    plan_map.show(shape, pools, costs, market, slo, picture)


def _priced(
    shape: "ModelShape",
    compute: str,
    memory: str,
    catalogue: "Catalogue",
    prices: str,
    profile: "ProfileStore | None",
) -> "tuple[tuple[_Pool, _Pool], dict[str, CostModel], Prices]":
    """Both pools with the most of each kind, their cost models, and a market that prices them."""
    from lamina.plan.cost import CostModel, Fits
    from lamina.plan.prices import load

    pools = catalogue.pool(compute, MOST_COMPUTE), catalogue.pool(memory, MOST_MEMORY)
    costs = {entry.kind: CostModel(shape, entry, Fits.load(entry, profile)) for pool in pools for entry, _ in pool}
    market = load(prices)
    for kind in costs:
        market.require(kind)
    return pools, costs, market


def _slo(slo_tbt: str | None, slo_ttft: str | None, budget: float | None) -> "Slo":
    from lamina.plan.serving import Slo

    tbt, ttft = _duration("--slo-tbt", slo_tbt), _duration("--slo-ttft", slo_ttft)
    return Slo(
        tbt_s=Slo.tbt_s if tbt is None else tbt, ttft_s=Slo.ttft_s if ttft is None else ttft, usd_per_hour=budget
    )


def _planner(
    shape: "ModelShape",
    compute: str,
    memory: str,
    context: int,
    catalogue: "Catalogue",
    prices: str,
    profile: "ProfileStore | None",
) -> "tuple[Planner, list[Pools]]":
    """A planner of decoding alone for these pools, and every layout they allow."""
    from lamina.plan import workload
    from lamina.plan.planner import Goals, Planner, layouts

    served = workload.of_context(context)
    pools, costs, market = _priced(shape, compute, memory, catalogue, prices, profile)
    return Planner(shape, served, costs, market, Goals()), list(layouts(shape, *pools))


def _goals(slo_tbt: str | None, slo_ttft: str | None, budget: float | None) -> Any:
    from lamina.plan.planner import Goals

    return Goals(
        tbt_s=_duration("--slo-tbt", slo_tbt),
        ttft_s=_duration("--slo-ttft", slo_ttft),
        usd_per_hour=budget,
    )


def _duration(flag: str, text: str | None) -> float | None:
    """Seconds of "50ms" or "2s". Raises ConfigError for anything else."""
    if text is None:
        return None
    match = _DURATION.fullmatch(text.strip().lower())
    if match is None or float(match["number"]) == 0:
        number = re.sub(r"[^\d.]", "", text)
        hint = f"; did you mean {number}ms?" if number and number.strip(".0") else ""
        raise ConfigError(f"{flag} {text!r} is not a duration; give a number with us, ms or s, such as 50ms{hint}")
    return float(match["number"]) * _SECONDS[match["unit"]]


def _print(planner: "Planner", candidates: "list[Pools]", model: str, as_json: bool) -> None:
    from lamina.observe.progress import counting_progress
    from lamina.plan.advice import alone, beyond, pareto, recommend, refusal

    plans = []
    with counting_progress("Layouts", len(candidates)) as on_progress:
        for count, pools in enumerate(candidates):
            if count % 4096 == 0:
                on_progress(count)
            if (found := planner.evaluate(pools)) is not None:
                plans.append(found)
    if not plans:
        raise refusal(planner, candidates)
    front, best = pareto(plans), recommend(plans)
    if as_json:
        print(json.dumps(_as_dict(planner, front, best, model), indent=2))
        return
    from lamina.cli.console import output, print_table, print_text

    narrow = output().is_terminal and output().width < ONE_LINE_COLUMNS
    print_table(_table(planner, front, best, len(plans), two_lines=narrow))
    against = alone(planner, best)
    print_text(
        "Recommended for decoding alone: prompts, which compute workers also run, cost nothing here\n", style="bold"
    )
    if against and against.usd_per_million_out < best.usd_per_million_out:
        print_text(
            f"  Rent one pool: {against.count} {against.kind}, tensor parallelism {against.tensor_parallel}. The best "
            "two pools cost more for each token:\n"
        )
    print_text(f"  {launch_line(best, planner.shape, model)}\n")
    if missing := _not_launched(best):
        print_text(f"  (That line leaves out what lamina launch lacks yet: {', '.join(missing)}.)\n", style="dim")
    print_text(
        f"  {best.pools.replicas} x tensor parallelism {best.pools.tensor_parallel}, {best.pools.lanes} lanes; an "
        f"average prompt takes {best.ttft_s * 1e3:.0f} ms.\n"
        f"  Bottleneck: {best.bottleneck.value} (busy: compute {best.compute_busy:.0%}, memory {best.memory_busy:.0%}, "
        f"network {best.network_busy:.0%}); batch limited by: {best.limit.value}.\n"
    )
    most, longest = planner.shape.max_tokens, planner.workload.longest
    if most is not None and longest > most:
        print_text(f"  {planner.shape.name} supports {most} tokens; the workload has sequences of up to {longest}.\n")
    if against:
        print_text(f"  {against.against(best)}\n")
    for line in beyond(planner, best):
        print_text(f"  {line}\n", style="dim")


def launch_line(plan: "Plan", shape: "ModelShape", model: str) -> str:
    """The `lamina launch` command that starts these pools."""
    from lamina.cli.ways import kv_option

    compute, memory = _typed_kinds(plan)
    pools = plan.pools
    pipelining = "rotational" if pools.lanes == pools.replicas + 1 else "fixed"
    return (
        f"lamina launch --model {shlex.quote(model)} --compute {compute}:{pools.compute_workers} "
        f"--memory {memory}:{pools.memory_workers} --lanes {pools.lanes} --pipelining {pipelining}"
        + _batch_options(plan)
        + kv_option(shape)
    )


def _batch_options(plan: "Plan") -> str:
    """The options that admit the plan's batch, where the runtime's defaults are too small."""
    from lamina.config import EngineConfig

    pools, defaults = plan.pools, EngineConfig()
    sequences = -(-plan.batch // pools.replicas)
    # Where sequences may change lanes, one lane may come to hold them all.
    moves = pools.lanes == pools.replicas + 1 or pools.replicas == 1
    rows = max(sequences, plan.batch if moves else -(-plan.batch // pools.lanes))
    options = f" --max-num-seqs {sequences}" if sequences > defaults.max_num_seqs else ""
    return options + (f" --max-num-batched-tokens {rows}" if rows > defaults.max_num_batched_tokens else "")


def _not_launched(plan: "Plan") -> list[str]:
    """The parts of a plan that `lamina launch` does not support yet."""
    from lamina.cluster.pool import CPU
    from lamina.plan.planner import Partition

    pools = plan.pools
    missing = [f"{kind} workers" for kind in dict.fromkeys(_typed_kinds(plan)) if kind != CPU]
    missing += [f"tensor parallelism {pools.tensor_parallel}"] if pools.tensor_parallel > 1 else []
    return missing + (["head-level partition"] if pools.partition is Partition.HEAD else [])


def _typed_kinds(plan: "Plan") -> tuple[str, str]:
    """The kinds of both pools by the names that `lamina launch` takes."""
    from lamina.plan.hardware import ALIASES

    names = {entry: name for name, entry in ALIASES.items()}
    pools = plan.pools
    return names.get(pools.compute.kind, pools.compute.kind), names.get(pools.memory.kind, pools.memory.kind)


def _table(planner: "Planner", front: "list[Plan]", best: "Plan", count: int, *, two_lines: bool) -> "Table":
    """The Pareto front. ``two_lines``, for narrow terminals: each cell holds two figures, one above the other."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    served = planner.workload
    table = Table(
        title=f"{planner.shape.name}, decoding alone, {served.name}: {len(front)} of {count} plans are Pareto-optimal",
        caption=f"Sequences of {served.live:.0f} cached tokens. tp: tensor parallelism. $/M: per million tokens of "
        "prompt (in) or output (out). GB/s: network bandwidth needed between the pools. Bold: recommended.\n"
        f"Prices: {planner.prices.describe(planner.models)}.",
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    lines = 2 if two_lines else 1

    def joined(values: tuple[str, ...]) -> list[str]:
        return ["\n".join(values[at : at + lines]) for at in range(0, len(values), lines)]

    for place, heading in enumerate(joined(_HEADINGS)):
        table.add_column(heading, justify="left" if place * lines < _TEXTS else "right", no_wrap=True)
    for one in _spread(front, best):
        pools = one.pools
        row = (
            f"{pools.compute.kind}:{pools.compute_workers} tp{pools.tensor_parallel}",
            f"{pools.memory.kind}:{pools.memory_workers}",
            pools.partition.value,
            one.bottleneck.value,
            str(pools.lanes),
            str(one.batch),
            f"{one.tbt_s * 1e3:.1f}",
            f"{one.tokens_s:.0f}",
            f"{one.usd_per_hour:.2f}",
            f"{one.network_bytes_s / 1e9:.0f}",
            f"{one.usd_per_million_in:.2f}",
            f"{one.usd_per_million_out:.2f}",
        )
        table.add_row(*joined(row), style="bold green" if one is best else None)
    return table


def _spread(front: "list[Plan]", best: "Plan") -> "list[Plan]":
    """At most SHOWN plans: a selection from the cheapest to the most expensive, and the recommended one."""
    step = max(1, -(-len(front) // (SHOWN - 1)))
    chosen = front[::step]
    return sorted([best, *(one for one in chosen if one is not best)], key=lambda one: one.usd_per_million_out)


def _as_dict(planner: "Planner", front: "list[Plan]", best: "Plan", model: str) -> dict[str, Any]:
    from lamina.plan.advice import alone, beyond

    against = alone(planner, best)
    return {
        "model": planner.shape.name,
        "workload": {name: value for name, value in vars(planner.workload).items() if name != "sample"},
        "prices": planner.prices.describe(planner.models),
        "recommended": {
            **_plan_dict(best, planner.shape, model),
            "alone": vars(against) if against else None,
            "beyond": beyond(planner, best),
        },
        "front": [_plan_dict(one, planner.shape, model) for one in front],
    }


def _plan_dict(plan: "Plan", shape: "ModelShape", model: str) -> dict[str, Any]:
    pools = plan.pools
    values = {name: value for name, value in vars(plan).items() if name not in ("pools", "bottleneck", "limit")}
    return {
        "compute": {
            "kind": pools.compute.kind,
            "workers": pools.compute_workers,
            "tensor_parallel": pools.tensor_parallel,
            "replicas": pools.replicas,
        },
        "memory": {"kind": pools.memory.kind, "workers": pools.memory_workers, "partition": pools.partition.value},
        "lanes": pools.lanes,
        **values,
        "bottleneck": plan.bottleneck.value,
        "limit": plan.limit.value,
        "launch": launch_line(plan, shape, model),
    }
