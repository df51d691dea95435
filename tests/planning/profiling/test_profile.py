"""Profiles: fitting recovers the parameters that generated the times, and the real runtime can be measured."""

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from lamina.planning.plan import hardware, model_shapes, workload
from lamina.planning.plan.cost import CostModel, Fits
from lamina.planning.plan.fit_store import Fit, ProfileStore
from lamina.planning.plan.kernel_times import AttendCurve, ChunkFit, SliceCurve
from lamina.planning.plan.overheads import RuntimeFit
from lamina.planning.plan.planner import Planner
from lamina.planning.plan.prices import UNPRICED
from lamina.planning.plan.ways import NO_LIMITS, Way
from lamina.planning.profiling import profile
from lamina.planning.profiling.profile import DRAWN, Run
from lamina.planning.simulate import Arrivals, Deployment, simulate

SHAPE = model_shapes.from_config(
    "tiny",
    {"hidden_size": 512, "num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 999}
    | {"intermediate_size": 1408, "head_dim": 64, "dtype": "bfloat16"},
)
CURVE = SliceCurve(rows=[1, 8, 64], slice_s=[5e-5, 6e-5, 9e-5], weight_s=[5e-11, 6e-11, 3e-10])
TRUTH = RuntimeFit(
    exchange_s=4e-5,
    exchange_row_s=1e-6,
    step_s=7e-4,
    step_row_s=4e-5,
    attend=AttendCurve(rows=[1, 4, 16], seconds=[2e-5, 7e-5, 1.5e-4], heads=8),
    kv_bytes_s=15e9,
    chunks=ChunkFit(fixed_s=3e-6, row_s=2e-8, flops_s=1e11),
    round_trip_s=1e-5,
    contention=0.2,
)


def run(batch: int, prompt: int, lanes: int) -> Run:
    """The true times in plain arithmetic: 12 layers of 2 x 2 x 64 x 2 bytes of KV per token."""
    rows, live = batch / lanes, prompt + DRAWN / 2 + batch
    layer = 2 * 512 * 64 * (8 + 2) + 3 * 512 * 1408
    dense = 12 * float(CURVE.predict_slice(rows, layer)) + float(CURVE.predict_slice(rows, 999 * 512))
    messages = 12 * (4e-5 + 1e-6 * rows)
    beside = np.interp(rows, [1, 4, 16], [2e-5, 7e-5, 1.5e-4])
    attention = 12 * (beside + rows * live * 512 / 15e9)
    both = min(dense + messages, attention) / 0.8 * 0.2 if lanes > 1 else 0.0
    wait, draw = attention + 12 * 1e-5, 7e-4 + 4e-5 * rows
    return Run(
        batch=batch,
        live=live,
        lanes=lanes,
        step_s=dense + messages + wait + draw,
        slice_s=dense + both,
        exchange_s=messages,
        draw_s=draw,
        wait_s=wait,
        attention_s=attention + both,
    )


def test_what_the_runtime_takes_is_found_again() -> None:
    alone = [run(batch, prompt, 1) for batch, prompt in ((1, 32), (4, 32), (16, 32), (16, 512), (4, 1024))]
    assert TRUTH.chunks is not None
    found = profile.fit_runtime(SHAPE, CURVE, alone, [run(32, 256, 2), run(8, 700, 2)], TRUTH.chunks)
    assert found.attend is not None and TRUTH.attend is not None
    assert found.attend.seconds == pytest.approx(TRUTH.attend.seconds, rel=1e-6)
    for name, value in vars(TRUTH).items():
        if name not in ("attend", "chunks"):
            assert getattr(found, name) == pytest.approx(value, rel=1e-6), name


def test_what_chunks_take_is_found_again() -> None:
    """By summing over the keys that each row of each of 8 heads sees."""
    chunks = [(16, 0), (64, 0), (256, 0), (64, 256), (256, 1024)]
    keys = [sum(prefix + row + 1 for row in range(own)) for own, prefix in chunks]
    times = [3e-6 + 8 * (2e-8 * own + 4 * 64 * seen / 1e11) for (own, _), seen in zip(chunks, keys, strict=True)]
    found = profile.fit_chunks(SHAPE, chunks, times)
    assert TRUTH.chunks is not None and vars(found) == pytest.approx(vars(TRUTH.chunks), rel=1e-6)
    measured = Fits(**{**vars(Fits.load(hardware.load()["epyc"])), "runtime": replace(TRUTH, chunks=found)})
    cost = CostModel(SHAPE, hardware.load()["epyc"], measured)
    assert [float(cost.chunk_attention_seconds(*chunk)) for chunk in chunks] == pytest.approx(times)


def test_slices_of_a_third_width_follow_from_two() -> None:
    rows, weights = (1, 8, 64), (2_000_000, 9_000_000)
    times = [[float(CURVE.predict_slice(count, own)) for count in rows] for own in weights]
    found = SliceCurve.fit(rows, weights, times)
    assert found.predict_slice(8, 5_000_000) == pytest.approx(6e-5 + 5e6 * 6e-11)
    assert found.predict_slice(64, 5_000_000) == pytest.approx(9e-5 + 5e6 * 3e-10)
    # Beyond the measured rows, the last slope continues: here five times as much for eight times the rows.
    assert found.predict_slice(512, 0) == pytest.approx(9e-5 * 1.5)
    noisy = SliceCurve.fit(rows, weights, [[2e-4] * 3, [1e-4] * 3])  # the larger one faster: no weight may cost nothing
    assert np.all(noisy.predict_slice(np.array(rows), 9_000_000) >= 1e-4 * 0.99)


def one_of_each(kind: hardware.Hardware, lanes: int) -> Way:
    """A compute and a memory worker of a kind."""
    return Way(compute=kind, compute_workers=1, memory=kind, memory_workers=1, lanes=lanes)


def test_pools_that_share_a_memory_slow_each_other() -> None:
    """Two lanes: while both pools work, which is as long as attention takes, each takes a fifth longer."""
    entry = hardware.load()["epyc"]
    served = workload.of_context(100)

    def tbt(contention: float, lanes: int) -> float:
        runtime = RuntimeFit(**{**vars(TRUTH), "contention": contention})
        fits = Fits(**{**vars(Fits.load(entry)), "slices": CURVE, "runtime": runtime})
        planner = Planner(SHAPE, served, {"epyc": CostModel(SHAPE, entry, fits)}, UNPRICED, NO_LIMITS)
        pools = one_of_each(entry, lanes)
        return float(planner.tbt(pools, np.array([8.0]))[0])

    attention_s = 12 * (np.interp(8, [1, 4, 16], [2e-5, 7e-5, 1.5e-4]) + 800 * 512 / 15e9)
    assert tbt(0.2, 2) - tbt(0.0, 2) == pytest.approx(2 * 0.2 / 0.8 * attention_s, rel=1e-6)
    assert tbt(0.2, 1) == tbt(0.0, 1)


@pytest.mark.slow
def test_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "ROWS", (1, 8))
    monkeypatch.setattr(profile, "LAYERS", 4)
    monkeypatch.setattr(profile, "BATCHES", ((1, 8), (2, 8), (2, 64)))
    monkeypatch.setattr(profile, "OVERLAPPED", ((4, 8),))
    store = ProfileStore(tmp_path / "cpu.sqlite")
    profile.measure("cpu", store)
    fits = Fits.load(replace(hardware.load()["epyc"], kind="cpu"), store)
    assert fits.slices is not None and min(fits.slices.weight_s) > 0
    assert fits.runtime.attend is not None and fits.runtime.kv_bytes_s is not None and fits.runtime.kv_bytes_s > 1e8
    assert fits.runtime.chunks is not None and fits.runtime.chunks.flops_s > 1e8
    assert store.samples("runtime", "cpu")
    assert Fits.load(hardware.load()["a100"], store).runtime == RuntimeFit()


