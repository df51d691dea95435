"""Messages between the engine and its workers, encoded as MessagePack; at most one per worker and step."""

from collections.abc import Iterator

import msgspec

from lamina.control.file_transfer import FileSource
from lamina.control.timeline import Span
from lamina.core.pipeline import Pipeline
from lamina.core.steps import StepPlan
from lamina.core.topology import FIRST, Epoch, Topology
from lamina.core.types import (
    ActivationDType,
    AttentionSpec,
    DType,
    KvCacheDType,
    LoadFormat,
    Overlap,
    Polling,
    Quantization,
    Segment,
)
from lamina.dataplane.leases import ArenaPlan, Lease
from lamina.dataplane.transport_choice import Offer, Transport


class ComputeSetup(msgspec.Struct, tag=True, frozen=True):
    """Engine to compute worker: load this model.

    Attributes:
        rows: most rows of a step.
        overlap: how q, k and v are sent to memory workers.
        head_workers: most memory workers that share the heads of a sequence.
        local: True if a MemorySetup follows once the model is loaded, for a slab in the worker's own memory.
        source: server of the model's files, for a machine that does not have them at ``model``.
        rank: which of ``ranks`` parts of every slice to load.
        degrees: ranks of a replica, by pool.
        sequences: most sequences that draw a token in a step.
        meeting: name of a folder for temporary files, in which the ranks of a stage on GPUs find each other.
        stage: which of ``stages`` parts of the slices to load.
        quantization: type to which the weights of linear layers are quantised.
        activation_dtype: element type of the inputs of linear layers whose weights are held as codes.
        gpu_share: share of a GPU's memory that all its processes together may use.
        scratch: True if a MemorySetup follows once the model is loaded, for scratch memory of prompts.
    """

    model: str
    dtype: DType | None
    load_format: LoadFormat
    seed: int
    threads: int
    rows: int
    overlap: Overlap
    eos_token_ids: list[int]
    trace: bool
    head_workers: int = 1
    local: bool = False
    source: FileSource | None = None
    rank: int = 0
    ranks: int = 1
    degrees: tuple[int, ...] = (1,)
    sequences: int = 1
    meeting: str = ""
    stage: int = 0
    stages: int = 1
    quantization: Quantization = "none"
    activation_dtype: ActivationDType = "auto"
    gpu_share: float = 1.0
    scratch: bool = False


class MemorySetup(msgspec.Struct, tag=True, frozen=True):
    """Engine to memory worker, or to a compute worker with local memory: allocate a slab for these attentions.

    Attributes:
        dtype: the model's element type, that of k, v and q in messages.
        capacity: tokens of the slab.
        kv_cache_dtype: element type of the slab.
        head_shards: parts into which the heads of every attention are cut (``lamina.core.heads``).
        overcommit: KV in slab and ``spill_dir`` together, as a multiple of the KV in the slab.
        ranks: ranks of the replicas that have most, which share the head shards.
        least_ranks: ranks of the replicas that have fewest.
        forgets: True if layers with a sliding window drop the KV of tokens that have left the window.
        polling: who polls for messages, the device or the host.
        gpu_share: share of a GPU's memory that all its processes together may use.
        home: name by which segments refer to the slab; empty: the worker's.
        layers: indices [start, stop) of the attentions whose K and V the slab has, those of a stage; None: all.
    """

    attentions: list[AttentionSpec]
    dtype: DType
    capacity: int
    threads: int
    overlap: Overlap
    trace: bool
    kv_cache_dtype: KvCacheDType = "auto"
    head_shards: int = 1
    overcommit: float = 1.0
    spill_dir: str = ""
    ranks: int = 1
    least_ranks: int = 1
    forgets: bool = False
    polling: Polling = "host"
    gpu_share: float = 1.0
    home: str = ""
    layers: tuple[int, int] | None = None

    @property
    def own(self) -> list[AttentionSpec]:
        """The attentions that the slab has room for: those of ``layers``, and at least one. A stage without attention
        also keeps count of tokens, to know the rows of partials that it gets from the stage before."""
        first, stop = self.layers or (0, len(self.attentions))
        return self.attentions[first:stop] or self.attentions[-1:]


