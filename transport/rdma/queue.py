"""Queue pairs of an RDMA device, and the memory they send from. ``verbs`` are the modules of pyverbs."""

import contextlib
import errno
import os
import secrets
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from lamina._native import DOORBELL_NBYTES
from lamina._native import Arena as NativeArena
from lamina.core.errors import PeerLostError, TransportError
from lamina.transport.arena import allocate
from lamina.transport.base import DeviceMemory, Fetch, Part, part_nbytes
from lamina.transport.rdma.events import Events, Receiver
from lamina.transport.rdma.ports import INFINIBAND, SelectedPort

STAGING_NBYTES = 4 << 20  # most bytes in flight to one peer
CHUNK_NBYTES = STAGING_NBYTES // 4
QUEUE_DEPTH = 256  # most writes, or reads, in flight to one peer
READS = 4  # reads that a queue pair executes at once; every device supports 4
NUMBER = 8  # bytes of a sequence number

# Likely cause of a failed request for the operator, by ibv_wc_status.
REMEDIES = {
    5: "an earlier failure of the same connection stopped it",
    10: "the peer no longer allows access to its arena: it has closed it",
    12: "the peer does not answer: check that both ports are up, that the network lets UDP port 4791 pass (RoCE v2), "
    "and that the MTU is the same along the path",
    13: "the peer has not received messages for too long: check whether its process still runs",
}

# Cause and remedy when a NIC's driver rejects a dma-buf, by the errno of ibv_reg_dmabuf_mr.
REFUSALS = {
    errno.EOPNOTSUPP: "its driver does not support dma-bufs; use a NIC whose driver does (mlx5 of Linux 5.12 or later)",
    errno.EPROTONOSUPPORT: "the kernel does not support dma-bufs for RDMA; use Linux 5.12 or later",
    errno.EBADF: "the device's driver did not export a valid dma-buf",
    errno.EINVAL: "it cannot map the device's memory: both must be behind PCIe bridges that allow peer-to-peer access",
    errno.ENOMEM: "it cannot map that much memory; raise the limit of locked memory (ulimit -l unlimited)",
}


class Pair(msgspec.Struct, array_like=True, frozen=True):
    """The end of a queue pair, as the other end needs it to connect."""

    number: int
    first_packet: int
    gid: str
    lid: int
    mtu: int  # ibv_mtu


class RemoteMemory(msgspec.Struct, array_like=True, frozen=True):
    """Memory that a peer may write: its key, and its address for the owner's RDMA device."""

    key: int
    address: int


class Granted(msgspec.Struct, array_like=True, frozen=True):
    """The answer to the request for a queue pair: its other end, and the two parts of the arena."""

    pair: Pair
    data: RemoteMemory
    doorbells: RemoteMemory


class Device:
    """An open port, its protection domain, this process's registered arena, and the receiver of notifications.

    Attributes:
        local_key: key of the arena for this process.
        data: the arena's bytes, for peers.
        doorbells: the arena's doorbells, for peers.
    """

    def __init__(self, verbs: Any, selected: SelectedPort, arena: NativeArena) -> None:
        self.verbs = verbs
        self.selected = selected
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as stack, self.translated(f"cannot open {selected.port}"):
            self.context = stack.enter_context(contextlib.closing(verbs.device.Context(name=selected.port.device)))
            self.mtu: int = self.context.query_port(selected.port.number).active_mtu
            self.gid: str = self.context.query_gid(selected.port.number, selected.gid.index).gid
            self.domain = stack.enter_context(contextlib.closing(verbs.pd.PD(self.context)))
            enums = verbs.enums
            access = enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_WRITE | enums.IBV_ACCESS_REMOTE_READ
            nbytes = arena.data_address - arena.doorbells_address + arena.nbytes
            host = stack.enter_context(contextlib.closing(self.registered(arena.doorbells_address, nbytes, access)))
            self.local_key: int = host.lkey
            self.doorbells = RemoteMemory(host.rkey, arena.doorbells_address)
            self.data = RemoteMemory(host.rkey, arena.data_address)
            receiver = Receiver(verbs, self.context, self.domain, self.doorbells.address, self.local_key)
            self.receiver = stack.enter_context(contextlib.closing(receiver))
            self._stack = stack.pop_all()

    def registered(self, address: int, nbytes: int, access: int) -> Any:
        """Register memory with the device; the caller closes the region."""
        try:
            return self.verbs.mr.MR(self.domain, nbytes, access, address=address)
        except self.verbs.error as error:
            raise TransportError(
                f"{self.selected.port.device} cannot register {nbytes} bytes: {error}; raise the limit of locked "
                "memory (ulimit -l unlimited, or LimitMEMLOCK=infinity in a unit file)"
            ) from error

    @contextlib.contextmanager
    def translated(self, what: str) -> Iterator[None]:
        """Convert pyverbs' errors to TransportError."""
        try:
            yield
        except self.verbs.error as error:
            raise TransportError(f"{what}: {error}") from error

    def close(self) -> None:
        self._stack.close()


