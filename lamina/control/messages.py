"""Messages of the control plane, encoded with msgspec's MessagePack. Small, and sent once a step at most."""

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
)
from lamina.dataplane.leases import ArenaPlan, Lease
from lamina.dataplane.transport_choice import Offer, Transport


class ComputeSetup(msgspec.Struct, tag=True, frozen=True):
    """Engine to compute worker: load this model.

    Attributes:
        rows: most rows of a step.
        overlap: how steps are sent to memory workers.
        head_workers: most memory workers that share the heads of a sequence (``HeadShards.over``).
        local: a MemorySetup follows once the model is loaded, for a slab in the worker's own memory.
        source: of the model's files, for machines that do not have them under this path.
        rank: which of ``ranks`` parts of every slice to load.
        sequences: most sequences that draw a token in a step.
        meeting: a path in a folder of the engine's machine by which the ranks of a replica on GPUs join. The folder is
            removed once they have loaded the model.
        stage: which of ``stages`` parts of the slices to load.
        quantization: of the weights of linear layers.
        activation_dtype: of what linear layers multiply by weights held as codes.
        gpu_share: the part of a GPU's memory that all its processes together may use.
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
    sequences: int = 1
    meeting: str = ""
    stage: int = 0
    stages: int = 1
    quantization: Quantization = "none"
    activation_dtype: ActivationDType = "auto"
    gpu_share: float = 1.0


class MemorySetup(msgspec.Struct, tag=True, frozen=True):
    """Engine to memory worker, or to a compute worker with local memory: make a slab for these attentions.

    Attributes:
        dtype: the model's element type, which messages have.
        capacity: of the slab, in tokens.
        kv_cache_dtype: what the slab holds.
        head_shards: parts into which the heads of every attention are cut (``lamina.core.heads``).
        overcommit: the slab and a file in ``spill_dir`` together hold so many times the tokens of the slab.
        ranks: of a replica, which share the head shards.
        forgets: layers with a window keep no tokens that it has left.
        polling: who waits for messages.
        gpu_share: as in ComputeSetup.
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
    forgets: bool = False
    polling: Polling = "host"
    gpu_share: float = 1.0


class Reserve(msgspec.Struct, tag=True, frozen=True):
    """Engine to worker, before MemorySetup: allocate the device memory that steps need beside the slab, and compile
    kernels. Free memory is asked for afterwards.

    Attributes:
        setup: the MemorySetup that follows, with the largest capacity that it may have.
        rows: most rows of a step.
        sequences: most sequences of a step.
        steps: most steps that are planned at once, of all lanes.
        slot_rows: rows that a slot holds.
    """

    setup: MemorySetup
    rows: int
    sequences: int
    steps: int
    slot_rows: int
    lanes: int = 1


class Register(msgspec.Struct, tag=True, frozen=True):
    """Engine to worker: make this arena and let peers connect by these transports; answered by Registered.

    Attributes:
        spin_s: seconds for which waits busy-wait before they sleep, if all links use one transport.
        tls: only transports that are encrypted or stay on one machine may be used.
        open: later workers may link by a transport that no link uses yet.
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
        inboxes: peers whose devices may be able to write into an inbox here.
        inbox_keys: peers whose NICs may be able to.
    """

    slots: dict[str, int]
    inboxes: list[str] = []
    inbox_keys: list[str] = []


class LinkWay(msgspec.Struct, array_like=True, frozen=True):
    """How a worker reaches a peer.

    Attributes:
        lease: the part of the peer's arena that the worker may write into.
    """

    transport: Transport
    descriptor: bytes
    lease: Lease


class Link(msgspec.Struct, tag=True, frozen=True):
    """Engine to worker: connect to these peers and prove that data arrives; answered by Linked.

    Attributes:
        round: counts up from 1. Pairs that could not prove a link are linked again in the next round.
        workers: that take part in this round.
    """

    round: int
    peers: dict[str, LinkWay]
    workers: int = 2


class Connect(msgspec.Struct, tag=True, frozen=True):
    """Engine to worker: all links are up; answered by Connected.

    Attributes:
        computes: all compute workers; the number of one is its index.
        memories: all memory workers; the number of one is its index.
        epoch: the current one.
    """

    computes: list[str]
    memories: list[str]
    pipeline: Pipeline
    epoch: Epoch = FIRST


class Step(msgspec.Struct, tag=True, frozen=True):
    """Engine to worker: run this plan, or the part of it that concerns the worker.

    Attributes:
        epoch: of the plan. A worker that is in a later epoch ignores it.
    """

    plan: StepPlan
    epoch: Epoch = FIRST


class EndEpoch(msgspec.Struct, tag=True, frozen=True):
    """Engine to worker: workers were lost; drop every step in flight and be ready for the epoch of ``topology``.

    Answered by EpochEnded. All plans sent before it have been applied. A compute worker also forgets what it knows of
    requests: plans tell it again what it needs.

    Attributes:
        kept: tokens of KV to keep of each sequence that the worker holds. It forgets all other KV.
    """

    topology: Topology
    kept: dict[int, int] = {}


class Change(msgspec.Struct, tag=True, frozen=True):
    """Engine to worker: these are the members from now on, and the epoch goes on; answered by Changed.

    New members are linked already. Those that are not named any more do nothing, but may still run: the worker ends its
    links to them, and keeps their leases until ``Forget``. Replicas only change while no step is in flight.
    """

    number: int
    topology: Topology


