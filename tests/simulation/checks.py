"""What must hold in a simulated run: after each turn of the engine, and once nothing is left to do.

That each head of each token was seen exactly once is proved by the tokens drawn (``tests.simulation.model``). Checked
here is what tokens do not show: who owns slots, slots of messages, leases and requests.
"""

import collections
import contextlib
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

from lamina.compute.worker import ComputeWorker
from lamina.core.types import Segment
from lamina.memory.device.windows import Rows, Windows
from lamina.memory.slab import Slab
from lamina.memory.store import KvStore
from lamina.memory.worker import MemoryWorker
from tests.simulation.world import Broken
from tests.support.disk_blocks import unaccounted

if TYPE_CHECKING:
    from tests.simulation.cluster import Simulation

MOST_WAITING = 2000  # messages of workers that the engine has not read


def require(holds: bool, what: str) -> None:
    """Raise Broken unless ``holds``."""
    if not holds:
        raise Broken(what)


def check_turn(run: "Simulation") -> None:
    """Check what must hold whenever the engine has planned."""
    engine: Any = run.engine
    scheduler = engine._scheduler
    require(not run.processes.broken, "; ".join(run.processes.broken))
    running = collections.Counter(group for lane in scheduler._lanes for group in lane.running)
    waiting = collections.Counter([*scheduler._admissions._queue, *scheduler._admissions._skipped])
    waiting.update(list(scheduler._holding._waiting))
    waiting.update(list(scheduler.disks.held))
    for name, group in scheduler._requests.items():
        places = running[group] + waiting[group]
        ended = all(one.finished for one in group.completions)
        require(places == 1 or (ended and not places), f"{name} is in {places} places, {'ended' if ended else 'open'}")
        for completion in group.completions if group.lane >= 0 else ():
            stops = [0, *(one.tokens[1] for one in completion.segments)]
            starts = [one.tokens[0] for one in completion.segments]
            tiled = starts == stops[:-1] and stops[-1] is None
            require(tiled or completion.finished, f"sequence {completion.sequence} of {name} has {completion.segments}")
    known = scheduler._requests.keys()
    strangers = [
        group.request.request_id
        for group in running | waiting
        if group.request.request_id not in known and not all(one.finished for one in group.completions)
    ]
    require(not strangers, f"{', '.join(strangers)} are planned, but unknown")
    for lane in scheduler._lanes:
        for group in lane.running:
            until = max(group.until, *(one.until for one in group.completions))
            name, steps = group.request.request_id, lane.decoding.steps
            require(until <= steps, f"{name} waits for step {until} of lane {lane.number}, which has planned {steps}")
    _check_known(engine, running)
    aborted = run.frontends.aborted()
    late = sorted(aborted & run.aborted)
    require(not late, f"{', '.join(late)} run on, although their frontends have told the engine to abort them")
    run.aborted = aborted
    placement = scheduler.placement
    for place, reserved in placement.reserved.items():
        require(0 <= placement.returning[place] <= reserved, f"{reserved} slots of {place} are reserved")
        require(placement.idle[place] >= 0, f"{placement.idle[place]} slots of {place} are idle")
    require(run.processes.server.most_waiting < MOST_WAITING, "the engine has not read too many messages")
    living = [*run.processes.living.values()]
    for one in living:
        late = sorted({sender for sender, _, _ in one.overlooked})
        require(not late, f"{one.name} left messages of {', '.join(late)} unread for more than a slice")
    process = living[run.turns % len(living)] if living else None  # each in turn: it takes long
    if process is not None and (store := _store(process.worker)) is not None:
        _check_slab(process.name, store.slab)
        _check_order(process.name, store.held.segments)
    if process is not None and isinstance(process.worker, ComputeWorker):
        _check_order(process.name, process.worker._sequences.segments)


def _check_known(engine: Any, running: "collections.Counter[Any]") -> None:
    """The engine knows which workers know each sequence that a plan has admitted."""
    known, lanes = engine._members.recipients._known, engine._scheduler._lanes
    for group in running:
        for completion in () if group in lanes[group.lane].dealt else group.completions:
            told = completion.released or completion.sequence in known
            name = group.request.request_id
            require(told, f"no worker would be told of sequence {completion.sequence} of {name}, which runs")


def _check_order(name: str, segments: Mapping[int, Sequence[Segment]]) -> None:
    """Segments are listed by first token, and no two of them hold the same head of a token."""
    for sequence, held in segments.items():
        starts = [one.tokens[0] for one in held]
        require(starts == sorted(starts), f"{name} lists segments of sequence {sequence} out of order: {held}")
        for head in range(max((one.heads[1] for one in held), default=0)):
            spans = [one.tokens for one in held if one.heads[0] <= head < one.heads[1]]
            apart = all(stop is not None and stop <= start for (_, stop), (start, _) in itertools.pairwise(spans))
            require(apart, f"{name} holds tokens of head {head} of sequence {sequence} twice: {held}")


def _check_told(name: str, store: KvStore, known: Collection[Any]) -> None:
    """The engine knows of every segment with tokens, and so releases it at some time."""
    told = {
        (one.sequence, one.tokens[0], one.heads)
        for each in known
        for one in each.segments
        if one.worker == store.worker
    }
    held = {
        (sequence, first, (start, stop))
        for sequence, segments in store.held.lengths.items()
        for first, start, stop, tokens in segments
        if tokens
    }
    require(
        held <= told, f"the engine does not know of (sequence, first token, heads) {held - told}, which {name} holds"
    )


