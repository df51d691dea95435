"""Keeps K and V of running prompts in memory of the replica that runs them, until their last chunks (Lamina, 5.6).

The chunks of such a prompt attend to the tokens before them here, and memory workers only store K and V. The engine
says in plans which chunks these are (``lamina.schedule.scratch``). Nothing depends on scratch memory for longer than a
step: memory workers have the same K and V, so that a prompt can continue without it.

Slab, bookkeeping and kernels are those of a memory worker (``lamina.memory.store``). Each rank and stage has scratch
memory for its own heads and layers.
"""

import contextlib
from collections.abc import Sequence

import msgspec

from lamina.compute.device.base import Runner
from lamina.compute.local_memory import LocalShare, Partial, Partials
from lamina.control.messages import MemorySetup
from lamina.control.sockets import ControlClient
from lamina.core.sampling import SamplingParams
from lamina.core.steps import Admission, SequenceStep, StepPlan
from lamina.core.types import Segment
from lamina.dataplane.wire import SCRATCH
from lamina.memory.device.base import Array
from lamina.memory.slab_setup import make_store
from lamina.memory.store import KvStore


class ScratchShare:
    """Stores the chunks of one step in scratch memory, and attends to the tokens before them."""

    def __init__(self, share: LocalShare, store: KvStore, layers: Sequence[int], ending: Sequence[int]) -> None:
        """``layers``: attentions of the worker's slices. ``ending``: sequences whose last chunk the step runs."""
        self.queries = share.queries
        self._share, self._store, self._layers, self._ending = share, store, layers, ending

    def attend(self, index: int, q: Array, k: Array, v: Array) -> Partial | None:
        """Store k [T, Hkv, D] and v [T, Hkv, Dv] of the step's tokens, then attend with the rows ``queries`` of
        q [T, Hq, D]; arguments and result are those of ``LocalShare.attend``.

        After the worker's last attention, the prompts that end are forgotten.
        """
        partial = self._share.attend(self._layers.index(index), q, k, v)
        if index == self._layers[-1]:
            self._store.release(self._ending)
        return partial


class Scratch:
    """The scratch memory of a compute worker. The worker's thread owns it."""

    def __init__(self, store: KvStore, layers: Sequence[int]) -> None:
        """``layers``: attentions of the worker's slices, in the order of the store's."""
        self.store, self._layers = store, layers
        self._partials: Partials = {}  # merged before the next attention, so that all lanes share them

    @classmethod
    def allocate(cls, control: ControlClient, runner: Runner) -> "Scratch":
        """Allocate the slab as the engine directs. Raises ConfigError, WorkerError."""
        layers = [index for index in runner.slices if index < len(runner.attentions)]
        own = [runner.attentions[index] for index in layers] or list(runner.attentions[:1])

        def part(setup: MemorySetup) -> MemorySetup:
            return msgspec.structs.replace(setup, attentions=own)

        remedy = "Free memory there, or set --prompt-attention memory"
        store, _, _ = make_store(control, contextlib.ExitStack(), part, SCRATCH, remedy)  # it has no disk to close
        return cls(store, layers)

    def apply_plan(self, plan: StepPlan) -> ScratchShare | None:
        """Allocate slots for the chunks of a plan whose released prompts are forgotten; None without such chunks."""
        chunks = [chunk for chunk in plan.chunks if chunk.scratch]
        if not chunks or not self._layers:
            return None
        begun = [self._admission(chunk) for chunk in chunks if not chunk.start]
        rows = StepPlan(plan.step, plan.lane, plan.turn, [], [], begun, plan.chunks, plan.decoding)
        tables = self.store.apply(rows)[0]
        ending = [chunk.sequence for chunk in chunks if chunk.draws]
        return ScratchShare(LocalShare(self.store, tables, self._partials), self.store, self._layers, ending)

    def _admission(self, chunk: SequenceStep) -> Admission:
        place = Segment(chunk.sequence, SCRATCH, self.store.shards.whole, (0, None))
        return Admission(chunk.sequence, 1, chunk.stop, [place], SamplingParams(), 0)

    def end_epoch(self) -> None:
        """Forget all prompts: those that continue use memory workers."""
        self.store.truncate({})
