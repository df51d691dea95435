"""Fits the cost model to measurements and stores the result with the package.

    python -m bench.cost.fit bench/cost/measurements

fits every part to the files named in ``parts`` and rewrites ``fits.json`` in the package (``--output FILE``: another
file); experts have a command of their own, ``bench.cost.fit_experts``. Needs scipy. The directory's other files are
test data (``bench.cost.validate``) and are never read here.
``--cross-validate`` writes nothing: it fits parts without some of the data, or to one device, and prints the errors on
the data left out.

The parameters minimise a robust (soft L1) loss of predicted / measured - 1, the error that is reported, so that
outliers, for which the library chose an unusual kernel, have little influence.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from bench.cost.published_times import (
    Products,
    Reduction,
    Series,
    Table,
    decode_work,
    prefill_seconds,
    read_network,
    read_operators,
    read_products,
    read_reductions,
    read_table,
)
from bench.cost.transfers import TransferFit
from lamina.core.types import DType
from lamina.planning.plan import hardware
from lamina.planning.plan.cost import GEMMS, POINTWISE, CostModel, Fits, PointwiseFit
from lamina.planning.plan.fit_store import PACKAGED, Fit, packaged_fits
from lamina.planning.plan.kernel_times import (
    CUSTOM_BYTES,
    DecodeAttentionFit,
    Floats,
    GemmFit,
    PeerReadFit,
    PrefillAttentionFit,
    RingFit,
    gemm_seconds,
)
from lamina.planning.plan.model_shapes import KNOWN

KIND = "a100-80g"
HOPPER = "h100"
ADA = "l40s"
MODEL = KNOWN["llama-2-7b"]
MLP = "a100_llama2_7b_mlp.csv"
LOSS_SCALE = 0.05
"""Relative error above which the loss grows linearly instead of quadratically."""

PUBLISHED_SHARE = {KIND: 0.80, HOPPER: 0.92, ADA: 0.80}
"""Share of the memory bandwidth that decode attention reaches: Lamina section 3.1 (above 80%), Mnemosyne section 6.5
(92%, the highest). Not fitted, so that a class of kernels can be tried on the other's device."""

STARTED_BYTES = 32e6
STARTED_TOKENS = 512
SHORT_WEIGHT = 0.3
"""Weight of decode attention that reads less KV, and of shorter chunks: plans rarely depend on those."""

ROW_BANDS = (1, 17, 65, 129, 257, 1025)
"""First rows of the bands that count equally in the fit of pointwise operators: files have most rows above 1024."""

DECODING = ROW_BANDS.index(129)
"""Number of the bands with as many rows as steps of decoding have."""

START_GEMM = GemmFit(
    share=0.77,
    memory_share=0.97,
    activation_weight=2.9,
    overlap=3.0,
    quantisation=0.4,
    choice=4.8,
    launch_s=3e-06,
    tile_s=2.6e-07,
)
START_POINTWISE = PointwiseFit(
    norm_s=4e-6,
    rope_s=3e-6,
    activation_s=3e-6,
    add_s=2e-6,
    overlap=2.0,
    memory_share=0.9,
    norm_per_clock=5.0,
    rope_per_clock=6.0,
    activation_per_clock=6.0,
)
START_DECODE = DecodeAttentionFit(
    fixed_s=12e-6, ramp_cycles=2e4, unit_cycles=5e3, overlap=3.0, cached_gain=1.0, memory_share=0.8
)
START_PREFILL = PrefillAttentionFit(fixed_s=1e-5, share=0.6, tail=0.5, memory_share=0.8)
START_NVLINK = RingFit(latency_s=1e-5, hop_s=1.5e-6, link_share=0.7, ramp_s=2e-5, ramp_bytes=5e5, sharing=0.0)
START_PCIE = RingFit(latency_s=6e-6, hop_s=2e-6, link_share=0.6, ramp_s=1e-5, ramp_bytes=5e5, sharing=1.9)
START_PEER_READ = PeerReadFit(latency_s=5e-6, hop_s=2e-7, link_share=0.6, phase_s=2e-6)
START_TRANSFER = TransferFit(latency_s=1e-5, link_share=0.7)

