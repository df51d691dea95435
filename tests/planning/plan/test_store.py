"""Stored fits: round trips, and the package's fits equal those fitted to the measurements."""

import json
import sqlite3
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.cost import fit as fitting
from bench.cost import fit_experts
from bench.cost.fit import KIND, fit_part, write_fits
from bench.cost.published_times import Reduction, Series
from lamina.core.errors import ConfigError
from lamina.planning.plan import hardware
from lamina.planning.plan.cost import Fits, PointwiseFit
from lamina.planning.plan.fit_store import PACKAGED, Fit, ProfileStore, Sample, packaged_fit
from lamina.planning.plan.kernel_times import RingFit

CATALOGUE = hardware.load()
MEASUREMENTS = Path(__file__).parents[3] / "bench" / "cost" / "measurements"


def test_a_fit_is_replaced_and_found_by_kind(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path / "mine.sqlite")
    samples = [Sample("add", 8, 1, 2e-6, 3e-6), Sample("add", 16, 2, 4e-6, 4e-6)]
    for kind, latency in (("a100-80g", 1.0), ("h20", 2.0), ("a100-80g", 3.0)):
        store.save_fit(Fit("send_recv", kind, "x.csv", {"latency_s": latency}, 0.1, 0.2), samples)
    found = [store.fit("send_recv", kind) for kind in ("a100-80g", "h20", "a40")]
    assert [fit and fit.parameters for fit in found] == [{"latency_s": 3.0}, {"latency_s": 2.0}, None]
    assert store.samples("send_recv", "h20") == samples
    assert samples[0].error == pytest.approx(0.5)


def test_packaged_fits_come_back_and_serve_other_kinds(tmp_path: Path) -> None:
    stored = json.loads(PACKAGED.read_text())
    write_fits([Fit(**one) for one in stored], tmp_path / "fits.json")
    assert json.loads((tmp_path / "fits.json").read_text()) == stored
    assert packaged_fit("gemm", "h20") == packaged_fit("gemm", KIND)
    # Kernels of a class serve the kinds that run them.
    assert Fits.load(CATALOGUE["h20"]).decode == Fits.load(CATALOGUE["h100"]).decode
    assert (
        Fits.load(CATALOGUE["rtx3090"]).decode
        == Fits.load(CATALOGUE["a100"]).decode
        != Fits.load(CATALOGUE["h20"]).decode
    )


def test_the_packaged_errors_are_those_on_the_measurements() -> None:
    """Every stored fit, on the file that it names, has the errors stored with it."""
    made = fitting.parts(MEASUREMENTS, Fits.load(CATALOGUE[KIND]).pointwise)
    made += [fit_experts.part(name, fit_experts.read(MEASUREMENTS, name)) for name in fit_experts.FITTED]
    parts = {(part.name, part.kind): part for part in made}
    stored = [Fit(**one) for one in json.loads(PACKAGED.read_text())]
    assert {(one.name, one.kind) for one in stored} == parts.keys()
    for one in stored:
        part = parts[one.name, one.kind]
        errors = np.abs(part.errors(type(part.start)(**one.parameters)))
        assert part.source == one.source
        assert np.median(errors) == pytest.approx(one.median_error, abs=1e-6)
        assert np.quantile(errors, 0.95) == pytest.approx(one.p95_error, abs=1e-6)


def test_a_fit_finds_the_numbers_that_made_the_measurements() -> None:
    truth = PointwiseFit(
        norm_s=5e-6,
        rope_s=4e-6,
        activation_s=3e-6,
        add_s=2e-6,
        overlap=2.5,
        memory_share=0.7,
        norm_per_clock=3,
        rope_per_clock=4,
        activation_per_clock=5,
    )
    sizes = np.array([1, 8, 64, 512, 2048, 4096], dtype=np.float64)
    ones = np.ones_like(sizes)
    names = ("input_layernorm", "attn_rope", "mlp_act", "add")
    made = [Series(name, sizes, ones, ones) for name in names]
    part = fitting.operators(made, "pointwise", fitting.START_POINTWISE)
    found = fit_part(replace(part, seconds=part.predict(truth)))
    for name, value in vars(truth).items():
        assert getattr(found, name) == pytest.approx(value, rel=0.02), name
    ring = RingFit(latency_s=2e-5, hop_s=2e-6, link_share=0.6, ramp_s=3e-5, ramp_bytes=1e6, sharing=0.0)
    counts, nbytes = (part.ravel() for part in np.meshgrid([2.0, 4.0, 8.0], np.geomspace(1e3, 1e9, 20)))
    times = Reduction(Path("made"), nbytes, counts, np.ones_like(nbytes))
    reducing = fitting.reducing(times, "nvlink", KIND, fitting.START_NVLINK)
    recovered = fit_part(replace(reducing, seconds=reducing.predict(ring)))
    assert recovered.sharing == 0 and recovered.link_share == pytest.approx(0.6, rel=0.01)
    assert np.abs(reducing.predict(recovered) / reducing.predict(ring) - 1).max() < 0.01


def test_what_is_not_a_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the profile store .*missing.sqlite does not exist"):
        Fits.load(CATALOGUE["h100"], ProfileStore(tmp_path / "missing.sqlite"))
    (tmp_path / "text.sqlite").write_text("hello " * 1000)
    with pytest.raises(ConfigError, match="is not a profile store"):
        Fits.load(CATALOGUE["h100"], ProfileStore(tmp_path / "text.sqlite"))
    old = ProfileStore(tmp_path / "old.sqlite")
    old.save_fit(Fit("gemm", "h100", "x", {"peak": 1.0}, 0, 0), [])
    with pytest.raises(ConfigError, match=r"'gemm' of h100 was written by another version"):
        Fits.load(CATALOGUE["h100"], old)
    with sqlite3.connect(old.file) as connection:
        connection.execute("DELETE FROM fits")
    assert Fits.load(CATALOGUE["h100"], old) == Fits.load(
        CATALOGUE["h100"]
    )  # what a store does not have comes from the package