def register_memory(verbs: Any, domain: Any, nic: str, memory: DeviceMemory, access: int) -> tuple[Any, int]:
    """Register a device's memory with ``nic``. Returns the region, and its address as NICs see it.

    Raises TransportError with the reason if one of the drivers refuses.
    """
    exported = memory.export()
    try:
        if exported is None:
            return verbs.mr.MR(domain, memory.nbytes, access, address=memory.address), memory.address
        region = verbs.mr.DmaBufMR(domain, exported.nbytes, access, dmabuf=exported.fd, offset=exported.offset)
        return region, exported.offset  # with pyverbs, the NIC addresses the bytes of a dma-buf by their offset
    except verbs.error as error:
        raise TransportError(f"{nic} rejected memory of {memory.name}: {refusal(error)}") from error
    finally:
        if exported is not None:
            os.close(exported.fd)  # the registration keeps the memory


def refusal(error: Exception) -> str:
    """Return why a NIC's driver has rejected a dma-buf, given pyverbs' error, and the remedy."""
    number = getattr(error, "error_code", 0)
    why = REFUSALS.get(number, "the kernel's log may say more")
    return f"{error} (errno {number}): {why}"


class QueuePair:
    """A reliable queue pair and its completions.

    Args:
        accepted: True for the receiving end, over which the peer writes into the arena; this side only gets the
            notifications.
    """

    def __init__(self, device: Device, *, accepted: bool = False) -> None:
        self._device = device
        verbs, enums = device.verbs, device.verbs.enums
        writes = enums.IBV_QP_EX_WITH_RDMA_WRITE | enums.IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM
        with contextlib.ExitStack() as stack, device.translated("cannot make a queue pair"):
            self.events = device.receiver.events
            if not accepted:
                self.events = stack.enter_context(contextlib.closing(Events(verbs, device.context, QUEUE_DEPTH)))
            wanted = verbs.qp.QPInitAttrEx(
                qp_type=enums.IBV_QPT_RC,
                scq=self.events.completions,
                rcq=self.events.completions,
                srq=device.receiver.queue if accepted else None,
                cap=verbs.qp.QPCap(max_send_wr=QUEUE_DEPTH, max_recv_wr=1, max_send_sge=1, max_recv_sge=1),
                pd=device.domain,
                comp_mask=enums.IBV_QP_INIT_ATTR_PD | enums.IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
                send_ops_flags=writes | enums.IBV_QP_EX_WITH_RDMA_READ,
            )
            self.queue = stack.enter_context(contextlib.closing(verbs.qp.QPEx(device.context, wanted)))
            self._stack = stack.pop_all()
        self.local = Pair(self.queue.qp_num, secrets.randbits(24), device.gid, device.selected.port.lid, device.mtu)

    def join(self, other: Pair) -> None:
        """Connect to the other end. Raises TransportError."""
        verbs, port, gid = self._device.verbs, self._device.selected.port, self._device.selected.gid
        with self._device.translated(f"{port.device} cannot reach {other.gid}"):
            attributes = verbs.qp.QPAttr(port_num=port.number)
            enums = verbs.enums
            attributes.qp_access_flags = enums.IBV_ACCESS_REMOTE_WRITE | enums.IBV_ACCESS_REMOTE_READ
            attributes.max_rd_atomic = attributes.max_dest_rd_atomic = READS
            attributes.path_mtu = min(self.local.mtu, other.mtu)
            attributes.dest_qp_num = other.number
            attributes.rq_psn = other.first_packet
            attributes.sq_psn = self.local.first_packet
            attributes.timeout = 14  # 67 ms until a packet is sent again ...
            attributes.retry_cnt = 7  # ... up to 7 times
            attributes.rnr_retry = 7
            attributes.min_rnr_timer = 12
            route = verbs.addr.GlobalRoute(dgid=verbs.addr.GID(other.gid), sgid_index=gid.index)
            attributes.ah_attr = verbs.addr.AHAttr(
                gr=route,
                is_global=int(port.link_layer != INFINIBAND),
                dlid=other.lid,
                port_num=port.number,
            )
            self.queue.to_rts(attributes)

    def poll_completions(self, what: str) -> tuple[int, str]:
        """Return the number of requests completed since the last call, and the reason if the next one failed.

        ``what`` names a request in the reason.
        """
        count, completions = self.events.completions.poll(QUEUE_DEPTH)
        for done, completion in enumerate(completions[:count]):
            if completion.status != self._device.verbs.enums.IBV_WC_SUCCESS:
                remedy = REMEDIES.get(completion.status, "the kernel's log may say more")
                return done, (
                    f"{what} failed with verbs status {completion.status} "
                    f"(vendor error {completion.vendor_err}): {remedy}"
                )
        return count, ""

    def close(self) -> None:
        self._stack.close()


