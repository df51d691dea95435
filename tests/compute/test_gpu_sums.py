"""Sums over the ranks of a replica on emulated GPUs, by gloo between two processes."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from lamina.compute.device.emulated import Emulated
from lamina.compute.device.sums import GpuSums
from lamina.core.errors import ConfigError
from lamina.splitter.parts import Rank

STEPS = 3
OTHER = (
    "import sys, torch; torch.set_num_threads(1); from tests.compute.test_gpu_sums import play; play(1, sys.argv[1])"
)


def play(number: int, meeting: str) -> list[list[float]]:
    """What rank ``number`` of two gets from a recording with two sums, as often as it is replayed; prints it too."""
    sums, got = GpuSums(Rank(number, 2), Emulated(), meeting), []
    for dtype in (torch.float32, torch.bfloat16):
        memory, result = torch.zeros(2, 3, dtype=dtype), torch.zeros(3, 2, dtype=dtype)

        def work(memory: torch.Tensor = memory, result: torch.Tensor = result) -> None:
            first = sums.reduce(memory * 2 + 1)
            result.copy_(sums.reduce((first - memory).t()))  # not contiguous

        replay = Emulated().capture(work)
        for step in range(STEPS):
            memory.copy_(torch.arange(6).view(2, 3) + 4 * step + 0.5 * number)
            replay()
            got.append(result.flatten().tolist())
    sums.meet()
    print(json.dumps(got))
    return got


def test_sums_are_replayed_with_what_is_around_them(tmp_path: Path) -> None:
    meeting = str(tmp_path / "ranks")
    other = subprocess.Popen([sys.executable, "-c", OTHER, meeting], stdout=subprocess.PIPE, text=True)
    try:
        got = play(0, meeting)
        said, _ = other.communicate(timeout=60)
    finally:
        torch.distributed.destroy_process_group()
        other.kill()
    assert json.loads(said) == got  # the same bits
    each = [[(torch.arange(6).view(2, 3) + 4 * step + 0.5 * rank) for rank in range(2)] for step in range(STEPS)]
    wanted = [(2 * sum(2 * x + 1 for x in pair) - sum(pair)).t().flatten().tolist() for pair in each]  # type: ignore[union-attr]
    assert got == wanted * 2


def test_nothing_is_left_of_the_folder_in_which_ranks_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each machine has a folder of its own, with the name that the engine gave."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = f"import tempfile; tempfile.tempdir = {str(tmp_path)!r}; {OTHER}"
    other = subprocess.Popen([sys.executable, "-c", code, "lamina-name"], stdout=subprocess.DEVNULL)
    try:
        play(0, "lamina-name")
        assert other.wait(60) == 0
    finally:
        torch.distributed.destroy_process_group()
        other.kill()
    assert not list(tmp_path.iterdir())


def test_a_folder_of_another_user_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: -1)
    with pytest.raises(ConfigError, match="ranks belongs to another user; run all ranks of a machine as one user"):
        GpuSums(Rank(0, 2), Emulated(), str(tmp_path / "ranks"))
