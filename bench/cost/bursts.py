"""Cost of a burst of long contexts: adding memory workers, which load no weights, against adding replicas.

By closed form, for decoding alone: one replica's batch of sequences, and ``PEAK`` times as many in a burst. One system
adds replicas, the other adds memory workers to compute workers that were sized for the peak. A device is paid for from
its request until the burst has been served. It becomes available after ``delay``; a replica then loads its weights.
The burst waits meanwhile and ends later, which is paid for too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from bench.cost.lamina_paper import RENTS, cost_model
from bench.cost.page import Section
from bench.cost.published import Comparison
from lamina.core.pipeline import Shape
from lamina.planning.plan import hardware, model_shapes, workload
from lamina.planning.plan.cost import CostModel
from lamina.planning.plan.hardware import Hardware
from lamina.planning.plan.planner import Planner, evaluate_group
from lamina.planning.plan.ways import NO_LIMITS, Way

PEAK = 6
CONTEXT = 65_536
PERIOD_S = 3600.0
"""One burst in so much time."""

LOAD_BYTES_S = 5e9
"""A replica's weights from a local NVMe drive; assumed."""

DELAYS_S = (0.0, 10.0, 60.0, 180.0)
LENGTHS_S = (60.0, 300.0, 1200.0)
MOST_GROUPS, MOST_MEMORY = 4, 48


@dataclass(frozen=True)
class Elastic:
    """Dollars per hour of permanent devices (``kept``) and of devices added for a burst; load time of the latter."""

    kept: float
    added: float
    load_s: float = 0.0

    def usd(self, burst_s: float, delay_s: float) -> float:
        return (self.kept * PERIOD_S + self.added * (delay_s + self.load_s + burst_s)) / 3600


def memory_workers(model: CostModel, tensor_parallel: int, memory: Hardware, base: int, tbt_s: float) -> Elastic | None:
    """The cheapest compute workers for the peak, and as many memory workers as the sequences need."""
    costs = {model.hardware.kind: model, memory.kind: cost_model(model.shape, memory)}
    planner = Planner(model.shape, workload.of_context(CONTEXT), costs, RENTS, replace(NO_LIMITS, tbt_s=tbt_s))

    def serves(groups: int, workers: int, sequences: int) -> bool:
        plans = (
            planner.evaluate(
                Way(
                    compute=model.hardware,
                    compute_workers=groups * tensor_parallel,
                    shape=Shape(tensor_parallel),
                    memory=memory,
                    memory_workers=workers,
                    lanes=lanes,
                )
            )
            for lanes in (groups, 2 * groups)
        )
        return any(plan is not None and plan.batch >= sequences for plan in plans)

    each = RENTS.usd_per_hour(memory, networked=True)
    found = []
    for groups in range(1, MOST_GROUPS + 1):
        first, last = (
            next((count for count in range(1, MOST_MEMORY + 1) if serves(groups, count, sequences)), None)
            for sequences in (base, PEAK * base)
        )
        if first is not None and last is not None:
            kept = groups * tensor_parallel * RENTS.usd_per_hour(model.hardware, networked=True) + first * each
            found.append(Elastic(kept, (last - first) * each))
    return min(found, key=lambda one: one.usd(LENGTHS_S[1], DELAYS_S[1]), default=None)


def burst(published: Mapping[str, Any], catalogue: hardware.Catalogue) -> Section:
    """Cost of an hour with one burst, by its length and the delay of devices."""
    section = Section("KernelFlume: cost through bursts of long contexts", published["paper"])
    why = (
        "Ours is decoding alone of equal contexts with one burst an hour, no queue and whole devices; the paper "
        "replays a trace of agents, whose contexts grow, against ServerlessLLM."
    )
    comparisons, rows = [], []
    for target in published["savings"]:
        shape, h100 = model_shapes.find(target["model"]), catalogue["h100"]
        model, degree = cost_model(shape, h100), target["tensor_parallel"]
        group = evaluate_group(model, degree, workload.of_context(CONTEXT), target["tbt_s"])
        batch = group.batch if group else 0
        split = memory_workers(model, degree, catalogue[target["kind"]], batch, target["tbt_s"]) if batch else None
        what = f"{shape.name}, attention on {target['kind']}"
        if split is None:
            section.text(f"{what}: no pools serve {CONTEXT} tokens within {target['tbt_s'] * 1e3:g} ms.")
            continue
        hourly = degree * RENTS.usd_per_hour(h100)
        full = Elastic(hourly, (PEAK - 1) * hourly, shape.weight_bytes / degree / LOAD_BYTES_S)
        saving = {
            (delay_s, burst_s): 100 * (1 - split.usd(burst_s, delay_s) / full.usd(burst_s, delay_s))
            for delay_s in DELAYS_S
            for burst_s in LENGTHS_S
        }
        ours = min(saving.values()), max(saving.values())
        comparisons.append(Comparison(what, "%", target["source"], tuple(target["percent"]), ours, why))
        section.data[what] = {
            "replicas": vars(full),
            "two pools": vars(split),
            "saving percent": {f"{delay:g} s delay, {length:g} s": value for (delay, length), value in saving.items()},
        }
        rows += [
            (what, f"{delay:g}", *(f"{saving[delay, length]:.0f}" for length in LENGTHS_S), f"{full.load_s:.1f}")
            for delay in DELAYS_S
        ]
    section.compare("Saving with elastic attention workers against elastic replicas", comparisons)
    section.table(
        f"One replica's batch of {CONTEXT} tokens each, {PEAK} times as many in one burst an hour; saving in percent",
        ("", "delay s", *(f"burst of {length:g} s" for length in LENGTHS_S), "weights load s"),
        rows,
    )
    section.text(
        "Prices of the second Lamina paper. A device is paid from its request on. The delay until it answers is the "
        f"same for both systems; a replica then loads its weights at an assumed {LOAD_BYTES_S / 1e9:g} GB/s a device."
    )
    return section