CEILINGS = dict.fromkeys(("share", "memory_share", "quantisation", "link_share"), 1.0) | {"sharing": 3.0}
"""Upper bounds of parameters that are shares of a limit. Pointwise operators have none: small ones hit the cache."""

FLOORS = {"overlap": 1.0}
"""Lower bounds: times that do not overlap add up."""

STARTS = 4
"""Number of starting points, sampled around the first with a fixed seed; the best fit is kept."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One fit to make.

    Attributes:
        name: Name of the stored fit.
        kind: Kind of the stored fit.
        source: File that it is fitted to.
        start: First guess, a dataclass of parameters.
        predict: Returns the predicted seconds of every measurement.
        seconds: Measured seconds.
        weights: Weights of the residuals.
        held: Parameters that are not fitted, besides parameters that are 0.
    """

    name: str
    kind: str
    source: str
    start: Any
    predict: Callable[[Any], Floats]
    seconds: Floats
    weights: Floats | None = None
    held: tuple[str, ...] = ()

    def errors(self, fitted: Any) -> Floats:
        return np.asarray(self.predict(fitted) / self.seconds - 1)


def fit_part(part: Part, starts: int = STARTS) -> Any:
    """Return the parameters of ``part``, the best of ``starts`` fits."""
    initial = asdict(part.start)
    free = [name for name, value in initial.items() if value and name not in part.held]
    weights = np.ones_like(part.seconds) if part.weights is None else part.weights

    def with_parameters(logarithms: Floats) -> Any:
        return replace(part.start, **dict(zip(free, np.exp(logarithms).tolist(), strict=True)))

    def residuals(logarithms: Floats) -> Floats:
        return weights * part.errors(with_parameters(logarithms))

    first = np.log([initial[name] for name in free])
    highest = np.array([np.log(CEILINGS[key]) if key in CEILINGS else np.inf for key in free])
    floors = np.array([np.log(FLOORS.get(key, 1e-300)) for key in free])
    lowest, highest = np.maximum(first - np.log(100), floors), np.minimum(highest, first + np.log(100))
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


_CATALOGUE = hardware.load()


def operators(series: list[Series], name: str, start: Any, kind: str = KIND) -> Part:
    """Return a part that predicts operators of MODEL: ``gemm`` or ``pointwise``. Every band of rows counts the same."""
    device = _CATALOGUE[kind]

    def predict(fitted: Any) -> Floats:
        model = CostModel(MODEL, device, _only(name, fitted))
        return np.concatenate([model.operator_seconds(one.operator, one.sizes, one.devices) for one in series])

    return part_of_series(name, kind, MLP, start, predict, [(one.seconds, one.sizes) for one in series])


def part_of_series(
    name: str,
    kind: str,
    source: str,
    start: Any,
    predict: Callable[[Any], Floats],
    series: Iterable[tuple[Floats, Floats]],
) -> Part:
    """Return a part of several series, each with its seconds and rows. Every band of rows counts the same."""
    seconds, rows = (np.concatenate(each) for each in zip(*series, strict=True))
    return Part(
        name=name, kind=kind, source=source, start=start, predict=predict, seconds=seconds, weights=by_band(rows)
    )


def _only(name: str, fitted: Any) -> Fits:
    """Return fits with one fitted part; the others are not used."""
    parts: dict[str, Any] = {**dict.fromkeys(Fits.__dataclass_fields__), name: fitted}
    return Fits(**parts)


def by_band(rows: Floats) -> Floats:
    band = np.searchsorted(ROW_BANDS, rows, side="right")
    return np.asarray(np.sqrt(len(rows) / len(ROW_BANDS) / np.bincount(band)[band]))


