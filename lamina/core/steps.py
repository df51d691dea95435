"""``StepPlan``, the message that tells workers to run a step, and the changes of state that it carries."""

import functools

import msgspec

from lamina.core.sampling import SamplingParams
from lamina.core.types import Segment

BLOCK = 64
"""Consecutive tokens of which a disk stores one shard of heads as one block."""


def blocks_of(capacity: int, overcommit: float) -> int:
    """Return the blocks on disk of a memory worker: ``capacity`` slots and these hold ``overcommit * capacity``. Slots
    and blocks each hold one shard of heads."""
    return int(capacity * (overcommit - 1)) // BLOCK


class Spill(msgspec.Struct, array_like=True, frozen=True):
    """Memory worker ``worker`` copies blocks of a cached sequence to its disk, and answers with ``Stored``.

    Its n shards of tokens [``BLOCK`` * places[i], ``BLOCK`` * (places[i] + 1)) go to ``blocks[i * n : (i + 1) * n]``. A
    release of the sequence ends the copying. If several workers have shards, each has a part with the same ``number``.
    """

    number: int
    worker: str
    sequence: int
    places: list[int]
    blocks: list[int]


class Fetch(msgspec.Struct, array_like=True, frozen=True):
    """Memory worker ``worker`` reads blocks from its disk into new slots of ``child``, from token ``start`` on, and
    answers with ``Stored``.

    ``child`` is a cached sequence, of which the worker has these heads. ``blocks`` has one block for each shard, as in
    ``Spill``. If ``start`` is not 0, the same plan has forked it.
    """

    number: int
    worker: str
    child: int
    start: int
    blocks: list[int]
    heads: tuple[int, int]


LAST_DRAWN = -1  # stands for the token that the lane's previous step draws for the same sequence


class SequenceStep(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The tokens of one sequence in one step: positions [start, start + len(tokens)).

    A token that is still being drawn when the step is planned is ``LAST_DRAWN``. ``draws`` names the sequences for
    which a next token is drawn from the last row (several right after a prompt with n > 1 completions, none before the
    last chunk of a prompt).

    ``scratch``: the tokens of a prompt from this position on, the chunk's own too, are in scratch memory of the replica
    that runs it (``lamina.compute.local_memory``). The replica attends to those before the chunk; memory workers store
    the chunk, and attend only to tokens before this position. None: no token of the prompt is in scratch memory.
    """

    sequence: int
    start: int
    tokens: list[int]
    draws: list[int]
    scratch: int | None = None

    @property
    def stop(self) -> int:
        """Position after the last token of this step."""
        return self.start + len(self.tokens)

    @property
    def before_scratch(self) -> int:
        """Number of tokens before this step that are not in scratch memory."""
        return self.start if self.scratch is None else self.scratch


class DecodeRows(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Sequences that each run the token they drew last, and draw the next: lists of equal length.

    Attributes:
        starts: position of each token.
        tokens: the tokens to run, as in ``SequenceStep``; empty if all are ``LAST_DRAWN``.
    """

    sequences: list[int]
    starts: list[int]
    tokens: list[int]

    @property
    def steps(self) -> list[SequenceStep]:
        tokens = self.tokens or [LAST_DRAWN] * len(self.sequences)
        rows = zip(self.sequences, self.starts, tokens, strict=True)
        return [SequenceStep(sequence, start, [token], [sequence]) for sequence, start, token in rows]


class Admission(msgspec.Struct, array_like=True, frozen=True):
    """A request that is new to the workers: sequences [sequence, sequence + count), one per completion.

    The first sequence runs the prompt; the others are forked from it.

    Attributes:
        segments: where the KV of the first sequence is, and that of the forked ones for a worker that joined later.
        seed: makes the draws reproducible.
        prompt: its tokens, only if the penalties need them.
        indices: numbers of the completions within the request; those that had ended are left out.
        request: id of the request.
    """

    sequence: int
    count: int
    prompt_length: int
    segments: list[Segment]
    params: SamplingParams
    seed: int
    prompt: list[int] = []
    indices: list[int] = []
    request: str = ""


class Fork(msgspec.Struct, array_like=True, frozen=True):
    """``child`` shares the first ``tokens`` tokens of ``parent``, beyond those that ``child`` has already.

    A child that neither this nor an earlier plan admits is a cached prefix, which only memory workers know.
    """

    parent: int
    child: int
    tokens: int


class KvMove(msgspec.Struct, array_like=True, frozen=True):
    """Memory worker ``target`` pulls K and V of tokens [start, stop) of a sequence from memory worker ``source``.

    It allocates slots for them and reports when all have arrived. ``number`` counts a cluster's moves from 1. If
    several workers hold these tokens, or will hold them, each pair has a part with its ``heads`` and the same number.

    ``sequence`` is a carrier: it is never run, and holds only these tokens, which are the parent's. At the source it
    shares the parent's slots, so that they stay valid when the parent is released.
    """

    number: int
    sequence: int
    source: str
    target: str
    start: int
    stop: int
    parent: int
    heads: tuple[int, int]


class Switch(msgspec.Struct, array_like=True, frozen=True):
    """Moved tokens are used at their target from now on: each of ``segments`` replaces those that held its tokens.

    The KV is in the slots of ``carrier``. All segments begin with the carrier's first token; one without an end is the
    last segment of a cached prefix.
    """

    carrier: int
    segments: list[Segment]


class StepPlan(msgspec.Struct, array_like=True, frozen=True, dict=True):
    """One pass of one batch through all slices, in one lane: deltas only.

    Workers apply it in this order: ``switches``, ``forks``, ``released`` sequences are forgotten, ``moves`` begin,
    ``admitted`` sequences are registered, ``grown`` segments take over from those before them
    (``lamina.core.segments.grown``), ``fetches`` and ``spills`` begin, then ``sequences`` run: those that decode, and
    ``chunks`` of prompts. A plan goes to the compute workers that run its slices; a memory worker gets the part about
    sequences with a segment on it (``lamina.schedule.recipients``).

    ``turn`` counts the attentions of the lane's earlier steps. From it and ``rotates`` (whether slices rotate over
    replicas), workers derive which attention a message belongs to and which compute worker runs which slice.
    ``histories`` are the tokens generated so far by sequences whose draws depend on them, for replicas that have not
    run all of these sequences' steps.
    """

    step: int
    lane: int
    turn: int
    forks: list[Fork]
    released: list[int]
    admitted: list[Admission]
    chunks: list[SequenceStep]
    decoding: DecodeRows
    moves: list[KvMove] = []
    rotates: bool = False
    histories: dict[int, list[int]] = {}
    grown: list[Segment] = []
    switches: list[Switch] = []
    spills: list[Spill] = []
    fetches: list[Fetch] = []

    @property
    def runs(self) -> bool:
        """True if there are sequences to run."""
        return bool(self.decoding.sequences or self.chunks)

    @functools.cached_property
    def row_count(self) -> int:
        """Number of tokens that run: one of each sequence that decodes, and those of the chunks."""
        return len(self.decoding.sequences) + sum(len(chunk.tokens) for chunk in self.chunks)

    @functools.cached_property
    def drawing(self) -> list[int]:
        """The sequences for which the step draws a token, in the order of the batch's rows."""
        return self.decoding.sequences + [sequence for chunk in self.chunks for sequence in chunk.draws]

    @functools.cached_property
    def sequences(self) -> list[SequenceStep]:
        """All sequences that run, in the order of the batch's rows."""
        return self.decoding.steps + self.chunks
