"""Decode steps over local memory as one recording each, on emulated GPUs: the logits of steps that run by slices."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

from lamina.compute.device.emulated import Emulated
from lamina.compute.device.kit import Replay
from lamina.control.timeline import Timeline
from lamina.memory.device.gpu import Gpu, _Pages
from tests.support.late_backend import LateBackend, LateKit
from tests.support.local_steps import LocalWorker, assert_same_logits, plans, recorded_and_usual
from tests.support.sweep import sweep

FAMILIES = ("llama", "gemma2", "gpt_oss", "bloom")
CAPACITY = 60


@pytest.mark.parametrize("family", sweep(FAMILIES, ("gemma2", "gpt_oss")))
def test_a_recorded_step_gives_the_logits_of_slices(family: str) -> None:
    """Compare logits while lengths change, batches grow and shrink, and page tables move to larger memory."""
    recorded, usual = recorded_and_usual(family, Emulated(), "emulated", CAPACITY)
    device = recorded.store.device
    assert isinstance(device, Gpu)
    device._pages = pages = _Pages(device._backend, 64)  # for one sequence
    assert_same_logits(recorded, usual, seed=0, steps=8, most=3, longest=8, reserved=2)
    assert device._pages is not pages


def test_a_replay_waits_for_what_was_given_to_the_gpu_before() -> None:
    """On a GPU whose work runs as late as it may."""
    kit, backend = LateKit(), LateBackend()
    backend.queue = kit.queue
    usual = LocalWorker("llama", Emulated(), "emulated", CAPACITY, records=False)
    specs, element = usual.store.attentions, usual.store.element
    with kit.mode:
        recorded = LocalWorker("llama", kit, "emulated", CAPACITY, Gpu(backend, specs, element, CAPACITY))
        assert_same_logits(recorded, usual, seed=2, steps=8, most=2, longest=8)


class Counting(Emulated):
    """Counts recordings of whole steps."""

    recorded = 0

    def capture(self, work: Callable[[], object]) -> Replay:
        self.recorded += "RecordedSteps" in work.__qualname__
        return super().capture(work)


def test_steps_of_any_lengths_replay_what_was_recorded_at_the_start() -> None:
    kit = Counting()
    worker = LocalWorker("llama", kit, "emulated", 5 * CAPACITY)  # page tables do not move
    assert worker.steps is not None
    worker.runner.reserve(8, 2, 1)
    worker.steps.reserve(2)
    reserved = kit.recorded
    assert reserved == 2
    for plan in plans(seed=3, steps=8, most=2, longest=8, heads=worker.store.shards.heads):
        worker.run(plan)
    assert worker.whole > 2 and kit.recorded == reserved


class Slow(Emulated):
    """Takes three more looks to end each step.

    Attributes:
        ends: Monotonic nanoseconds at which the end of each step was seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ends, self._looks = list[int](), 0

    def has_ended(self) -> bool:
        self._looks += 1
        if self._looks % 4:
            return False
        self.ends.append(time.monotonic_ns())
        return True


def test_the_slice_of_a_recorded_step_ends_with_the_step_and_is_awaited_only_if_times_are_recorded() -> None:
    """The host gives a step to the GPU in a moment."""
    kit = Slow()
    worker = LocalWorker("llama", kit, "emulated", 5 * CAPACITY)
    steps = [*plans(seed=3, steps=8, most=2, longest=8, heads=worker.store.shards.heads)]
    for plan in steps[:4]:
        worker.run(plan)
    assert worker.whole and not kit.ends
    before, timeline = worker.whole, Timeline(True)
    worker._replica = replace(worker._replica, timeline=timeline)
    for plan in steps[4:]:
        worker.run(plan)
    assert len(kit.ends) == worker.whole - before > 0
    for seen in kit.ends:
        covering = [span.stage for span in timeline.spans if span.begin_ns < seen <= span.end_ns]
        assert covering == ["slice"]


def test_padding_rows_append_nothing() -> None:
    """A step of three rows replays a recording of four: no slot of the slab changes but those of its tokens."""
    worker = LocalWorker("llama", Emulated(), "emulated", CAPACITY)
    steps = list(plans(seed=5, steps=8, most=3, longest=3, heads=worker.store.shards.heads))
    device = worker.store.device
    assert isinstance(device, Gpu)
    for plan in steps:
        before = [slab.k.copy() for slab in device._slabs]
        worker.run(plan)
        if not plan.chunks:
            used = {
                int(worker.store.slab.slots(worker.store.held.key(each.sequence, 0, 0))[-1]) for each in plan.sequences
            }
            for old, slab in zip(before, device._slabs, strict=True):
                changed = np.flatnonzero((old.view(np.int32) != slab.k.view(np.int32)).any(axis=(1, 2)))
                assert set(changed.tolist()) <= used
    assert worker.whole > 2


class Refusing(Emulated):
    """Records slices, and nothing that asks more of a backend than to launch kernels."""

    def capture(self, work: Callable[[], object]) -> Replay:
        if "RecordedSteps" in work.__qualname__:
            raise RuntimeError("operation not permitted when stream is capturing")
        return super().capture(work)


def test_a_step_that_cannot_be_recorded_runs_by_slices_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    worker = LocalWorker("llama", Refusing(), "emulated", CAPACITY)
    usual = LocalWorker("llama", Emulated(), "emulated", CAPACITY, records=False)
    for plan in plans(seed=4, steps=6, most=2, longest=5, heads=worker.store.shards.heads):
        torch.testing.assert_close(worker.run(plan), usual.run(plan))
    assert worker.whole == 0
    assert [record.message for record in caplog.records if "stream is capturing" in record.message] == [
        "decode steps run slice by slice, which takes longer: 1 rows are not recorded as one step: "
        "RuntimeError: operation not permitted when stream is capturing"
    ]


def test_a_recording_must_not_allocate_copy_or_wait() -> None:
    """What CUDA forbids while a stream is captured fails in the emulation, too."""
    from lamina.kernels.gpu.interpreter import Interpreter

    backend, array = Interpreter(), np.zeros(4, np.float32)
    forbidden: tuple[Callable[[], object], ...] = (
        lambda: backend.empty((1,), np.int32),
        lambda: backend.upload(array, array),
        backend.download,
    )
    for what in forbidden:
        with pytest.raises(RuntimeError, match="which a recording must not do"):
            Emulated().capture(what)
