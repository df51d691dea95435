"""The second Lamina paper's comparison at equal cost: three models, four traces, by closed form and simulated."""

from collections.abc import Mapping
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from bench.cost.lamina_paper import RENTS, Layout, cost_model, planner
from bench.cost.page import Section
from bench.cost.published import Comparison
from bench.pictures import axes, legend_above
from lamina.core.pipeline import Shape
from lamina.planning.plan import hardware, model_shapes, workload
from lamina.planning.plan.advice import beyond, recommend
from lamina.planning.plan.cost import CostModel
from lamina.planning.plan.planner import Group, Plan, evaluate_group
from lamina.planning.plan.ways import Partition, layouts
from lamina.planning.simulate import Arrivals, Deployment, System, simulate


def served(trace: Mapping[str, Any]) -> workload.Workload:
    """Means of a trace: lengths do not vary, for the paper gives no more."""
    prompt, output = trace["prompt"], trace["output"]
    live, longest = prompt + output / 2, round(prompt + output)
    return workload.Workload(name=trace["name"], prompt=prompt, output=output, live=live, longest=longest)


def equal_cost(published: Mapping[str, Any], catalogue: hardware.Catalogue) -> Section:
    """Decode throughput of both at about the same dollars an hour."""
    section = Section("Second Lamina paper: throughput at equal cost", published["paper"])
    h100, h20 = catalogue["h100"], catalogue["h20"]
    rows, gains, batches = [], {}, []
    for pair in published["pairs"]:
        shape = model_shapes.find(pair["model"])
        layout = Layout(h100, pair["h100"], h20, pair["h20"])
        for trace in published["traces"]:
            offloaded = _best(layout, shape, served(trace))
            alone = _best_alone(cost_model(shape, h100), pair["baseline_h100"], served(trace))
            hourly = pair["baseline_h100"] * RENTS.usd_per_hour(h100)
            gain = offloaded.tokens_s / alone.tokens_s - 1
            gains[shape.name, trace["name"]] = gain
            batches.append(offloaded.batch / alone.batch)
            rows.append(
                (
                    shape.name,
                    trace["name"],
                    f"{alone.tokens_s:.0f}",
                    f"{offloaded.tokens_s:.0f}",
                    f"{gain:+.0%}",
                    f"{batches[-1]:.2f}",
                    f"{alone.tbt_s * 1e3:.0f}",
                    f"{offloaded.tbt_s * 1e3:.0f}",
                    f"{offloaded.usd_per_hour / hourly:.2f}",
                    offloaded.bottleneck.value,
                )
            )
    low, high = (value / 100 for value in published["gain_percent"])
    why = (
        "The baseline pays for kernels and all-reduces here, but not for vLLM's host time, which is part of what was "
        "measured; short contexts leave the pair's fewer H100s as the bottleneck."
    )
    percent = [100 * gain for gain in gains.values()]
    section.compare(
        "Gain in throughput at equal cost, lowest and highest of twelve",
        [
            Comparison("gain", "%", published["source"], (100 * low, 100 * high), (min(percent), max(percent)), why),
            Comparison(
                "batch over vLLM's, mean",
                "x",
                published["source"],
                published["batch_ratio"],
                float(np.mean(batches)),
                "Here KV may fill 90% of a device, less the weights; vLLM keeps activations beside it.",
            ),
        ],
    )
    section.table(
        "Decode at the largest useful batch; baseline: the better of one tensor-parallel group and two",
        (
            *("model", "trace", "tokens/s alone", "offloaded", "gain", "batch over alone"),
            *("TBT ms alone", "offloaded", "cost ratio", "needs"),
        ),
        rows,
    )
    inside = sum(low <= gain <= high for gain in gains.values())
    section.text(f"{inside} of {len(gains)} gains lie inside the published band of {low:.0%} to {high:.0%}.")
    section.data["gains"] = {f"{model}, {trace}": gain for (model, trace), gain in gains.items()}
    plot, (left,) = axes()
    names = [trace["name"] for trace in published["traces"]]
    for index, pair in enumerate(published["pairs"]):
        values = [100 * gains[pair["model"], name] for name in names]
        left.bar(np.arange(len(names)) + 0.26 * (index - 1), values, 0.24, label=pair["model"])
    left.axhspan(100 * low, 100 * high, color="C5", alpha=0.15, zorder=0, label="published band")
    left.axhline(0, color="C5", linewidth=1)
    left.set_xticks(range(len(names)), names)
    left.set(ylabel="throughput over H100s alone (%)")
    legend_above(left, 4)
    section.figure("equal-cost", "Gain in decode throughput at equal cost, by trace and model.", plot)
    _ratio(section, published, catalogue)
    _simulate(section, published, catalogue)
    return section


MOST_H20 = 8
"""Memory workers that the planner may take beside a pair's H100s."""


