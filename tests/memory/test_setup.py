"""A slab that does not fit is one clear error at start."""

import contextlib

import pytest

from lamina.errors import ConfigError
from lamina.memory import setup
from lamina.protocol.messages import MemorySetup
from lamina.types import AttentionSpec, DType, Overlap
from tests.memory.test_worker import Control

SPEC = AttentionSpec(0, 2, 2, 8, 8, 0.5)


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
    control.tell(MemorySetup([SPEC], DType.FLOAT32, 40, 1, Overlap(), False))
    with pytest.raises(ConfigError, match=rf"{device} has too little memory for the KV of 40 tokens: .* {remedy}"):
        setup.make_store(control, contextlib.ExitStack())  # type: ignore[arg-type]
