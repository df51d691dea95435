"""Slices fused by torch.compile: they compute the same, and run where they are faster."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from lamina.compute.device.base import Rows
from lamina.compute.device.emulated import Emulated
from lamina.compute.device.gpu import Gpu, GpuRunner
from lamina.lowering import Target, lower
from lamina.lowering.gpu_slices import Main
from lamina.splitter import split
from tests.support.random_models import random_model, variant


class Fusing(Emulated):
    """Fuses operators for the CPU. Such kernels cannot be recorded: it runs them again."""

    name, backend_of = "fusing", "eager"

    def __init__(self, fused_s: float = 1.0) -> None:
        self.compiles, self.times = 0, iter([2.0, fused_s] * 99)

    def capture(self, work: Callable[[], object]) -> Callable[[], None]:
        def replay() -> None:
            work()

        replay()
        return replay

    def compiled(self, graph: Main) -> Main:
        self.compiles += 1
        compiled: Main = torch.compile(graph, dynamic=True, fullgraph=True, backend=self.backend_of)
        return compiled

    def time_replay(self, replay: Callable[[], None]) -> float:
        return next(self.times)


def steps(runner: GpuRunner, counts: Sequence[int]) -> list[Tensor]:
    """The results of all slices but the last for some rows, one step after another."""
    found = []
    for count in counts:
        draw = torch.Generator().manual_seed(count)
        rows, attention, context = Rows(torch.arange(count), torch.arange(count)), None, tuple[Tensor, ...]()
        for index, spec in enumerate(runner.attentions):
            output = runner.run(index, rows, attention, context)
            found += [each.clone() for each in output.results]
            attention, context = torch.randn(count, spec.query_heads, spec.v_dim, generator=draw), output.context
    return found


@pytest.mark.parametrize(
    "backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)], ids=["traced", "compiled"]
)
def test_fused_slices_compute_the_same_and_are_kept_where_they_are_faster(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAMINA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(Fusing, "backend_of", backend)
    lowered, state = lower(split(variant("gemma2")), Target.GPU), random_model(variant("gemma2")).state_dict()
    weights = {name: state[name] for name in lowered.weights}
    counts, graphs = (4, 8, 4), 2
    wanted = steps(Gpu(Emulated()).runner(lowered, weights), counts)
    for fused_s, compiles in ((1.0, graphs), (1.0, graphs), (3.0, graphs), (3.0, 0)):
        kit = Fusing(fused_s)
        if compiles and fused_s > 2.0:  # measure again
            shutil.rmtree(tmp_path)
        for ours, right in zip(steps(Gpu(kit).runner(lowered, weights), counts), wanted, strict=True):
            torch.testing.assert_close(ours, right)
        assert kit.compiles == compiles, "what has been found to be slower is not compiled again"


def test_what_cannot_be_fused_runs_operator_by_operator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LAMINA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch, "compile", Mock(side_effect=RuntimeError("no such operator")))
    lowered, state = lower(split(variant("llama")), Target.GPU), random_model(variant("llama")).state_dict()
    weights = {name: state[name] for name in lowered.weights}
    found = steps(Gpu(Fusing()).runner(lowered, weights), (4, 8))
    for ours, right in zip(found, steps(Gpu(Emulated()).runner(lowered, weights), (4, 8)), strict=True):
        assert torch.equal(ours, right)
    assert caplog.text.count("no such operator") == 2, "once for each graph"
