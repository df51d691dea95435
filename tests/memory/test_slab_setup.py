"""A slab that does not fit is one clear error at start."""

import contextlib

import pytest

from lamina.control.messages import MemorySetup, Reserve
from lamina.core.errors import ConfigError
from lamina.core.types import AttentionSpec, DType, Overlap
from lamina.memory import slab_setup
from tests.support.memory_worker import Control

SETUP = MemorySetup([AttentionSpec(0, 2, 2, 8, 8, 0.5)], DType.FLOAT32, 40, 1, Overlap(), False)


@pytest.mark.parametrize(
    ("device", "remedy"),
    [("cpu", "Lower kv_cache_memory_bytes$"), ("cuda:1", "Lower kv_cache_memory_bytes or gpu_memory_utilization$")],
)
def test_a_slab_that_does_not_fit_says_what_to_lower(device: str, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(*_: object) -> None:
        raise MemoryError("out of memory allocating 9 bytes")

    monkeypatch.setattr("lamina.memory.store.make", make)
    control = Control()
    monkeypatch.setattr(control, "device", device, raising=False)
    monkeypatch.setattr("lamina.memory.slab_setup.reserve", lambda *_: None)
    control.tell(Reserve(SETUP, 8, 2, 4, 8))
    control.tell(SETUP)
    with pytest.raises(ConfigError, match=rf"{device} has too little memory for the KV of 40 tokens: .* {remedy}"):
        slab_setup.make_store(control, contextlib.ExitStack())  # type: ignore[arg-type]


def test_too_little_memory_for_steps_says_what_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the engine computes how many tokens fit."""

    def reserve(*_: object) -> None:
        raise MemoryError("out of memory allocating 9 bytes")

    monkeypatch.setattr("lamina.memory.slab_setup.reserve", reserve)
    control = Control()
    control.tell(Reserve(SETUP, 512, 2, 4, 256))
    with pytest.raises(ConfigError, match=r"steps of 512 rows beside the KV: .* 9 bytes\. Lower max_num_batched_tok"):
        slab_setup.make_store(control, contextlib.ExitStack())  # type: ignore[arg-type]
