"""Cells of `lamina plan --map`, simulated: the cheapest ways on one kind and on two, at the highest load that holds.

    python -m bench.cost.map_cells                         # the cells below; many minutes
    python -m bench.cost.map_cells --cell 4096 128 3686    # prompt, output, tokens that all prompts share

Llama-3-70B on up to 8 H100 and 8 H20, at the rents of the second Lamina paper. Requests arrive at random.
"""

import argparse

import numpy as np

from lamina.plan import hardware, models, prices
from lamina.plan.cost import CostModel, Fits
from lamina.plan.map import cells
from lamina.plan.reuse import Sessions
from lamina.plan.ways import Capacity, Slo
from lamina.plan.workload import TracedRequest, Workload, of_lengths
from lamina.simulate.trial import MOST, Course, Trial

MODEL, COMPUTE, MEMORY, COUNT = "Llama-3-70B", "h100", "h20", 8
CELLS = ((4096, 128, 0), (16384, 512, 0), (65536, 512, 0), (256, 2048, 0), (4096, 128, 3686))


def trace(workload: Workload, shared: int) -> list[TracedRequest]:
    """Requests of one length, a second apart on average, whose prompts begin alike."""
    times = np.cumsum(np.random.default_rng(0).exponential(1.0, MOST)).tolist()
    prompt, output = round(workload.prompt), round(workload.output)
    if not shared:
        return []
    return [
        TracedRequest(at, prompt, output, ((0, shared), (1 + place, prompt - shared))) for place, at in enumerate(times)
    ]


def best(course: Course, capacity: Capacity | None) -> Trial | None:
    """One side of a cell, simulated."""
    return None if capacity is None else course.most(capacity)


def main() -> None:
    """Print a line for every cell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cell", type=int, nargs=3, action="append", metavar=("PROMPT", "OUTPUT", "SHARED"))
    chosen = parser.parse_args().cell or CELLS
    catalogue, market, shape = hardware.load(), prices.load("paper"), models.find(MODEL)
    costs = {kind: CostModel(shape, catalogue[kind], Fits.load(catalogue[kind])) for kind in (COMPUTE, MEMORY)}
    pools = [(catalogue[COMPUTE], COUNT)], [(catalogue[MEMORY], COUNT)]
    for prompt, output, shared in chosen:
        workload = of_lengths(prompt, output, Sessions(shared=shared) if shared else None)
        (cell,) = cells(shape, [workload], pools, costs, market, Slo())
        course = Course(shape, workload, trace(workload, shared), market, Slo())
        alone, together = best(course, cell.alone), best(course, cell.together)
        print(f"{workload.name}: closed form {cell.gain or float('nan'):+.0%}", end="")
        if alone is None or together is None:
            print(f", simulated: {'neither' if alone is together else 'one kind' if alone else 'two kinds'} alone")
        else:
            print(f", simulated {alone.usd_per_request / together.usd_per_request - 1:+.0%}")
        for side, trial in ((cell.alone, alone), (cell.together, together)):
            if side is not None:
                found = f"{trial.requests_s:.3f}" if trial else "none"
                print(f"  {side.way.describe()}: closed form {side.requests_s:.3f} requests/s, simulated {found}")
        print(flush=True)


if __name__ == "__main__":
    main()
