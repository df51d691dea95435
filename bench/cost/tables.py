"""Tables 1 and 3 of the Lamina paper next to what the catalogue and the cost model say.

    python bench/cost/tables.py [--json FILE]

Table 1 is dollars per GB and per GB/s of memory; Table 3 the network bandwidth that keeps compute devices busy, with
the utilisation that each number implies. Nothing is tuned: prices come from the catalogue, times from the cost model.
"""

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lamina.plan import hardware, models
from lamina.plan.cost import CostModel, Fits

TABLE_1 = {  # kind: dollars per GB, dollars per GB/s
    "a100-80g": (219, 9.04),
    "h100": (456, 10.90),
    "rtx3090": (67, 1.71),
    "rx7900xtx": (42, 1.04),
    "arc-a770": (22, 0.63),
}
BATCHES = (128, 256, 512, 1024)
TABLE_3 = {  # model, A100s: GB/s at each of BATCHES
    ("LLaMA-13B", 1): (4.90, 8.12, 9.08, 10.06),
    ("LLaMA-33B", 2): (5.94, 9.31, 11.56, 12.53),
    ("LLaMA-65B", 4): (7.55, 11.78, 13.92, 15.90),
}


@dataclass(frozen=True)
class Memory:
    """One row of Table 1: published and ours."""

    kind: str
    published_usd_gb: float
    usd_gb: float
    published_usd_gb_s: float
    usd_gb_s: float


@dataclass(frozen=True)
class Bandwidth:
    """One cell of Table 3: published and ours, with the share of peak FLOP/s that each implies."""

    model: str
    devices: int
    batch: int
    published_gb_s: float
    gb_s: float
    published_utilisation: float
    utilisation: float

    @property
    def ratio(self) -> float:
        """Ours over the published one."""
        return self.gb_s / self.published_gb_s


def table_1(catalogue: hardware.Catalogue) -> list[Memory]:
    """Prices of memory."""
    rows = []
    for kind, (usd_gb, usd_gb_s) in TABLE_1.items():
        entry = catalogue[kind]
        ours = entry.price_usd / entry.memory_bytes * 1e9, entry.price_usd / entry.memory_bytes_s * 1e9
        rows.append(Memory(kind, usd_gb, ours[0], usd_gb_s, ours[1]))
    return rows


def table_3(catalogue: hardware.Catalogue) -> list[Bandwidth]:
    """Bytes that a step sends over the time its slices take: 4 e d B L / M(B), the paper's section 4.2."""
    device = catalogue["a100"]
    cells = []
    for (name, devices), published in TABLE_3.items():
        shape = models.find(name)
        model = CostModel(shape, device, Fits.load(device.kind))
        peak = devices * device.flops[shape.dtype]
        for batch, stated in zip(BATCHES, published, strict=True):
            seconds = float(model.pass_seconds(batch, devices))
            moved = float(model.exchange_bytes(batch)) * shape.layers
            work = 2 * shape.parameters * batch
            cells.append(
                Bandwidth(
                    name,
                    devices,
                    batch,
                    stated,
                    moved / seconds / 1e9,
                    work / (moved / (stated * 1e9)) / peak,
                    work / seconds / peak,
                )
            )
    return cells


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description="Tables 1 and 3 of the Lamina paper next to ours.")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    arguments = parser.parse_args()
    catalogue = hardware.load()
    prices, cells = table_1(catalogue), table_3(catalogue)
    console = Console(width=110, highlight=False)
    first = Table("kind", "$/GB paper", "ours", "$/(GB/s) paper", "ours", "ratio", title="Table 1")
    for row in prices:
        ratio = row.usd_gb_s / row.published_usd_gb_s
        values = (row.published_usd_gb, row.usd_gb, row.published_usd_gb_s, row.usd_gb_s, ratio)
        first.add_row(row.kind, *(f"{value:.{digits}f}" for value, digits in zip(values, (0, 0, 2, 2, 2), strict=True)))
    console.print(first)
    second = Table(
        "model", "A100s", "batch", "GB/s paper", "ours", "ratio", "use of peak, paper", "ours", title="Table 3"
    )
    for cell in cells:
        second.add_row(
            cell.model,
            str(cell.devices),
            str(cell.batch),
            f"{cell.published_gb_s:.2f}",
            f"{cell.gb_s:.2f}",
            f"{cell.ratio:.2f}",
            f"{cell.published_utilisation:.0%}",
            f"{cell.utilisation:.0%}",
            end_section=cell.batch == BATCHES[-1],
        )
    console.print(second)
    if arguments.json:
        values = {"table_1": [asdict(row) for row in prices], "table_3": [asdict(cell) for cell in cells]}
        arguments.json.write_text(json.dumps(values, indent=2) + "\n")


if __name__ == "__main__":
    main()
