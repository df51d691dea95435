"""Stored fits: round trips, and the package's fits equal those fitted to the measurements."""

import json
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from lamina.errors import ConfigError
from lamina.plan.cost import GEMMS, POINTWISE, CollectiveFit, Fits, PointwiseFit, TransferFit
from lamina.plan.store import PACKAGED, Fit, ProfileStore, Sample, packaged_fit, write_fits
from lamina.profiling.fit import KIND, MODEL, START, fit_part, samples_of
from lamina.profiling.fit import operators as predict_operator
from lamina.profiling.fit import send_recv as predict_transfer
from lamina.profiling.measurements import Series, read_operators

MEASUREMENTS = Path(__file__).parents[2] / "bench" / "cost" / "measurements"


def test_a_fit_is_replaced_and_found_by_kind(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path / "mine.sqlite")
    samples = [Sample("add", 8, 1, 2e-6, 3e-6), Sample("add", 16, 2, 4e-6, 4e-6)]
    for kind, latency in (("a100-80g", 1.0), ("h20", 2.0), ("a100-80g", 3.0)):
        store.write(Fit("send_recv", kind, "x.csv", {"latency_s": latency}, 0.1, 0.2), samples)
    found = [store.fit("send_recv", kind) for kind in ("a100-80g", "h20", "a40")]
    assert [fit and fit.parameters for fit in found] == [{"latency_s": 3.0}, {"latency_s": 2.0}, None]
    assert store.samples("send_recv", "h20") == samples
    assert samples[0].error == pytest.approx(0.5)


def test_packaged_fits_come_back_and_serve_other_kinds(tmp_path: Path) -> None:
    fits = [packaged_fit(name) for name in ("gemm", "pointwise", "all_reduce", "send_recv")]
    write_fits(fits, tmp_path / "fits.json")
    assert json.loads((tmp_path / "fits.json").read_text()) == json.loads(PACKAGED.read_text())
    assert packaged_fit("gemm", "h20") == packaged_fit("gemm", KIND)


def test_the_packaged_errors_are_those_on_the_measurements() -> None:
    fits = Fits.load(KIND)
    for name, operators in (("gemm", GEMMS), ("pointwise", POINTWISE)):
        fit = packaged_fit(name, KIND)
        series = read_operators(MEASUREMENTS / fit.source, MODEL, operators)
        errors = np.abs([sample.error for sample in samples_of(fits, series, predict_operator)])
        assert np.median(errors) == pytest.approx(fit.median_error, abs=1e-6)
        assert np.quantile(errors, 0.95) == pytest.approx(fit.p95_error, abs=1e-6)


def test_a_fit_finds_the_numbers_that_made_the_measurements() -> None:
    truth = Fits(
        gemm=START.gemm,
        pointwise=PointwiseFit(
            launch_s=4e-6, memory_share=0.7, norm_per_clock=3, rope_per_clock=4, activation_per_clock=5
        ),
        all_reduce=CollectiveFit(latency_s=2e-5, hop_s=2e-6, link_share=0.6),
        send_recv=TransferFit(latency_s=8e-6, link_share=0.5),
    )
    sizes = np.array([1, 8, 64, 512, 2048, 4096], dtype=np.float64)
    ones = np.ones_like(sizes)
    names = ("input_layernorm", "attn_rope", "mlp_act", "add")
    measured = [Series(name, sizes, ones, predict_operator(truth, Series(name, sizes, ones, ones))) for name in names]
    found = fit_part("pointwise", START, measured, predict_operator).pointwise
    for name, value in vars(truth.pointwise).items():
        assert getattr(found, name) == pytest.approx(value, rel=0.02), name
    nbytes = sizes * 2e4
    transfers = [Series("send_recv", nbytes, ones, predict_transfer(truth, Series("send_recv", nbytes, ones, ones)))]
    found_transfer = fit_part("send_recv", START, transfers, predict_transfer)
    assert found_transfer.send_recv.link_share == pytest.approx(0.5, rel=0.01)
    assert max(abs(sample.error) for sample in samples_of(found_transfer, transfers, predict_transfer)) < 0.001


def test_what_is_not_a_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the profile store .*missing.sqlite does not exist"):
        Fits.load("h100", ProfileStore(tmp_path / "missing.sqlite"))
    (tmp_path / "text.sqlite").write_text("hello " * 1000)
    with pytest.raises(ConfigError, match="is not a profile store"):
        Fits.load("h100", ProfileStore(tmp_path / "text.sqlite"))
    old = ProfileStore(tmp_path / "old.sqlite")
    old.write(Fit("gemm", "h100", "x", {"peak": 1.0}, 0, 0), [])
    with pytest.raises(ConfigError, match=r"'gemm' of h100 was written by another version"):
        Fits.load("h100", old)
    with sqlite3.connect(old.file) as connection:
        connection.execute("DELETE FROM fits")
    assert Fits.load("h100", old) == Fits.load("h100")  # what a store does not have comes from the package
