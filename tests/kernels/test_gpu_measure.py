"""Tilings are measured once per device, and the fastest of those that fit are kept."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lamina.core.types import AttentionSpec, KvElement
from lamina.kernels.gpu.tilings import Choices, classify

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

from lamina.kernels.gpu import measure_tilings
from lamina.kernels.gpu.backend import Program
from lamina.kernels.gpu.interpreter import Interpreter
from lamina.memory.device.base import Largest
from lamina.memory.device.workspaces import Workspaces

SPECS = [AttentionSpec(layer, 8, 2, 64, 64, 0.125) for layer in range(3)]
SPECS.append(AttentionSpec(3, 8, 2, 64, 64, 0.125, window=100))  # selects tilings as the others do


class Clock(Interpreter):
    """A GPU on which programs take as long as a test says, and compute nothing."""

    timed, name = True, "GPU of a test"

    def __init__(self, seconds: Callable[[Program, int], float]) -> None:
        self.takes, self.launched = seconds, list[Program]()
        self.timings = 0

    def launch(self, program: Program, grid: tuple[int, ...], arguments: Any) -> None:
        self.launched.append(program)
        if program.kernel == "attend":
            self.last = self.takes(program, grid[0] // int(dict(program.constants)["kv_heads"]))

    def fits(self, program: Program) -> bool:
        return int(dict(program.constants)["block_n"]) < 128

    def time_on_device(self, call: Callable[[], object]) -> float:
        self.timings += 1
        call()
        return self.last


def reserve(card: Clock) -> Workspaces:
    workspaces = Workspaces(card)
    workspaces.reserve(SPECS, KvElement.BFLOAT16, np.uint16, Largest(4, 4, 1))
    return workspaces


def test_steps_are_those_of_all_classes() -> None:
    assert {
        classify(np.array(lengths, np.int32)) for lengths in measure_tilings.STEPS.values()
    } == measure_tilings.STEPS.keys()
    assert all(classify(np.array(lengths, np.int32)) == each for each, lengths in measure_tilings.STEPS.items())


def test_a_device_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here 8 warps are the fastest, and many programs slower."""
    monkeypatch.setenv("LAMINA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(measure_tilings, "SLAB_BYTES", 1 << 20)
    card = Clock(lambda program, programs: programs / program.warps)
    reserve(card)
    fitting = [tiling for tiling in measure_tilings.WIDE if tiling.block_n < 128]
    prompt = [tiling for tiling in measure_tilings.PROMPT if tiling.block_n < 128]
    assert card.timings == len(measure_tilings.STEPS) * (len(fitting) * len(measure_tilings.WAVES) + len(prompt))
    assert all(card.fits(program) for program in card.launched if program.kernel == "attend")
    kept = Choices.load(card.name).measured
    assert len(kept) == 2 * len(measure_tilings.STEPS)
    assert {(tiling.warps, tiling.waves) for tiling in kept.values()} == {(8, 1)}
    again = Clock(lambda program, programs: 1.0)
    reserve(again)
    assert again.timings == 0
    other = Workspaces(again)
    other.reserve([AttentionSpec(0, 2, 2, 64, 64, 0.125)], KvElement.BFLOAT16, np.uint16, Largest(4, 4, 1))
    assert again.timings == card.timings and len(Choices.load(card.name).measured) == 2 * len(kept)


def test_what_cannot_be_timed_or_kept_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LAMINA_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "nowhere")
    card = Clock(lambda program, programs: 1.0)
    reserve(card)
    assert card.timings == 0