class Reserve(msgspec.Struct, tag=True, frozen=True):
    """Engine to worker, before MemorySetup: allocate the device memory that steps need beside the slab, and compile
    kernels. The engine inspects free memory afterwards, and derives the slab's capacity from it.

    Attributes:
        setup: the MemorySetup that follows, with the largest possible capacity.
        rows: most rows of a step.
        sequences: most sequences of a step.
        steps: most steps in flight, over all lanes.
        slot_rows: rows that a message slot holds.
    """

    setup: MemorySetup
    rows: int
    sequences: int
    steps: int
    slot_rows: int
    lanes: int = 1


class Register(msgspec.Struct, tag=True, frozen=True):
    """Engine to worker: allocate this arena and let peers connect by these transports; answered by Registered.

    Attributes:
        spin_s: seconds for which waits spin before they sleep, if all links use one transport.
        tls: True if data that leaves a machine must be encrypted.
        open: True if workers that join later may use a transport that no link uses yet.
    """

    arena: ArenaPlan
    transports: list[Transport]
    spin_s: float
    tls: bool = False
    open: bool = False


class Grant(msgspec.Struct, tag=True, frozen=True):
    """Engine to worker: lease parts of your arena to these peers; answered by Granted.

    Attributes:
        slots: bytes of a slot, by peer.
        inboxes: peers whose devices may write into memory of this worker's device.
        inbox_keys: peers whose NICs may write into memory of this worker's device.
    """

    slots: dict[str, int]
    inboxes: list[str] = []
    inbox_keys: list[str] = []


class LinkWay(msgspec.Struct, array_like=True, frozen=True):
    """How a worker reaches a peer. ``lease``: the part of the peer's arena that the worker may write into."""

    transport: Transport
    descriptor: bytes
    lease: Lease


class Link(msgspec.Struct, tag=True, frozen=True):
    """Engine to worker: connect to these peers and prove that data arrives; answered by Linked.

    Attributes:
        round: number of the round, from 1. Pairs whose link failed are linked again in the next round.
        workers: number of workers that take part in this round.
    """

    round: int
    peers: dict[str, LinkWay]
    workers: int = 2


class Connect(msgspec.Struct, tag=True, frozen=True):
    """Engine to worker: all links are up; answered by Connected.

    Attributes:
        computes: all compute workers, by number.
        memories: all memory workers, by number.
    """

    computes: list[str]
    memories: list[str]
    pipeline: Pipeline
    epoch: Epoch = FIRST


class Step(msgspec.Struct, tag=True, frozen=True):
    """Engine to worker: run this plan, or the part of it that concerns the worker.

    Attributes:
        epoch: epoch of the plan. A worker in a later epoch ignores the plan.
    """

    plan: StepPlan
    epoch: Epoch = FIRST


class EndEpoch(msgspec.Struct, tag=True, frozen=True):
    """Engine to worker: workers were lost; drop every step in flight and begin the epoch of ``topology``.

    Answered by EpochEnded. The worker has applied all plans sent earlier. A compute worker also forgets all requests:
    later plans admit them again.

    Attributes:
        kept: tokens of KV to keep of each sequence that the worker holds. It forgets all other KV.
    """

    topology: Topology
    kept: dict[int, int] = {}


class Recall(msgspec.Struct, tag=True, frozen=True):
    """Engine to worker: the engine before has ended; report what is here of its requests. Answered by Recalled.

    The worker runs none of that engine's steps any more, but for ranks that cannot leave a sum: they answer once they
    have run all that they have. ``EndEpoch`` follows.
    """


class Computed(msgspec.Struct, array_like=True, frozen=True):
    """Completed steps have computed the first ``tokens`` tokens of a sequence, whose KV is where ``segments`` say.

    Attributes:
        request: The request's id.
        index: The completion within the request.
    """

    request: str
    index: int
    sequence: int
    tokens: int
    segments: list[Segment]


class Recalled(msgspec.Struct, tag=True, frozen=True):
    """Worker to engine: the answer to Recall.

    Attributes:
        computed: Sequences whose last slices have run on this compute worker.
        held: Sequences with KV in this worker's slab: of each segment, its first token, its heads [first, stop), and
            how many tokens have slots.
    """

    computed: list[Computed] = []
    held: dict[int, list[tuple[int, int, int, int]]] = {}


class Change(msgspec.Struct, tag=True, frozen=True):
    """Engine to worker: the members have changed within the epoch; answered by Changed.

    New members are linked already. Members that left have no work, but their processes may still run: the worker ends
    its links to them, and keeps their leases until ``Forget``. Replicas only change while no step is in flight.
    """

    number: int
    topology: Topology


