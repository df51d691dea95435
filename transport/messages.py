"""Messages of the control plane, encoded with msgspec's MessagePack. Sent once a step at most, and small."""

import msgspec

from lamina.config import LoadFormat
from lamina.transport.channel import ChannelLayout
from lamina.types import AttentionSpec, DType, Logprob, StepPlan


class ComputeSetup(msgspec.Struct, tag=True, frozen=True):
    """Engine to compute worker: load this model."""

    model: str
    dtype: DType | None
    load_format: LoadFormat
    seed: int
    threads: int
    eos_token_ids: list[int]


class MemorySetup(msgspec.Struct, tag=True, frozen=True):
    """Engine to memory worker: make a slab of ``capacity`` tokens for these attentions."""

    attentions: list[AttentionSpec]
    dtype: DType
    capacity: int
    threads: int


class ChannelSetup(msgspec.Struct, frozen=True):
    """One compute-memory channel: its layout, and where its slots and doorbells lie in the two arenas."""

    compute: str
    memory: str
    layout: ChannelLayout
    request_offset: int
    request_doorbell: int
    reply_offset: int
    reply_doorbell: int

    @property
    def places(self) -> dict[str, int]:
        """Keyword arguments of Requester and Responder."""
        return {
            "request_offset": self.request_offset,
            "request_doorbell": self.request_doorbell,
            "reply_offset": self.reply_offset,
            "reply_doorbell": self.reply_doorbell,
        }


class Register(msgspec.Struct, tag=True, frozen=True):
    """Engine to worker: make an arena of this size; answered by Registered."""

    nbytes: int
    doorbells: int


class Connect(msgspec.Struct, tag=True, frozen=True):
    """Engine to worker: open these peers' arenas and use these channels; answered by Connected."""

    descriptors: dict[str, bytes]
    channels: list[ChannelSetup]


class Step(msgspec.Struct, tag=True, frozen=True):
    """Engine to worker: run this plan."""

    plan: StepPlan


class Stop(msgspec.Struct, tag=True, frozen=True):
    """Engine to worker: end now."""


class Hello(msgspec.Struct, tag=True, frozen=True):
    """Worker to engine: started."""


class LoadProgress(msgspec.Struct, tag=True, frozen=True):
    """Worker to engine: ``done`` of ``total`` tensors of ``stage`` are there."""

    worker: str
    stage: str
    done: int
    total: int


class ModelLoaded(msgspec.Struct, tag=True, frozen=True):
    """Compute worker to engine: the model is split and its weights are in memory."""

    attentions: list[AttentionSpec]
    dtype: DType
    parameters: int


class SlabReady(msgspec.Struct, tag=True, frozen=True):
    """Memory worker to engine: the slab is allocated."""

    capacity: int


class Registered(msgspec.Struct, tag=True, frozen=True):
    """Worker to engine: the arena exists; peers connect with this descriptor."""

    descriptor: bytes


class Connected(msgspec.Struct, tag=True, frozen=True):
    """Worker to engine: all channels are open."""


class Draw(msgspec.Struct, array_like=True, frozen=True):
    """The token drawn for one sequence; ``logprobs`` has the drawn token first, empty if none were asked for."""

    sequence: int
    token: int
    logprobs: list[Logprob] = []


class StepDone(msgspec.Struct, tag=True, frozen=True):
    """Compute worker to engine: the step ran; one draw per sequence named in ``draws`` of the plan.

    ``undrawable`` sequences got none, since the model gave them no finite logits; ``error`` says so.
    """

    step: int
    draws: list[Draw]
    undrawable: list[int] = []
    error: str = ""


class SlabUsage(msgspec.Struct, tag=True, frozen=True):
    """Memory worker to engine: slots in use and sequences known after plan ``step`` was applied."""

    step: int
    used: int
    sequences: int


class Failed(msgspec.Struct, tag=True, frozen=True):
    """Worker to engine: it cannot go on. ``kind`` is the exception's class name; ``user`` marks a UserError."""

    kind: str
    message: str
    user: bool
    traceback: str


ToWorker = ComputeSetup | MemorySetup | Register | Connect | Step | Stop
ToEngine = Hello | LoadProgress | ModelLoaded | SlabReady | Registered | Connected | StepDone | SlabUsage | Failed