class Sender:
    """Sends messages to one peer from registered memory, a ring buffer that completions free."""

    def __init__(self, device: Device, pair: QueuePair, granted: Granted, peer: str) -> None:
        self._pair, self._peer = pair, peer
        self._arena, self._doorbells = granted.data, granted.doorbells
        self._queue = pair.queue
        enums = device.verbs.enums
        self._signalled = enums.IBV_SEND_SIGNALED
        self._receiver = device.receiver
        self._staging_file = allocate(peer, STAGING_NBYTES, 1)
        self._staging = self._staging_file.native
        self._view = memoryview(self._staging)
        self._memory = device.registered(self._staging.data_address, STAGING_NBYTES, enums.IBV_ACCESS_LOCAL_WRITE)
        self._address = self._staging.data_address
        self._element = device.verbs.wr.SGE(self._address, 0, self._memory.lkey)
        self._written = 0  # bytes of staging handed out so far
        self._freed = 0  # bytes of staging freed so far
        self._ends: deque[int] = deque()  # by post in flight: value of ``_freed`` once it has completed
        self.failure = ""

    def write_and_ring(
        self,
        offset: int,
        parts: Sequence[Part],
        total: int,
        ring: tuple[int, int] | None,
        stall_s: float,
        target: RemoteMemory | None = None,
    ) -> None:
        """Write the parts of ``total`` bytes to ``offset`` of the peer's arena or of ``target``, then ring.

        ``ring``: (doorbell, sequence).
        """
        there = target or self._arena
        if total <= CHUNK_NBYTES:
            at = self._stage(parts, total, stall_s)
            self._post(at, there, offset, total, ring)
            return
        for view in [_flat(part) for part in parts]:
            for start in range(0, view.nbytes, CHUNK_NBYTES):
                chunk = view[start : start + CHUNK_NBYTES]
                at = self._stage([chunk], chunk.nbytes, stall_s)
                self._post(at, there, offset, chunk.nbytes, None)
                offset += chunk.nbytes
        if ring is not None:
            self._post(self._stage([], 0, stall_s), there, 0, 0, ring)

    def process_completions(self) -> None:
        """Process completions. Keeps the first failure."""
        done, failure = self._pair.poll_completions("a write to it")
        self.failure = self.failure or failure
        for _ in range(done):
            self._freed = self._ends.popleft()

    def close(self) -> None:
        """Release all memory, after all messages have arrived or one second has passed."""
        deadline = time.monotonic() + 1.0
        with contextlib.suppress(Exception):  # the device may have been removed
            while self._ends and not self.failure and time.monotonic() < deadline:
                self.process_completions()
        self._pair.close()
        self._memory.close()
        self._staging_file.close()

    def _stage(self, parts: Sequence[Part], nbytes: int, stall_s: float) -> int:
        """Copy parts, and space for a sequence number, into free staging memory. Returns their offset."""
        space = -(-nbytes // NUMBER) * NUMBER + NUMBER
        at = self._written % STAGING_NBYTES
        if at + space > STAGING_NBYTES:
            self._written += STAGING_NBYTES - at
            at = 0
        if self._is_full(space) or len(self._ends) >= QUEUE_DEPTH // 4:
            self._wait_for_space(space, stall_s)
        self._written += space
        place = at
        for part in parts:
            self._staging.write(place, part)
            place += part_nbytes(part)
        return at

    def _is_full(self, space: int) -> bool:
        return self._written + space - self._freed > STAGING_NBYTES or len(self._ends) >= QUEUE_DEPTH // 2

    def _wait_for_space(self, space: int, stall_s: float) -> None:
        self.process_completions()
        deadline = time.monotonic() + stall_s
        while self._is_full(space) and not self.failure:
            if time.monotonic() > deadline:
                self.failure = f"it has accepted no bytes for {stall_s:g} s"
                break
            self._receiver.refill()  # otherwise two endpoints that only send to each other would block each other
            time.sleep(0)
            self.process_completions()
        if self.failure:
            raise PeerLostError(self._peer, self.failure)

    def _post(self, at: int, there: RemoteMemory, offset: int, nbytes: int, ring: tuple[int, int] | None) -> None:
        """Post a write of the data, if any, and of the doorbell, if any; the last write reports its completion."""
        queue, element, doorbells = self._queue, self._element, self._doorbells
        queue.wr_start()
        if nbytes or ring is None:
            queue.wr_flags = 0 if ring else self._signalled
            queue.wr_rdma_write(there.key, there.address + offset)
            element.addr, element.length = self._address + at, nbytes
            queue.wr_set_sge(element)
        if ring is not None:
            doorbell, sequence = ring
            place = at + -(-nbytes // NUMBER) * NUMBER
            self._view[place : place + NUMBER] = sequence.to_bytes(NUMBER, "little")
            queue.wr_flags = self._signalled
            queue.wr_rdma_write_imm(doorbells.key, doorbells.address + doorbell * DOORBELL_NBYTES, 0)
            element.addr, element.length = self._address + place, NUMBER
            queue.wr_set_sge(element)
        queue.wr_complete()
        self._ends.append(self._written)


class Reader:
    """Reads from one peer's arena into this process's arena, and rings a doorbell there as each read completes."""

    def __init__(self, device: Device, pair: QueuePair, granted: Granted, own: NativeArena, peer: str) -> None:
        self._pair, self._there, self._own, self._peer = pair, granted.data, own, peer
        self._signalled = device.verbs.enums.IBV_SEND_SIGNALED
        self._to = device.data.address
        self._element = device.verbs.wr.SGE(self._to, 0, device.local_key)
        self._rings: deque[tuple[int, int]] = deque()  # (doorbell, sequence) of every read in flight
        self.failure = ""

    @property
    def events(self) -> Events | None:
        """The event source of completed reads; None while no read is in flight."""
        return self._pair.events if self._rings else None

    def fetch(self, fetch: Fetch, stall_s: float) -> None:
        """Post one read. Raises PeerLostError if the queue is full and no read has completed for ``stall_s``."""
        deadline = time.monotonic() + stall_s
        while len(self._rings) == QUEUE_DEPTH and not self.failure:
            self.process_completions()
            if time.monotonic() > deadline:
                self.failure = f"no read from it has completed for {stall_s:g} s"
        if self.failure:
            raise PeerLostError(self._peer, self.failure)
        queue, element = self._pair.queue, self._element
        queue.wr_start()
        queue.wr_flags = self._signalled
        queue.wr_rdma_read(self._there.key, self._there.address + fetch.offset)
        element.addr, element.length = self._to + fetch.to, fetch.nbytes
        queue.wr_set_sge(element)
        queue.wr_complete()
        self._rings.append((fetch.doorbell, fetch.sequence))

    def process_completions(self) -> None:
        """Process completions. Keeps the first failure."""
        done, failure = self._pair.poll_completions("a read from it")
        self.failure = self.failure or failure
        for _ in range(done):
            self._own.ring(*self._rings.popleft())

    def close(self) -> None:
        """Destroy the queue pair; reads in flight are discarded."""
        self._pair.close()


def _flat(part: Any) -> memoryview:
    """Return the bytes of a part as a flat view. Raises ValueError unless it is contiguous."""
    view = memoryview(part)
    if not view.c_contiguous:
        raise ValueError("a part is not C-contiguous; copy it first")
    if isinstance(part, np.ndarray):
        view = memoryview(part.reshape(-1).view(np.uint8).data)
    return view.cast("B")
