"""Fits the products of experts to times that others measured.

    python -m bench.cost.fit_experts bench/cost/measurements

rewrites these fits in the package's ``fits.json``. Activations and gathering come from its other fits: run it after
``bench.cost.fit``. Marlin's kernels are fitted to other models than gpt-oss-120b, whose served rows
(``bench.cost.measured``) test the whole; Triton's with 4 bits are tested on gpt-oss-20b.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.cost.fit import HOPPER, Part, fit_of, fit_part, others_of, part_of_series, summary, write_fits
from bench.cost.published_times import ExpertTimes, read_experts
from lamina.planning.plan import hardware
from lamina.planning.plan.cost import OF_EXPERTS, CostModel, Fits
from lamina.planning.plan.fit_store import PACKAGED
from lamina.planning.plan.kernel_times import ExpertsFit, Floats, gemm_seconds
from lamina.planning.plan.model_shapes import find

SOURCE = "h200_experts.csv"
DEVICE = hardware.load()["h200"]
LIKE = find("gpt-oss-120b")
START = ExpertsFit(share=0.5, memory_share=0.7, uneven_rows=10.0, overlap=3.0, dispatch_s=1e-5, expert_s=1e-7)

FITTED = {
    "experts": ("triton", "bfloat16"),
    "experts_int4": ("triton", "mxfp4"),
    "experts_fp8": ("triton", "fp8"),
    "experts_marlin": ("marlin", "mxfp4", "int4"),
}
"""By name of the fit: its kernel, and the types of weights that it is fitted to."""

TESTED = 32
"""Experts of gpt-oss-20b, to which nothing is fitted."""


def part(name: str, times: Sequence[ExpertTimes]) -> Part:
    """Return a part to fit. Every band of tokens counts the same."""
    stored = Fits.load(DEVICE)

    def predict(fitted: Any) -> Floats:
        fits = replace(stored, experts=fitted, experts_int4=fitted, experts_fp8=fitted)
        return np.concatenate([seconds(CostModel(one.model, DEVICE, fits), one) for one in times])

    return part_of_series(name, HOPPER, SOURCE, START, predict, [(one.seconds, one.tokens) for one in times])


def seconds(model: CostModel, times: ExpertTimes) -> Floats:
    """Return the predicted seconds of the experts of one layer, without the router's product."""
    assert times.model.experts is not None
    layer = sum(model.operator_seconds(operator, times.tokens, times.devices) for operator in OF_EXPERTS)
    sizes = times.tokens, times.model.experts.count, times.model.hidden, times.model.dtype
    return np.asarray(layer - gemm_seconds(model.fits.gemm, model.hardware, *sizes))


def read(directory: Path, name: str, tested: bool = False) -> list[ExpertTimes]:
    """Return the times that a fit is fitted to or, ``tested``, only tested on."""
    kernel, *dtypes = FITTED[name]
    found = [one for dtype in dtypes for one in read_experts(directory / SOURCE, kernel, dtype, LIKE)]
    return [one for one in found if (one.model.experts is not None and one.model.experts.count == TESTED) == tested]


def main() -> None:
    """Fit, print errors and store the fits."""
    parser = argparse.ArgumentParser(description="Fit the products of experts.")
    parser.add_argument("measurements", type=Path, help="directory with the measured CSV files")
    directory = parser.parse_args().measurements
    found = []
    for name in FITTED:
        own = part(name, read(directory, name))
        fitted = fit_part(own, starts=2)
        found.append(fit_of(own, fitted))
        print(f"{name}: {summary(own.errors(fitted))}\n  {fitted}", flush=True)
        if tested := read(directory, name, tested=True):
            print(f"  gpt-oss-20b, not fitted: {summary(part(name, tested).errors(fitted))}")
    write_fits([*others_of({fit.name for fit in found}), *found], PACKAGED)


if __name__ == "__main__":
    main()