def with_layers(part: Part, products: list[Series], others: list[Series], pointwise: PointwiseFit) -> Part:
    """Add to a part of matrix products: the sums over layers, and the mean error of the sums in each DECODING band.

    A sum weighs as much as all products of its layer, since plans use the sum, and errors of single products, mostly
    caused by the library's choice of kernels, would bias it. A band's mean error weighs as much as all of its sums,
    since the robust loss alone would leave a bias.
    """
    first = products[0]
    device = CostModel(MODEL, _CATALOGUE[part.kind], _only("pointwise", pointwise))
    added = sum(device.operator_seconds(one.operator, one.sizes, one.devices) for one in others)
    whole = np.sum([one.seconds for one in (*products, *others)], axis=0)

    band = np.searchsorted(ROW_BANDS, first.sizes, side="right") - 1
    members = np.bincount(band)

    def predict(fitted: Any) -> Floats:
        single = part.predict(fitted)
        sums = single.reshape(len(products), -1).sum(axis=0) + added
        return np.concatenate([single, sums, (np.bincount(band, weights=sums / whole) / members)[:DECODING]])

    assert part.weights is not None
    of_sums = len(products) * by_band(first.sizes)
    of_means = np.full(DECODING, len(products) * np.sqrt(len(whole) / len(members)))
    return replace(
        part,
        predict=predict,
        seconds=np.concatenate([part.seconds, whole, np.ones(DECODING)]),
        weights=np.concatenate([part.weights, of_sums, of_means]),
    )


CAST = {"bfloat16": 0.0, "fp8": 0.5}
"""First guess of ``GemmFit.cast_share`` by element type: vLLM casts the activations of a product of 8-bit floats."""


def products(times: Products, kind: str, dtype: str) -> Part:
    """Return a part of matrix products of one element type. Every band of rows counts the same."""
    device = _CATALOGUE[kind]
    sizes = times.rows, times.columns, times.depth
    return Part(
        name="gemm" if dtype == "bfloat16" else f"gemm_{dtype}",
        kind=kind,
        source=times.file.name,
        start=replace(START_GEMM, cast_share=CAST[dtype]),
        predict=lambda fitted: gemm_seconds(fitted, device, *sizes, DType.BFLOAT16, dtype == "fp8"),
        seconds=times.seconds,
        weights=by_band(times.rows),
    )


def from_memory(times: Products, kind: str) -> Products:
    """Return the products whose weights are too large to stay in the last-level cache between two calls, as in a model,
    where other weights are read in between."""
    return times.where(2 * times.columns * times.depth >= CACHED_BYTES[kind])


CACHED_BYTES = {HOPPER: 0, ADA: 8e6}
"""Bytes of 16-bit weights below which calls were faster than the memory of the device allows."""


def decoding(table: Table, kind: str) -> Part:
    device = _CATALOGUE[kind]
    nbytes, units = decode_work(table)
    return Part(
        name="decode",
        kind=kind,
        source=table.file.name,
        start=replace(START_DECODE, memory_share=PUBLISHED_SHARE[kind]),
        predict=lambda fitted: np.asarray(fitted.predict_decode(device, nbytes, units, repeated=True)),
        seconds=table.seconds,
        weights=np.where(nbytes >= STARTED_BYTES, 1.0, SHORT_WEIGHT),
        held=("memory_share",),
    )


def prefilling(table: Table, kind: str) -> Part:
    device = _CATALOGUE[kind]
    return Part(
        name="prefill",
        kind=kind,
        source=table.file.name,
        start=replace(START_PREFILL, memory_share=PUBLISHED_SHARE[kind]),
        predict=lambda fitted: prefill_seconds(fitted, device, table),
        seconds=table.seconds,
        weights=np.where(table["chunk"] >= STARTED_TOKENS, 1.0, SHORT_WEIGHT),
        held=("memory_share",),
    )


def reducing(times: Reduction, name: str, kind: str, start: Any) -> Part:
    link = _CATALOGUE[kind].link_bytes_s
    return Part(
        name=name,
        kind=kind,
        source=times.file.name,
        start=start,
        predict=lambda fitted: times.by_devices(lambda nbytes, n: fitted.predict_all_reduce(nbytes, n, link)),
        seconds=times.seconds,
    )


def own_kernel(times: Reduction) -> Reduction:
    """Return the sizes that vLLM leaves to its own kernel."""
    return times.where(times.sizes < CUSTOM_BYTES)