@contextlib.contextmanager
def rows_watched(run: "Simulation") -> Iterator[None]:
    """Let memory workers fail that free rows of windows under a step that brings their tokens."""
    collect = Windows._collect

    def watched(windows: Windows, arriving: Rows) -> None:
        before = windows._rows >= 0
        collect(windows, arriving)
        for one in run.processes.living.values():
            worker = one.worker
            if isinstance(worker, MemoryWorker) and worker._store.held is windows._needed.__self__:  # type: ignore[attr-defined]
                for step in itertools.chain.from_iterable(lane.steps for lane in worker._lanes):
                    slots = np.concatenate([step.slots, step.pulled_slots])
                    lost = int((before[slots] & (windows._rows[slots] < 0)).sum())
                    require(not lost, f"rows of {lost} tokens were freed during the step that brings them")

    with mock.patch.object(Windows, "_collect", watched):
        yield


def _store(worker: object) -> KvStore | None:
    """Return the KV of a worker, if it holds any."""
    if isinstance(worker, MemoryWorker):
        return worker._store
    local = isinstance(worker, ComputeWorker) and worker._memory
    return local.store if local else None


def _check_slab(name: str, slab: Slab[Any]) -> None:
    """Each slot is free, set aside for one segment, or used by as many segments as it counts."""
    uses = np.zeros(slab.capacity, np.int64)
    for table in slab._tables.values():
        np.add.at(uses, table.slots[: table.length], 1)
    require(bool((uses == slab._references).all()), f"{name} counts uses of slots wrongly")
    aside = [table.slots[table.length : table.held] for table in slab._tables.values()]
    free = np.concatenate([slab._free[: slab._free_count], *aside])
    require(len(free) == slab.free_slots, f"{name} has {len(free)} free slots and counts {slab.free_slots}")
    owned = np.bincount(free, minlength=slab.capacity) + (uses > 0)
    require(bool((owned == 1).all()), f"{name} has slots that are free twice, free and in use, or lost")


def check_quiet(run: "Simulation") -> None:
    """Check what must hold once all requests have ended and no fault comes any more."""
    engine: Any = run.engine
    scheduler, topology = engine._scheduler, engine.topology
    require(not engine._tracked and not scheduler._requests, "ended requests are still known")
    require(not len(engine._places), "ended requests still have places")
    require(not (known := run.frontends.left_over()), "; ".join(known))
    require(not engine._turn.in_flight, "steps are in flight although nothing runs")
    require(
        not scheduler._dealer.seats.total and not scheduler._dealer.seats.leaving, "ended sequences still have seats"
    )
    require(not scheduler.scratch.used, f"{scheduler.scratch.used} tokens of scratch memory are reserved")
    placement, prefixes = scheduler.placement, scheduler.prefixes
    for place in placement.capacities:
        left = placement.reserved[place], placement.returning[place], placement.sequences[place]
        require(not any(left), f"(reserved, returning, sequences) of {place} are {left} although nothing runs")
    lost = unaccounted(scheduler.disks)
    require(not lost, f"blocks of disks are not accounted for: {lost}")
    workers: dict[str, Any] = {}
    for name in topology.names:
        process = run.processes.all[name]
        require(not process.reason and process.worker is not None, f"{name} is a member, but has ended")
        workers[name] = process.worker
    others = run.processes.living.keys() - topology.names - (engine._members.pools.states.keys())
    require(not others, f"{', '.join(others)} are no members, but run")
    for name, worker in workers.items():
        require(worker._fence.open and worker._fence.epoch == topology.epoch, f"{name} is not in the engine's epoch")
        linked = {other for other in workers if other != name and worker._links.has(other)}
        needed = {other for other in workers if other != name and "memory" in name + other}
        require(needed <= linked, f"{name} has no link to {', '.join(sorted(needed - linked))}")
        leased = worker._links._leases.keys()
        joining = engine._members.pools.states.keys()
        require(
            leased <= workers.keys() | joining, f"{name} leases memory to {', '.join(sorted(leased - workers.keys()))}"
        )
        if (store := _store(worker)) is not None:
            _check_slab(name, store.slab)
            idle, held = prefixes.idle().get(store.worker, (0, 0))[0], store.used_tokens
            require(held == idle, f"{name} holds {held} tokens; the engine knows of {idle} in cached prefixes")
            _check_told(name, store, engine._members.recipients._known.values())
        if isinstance(worker, MemoryWorker):
            idles = all(lane.is_idle and not lane.steps for lane in worker._lanes)
            require(idles, f"{name} has lanes that are not idle")
        if isinstance(worker, ComputeWorker):
            require(not any(lane.steps for lane in worker._lanes), f"{name} has steps")
            kept = 0 if worker._scratch is None else worker._scratch.store.slab.used
            require(not kept, f"{name} keeps {kept} tokens of prompts in scratch memory")
            require(not worker._sequences, f"{name} knows {len(worker._sequences)} sequences that have ended")
        for peer, channel in _channels(worker).items():
            back = _channels(workers[peer])[name]
            freed, used = back._freed, channel._slots_there.used
            # What the last step of a lane drew stays with the first stage until the lane has another step.
            stages = topology.pipeline.most_stages > 1 and isinstance(workers[peer], ComputeWorker)
            held = topology.pipeline.lanes if stages and isinstance(worker, ComputeWorker) else 0
            require(
                0 <= sum(used) - sum(freed) <= held,
                f"{name} has used slots of {peer} {used} times, which has freed them {freed} times",
            )
            require(channel._announced == back._fetched, f"{peer} has not fetched all regions of {name}")
            require(held > 0 or not channel._kept, f"{name} keeps messages for {peer}")


def _channels(worker: Any) -> dict[str, Any]:
    return worker._channels if isinstance(worker, MemoryWorker) else worker._mail.channels