class Forget(msgspec.Struct, tag=True, frozen=True):
    """Engine to worker: the processes of these workers have ended; end links to them, if any, and their leases."""

    workers: list[str]


class Release(msgspec.Struct, tag=True, frozen=True):
    """Engine to worker: forget these sequences, outside of any plan."""

    sequences: list[int]


class Observe(msgspec.Struct, tag=True, frozen=True):
    """Engine to worker: somebody watches; answered by Observed, with what was recorded since the Observe before."""


class Stop(msgspec.Struct, tag=True, frozen=True):
    """Engine to worker: exit; answered by Traced if set up with ``trace``."""


class Hello(msgspec.Struct, tag=True, frozen=True):
    """Worker to engine: started.

    Attributes:
        host: identifies the machine, as ``transport.shm.host`` does.
        machine: name of the machine, for people.
        version: version of lamina.
        cores: the numbers of the CPU cores that the worker may use.
        rdma: True if the machine has an RDMA device.
        device: what the worker runs on, as in ``control.sockets.Bootstrap``.
    """

    host: str
    version: str = ""
    machine: str = ""
    cores: list[int] = []
    rdma: bool = False
    device: str = "cpu"


class Inspect(msgspec.Struct, tag=True, frozen=True):
    """Engine to worker, any time: report free memory and the clock. Answered by Resources.

    Attributes:
        sent_ns: time by the engine's monotonic clock.
    """

    sent_ns: int = 0


class Resources(msgspec.Struct, tag=True, frozen=True):
    """Worker to engine: resources at ``now_ns`` of the worker's monotonic clock.

    Attributes:
        sent_ns: copied from Inspect.
        free_bytes: bytes that the worker may allocate.
        machine_bytes: bytes that all processes of the machine together may allocate.
        gpu_bytes: free bytes of the worker's GPU; 0 without a GPU.
        gpu_total: all bytes of the worker's GPU; 0 without a GPU.
        forgets: True if the worker's slab can drop tokens behind a sliding window.
    """

    sent_ns: int
    now_ns: int
    free_bytes: int
    machine_bytes: int
    gpu_bytes: int = 0
    gpu_total: int = 0
    forgets: bool = True


class LoadProgress(msgspec.Struct, tag=True, frozen=True):
    """Worker to engine: ``done`` of ``total`` tensors of ``stage`` are loaded."""

    stage: str
    done: int
    total: int


class ModelLoaded(msgspec.Struct, tag=True, frozen=True):
    """Compute worker to engine: the model is split and its weights are in memory.

    Attributes:
        vocabulary: rows of the embedding.
        context_nbytes: bytes of the largest message from one replica or stage to the next.
        digest: digest of the checkpoint, by ``models.directory``.
        starts: the first slice of each stage.
        weights: how weights are stored, in words; empty: all have ``dtype``.
    """

    attentions: list[AttentionSpec]
    dtype: DType
    parameters: int
    vocabulary: int
    context_nbytes: int
    digest: str = ""
    starts: tuple[int, ...] = (0,)
    weights: str = ""


class SlabReady(msgspec.Struct, tag=True, frozen=True):
    """Worker to engine: the slab is allocated."""


class Registered(msgspec.Struct, tag=True, frozen=True):
    """Worker to engine: the arena exists; this is how peers connect."""

    offer: Offer


class Granted(msgspec.Struct, tag=True, frozen=True):
    """Worker to engine: the leases, by peer. ``obstacle``: why there are no leases; empty if there are."""

    leases: dict[str, Lease]
    obstacle: str = ""


class Linked(msgspec.Struct, tag=True, frozen=True):
    """Worker to engine: it is linked with its peers.

    Attributes:
        failures: peers with which it could not exchange proofs, with the reasons.
    """

    failures: dict[str, str]


class Connected(msgspec.Struct, tag=True, frozen=True):
    """Worker to engine: ready for steps."""


