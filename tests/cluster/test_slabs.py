"""How many token slots some bytes have room for."""

from typing import Any

import pytest

from lamina.cluster.slabs import Rows, SlabSize, slab_size
from lamina.core.types import AttentionSpec, KvElement
from lamina.kernels.gpu.specialize import power_of_two
from lamina.memory.device.windows import most_rows
from lamina.schedule.limits import Limits

LIMITS = Limits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=4096)


@pytest.mark.parametrize(
    "size",
    [
        SlabSize(7),
        SlabSize(0, (Rows(5, 100),)),
        SlabSize(3, (Rows(5, 100), Rows(2, 1000))),
        SlabSize(3, (Rows(5, 9, 30), Rows(1, 100))),
    ],
)
@pytest.mark.parametrize("nbytes", [0, 6, 7, 499, 500, 501, 12_345])
def test_the_slots_are_the_most_that_fit(size: SlabSize, nbytes: int) -> None:
    slots = size.slots(nbytes, 3000)
    assert size.nbytes(slots) <= nbytes and (slots == 3000 or size.nbytes(slots + 1) > nbytes)


def test_only_layers_with_a_window_have_fewer_rows_than_slots_and_only_if_they_forget() -> None:
    windows = (0, 512, 0, 128)
    sizes: dict[str, Any] = {"query_heads": 4, "kv_heads": 2, "qk_dim": 8, "v_dim": 8, "scale": 1.0}
    specs = [AttentionSpec(layer=layer, window=window, **sizes) for layer, window in enumerate(windows)]
    each = specs[0].slab_bytes_per_token(KvElement.BFLOAT16)
    size = slab_size(specs, KvElement.BFLOAT16, True, LIMITS, lanes=2)
    rows = [most_rows(window, 8, 128) for window in (512, 128)]
    assert size == SlabSize(2 * each, (Rows(each, rows[0]), Rows(each, rows[1])))
    assert rows[0] == 1024 + (8 * 516 + 4 * 128) * 9 // 8
    assert slab_size(specs, KvElement.BFLOAT16, False, LIMITS, lanes=2) == SlabSize(4 * each) == size.whole
    cached = slab_size(specs, KvElement.BFLOAT16, True, LIMITS, lanes=2, prefix_cache=True)
    assert cached.rows == (Rows(each, rows[0], 8 * 512), Rows(each, rows[1], 8 * 128))
    assert cached.rows[0].most(10**6) == rows[0] + 10**6 // 4 * 9 // 8
    assert cached.rows[0].most(15_000) == rows[0] + 8 * 512 * 9 // 8 and cached.rows[0].most(9000) == 9000
    assert 1.3 * size.whole.slots(10**7, 10**9) < cached.slots(10**7, 10**9) < size.slots(10**7, 10**9)
    assert size.slots(10**7, 10**9) > 1.8 * size.whole.slots(10**7, 10**9)


@pytest.mark.parametrize("capacity", [1, 2, 3, 1000, 1024, 1025])
def test_a_gpu_holds_page_tables_as_well(capacity: int) -> None:
    words = power_of_two(2 * (2 * capacity))  # as ``lamina.memory.device.gpu`` makes them
    assert SlabSize(7).with_pages(2).nbytes(capacity) >= 7 * capacity + 4 * words
