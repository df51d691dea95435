"""Fits the cost model to measurements and writes the package's fits.

    python -m lamina.profiling.fit bench/cost/measurements

fits Llama-2-7B on the A100 and the two network files, and rewrites ``fits.json`` in the package (``--output FILE``:
another file). Needs scipy, which nothing else does. The other files in that directory are for testing (``lamina plan
--validate``) and are never read here. ``--cross-validate`` writes nothing: it fits the matrix products without one or
two operators, or without two degrees of tensor parallelism, and prints the errors on the part left out.

The parameters minimise a robust (soft L1) loss of predicted / measured - 1, the error that is reported, so that
outliers, for which the library chose an unusual kernel, have little influence.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from itertools import combinations
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from lamina.plan import hardware
from lamina.plan.cost import GEMMS, POINTWISE, CollectiveFit, CostModel, Fits, PointwiseFit, TransferFit
from lamina.plan.gemm import Floats, GemmFit
from lamina.plan.models import KNOWN
from lamina.plan.store import PACKAGED, Fit, Sample, write_fits
from lamina.profiling.measurements import Series, read_network, read_operators

KIND = "a100-80g"
MODEL = KNOWN["llama-2-7b"]
MLP = "a100_llama2_7b_mlp.csv"
LOSS_SCALE = 0.05
"""Relative error above which the loss grows linearly instead of quadratically."""

START = Fits(
    gemm=GemmFit(
        share=0.77,
        memory_share=0.97,
        activation_weight=2.9,
        overlap=3.0,
        quantisation=0.4,
        choice=4.8,
        launch_s=3e-06,
        tile_s=2.6e-07,
    ),
    pointwise=PointwiseFit(
        launch_s=3e-6,
        memory_share=0.9,
        norm_per_clock=5.0,
        rope_per_clock=6.0,
        activation_per_clock=6.0,
    ),
    all_reduce=CollectiveFit(latency_s=3e-5, hop_s=1e-6, link_share=0.5),
    send_recv=TransferFit(latency_s=1e-5, link_share=0.7),
)
CEILINGS = dict.fromkeys(("share", "memory_share", "quantisation", "link_share"), 1.0)
"""Upper bounds of parameters that are shares of a limit. Pointwise operators have none: small ones hit the cache."""

STARTS = 4
"""Number of starting points, sampled around START with a fixed seed; the best fit is kept."""

Prediction = Callable[[Fits, Series], Floats]


def fit_part(name: str, start: Fits, series: list[Series], predict: Prediction, starts: int = STARTS) -> Fits:
    """``start`` with the parameters of its part ``name`` fitted to ``series``, the best of ``starts`` fits."""
    initial = asdict(getattr(start, name))
    part = type(getattr(start, name))

    def with_parameters(logarithms: Floats) -> Fits:
        values = dict(zip(initial, np.exp(logarithms).tolist(), strict=True))
        return Fits(**{**vars(start), name: part(**values)})

    def residuals(logarithms: Floats) -> Floats:
        fits = with_parameters(logarithms)
        return np.concatenate([predict(fits, one) / one.seconds - 1 for one in series])

    first = np.log(list(initial.values()))
    highest = np.array([np.log(CEILINGS[key]) if key in CEILINGS else np.inf for key in initial])
    lowest, highest = first - np.log(100), np.minimum(highest, first + np.log(100))
    draw = np.random.default_rng(0)
    firsts = [first, *(first + draw.normal(0, 0.3, len(first)) for _ in range(starts - 1))]
    found = [
        least_squares(
            residuals,
            np.clip(one, lowest + 1e-3, highest - 1e-3),
            bounds=(lowest, highest),
            loss="soft_l1",
            f_scale=LOSS_SCALE,
            diff_step=2e-3,
            max_nfev=80,
        )
        for one in firsts
    ]
    return with_parameters(min(found, key=lambda one: float(one.cost)).x)


def samples_of(fits: Fits, series: list[Series], predict: Prediction) -> list[Sample]:
    """Every measurement with the prediction of ``fits``."""
    return [
        Sample(one.operator, int(size), int(devices), measured, predicted)
        for one in series
        for size, devices, measured, predicted in zip(
            one.sizes.tolist(), one.devices.tolist(), one.seconds.tolist(), predict(fits, one).tolist(), strict=True
        )
    ]


def operators(fits: Fits, series: Series) -> Floats:
    """Predicted seconds of an operator of the model."""
    return CostModel(MODEL, _DEVICE, fits).operator_seconds(series.operator, series.sizes, series.devices)


def all_reduce(fits: Fits, series: Series) -> Floats:
    """Predicted seconds of an all-reduce over the devices of a machine."""
    model = CostModel(MODEL, _DEVICE, fits)
    pairs = zip(series.sizes, series.devices, strict=True)
    return np.array([float(model.all_reduce_seconds(size, int(devices))) for size, devices in pairs])


def send_recv(fits: Fits, series: Series) -> Floats:
    """Predicted seconds of a transfer between two devices of a machine."""
    return CostModel(MODEL, _DEVICE, fits).send_recv_seconds(series.sizes)


_DEVICE = hardware.load()[KIND]


def fit_all(directory: Path) -> Mapping[str, tuple[Fit, list[Sample]]]:
    """Fit every part of the cost model to the files in ``directory``: name -> (fit, samples)."""
    mlp = directory / MLP
    parts: dict[str, tuple[str, list[Series], Prediction]] = {
        "gemm": (mlp.name, read_operators(mlp, MODEL, GEMMS), operators),
        "pointwise": (mlp.name, read_operators(mlp, MODEL, POINTWISE), operators),
        "all_reduce": (
            "a100_dgx_all_reduce.csv",
            [read_network(directory / "a100_dgx_all_reduce.csv", "all_reduce")],
            all_reduce,
        ),
        "send_recv": (
            "a100_dgx_send_recv.csv",
            [read_network(directory / "a100_dgx_send_recv.csv", "send_recv")],
            send_recv,
        ),
    }
    result = {}
    for name, (source, series, predict) in parts.items():
        fits = fit_part(name, START, series, predict)
        samples = samples_of(fits, series, predict)
        errors = np.abs([sample.error for sample in samples])
        median, p95 = float(np.median(errors)), float(np.quantile(errors, 0.95))
        result[name] = (Fit(name, KIND, source, asdict(getattr(fits, name)), median, p95), samples)
    return result


def cross_validate(mlp: Path) -> Iterator[tuple[str, float, float]]:
    """Fit the matrix products without part of the data: (title of that part, median and p95 of the errors on it)."""
    series = read_operators(mlp, MODEL, GEMMS)
    fits = Fits.load(KIND)
    degrees = np.unique(series[0].devices).tolist()
    names = [*combinations(GEMMS, 1), *combinations(GEMMS, 2)]
    groups: list[tuple[str, tuple[str, ...], tuple[float, ...]]] = [
        *((f"without {' and '.join(left_out)}", left_out, ()) for left_out in names),
        *((f"without TP {a:.0f} and {b:.0f}", (), (a, b)) for a, b in combinations(degrees, 2)),
    ]
    for title, left_operators, left_degrees in groups:
        kept: list[Series] = []
        left: list[Series] = []
        for one in series:
            out = np.isin(one.devices, left_degrees) | (one.operator in left_operators)
            for part, where in ((kept, ~out), (left, out)):
                if where.any():
                    part.append(Series(one.operator, one.sizes[where], one.devices[where], one.seconds[where]))
        without = fit_part("gemm", fits, kept, operators, starts=1)
        errors = np.abs([sample.error for sample in samples_of(without, left, operators)])
        yield title, float(np.median(errors)), float(np.quantile(errors, 0.95))


def main() -> None:
    """Fit, write the fits, and print parameters and errors."""
    parser = argparse.ArgumentParser(description="Fit the cost model and write its parameters.")
    parser.add_argument("measurements", type=Path, help="directory with the measured CSV files")
    parser.add_argument("--output", type=Path, default=PACKAGED, help="JSON file to write")
    parser.add_argument("--cross-validate", action="store_true", help="print errors on parts left out of the fit")
    arguments = parser.parse_args()
    if arguments.cross_validate:
        for title, median, p95 in cross_validate(arguments.measurements / MLP):
            print(f"{title}: median {median:.2%}, 95th percentile {p95:.2%}", flush=True)
        return
    fitted = fit_all(arguments.measurements).values()
    write_fits((fit for fit, _ in fitted), arguments.output)
    for fit, samples in fitted:
        print(f"{fit.name}: median {fit.median_error:.2%}, 95th percentile {fit.p95_error:.2%} of {len(samples)}")
        print("  " + ", ".join(f"{name} {value:.4g}" for name, value in fit.parameters.items()))


if __name__ == "__main__":
    main()