class StepDone(msgspec.Struct, tag=True, frozen=True):
    """Compute worker to engine: the step has run.

    Attributes:
        tokens: the tokens drawn, in the order of ``StepPlan.drawing``, without those of ``undrawable`` sequences.
        logprobs: log-probabilities packed by ``packed_logprobs``, by sequence that wants them.
        undrawable: sequences without a token because their logits are not finite, as ``error`` says.
        rows: rows that went through the slices.
        busy_s: total time of the slices.
        waited_s: total time that slices waited for attention; 0 if unknown. Estimated from the slices whose
            predecessor this worker ran, and at which it was idle when the attention arrived.
        starved_s: time that this worker had nothing to run before the step's plan came.
    """

    step: int
    tokens: list[int]
    logprobs: dict[int, bytes] = {}
    undrawable: list[int] = []
    error: str = ""
    rows: int = 0
    busy_s: float = 0.0
    waited_s: float = 0.0
    starved_s: float = 0.0

    def drawn(self, plan: StepPlan) -> Iterator[tuple[int, int]]:
        """Yield each sequence for which ``plan``, the step's, has drawn a token, and the token.

        Raises ValueError if tokens are missing or too many.
        """
        sequences, without = plan.drawing, self.undrawable
        if without:
            sequences = [sequence for sequence in sequences if sequence not in without]
        return zip(sequences, self.tokens, strict=True)


class SlabUsage(msgspec.Struct, tag=True, frozen=True):
    """Worker with a slab to engine, every ``USAGE_S`` until two in a row are equal, and as soon as the slab is empty.

    Attributes:
        used: slots in use.
        sequences: number of sequences with KV in the slab.
        busy_s: time spent on attention so far.
        parked: messages that have waited for the watermark of a sequence so far.
        parked_nbytes: bytes in them.
    """

    used: int
    sequences: int
    busy_s: float = 0.0
    parked: int = 0
    parked_nbytes: int = 0


USAGE_S = 0.9  # time between two SlabUsage of one worker, below ``PING_S``: a worker that reports gets no pings
REPORT_S = 1.0  # least time between two Working of one worker


class Working(msgspec.Struct, tag=True, frozen=True):
    """Worker to engine, at most every ``REPORT_S`` during long steps: these lanes make progress."""

    lanes: list[int]


class KvMoved(msgspec.Struct, tag=True, frozen=True):
    """Memory worker to engine: all KV of move ``number`` from worker ``source`` has arrived."""

    number: int
    source: str


class Stored(msgspec.Struct, tag=True, frozen=True):
    """Memory worker to engine: Spill or Fetch ``number`` is over.

    Attributes:
        complete: False if some blocks were not copied, because the disk failed or the sequence was released.
        error: the disk's error; empty if there was none.
    """

    number: int
    complete: bool
    error: str = ""


class EpochEnded(msgspec.Struct, tag=True, frozen=True):
    """Worker to engine: it has dropped the steps of all epochs before ``epoch``, and sends no more of their messages.

    Attributes:
        missing: peers whose messages of an earlier epoch may still arrive. Once there are none, EpochEnded is sent
            again.
    """

    epoch: Epoch
    missing: list[str]


class Changed(msgspec.Struct, tag=True, frozen=True):
    """Worker to engine: it has applied Change ``number``, and sends nothing to members that have left."""

    number: int


class PeerLost(msgspec.Struct, tag=True, frozen=True):
    """Worker to engine: it has no link to ``peer`` any more. Its steps stop until the epoch ends."""

    peer: str
    reason: str


class Observed(msgspec.Struct, tag=True, frozen=True):
    """Worker to engine: what it did in the window that the Observe before this one began.

    Attributes:
        sent_ns: by the worker's monotonic clock.
    """

    sent_ns: int
    spans: list[Span]


class Traced(msgspec.Struct, tag=True, frozen=True):
    """Worker to engine, its last message: the spans of its timeline."""

    spans: list[Span]


class Failed(msgspec.Struct, tag=True, frozen=True):
    """Worker to engine: it cannot continue.

    Attributes:
        kind: class name of the exception.
        user: True if the exception is a UserError.
        machine: name of the machine, for people.
    """

    kind: str
    message: str
    user: bool
    traceback: str
    machine: str = ""


ToWorker = (
    ComputeSetup
    | MemorySetup
    | Reserve
    | Inspect
    | Register
    | Grant
    | Link
    | Connect
    | Step
    | Release
    | EndEpoch
    | Recall
    | Change
    | Forget
    | Observe
    | Stop
)
ToEngine = (
    Hello
    | Resources
    | LoadProgress
    | ModelLoaded
    | SlabReady
    | Registered
    | Granted
    | Linked
    | Connected
    | StepDone
    | SlabUsage
    | Working
    | KvMoved
    | Stored
    | EpochEnded
    | Recalled
    | Changed
    | PeerLost
    | Observed
    | Traced
    | Failed
)