def parts(directory: Path, fitted: PointwiseFit | None = None) -> list[Part]:
    """Everything that is fitted, to the files in ``directory``. ``fitted``: pointwise operators, if known."""
    of_layer, others = (read_operators(directory / MLP, MODEL, names) for names in (GEMMS, POINTWISE))
    transfer = read_network(directory / "a100_dgx_send_recv.csv", "send_recv")
    link = _CATALOGUE[KIND].link_bytes_s
    pointwise = operators(others, "pointwise", START_POINTWISE)
    return [
        pointwise,
        with_layers(operators(of_layer, "gemm", START_GEMM), of_layer, others, fitted or fit_part(pointwise)),
        *(
            products(from_memory(read_products(directory / f"{kind}_products.csv", dtype), kind), kind, dtype)
            for kind in (HOPPER, ADA)
            for dtype in CAST
        ),
        *(decoding(read_table(directory / f"{name}_attention_decode.csv"), kind) for name, kind in _DEVICES),
        *(prefilling(read_table(directory / f"{name}_attention_prefill.csv"), kind) for name, kind in _DEVICES),
        reducing(read_reductions(directory / "a100_all_reduce_nccl.csv"), "nvlink", KIND, START_NVLINK),
        reducing(read_reductions(directory / "h100_all_reduce_nccl.csv"), "nvlink", HOPPER, START_NVLINK),
        reducing(read_reductions(directory / "l40s_all_reduce_nccl.csv"), "pcie", ADA, START_PCIE),
        reducing(
            own_kernel(read_reductions(directory / "a100_all_reduce_custom.csv")), "peer_read", KIND, START_PEER_READ
        ),
        reducing(
            own_kernel(read_reductions(directory / "h100_all_reduce_custom.csv")), "peer_read", HOPPER, START_PEER_READ
        ),
        Part(
            name="send_recv",
            kind=KIND,
            source="a100_dgx_send_recv.csv",
            start=START_TRANSFER,
            predict=lambda fitted: np.asarray(fitted.predict_transfer(transfer.sizes, link)),
            seconds=transfer.seconds,
        ),
    ]


_DEVICES = (("a100", KIND), ("h100", HOPPER), ("l40s", ADA))
"""Devices whose attention is fitted, with the names of their files."""


def fit_all(directory: Path) -> Iterator[Fit]:
    yield from (fit_of(part, fit_part(part)) for part in parts(directory))


def fit_of(part: Part, fitted: Any) -> Fit:
    """Return the fit to store."""
    errors = np.abs(part.errors(fitted))
    median, p95 = float(np.median(errors)), float(np.quantile(errors, 0.95))
    return Fit(part.name, part.kind, part.source, asdict(fitted), median, p95)


def others_of(names: set[str]) -> list[Fit]:
    """Return the package's fits with other names."""
    return [fit for fit in packaged_fits() if fit.name not in names]


def cross_validate(directory: Path) -> Iterator[tuple[str, Floats]]:
    """Fit without part of the data: (title of that part, errors on it)."""
    yield from _across_devices(directory)
    yield from _without_a_count(directory)
    yield from _products(directory / MLP)
    yield from _shapes(directory)


def _across_devices(directory: Path) -> Iterator[tuple[str, Floats]]:
    """Attention of one device's kernels on the other, with nothing changed but the catalogue entry."""
    for what, make, lasting in (
        ("decode", decoding, lambda table: decode_work(table)[0] >= STARTED_BYTES),
        ("prefill", prefilling, lambda table: table["chunk"] >= STARTED_TOKENS),
    ):
        tables = {kind: read_table(directory / f"{name}_attention_{what}.csv") for name, kind in _DEVICES}
        for one, other in ((KIND, HOPPER), (HOPPER, KIND)):
            fitted = fit_part(make(tables[one], one), starts=2)
            tried = make(tables[other], other)
            moved = replace(fitted, memory_share=PUBLISHED_SHARE[other])
            yield f"{what} attention of {one} on {other}", tried.errors(moved)[lasting(tables[other])]