def test_the_simulator_takes_what_was_measured(tmp_path: Path) -> None:
    """One sequence in one lane: its times between tokens are the planner's for as many cached tokens."""
    entry = replace(hardware.load()["epyc"], kind="cpu", nic_bytes_s=1e18)
    store = ProfileStore(tmp_path / "mine.sqlite")
    store.save_fit(Fit("slices", "cpu", "a test", asdict(CURVE), 0, 0), [])
    store.save_fit(Fit("runtime", "cpu", "a test", asdict(TRUTH), 0, 0), [])
    (tmp_path / "mine.toml").touch()
    assert ProfileStore.beside(tmp_path / "none.toml") is None
    deployment = Deployment(
        model=SHAPE,
        compute=entry,
        compute_workers=1,
        memory=entry,
        memory_workers=1,
        lanes=1,
        profile=ProfileStore.beside(tmp_path / "mine.toml"),
    )
    result = simulate(deployment, Arrivals(np.zeros(1), np.array([64]), np.array([5])))
    times, counts = result.log.gaps
    expected = []
    for cached in range(64, 68):
        served = workload.of_context(cached + 1)
        planner = Planner(SHAPE, served, {"cpu": deployment.compute_cost}, UNPRICED, NO_LIMITS)
        pools = one_of_each(entry, 1)
        expected.append(float(planner.tbt(pools, np.ones(1))[0]))
    assert np.repeat(times, counts) == pytest.approx(expected, rel=1e-6)
