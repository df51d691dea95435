"""Compares the automatic choice of lanes with the best fixed setting: simulated seconds over a grid of workloads.

python -m bench.cost.lanes                    # prints a row for each cell and the worst ratio; some minutes
python -m bench.cost.lanes --workload mixed --replicas 2
"""

import argparse
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from lamina.core.types import Pipelining
from lamina.planning.plan import hardware, model_shapes
from lamina.planning.simulate import Arrivals, Deployment, simulate

MODEL, COMPUTE, MEMORY = "Llama-2-7B", "a100", "rtx3090"
REPLICAS = (1, 2, 4)
MEMORIES = (1, 2, 6)  # for each replica
Ints = NDArray[np.int64]
Setting = tuple[int | None, Pipelining]


def _spread(random: np.random.Generator, mean: float, count: int, sigma: float) -> Ints:
    """Lengths that are log-normal: most are short, a few are many times as long."""
    return np.maximum(1, random.lognormal(np.log(mean) - sigma**2 / 2, sigma, count)).astype(np.int64)


def workload(name: str, replicas: int) -> Arrivals:
    """Requests that all arrive at once, so that the time they take is the runtime's alone."""
    random = np.random.default_rng(3)

    def same(count: int, prompt: int, output: int) -> tuple[Ints, Ints]:
        return np.full(count, prompt), np.full(count, output)

    lengths: dict[str, Callable[[], tuple[Ints, Ints]]] = {
        "prompts": lambda: same(100 * replicas, 2048, 1),
        "short prompts": lambda: (_spread(random, 300, 400 * replicas, 0.8), np.full(400 * replicas, 1)),
        "decode": lambda: same(256 * replicas, 64, 192),
        "few": lambda: same(24, 256, 192),
        "mixed": lambda: (_spread(random, 800, 300 * replicas, 0.8), _spread(random, 160, 300 * replicas, 0.8)),
        "long": lambda: (_spread(random, 12000, 24 * replicas, 0.5), np.full(24 * replicas, 192)),
        "short": lambda: same(800 * replicas, 32, 32),
        "unequal": lambda: (
            np.where(random.random(200 * replicas) < 0.1, 10000, 64),
            np.where(random.random(200 * replicas) < 0.1, 16, 160),
        ),
    }
    prompt, output = lengths[name]()
    return Arrivals(np.zeros(len(prompt)), prompt, output)


WORKLOADS = ("prompts", "short prompts", "decode", "few", "mixed", "long", "short", "unequal")


def settings(replicas: int) -> Iterator[Setting]:
    """Yield the values of `--lanes` and `--pipelining` to compare."""
    for each in (1, 2, 3, 4):
        yield each * replicas, "fixed"
    if replicas > 1:
        yield replicas + 1, "rotational"


def seconds(arrivals: Arrivals, replicas: int, memories: int, setting: Setting) -> float:
    lanes, pipelining = setting
    catalogue = hardware.load()
    deployment = Deployment(
        model=model_shapes.find(MODEL),
        compute=catalogue[COMPUTE],
        compute_workers=replicas,
        memory=catalogue[MEMORY],
        memory_workers=memories * replicas,
        lanes=lanes,
        pipelining=pipelining,
    )
    return simulate(deployment, arrivals).seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, action="append")
    parser.add_argument("--replicas", type=int, action="append")
    options = parser.parse_args()
    ratios = []
    print(f"{'workload':14}{'replicas':>9}{'memories':>9}  {'best':16}{'s':>8}{'auto s':>8}{'auto/best':>10}")
    for name in options.workload or WORKLOADS:
        for replicas in options.replicas or REPLICAS:
            for memories in MEMORIES:
                arrivals = workload(name, replicas)
                times = {one: seconds(arrivals, replicas, memories, one) for one in settings(replicas)}
                (lanes, order), best = min(times.items(), key=lambda item: item[1])
                auto = seconds(arrivals, replicas, memories, (None, "auto"))
                ratios.append(auto / best)
                row = f"{name:14}{replicas:9}{memories * replicas:9}  {f'{lanes} {order}':16}{best:8.1f}{auto:8.1f}"
                print(f"{row}{ratios[-1]:10.2f}", flush=True)
    within = sum(ratio <= 1.05 for ratio in ratios)
    print(f"worst {max(ratios):.2f}, median {np.median(ratios):.2f}; {within} of {len(ratios)} within 5% of the best")


if __name__ == "__main__":
    main()
