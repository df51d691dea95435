"""Launch options by context class and raggedness: classes, defaults and what one device has measured."""

import numpy as np
import pytest

from lamina.core.types import KvElement
from lamina.kernels.gpu.measure_tilings import candidates
from lamina.kernels.gpu.tilings import SHARED_KIB, Choices, Context, Shape, Tiling, classify, default
from lamina.kernels.segments import STORAGE

SHAPE = Shape(Context.LONG, False, False, KvElement.BFLOAT16, 4, 128)


@pytest.mark.parametrize(
    ("tokens", "wanted"),
    [
        ([], (Context.NORMAL, False)),
        ([8192] * 3, (Context.NORMAL, False)),
        ([8193], (Context.LONG, False)),
        ([32768, 30000], (Context.LONG, False)),
        ([32769, 20000], (Context.ULTRA, False)),
        ([500_000] + [1000] * 31, (Context.ULTRA, True)),
        ([4000] + [500] * 9, (Context.NORMAL, True)),
    ],
)
def test_steps_are_classified_by_their_lengths(tokens, wanted):
    assert classify(np.array(tokens, np.int32)) == wanted


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 75])
@pytest.mark.parametrize("element", KvElement)
@pytest.mark.parametrize("dim", [16, 80, 128, 256, 512])
def test_the_default_is_one_that_products_take(capability, element, dim):
    for block_m in (16, 32, 64):
        tiling = default(Shape(Context.NORMAL, True, block_m > 16, element, 4, dim), block_m, capability)
        assert tiling.block_n in (16, 32, 64) and tiling.warps in (4, 8) and tiling.stages == 3
        assert 64 <= tiling.registers <= 255 and 32 * tiling.warps * tiling.resident * tiling.registers <= 65536
        if capability in SHARED_KIB and dim <= 256:
            loaded = 2 * tiling.block_n * dim * STORAGE[element].itemsize * tiling.resident
            assert loaded <= SHARED_KIB[capability] * 1024


def test_an_h200_has_enough_bytes_on_their_way():
    """Little's law: 4.8 TB/s for a microsecond, over 132 multiprocessors; twice, as programs compute in between."""
    for group in (1, 4, 8):
        tiling = default(Shape(Context.NORMAL, False, False, KvElement.BFLOAT16, group, 128), 16, 90)
        assert tiling.resident * 2 * tiling.block_n * 128 * 2 > 2 * 4.8e12 * 1e-6 / 132


def test_ragged_and_ultra_long_steps_are_cut_finer():
    even, ragged, ultra = (
        default(Shape(context, uneven, False, KvElement.BFLOAT16, 4, 128), 16, 90).waves
        for context, uneven in ((Context.NORMAL, False), (Context.NORMAL, True), (Context.ULTRA, False))
    )
    assert even < ragged == ultra


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LAMINA_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_what_was_measured_is_kept_for_its_shape_device_and_compiler_alone(cache, monkeypatch):
    measured = Tiling(128, 8, 4, 2, 1, 512)
    Choices("NVIDIA H200").merge_measured({str(SHAPE): measured})
    again = Choices.load("NVIDIA H200")
    assert again.tiling(SHAPE, 16, 90) == measured
    other = Shape(Context.LONG, True, False, KvElement.BFLOAT16, 4, 128)
    assert again.tiling(other, 16, 90) == default(other, 16, 90)
    assert Choices.load("NVIDIA A40").measured == {}
    monkeypatch.setattr("importlib.metadata.version", lambda package: "99.1")
    assert Choices.load("NVIDIA H200").measured == {}


@pytest.mark.parametrize("element", [KvElement.INT8, KvElement.FP8])
def test_tall_tiles_over_codes_have_eight_warps_whatever_was_measured_before(element):
    tall = Shape(Context.LONG, False, True, element, 4, 64)
    choices = Choices("NVIDIA H200", {str(tall): Tiling(64, 4, 3, 2)})
    assert choices.tiling(tall, 64, 90).warps == 8
    assert choices.tiling(tall, 16, 90).warps == 4
    assert {tiling.warps for tiling in candidates(element, prompt=True, block_m=64)} == {8}
    assert {tiling.warps for tiling in candidates(element, prompt=False, block_m=16)} == {4, 8}


@pytest.mark.parametrize("content", ["", "[]", '{"a": {"block_m": 3}}', '{"a": 1}'])
def test_a_damaged_file_is_as_if_there_were_none(cache, content):
    Choices("card").merge_measured({str(SHAPE): Tiling(64, 4, 3, 4)})
    (saved,) = cache.glob("attention/*.json")
    assert Choices.load("card").measured
    saved.write_text(content)
    assert Choices.load("card").measured == {}
