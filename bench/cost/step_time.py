"""The cost model on this machine: predicted against measured time between tokens of the real runtime.

    lamina plan --measure machine.toml
    python -m bench.cost.step_time machine.toml [--lanes 1 2] [--json FILE]

Serves a random Llama of another width than those the machine was profiled with, on one compute and one memory worker
that have half of the cores each, over a grid of batch x context x lanes. The prediction is the planner's own formula
with the stored profile; nothing is fitted to what is measured here.
"""

import argparse
import json
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from lamina.planning.plan import hardware, model_shapes, workload
from lamina.planning.plan.cost import CostModel, Fits
from lamina.planning.plan.fit_store import ProfileStore
from lamina.planning.plan.planner import Planner
from lamina.planning.plan.prices import UNPRICED
from lamina.planning.plan.ways import NO_LIMITS, Way
from lamina.planning.profiling import profile
from lamina.planning.profiling.profile import Run

GRID = tuple((batch, context) for batch in (1, 4, 16, 32) for context in (64, 512))


@dataclass(frozen=True)
class Cell:
    """One point of the grid: milliseconds between two tokens of a sequence."""

    batch: int
    live: float
    lanes: int
    measured_ms: float
    predicted_ms: float

    @property
    def error(self) -> float:
        return self.predicted_ms / self.measured_ms - 1


def predicted_s(model: CostModel, run: Run) -> float:
    lanes = min(run.lanes, run.batch)
    pools = Way(compute=model.hardware, compute_workers=1, memory=model.hardware, memory_workers=1, lanes=lanes)
    served = workload.of_context(max(1, round(run.live)))
    planner = Planner(model.shape, served, {model.hardware.kind: model}, UNPRICED, NO_LIMITS)
    return float(planner.tbt(pools, np.array([run.batch / lanes]))[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hardware", type=Path, help="what lamina plan --measure wrote")
    parser.add_argument("--lanes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--show", action="store_true", help="print what each part took")
    args = parser.parse_args()
    entry = hardware.load(args.hardware)["cpu"]
    fits = Fits.load(hardware.load(args.hardware)["cpu"], ProfileStore(args.hardware.with_suffix(".sqlite")))
    with tempfile.TemporaryDirectory(prefix="lamina-step-") as place:
        path = profile.random_llama(Path(place) / "model", args.width, args.layers)
        model = CostModel(model_shapes.find(str(path)), entry, fits)
        runs = [run for lanes in args.lanes for run in profile.decode(path, GRID, lanes)]
    cells = [Cell(r.batch, r.live, r.lanes, r.step_s * 1e3, predicted_s(model, r) * 1e3) for r in runs]
    table = Table("batch", "context", "lanes", "measured ms", "predicted ms", "error", title=entry.device)
    for c in cells:
        values = f"{c.live:.0f}", str(c.lanes), f"{c.measured_ms:.2f}", f"{c.predicted_ms:.2f}", f"{c.error:+.1%}"
        table.add_row(str(c.batch), *values)
    Console().print(table)
    median = statistics.median(abs(cell.error) for cell in cells)
    print(f"median error {median:.1%} over {len(cells)} points")
    if args.show:
        for run in runs:
            lanes = min(run.lanes, run.batch)
            slices = float(model.pass_seconds(run.batch / lanes))
            attention = model.shape.layers * float(
                model.attention_seconds(run.batch / lanes * run.live, run.batch / lanes)
            )
            print({k: round(v * 1e3, 3) if k.endswith("_s") else v for k, v in asdict(run).items()}, end=" ")
            print(f"predicted slices {slices * 1e3:.3f} attention {attention * 1e3:.3f}")
    if args.json:
        args.json.write_text(json.dumps([asdict(c) | {"error": c.error} for c in cells], indent=1) + "\n")


if __name__ == "__main__":
    main()
