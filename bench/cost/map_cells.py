"""Cells of `lamina plan --map`, simulated: the cheapest ways on one kind and on two, at the highest load that holds.

    python -m bench.cost.map_cells                         # the cells below; many minutes
    python -m bench.cost.map_cells --cell 4096 128 3686    # prompt, output, tokens that all prompts share

Llama-3-70B on up to 8 H100 and 8 H20, at the rents of the second Lamina paper. Requests arrive at random.
"""

import argparse

from lamina.planning.crossover_map import Cell, cells, simulate
from lamina.planning.plan import hardware, model_shapes, prices
from lamina.planning.plan.cost import CostModel, Fits
from lamina.planning.plan.ways import Slo
from lamina.planning.plan.workload import Sessions, of_lengths

MODEL, COMPUTE, MEMORY, COUNT = "Llama-3-70B", "h100", "h20", 8
CELLS = ((4096, 128, 0), (16384, 128, 0), (16384, 512, 0), (1024, 512, 922))


def gain(cell: Cell) -> str:
    return f"{cell.gain:+.0%}" if cell.gain is not None else "not to be compared"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cell", type=int, nargs=3, action="append", metavar=("PROMPT", "OUTPUT", "SHARED"))
    chosen = parser.parse_args().cell or CELLS
    catalogue, market, shape = hardware.load(), prices.load("paper"), model_shapes.find(MODEL)
    costs = {kind: CostModel(shape, catalogue[kind], Fits.load(catalogue[kind])) for kind in (COMPUTE, MEMORY)}
    pools = [(catalogue[COMPUTE], COUNT)], [(catalogue[MEMORY], COUNT)]
    for prompt, output, shared in chosen:
        workload = of_lengths(prompt, output, Sessions(shared=shared) if shared else None)
        (cell,) = cells(shape, [workload], pools, costs, market, Slo())
        measured = simulate(cell, shape, market, Slo())
        print(f"{workload.name}: closed form {gain(cell)}, simulated {gain(measured)}")
        for side in ("alone", "offloaded", "apart"):
            ours, theirs = getattr(cell, side), getattr(measured, side)
            if ours is not None:
                found = f"{theirs.requests_s:.3f}, {theirs.way.describe()}" if theirs else "none, or none cheaper"
                print(f"  closed form {ours.requests_s:.3f} requests/s, {ours.way.describe()}; simulated {found}")
        print(flush=True)


if __name__ == "__main__":
    main()