def _without_a_count(directory: Path) -> Iterator[tuple[str, Floats]]:
    """Yield all-reduces on a number of devices that was not fitted, and on another machine (a DGX A100, older NCCL)."""
    nccl, custom, bus = (
        read_reductions(directory / f"{name}.csv")
        for name in ("a100_all_reduce_nccl", "a100_all_reduce_custom", "l40s_all_reduce_nccl")
    )
    starts: tuple[tuple[Reduction, str, str, Any], ...] = (
        (nccl, "nvlink", KIND, START_NVLINK),
        (own_kernel(custom), "peer_read", KIND, START_PEER_READ),
        (bus, "pcie", "l40s", replace(START_PCIE, sharing=1.0)),
    )
    for times, name, kind, start in starts:
        for count in np.unique(times.devices):
            without = reducing(times.where(times.devices != count), name, kind, start)
            left = times.where((times.devices == count) & times.usual)
            errors = reducing(left, name, kind, start).errors(fit_part(without, starts=2))
            yield f"{name} all-reduce without {count:.0f} devices, on those", errors
    fitted = fit_part(reducing(nccl, "nvlink", KIND, START_NVLINK))
    dgx = read_reductions(directory / "a100_dgx_all_reduce.csv")
    for count in np.unique(dgx.devices):
        left = dgx.where((dgx.devices == count) & dgx.usual)
        yield (
            f"nvlink all-reduce on {count:.0f} devices of the DGX",
            reducing(left, "nvlink", KIND, fitted).errors(fitted),
        )


def _products(mlp: Path) -> Iterator[tuple[str, Floats]]:
    """Matrix products without one or two operators, or without two degrees of tensor parallelism."""
    series = read_operators(mlp, MODEL, GEMMS)
    start = Fits.load(_CATALOGUE[KIND]).gemm
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
            for group, where in ((kept, ~out), (left, out)):
                if where.any():
                    group.append(Series(one.operator, one.sizes[where], one.devices[where], one.seconds[where]))
        without = fit_part(operators(kept, "gemm", start), starts=1)
        yield title, operators(left, "gemm", start).errors(without)


def _shapes(directory: Path) -> Iterator[tuple[str, Floats]]:
    """Yield products of a third of the shapes (columns and depth), which were not fitted."""
    for kind in (HOPPER, ADA):
        for dtype in CAST:
            times = from_memory(read_products(directory / f"{kind}_products.csv", dtype), kind)
            shapes = times.columns * 1e6 + times.depth
            left = np.isin(shapes, np.random.default_rng(1).permutation(np.unique(shapes))[::3])
            fitted = fit_part(products(times.where(~left), kind, dtype), starts=1)
            yield (
                f"products in {dtype} on {kind}, other shapes",
                products(times.where(left), kind, dtype).errors(fitted),
            )


def write_fits(fits: Iterable[Fit], file: Path) -> None:
    """Write fits to a JSON file in the package's format."""
    file.write_text(json.dumps([asdict(fit) for fit in fits], indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Fit the cost model and write its parameters.")
    parser.add_argument("measurements", type=Path, help="directory with the measured CSV files")
    parser.add_argument("--output", type=Path, default=PACKAGED, help="JSON file to write")
    parser.add_argument("--cross-validate", action="store_true", help="print errors on parts left out of the fit")
    arguments = parser.parse_args()
    if arguments.cross_validate:
        for title, errors in cross_validate(arguments.measurements):
            print(f"{title}: {summary(errors)}", flush=True)
        return
    fitted = list(fit_all(arguments.measurements))
    write_fits([*fitted, *others_of({fit.name for fit in fitted})], arguments.output)
    for fit in fitted:
        print(f"{fit.name}, {fit.kind}: median {fit.median_error:.2%}, 95th percentile {fit.p95_error:.2%}")
        print("  " + ", ".join(f"{name} {value:.4g}" for name, value in fit.parameters.items()))


def summary(errors: Floats) -> str:
    """Return the median, 95th percentile and bias of errors."""
    absolute = np.abs(errors)
    return (
        f"median {np.median(absolute):.1%}, 95th percentile {np.quantile(absolute, 0.95):.1%}, "
        f"bias {np.median(errors):+.1%}, of {len(errors)}"
    )


if __name__ == "__main__":
    main()
