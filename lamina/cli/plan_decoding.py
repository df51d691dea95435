"""`lamina plan --context`: plans for decoding alone, as in the papers, whose prompts cost nothing."""

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from lamina.planning.plan.cost import CostModel
    from lamina.planning.plan.hardware import Hardware
    from lamina.planning.plan.model_shapes import ModelShape
    from lamina.planning.plan.planner import Plan, Planner
    from lamina.planning.plan.prices import Prices
    from lamina.planning.plan.ways import Slo, Way

    _Pool = list[tuple[Hardware, int]]

SHOWN = 12
"""Plans of the Pareto front that the table shows."""

_HEADINGS = (
    *("compute", "memory", "split by", "bottleneck"),
    *("lanes", "batch", "TBT ms", "tokens/s", "$/h", "GB/s", "$/M in", "$/M out"),
)
_TEXTS = 4  # so many of the first columns hold text

ONE_LINE_COLUMNS = 120
"""Narrower terminals show each plan on two lines."""


def show(
    shape: "ModelShape",
    context: int,
    pools: "tuple[_Pool, _Pool]",
    costs: "dict[str, CostModel]",
    prices: "Prices",
    goals: "Slo",
    model: str,
    as_json: bool,
) -> None:
    """Print the best plans for sequences of ``context`` cached tokens. Raises ConfigError if none reaches ``goals``."""
    from lamina.planning.plan import workload
    from lamina.planning.plan.planner import Planner
    from lamina.planning.plan.ways import layouts

    planner = Planner(shape, workload.of_context(context), costs, prices, goals)
    _print(planner, list(layouts(shape, *pools)), model, as_json)


def _print(planner: "Planner", candidates: "list[Way]", model: str, as_json: bool) -> None:
    from lamina.observe.progress import counting_progress
    from lamina.planning.plan.advice import alone, beyond, pareto, recommend, refusal

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
    from lamina.cli.console import output, print_sentence, print_table
    from lamina.cli.plan_commands import missing, untried, warn_of_prices

    narrow = output().is_terminal and output().width < ONE_LINE_COLUMNS
    print_table(_table(planner, front, best, len(plans), two_lines=narrow))
    against = alone(planner, best)
    print_sentence(
        "Recommended for decoding alone: prompts, which compute workers also run, cost nothing here", style="bold"
    )
    if against and against.usd_per_million_out < best.usd_per_million_out:
        print_sentence(
            f"Rent one pool: {against.count} {against.kind}, tensor parallelism {against.tensor_parallel}. The best "
            "two pools cost more for each token:"
        )
    print_sentence(_launch_line(best, planner.shape, model))
    if lacking := missing(best.pools, planner.shape, model):
        print_sentence(f"(That line leaves out what lamina launch lacks yet: {', '.join(lacking)}.)", style="dim")
    for note in untried(planner.shape, best.pools.compute.kind):
        print_sentence(note, style="dim")
    print_sentence(
        f"{best.pools.replicas} x tensor parallelism {best.pools.shape.ranks}, {best.pools.lanes} lanes; an "
        f"average prompt takes {best.ttft_s * 1e3:.0f} ms."
    )
    print_sentence(
        f"Bottleneck: {best.bottleneck.value} (busy: compute {best.compute_busy:.0%}, memory {best.memory_busy:.0%}, "
        f"network {best.network_busy:.0%}); batch limited by: {best.limit.value}."
    )
    most, longest = planner.shape.max_tokens, planner.workload.longest
    if most is not None and longest > most:
        print_sentence(f"{planner.shape.name} supports {most} tokens; the workload has sequences of up to {longest}.")
    if against:
        print_sentence(against.against(best))
    for line in beyond(planner, best):
        print_sentence(line, style="dim")
    warn_of_prices(planner.prices, planner.models)


def _launch_line(plan: "Plan", shape: "ModelShape", model: str) -> str:
    from lamina.cli.plan_commands import launch_command

    return launch_command(plan.pools, shape, model, _batch_options(plan))


def _batch_options(plan: "Plan") -> str:
    """Return the options that admit the plan's batch, where the runtime's defaults are too small."""
    from lamina.config.engine_config import EngineConfig

    pools, defaults = plan.pools, EngineConfig()
    sequences = -(-plan.batch // pools.replicas)
    # Where sequences may change lanes, one lane may come to hold them all.
    moves = pools.rotates or pools.replicas == 1
    rows = max(sequences, plan.batch if moves else -(-plan.batch // pools.lanes))
    options = f" --max-num-seqs {sequences}" if sequences > defaults.max_num_seqs else ""
    return options + (f" --max-num-batched-tokens {rows}" if rows > defaults.max_num_batched_tokens else "")


def _table(planner: "Planner", front: "list[Plan]", best: "Plan", count: int, *, two_lines: bool) -> "Table":
    """Show the Pareto front. ``two_lines``, for narrow terminals: each cell holds two figures, one above the other."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    served = planner.workload
    table = Table(
        title=f"{planner.shape.name}, decoding alone, {served.name}: {len(front)} of {count} plans are Pareto-optimal",
        caption=f"Sequences of {served.live:.0f} cached tokens. tp: devices that hold one copy of the weights. lanes: "
        "batches in flight. TBT: time between tokens. split by: how memory workers divide attention. $/M: per million "
        "tokens of prompt (in) or output (out). GB/s: network bandwidth needed between the pools. Bold: recommended.\n"
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
            f"{pools.compute.kind}:{pools.compute_workers} tp{pools.shape.ranks}",
            f"{pools.second.kind}:{pools.memory_workers}",
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
    """Return at most SHOWN plans of the front, evenly selected by cost, with the recommended one."""
    step = max(1, -(-len(front) // (SHOWN - 1)))
    chosen = front[::step]
    return sorted([best, *(one for one in chosen if one is not best)], key=lambda one: one.usd_per_million_out)


def _as_dict(planner: "Planner", front: "list[Plan]", best: "Plan", model: str) -> dict[str, Any]:
    from lamina.planning.plan.advice import alone, beyond

    against = alone(planner, best)
    return {
        "model": planner.shape.name,
        "workload": planner.workload.summary(),
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
            "tensor_parallel": pools.shape.ranks,
            "replicas": pools.replicas,
        },
        "memory": {"kind": pools.second.kind, "workers": pools.memory_workers, "partition": pools.partition.value},
        "lanes": pools.lanes,
        **values,
        "bottleneck": plan.bottleneck.value,
        "limit": plan.limit.value,
        "launch": _launch_line(plan, shape, model),
    }
