"""Data types shared by all of Lamina: element types, attention specs, segments and requests.

Shapes in docstrings use: T tokens of a step, R query rows, S sequences, Hq query heads, Hkv key/value heads,
D head size of q and k, Dv head size of v.
"""

import enum
from dataclasses import dataclass
from typing import Literal, NamedTuple

from lamina.core.sampling import SamplingParams


class DType(enum.Enum):
    """Element type of weights, activations and KV, by its Hugging Face name."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return 4 if self is DType.FLOAT32 else 2


DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
"""Setting of an element type: a value of ``DType``, or auto for that of the checkpoint."""

KvCacheDType = Literal["auto", "int8", "fp8"]
"""Setting of the element type of KV: auto for the model's, or one-byte codes."""


class KvElement(enum.Enum):
    """How a slab stores K and V: in the model's element type, or as codes of one byte with float32 scales.

    Codes are int8 or fp8 (e4m3 without infinities). A row, K or V of one token and KV head, is its codes times its
    scale: the row's largest magnitude over the largest code, which is 127 or 448. Codes round to nearest even.
    """

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"
    FP8 = "fp8"

    @classmethod
    def from_setting(cls, name: KvCacheDType, dtype: DType) -> "KvElement":
        """Return the element that the setting ``name`` selects for a model of ``dtype``."""
        return cls(dtype.value if name == "auto" else name)

    @property
    def scaled(self) -> bool:
        return self in (KvElement.INT8, KvElement.FP8)

    def row_nbytes(self, size: int) -> int:
        """Return the bytes of a row of ``size`` elements, its scale included."""
        return size + 4 if self.scaled else size * DType(self.value).itemsize


Partition = Literal["auto", "request", "head", "token"]
"""Setting of how a request's KV is divided between memory workers, see ``lamina.kv.stripes``."""

Quantization = Literal["none", "int8", "int4", "fp8"]
"""Setting of the type to which weights of linear layers are quantised while loaded; none: they are not."""

ActivationDType = Literal["auto", "dtype", "int8"]
"""Setting of the element type of what linear layers multiply by weights held as codes; dtype: the model's."""

ToolCallParser = Literal[
    "auto", "none", "hermes", "qwen3_coder", "glm45", "mistral", "llama3_json", "deepseek_v3", "openai"
]
ReasoningParserName = Literal["auto", "none", "deepseek_r1", "mistral", "openai_gptoss"]


@dataclass(frozen=True)
class ChatSettings:
    """Settings of chats.

    Attributes:
        template: The text of a Jinja template in place of the model's; None: the model's.
        tool_call_parser: Form of tool calls in answers; auto: by the template.
        reasoning_parser: Form of reasoning in answers; auto: by the template.
    """

    template: str | None = None
    tool_call_parser: ToolCallParser = "auto"
    reasoning_parser: ReasoningParserName = "auto"


LoadFormat = Literal["auto", "dummy"]
GenerationConfig = Literal["auto", "none"]
Pipelining = Literal["auto", "fixed", "rotational"]
TransportName = Literal["auto", "shm", "rdma", "tcp"]

Polling = Literal["auto", "device", "host"]
"""Setting of who polls for messages to a memory worker on a GPU: the GPU itself, or the host."""

PromptAttention = Literal["auto", "memory", "compute"]
"""Setting of which workers attend to the earlier chunks of a prompt."""

Balance = Literal["auto", "off", "bandwidth", "throughput", "ledger"]
"""Setting of the policy of ``lamina.kv.balancing`` that moves KV; "off": none; "auto": see ``policy_for`` there."""

MOST_MINI_BATCHES = 15


@dataclass(frozen=True)
class Overlap:
    """How compute workers send q, k and v, so that attention begins before all of it has arrived.

    Attributes:
        mini_batches: Most messages into which the rows of q are divided, 1 to ``MOST_MINI_BATCHES``.
        least: Fewest sequences in a mini-batch; fewer are not worth a message of their own.
    """

    mini_batches: int = 1
    least: int = 1


@dataclass(frozen=True)
class AttentionSpec:
    """One attention operator of the model: everything its kernel needs besides q, k and v.

    A query at position p sees the key at position j when j <= p, and p - j < window (if window > 0), and
    j // chunk == p // chunk (if chunk > 0). Scores are ``scale * q.k``, then ``softcap * tanh(score / softcap)``
    (if softcap > 0), then ``+ slope[h] * (j - p)`` (if alibi_slopes). With ``sinks``, the model adds one learned logit
    per query head to the softmax's denominator, once, when partials are merged.
    """

    layer: int
    query_heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    scale: float
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    sinks: bool = False
    alibi_slopes: tuple[float, ...] | None = None

    def kv_bytes_per_token(self, dtype: DType) -> int:
        """Return the bytes of K and V of one token in messages to memory workers."""
        return self.kv_heads * (self.qk_dim + self.v_dim) * dtype.itemsize

    def slab_bytes_per_token(self, element: KvElement) -> int:
        """Return the bytes of K and V, scales included, of one token in a slab."""
        return self.kv_heads * (element.row_nbytes(self.qk_dim) + element.row_nbytes(self.v_dim))

    def query_bytes_per_token(self, dtype: DType) -> int:
        """Return the bytes of q of one token in messages to memory workers."""
        return self.query_heads * self.qk_dim * dtype.itemsize


@dataclass(frozen=True)
class Segment:
    """KV of a range of heads and tokens of one sequence on one memory worker: the unit of KV placement.

    ``heads`` is [first, stop) of the KV heads, ``tokens`` is [start, stop) in positions; a stop of None means that the
    segment grows with its sequence.
    """

    sequence: int
    worker: str
    heads: tuple[int, int]
    tokens: tuple[int, int | None]


class Client(NamedTuple):
    """Sender of a request. Accounts share the engine fairly; connections of an account share its part fairly."""

    account: str = ""
    connection: str = ""


NOBODY = Client()


@dataclass(frozen=True)
class Request:
    """A prompt with its parameters. ``seed`` is that of the parameters, or a random seed if they have none."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int = 0
    client: Client = NOBODY