def _ratio(section: Section, published: Mapping[str, Any], catalogue: hardware.Catalogue) -> None:
    """Add the planner's number of H20 beside two H100 for Llama-3-70B, and the gain by twice as many."""
    pair = published["pairs"][-1]
    shape, h100, h20 = model_shapes.find(pair["model"]), catalogue["h100"], catalogue["h20"]
    rows = []
    for trace in published["traces"]:
        offloading = planner(shape, Layout(h100, pair["h100"], h20, MOST_H20), served(trace), RENTS)
        plans = [
            found
            for pools in layouts(shape, [(h100, pair["h100"])], [(h20, MOST_H20)])
            if (found := offloading.evaluate(pools))
        ]
        best = recommend(plans)
        paper = min(
            (plan for plan in plans if plan.pools.memory_workers == pair["h20"]),
            key=lambda plan: plan.usd_per_million_out,
        )
        rows.append(
            (
                trace["name"],
                f"{pair['h100']} + {pair['h20']}",
                f"{best.pools.compute_workers} + {best.pools.memory_workers}",
                f"{best.pools.memory_workers / pair['h20']:.2f}",
                f"{paper.usd_per_million_out / best.usd_per_million_out - 1:+.0%}",
                f"{best.bottleneck.value}; {best.limit.value}",
                next(iter(beyond(offloading, best)), ""),
            )
        )
        section.data[f"recommended H20, {trace['name']}"] = best.pools.memory_workers
    section.table(
        f"{shape.name}: cheapest pools per token, up to {pair['h100']} H100 and {MOST_H20} H20",
        (
            *("trace", "published H100 + H20", "ours", "ratio of H20", "cost of the published ones"),
            *("needs; batch bounded by", "beyond it"),
        ),
        rows,
    )
    section.text(
        "Where sequences are short, compute saturates at the paper's ratio or before. Where they are long, the batch "
        "is bounded by KV until there are more H20 than the paper's; it takes one ratio for all traces."
    )


SIMULATED = 256
"""Requests of each simulation, all there at first."""


def _simulate(section: Section, published: Mapping[str, Any], catalogue: hardware.Catalogue) -> None:
    """Add a simulation of the same devices with prompts; the paper measures decoding alone."""
    rows, gains = [], {}
    for pair, trace in product(published["pairs"], published["traces"]):
        prompt, output = (np.full(SIMULATED, round(trace[part])) for part in ("prompt", "output"))
        arrivals = Arrivals(np.zeros(SIMULATED), prompt, output)
        h100 = partial(Deployment, model=model_shapes.find(pair["model"]), compute=catalogue["h100"], max_num_seqs=1024)
        two_pools = h100(
            compute_workers=pair["h100"],
            shape=Shape(pair["h100"]),
            memory=catalogue["h20"],
            memory_workers=pair["h20"],
            lanes=2,
        )
        count = pair["baseline_h100"]
        one_pool = h100(compute_workers=count, shape=Shape(count))
        ours = simulate(two_pools, arrivals).tokens_s
        alone = simulate(one_pool, arrivals, System.CHUNKED_PREFILL).tokens_s
        gains[f"{pair['model']}, {trace['name']}"] = ours / alone - 1
        rows.append((pair["model"], trace["name"], f"{alone:.0f}", f"{ours:.0f}", f"{ours / alone - 1:+.0%}"))
    section.table(
        f"Simulated, with prefill: {SIMULATED} requests that arrive at once; baseline: chunked prefill on all H100s",
        ("model", "trace", "tokens/s alone", "offloaded", "gain"),
        rows,
    )
    section.text(
        "The paper leaves prefill out of both sides. In the simulator, where the compute workers prefill "
        "too, the pair has "
        "half of the baseline's H100s for it and loses: the comparison at equal cost holds for decoding, "
        "with prefill on "
        f"devices of its own. ({SIMULATED} requests do not fill the batch of Llama-3-70B, whose KV is small.)"
    )
    section.data["simulated_gains"] = gains


def _best(layout: Layout, shape: model_shapes.ModelShape, traffic: workload.Workload) -> Plan:
    offloading = planner(shape, layout, traffic, RENTS)
    plans = [
        found
        for lanes in (1, 2)
        for partition in Partition
        if partition is Partition.REQUEST or shape.kv_heads % layout.workers == 0
        if (found := offloading.evaluate(layout.pools(lanes, partition)))
    ]
    return max(plans, key=lambda plan: plan.tokens_s)


def _best_alone(model: CostModel, devices: int, traffic: workload.Workload) -> Group:
    """All devices in one tensor-parallel group, or in two side by side, whichever draws more."""
    whole = evaluate_group(model, devices, traffic)
    half = evaluate_group(model, devices // 2, traffic)
    both = half and Group(batch=2 * half.batch, tbt_s=half.tbt_s, tokens_s=2 * half.tokens_s)
    return max((found for found in (whole, both) if found), key=lambda found: found.tokens_s)