class Forget(msgspec.Struct, tag=True, frozen=True):
    """Engine to worker: the processes of these have ended; end links to them, if any, and their leases."""

    workers: list[str]


class Release(msgspec.Struct, tag=True, frozen=True):
    """Engine to worker: forget these sequences, which no plan for this worker has released."""

    sequences: list[int]


class Stop(msgspec.Struct, tag=True, frozen=True):
    """Engine to worker: exit; answered by Traced if set up with ``trace``."""


class Hello(msgspec.Struct, tag=True, frozen=True):
    """Worker to engine: started.

    Attributes:
        host: see ``transport.shm``.
        machine: its name for people.
        version: of lamina.
        cores: the numbers of the CPU cores that the worker may use.
        rdma: the machine has an RDMA device.
    """

    host: str
    version: str = ""
    machine: str = ""
    cores: list[int] = []
    rdma: bool = False


class Inspect(msgspec.Struct, tag=True, frozen=True):
    """Engine to worker, any time: what is free on your machine, and what time is it there? Answered by Resources.

    ``sent_ns``: by the engine's monotonic clock.
    """

    sent_ns: int = 0


class Resources(msgspec.Struct, tag=True, frozen=True):
    """Worker to engine: at ``now_ns`` of its monotonic clock.

    Attributes:
        sent_ns: as in Inspect.
        free_bytes: that the worker may allocate.
        machine_bytes: that all processes of its machine together may.
        gpu_bytes, gpu_total: free on its GPU, and all of it; 0: it has none.
        forgets: its slab can, see MemorySetup.
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
        context_nbytes: of the largest message from one replica or stage to the next.
        digest: of the checkpoint, see ``models.directory``.
        starts: the first slice of each stage.
        weights: how they are held, in words; empty: all have ``dtype``.
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
    """Worker to engine: the leases, by peer.

    Attributes:
        obstacle: why there are none.
    """

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


class Draw(msgspec.Struct, array_like=True, frozen=True):
    """The token drawn for one sequence.

    Attributes:
        logprobs: packed by ``control.logprobs``; empty if none are wanted.
    """

    sequence: int
    token: int
    logprobs: bytes = b""


class StepDone(msgspec.Struct, tag=True, frozen=True):
    """Compute worker to engine: the step has run.

    Attributes:
        draws: one for each sequence named in ``draws`` of the plan.
        undrawable: sequences without a draw because their logits are not finite, as ``error`` says.
        rows: that went through the slices.
        busy_s: time that the slices took in all.
        waited_s: time that slices waited for attention in all, estimated from those where this worker ran the slice
            before and was idle when the attention arrived; 0 without any.
    """

    step: int
    draws: list[Draw]
    undrawable: list[int] = []
    error: str = ""
    rows: int = 0
    busy_s: float = 0.0
    waited_s: float = 0.0


class SlabUsage(msgspec.Struct, tag=True, frozen=True):
    """Worker with a slab to engine, every ``USAGE_S`` until two in a row are equal, and as soon as the slab is empty.

    Attributes:
        used: slots in use.
        sequences: that it holds KV of.
        busy_s: time spent on attention so far.
    """

    used: int
    sequences: int
    busy_s: float = 0.0


USAGE_S = 0.5  # between two SlabUsage of one worker
REPORT_S = 1.0  # least time between two Working of one worker


class Working(msgspec.Struct, tag=True, frozen=True):
    """Worker to engine, now and then during long steps: it makes progress with these lanes."""

    lanes: list[int]


class Migrated(msgspec.Struct, tag=True, frozen=True):
    """Memory worker to engine: everything that migration ``number`` brings has arrived."""

    number: int


class Stored(msgspec.Struct, tag=True, frozen=True):
    """Memory worker to engine: Spill or Fetch ``number`` is over.

    Attributes:
        complete: False if some blocks were not copied, because the disk failed or the sequence was released.
        error: of its disk.
    """

    number: int
    complete: bool
    error: str = ""


class EpochEnded(msgspec.Struct, tag=True, frozen=True):
    """Worker to engine: it has dropped the steps of all epochs before ``epoch`` and sends nothing of them any more.

    Attributes:
        missing: peers whose messages of an earlier epoch may still arrive. EpochEnded is sent again without any.
    """

    epoch: Epoch
    missing: list[str]


class Changed(msgspec.Struct, tag=True, frozen=True):
    """Worker to engine: it has applied Change ``number``, and sends nothing to those that have left."""

    number: int


class PeerLost(msgspec.Struct, tag=True, frozen=True):
    """Worker to engine: it has no link to ``peer`` any more. Its steps stop until the epoch ends."""

    peer: str
    reason: str


class Traced(msgspec.Struct, tag=True, frozen=True):
    """Worker to engine, its last message: what it did when."""

    spans: list[Span]


class Failed(msgspec.Struct, tag=True, frozen=True):
    """Worker to engine: it cannot continue.

    Attributes:
        kind: the exception's class name.
        user: the exception is a UserError.
        machine: as in Hello.
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
    | Change
    | Forget
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
    | Migrated
    | Stored
    | EpochEnded
    | Changed
    | PeerLost
    | Traced
    | Failed
)
