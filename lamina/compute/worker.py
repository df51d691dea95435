"""The compute worker: holds the weights, runs the slices, owns nothing that outlives a step but copies of deltas."""

from dataclasses import dataclass, field

import numpy as np
import torch

from lamina.compute.exchange import StepExchange
from lamina.compute.runner import SliceRunner, padded
from lamina.engine.sampler import Row, sample
from lamina.errors import DeadlineError, LogitsError, WorkerError
from lamina.models import directory, weights
from lamina.models.config import load_config, resolve_dtype
from lamina.splitter import split
from lamina.transport.channel import Requester
from lamina.transport.control import ControlClient, expect
from lamina.transport.messages import (
    ComputeSetup,
    Connect,
    Connected,
    LoadProgress,
    ModelLoaded,
    Register,
    Registered,
    Step,
    StepDone,
    Stop,
)
from lamina.transport.process import run_worker
from lamina.transport.shm import ShmEndpoint
from lamina.types import Admission, Segment, StepPlan

CONNECT_TIMEOUT_S = 30.0
IDLE_SLICE_S = 1.0


@dataclass
class SequenceCopy:
    """What drawing the tokens of one sequence needs; rebuilt from any admission."""

    admission: Admission
    index: int
    generated: list[int] = field(default_factory=list)

    def row(self, eos_token_ids: list[int]) -> Row:
        """The sampler's view of the next token to draw."""
        return Row(
            sequence=self.admission.sequence + self.index,
            params=self.admission.params,
            seed=self.admission.seed,
            completion=self.index,
            generated=len(self.generated),
            eos_token_ids=eos_token_ids,
            prompt=self.admission.prompt,
            output=self.generated,
        )


class ComputeWorker:
    """Runs plans until the engine says stop."""

    def __init__(self, control: ControlClient) -> None:
        self.name = control.name
        self._control = control
        self._endpoint = ShmEndpoint(control.name)
        self._requesters: dict[str, Requester] = {}
        self._segments: dict[int, list[Segment]] = {}
        self._sequences: dict[int, SequenceCopy] = {}

    def run(self) -> None:
        """Set up as the engine tells, then run its plans."""
        self._set_up()
        self._serve()

    def close(self) -> None:
        """Leave the data plane. Idempotent."""
        self._endpoint.close()

    def _set_up(self) -> None:
        self._load(expect(self._control, ComputeSetup))
        register = expect(self._control, Register)
        arena = self._endpoint.register(register.nbytes, register.doorbells)
        self._control.send(Registered(self._endpoint.descriptor()))
        connect = expect(self._control, Connect)
        for channel in connect.channels:
            peer = self._endpoint.connect(connect.descriptors[channel.memory], CONNECT_TIMEOUT_S)
            self._requesters[channel.memory] = Requester(self._endpoint, arena, peer, channel.layout, **channel.places)
        self._control.send(Connected())

    def _load(self, setup: ComputeSetup) -> None:
        torch.set_num_threads(setup.threads)
        self._threads = setup.threads
        self._eos_token_ids = setup.eos_token_ids
        place = directory.find(setup.model, weights=setup.load_format != "dummy")
        config = load_config(place)
        dtype = resolve_dtype(config, setup.dtype or "auto")
        self._progress("splitting", 0, 1)
        model = split(config, dtype)
        self._progress("splitting", 1, 1)
        names = sorted(model.weights)
        tensors = weights.load(
            place,
            names,
            config,
            dtype,
            setup.load_format,
            setup.seed,
            lambda done, of: self._progress("weights", done, of),
        )
        self._runner = SliceRunner(model, tensors)
        self._control.send(
            ModelLoaded(list(model.attentions), dtype, sum(tensor.numel() for tensor in tensors.values()))
        )

    def _progress(self, stage: str, done: int, total: int) -> None:
        self._control.send(LoadProgress(self.name, stage, done, total))

    def _serve(self) -> None:
        while True:
            try:
                message = self._control.receive(IDLE_SLICE_S)
            except DeadlineError:
                continue
            if isinstance(message, Stop):
                return
            if not isinstance(message, Step):
                raise WorkerError(self.name, f"a compute worker that serves cannot take a {type(message).__name__}")
            self._control.send(self._step(message.plan))

    def _step(self, plan: StepPlan) -> StepDone:
        self._apply(plan)
        if not plan.sequences:
            return StepDone(plan.step, [])
        ids = torch.tensor([token for step in plan.sequences for token in step.tokens])
        positions = torch.cat([torch.arange(step.start, step.stop) for step in plan.sequences])
        ends = np.cumsum([len(step.tokens) for step in plan.sequences]) - 1
        rows = [int(end) for end, step in zip(ends, plan.sequences, strict=True) if step.draws]
        exchange = StepExchange(plan, self._segments, self._requesters, self._threads, padded(len(ids)))
        logits = self._runner.run(ids, positions, exchange, torch.tensor(rows, dtype=torch.int64))
        done = StepDone(plan.step, []) if logits is None else self._draw(plan, logits)
        exchange.drain()
        return done

    def _apply(self, plan: StepPlan) -> None:
        for sequence in plan.released:
            self._segments.pop(sequence, None)
            self._sequences.pop(sequence, None)
        for admission in plan.admitted:
            for index in range(admission.count):
                self._segments[admission.sequence + index] = admission.segments
                self._sequences[admission.sequence + index] = SequenceCopy(admission, index)

    def _draw(self, plan: StepPlan, logits: torch.Tensor) -> StepDone:
        """One token for every sequence that a plan's step draws for; several may share a prompt's last row."""
        copies: list[SequenceCopy] = []
        which: list[int] = []
        for row, step in enumerate(step for step in plan.sequences if step.draws):
            copies += [self._sequences[sequence] for sequence in step.draws]
            which += [row] * len(step.draws)
        rows = [copy.row(self._eos_token_ids) for copy in copies]
        logits = logits if len(which) == len(logits) else logits[which]
        undrawable, error = set[int](), ""
        try:
            draws = sample(logits, rows)
        except LogitsError as failed:  # these sequences end; the others must not suffer
            undrawable, error = set(failed.rows), str(failed)
            good = [place for place in range(len(rows)) if place not in undrawable]
            draws = sample(logits[good], [rows[place] for place in good]) if good else []
        for draw in draws:
            self._sequences[draw.sequence].generated.append(draw.token)
        return StepDone(plan.step, draws, [rows[place].sequence for place in sorted(undrawable)], error)


def main() -> None:
    """Entry point of the process."""
    run_worker(ComputeWorker)


if __name__ == "__main__":
    main()
