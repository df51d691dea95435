"""Balancing policies, which propose moves of KV between memory workers. Pure.

A policy gets a ``View``: the load of each worker, and where the tokens of each request are. A proposal may be rejected
(``lamina.schedule.moves``); the policy sees that from the next view.

* ``bandwidth``: equal time for every worker to read its KV once, also in a pool of mixed kinds.
* ``throughput``: Infinite-LLM's greedy algorithm (section 5.3) on its model of throughput.
* ``ledger``: DistKV-LLM's debts (section 4.4), with cycles of debt cleared (DGFM, section 4.5).

Tokens of a request that are not on its home are a debt of the home to the worker that holds them. With ``throughput``
and ``ledger``, creditors on the debtor's own host come first (DistKV-LLM, section 4.4: lowest communication cost, then
most free memory), and a creditor that needs its slots gets them back. A creditor that runs slices, as a compute worker
with local memory does, lends only as much as hardly slows its own steps (``most_reads``).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from lamina.core.topology import Topology
from lamina.core.types import Balance, Partition


@dataclass(frozen=True)
class Load:
    """Load of one memory worker.

    Attributes:
        capacity: Token slots.
        free: Token slots that moves may fill.
        sequences: Sequences whose new tokens are stored here.
        reads: Tokens of KV read in one step of each lane.
        token_s: Measured time to read a token, in seconds; only ratios matter to most policies.
        accepts: Whether KV may move here; False while the worker is leaving.
        step_s: Measured time of its own step, attention included, in seconds; 0: it runs no slices, or ``token_s`` is
            unknown, as on GPUs.
        host: The machine or container that it runs in.
    """

    capacity: int
    free: int
    sequences: int
    reads: int
    token_s: float = 1.0
    accepts: bool = True
    step_s: float = 0.0
    host: str = ""

    @property
    def seconds(self) -> float:
        """Time in which one step of each lane reads its KV, in seconds."""
        return self.reads * self.token_s


@dataclass(frozen=True)
class HeldTokens:
    """Written tokens of a request on one worker.

    Attributes:
        worker: Worker that holds the tokens.
        home: Worker on which new tokens of the request are stored.
        tokens: Number of tokens.
        readers: Times that each step reads every token.
    """

    request: str
    worker: str
    home: str
    tokens: int
    readers: int = 1


@dataclass(frozen=True)
class View:
    """State of the memory pool. ``dense_s``: Seconds of a step without attention, as a function of its rows."""

    loads: Mapping[str, Load]
    held: Sequence[HeldTokens]
    dense_s: Callable[[float], float] = field(default=lambda rows: 1.0)


@dataclass(frozen=True)
class Proposal:
    """A proposal to move ``tokens`` of a request from ``source`` to the first of ``targets`` that accepts them.

    Attributes:
        returns: True if lent tokens return to their home. They may return at once, but then are not lent to ``source``
            again soon.
    """

    request: str
    source: str
    targets: tuple[str, ...]
    tokens: int
    returns: bool = False


def policy_for(balance: Balance, topology: Topology, partition: Partition) -> Balance:
    """Resolve "auto": "bandwidth" if memory workers are of several kinds and ranges of tokens may move, else "off".

    Other values are returned unchanged.
    """
    if balance != "auto":
        return balance
    kinds = {member.kind for member in topology.members if member.role == "memory"}
    return "bandwidth" if len(kinds) > 1 and partition in ("auto", "token") else "off"


class Policy(Protocol):
    """Proposes moves of KV."""

    def propose(self, view: View) -> list[Proposal]:
        """Return proposed moves, most useful first. They do not exceed free slots of targets and tokens of sources."""
        ...


LEAST = 64  # tokens of the smallest move
UNEVEN = 1.1  # ratio of the slowest to the fastest worker's time above which KV moves
MOST_PROPOSALS = 8  # proposals per view; loads change while KV moves


class ByBandwidth:
    """Moves tokens from the worker that takes longest to read its KV to the one that takes least."""

    def propose(self, view: View) -> list[Proposal]:
        seconds = {worker: load.seconds for worker, load in view.loads.items()}
        free = {worker: load.free for worker, load in view.loads.items() if load.accepts}
        left = {(one.request, one.worker): one for one in view.held}
        tokens = {key: one.tokens for key, one in left.items()}
        proposals: list[Proposal] = []
        while free and len(proposals) < MOST_PROPOSALS:
            source = max(seconds, key=lambda worker: seconds[worker])
            target = min(free, key=lambda worker: seconds[worker])
            here, there = view.loads[source].token_s, view.loads[target].token_s
            candidates = [one for key, one in left.items() if one.worker == source and tokens[key] >= LEAST]
            if seconds[source] <= UNEVEN * seconds[target] or source == target or not candidates:
                break
            largest = max(candidates, key=lambda one: tokens[one.request, one.worker] * one.readers)
            even = (seconds[source] - seconds[target]) / (here + there) / largest.readers
            count = int(min(even, tokens[largest.request, source], free[target]))
            if count < LEAST:
                del free[target]
                continue
            proposals.append(Proposal(largest.request, source, (target,), count))
            seconds[source] -= count * largest.readers * here
            seconds[target] += count * largest.readers * there
            tokens[largest.request, source] -= count
            free[target] -= count
        return proposals


SHORT = 0.1  # share of free slots below which a worker needs slots
LENGTHENED = 0.25  # share by which attention for debtors may lengthen the steps of a creditor that runs slices


def debts(view: View) -> dict[tuple[str, str], int]:
    """Return the debts in tokens by (debtor, creditor)."""
    found: dict[tuple[str, str], int] = {}
    for one in view.held:
        if one.worker != one.home:
            found[one.home, one.worker] = found.get((one.home, one.worker), 0) + one.tokens
    return found


def is_far(view: View, debtor: str, creditor: str) -> bool:
    """Return whether KV that moves from ``debtor`` to ``creditor``, and queries for it, travel between hosts."""
    return view.loads[debtor].host != view.loads[creditor].host


def most_reads(view: View, creditor: str) -> float:
    """Return how many more tokens debtors may read on a creditor in a step; infinite if it runs no slices or decodes
    nothing."""
    load = view.loads[creditor]
    if not load.step_s or not load.sequences:
        return math.inf
    lent = sum(one.tokens * one.readers for one in view.held if one.worker == creditor != one.home)
    return max(0.0, LENGTHENED * load.step_s / load.token_s - lent)


def recalls(view: View, free: dict[str, int], used: set[tuple[str, str]]) -> list[Proposal]:
    """Return moves of tokens that short workers hold for others back home, as far as homes do not become short.

    Args:
        free: Slots by worker that other proposals leave; reduced.
        used: Pairs of request and source that other proposals name; extended.
    """
    proposals: list[Proposal] = []
    for creditor, load in view.loads.items():
        needed = int(2 * SHORT * load.capacity) - load.free
        if load.free >= SHORT * load.capacity:
            continue
        for one in view.held:
            home = view.loads.get(one.home)
            if one.worker != creditor or one.home == creditor or home is None or not home.accepts:
                continue
            count = min(one.tokens, needed, free[one.home] - int(SHORT * home.capacity))
            if count >= LEAST and (one.request, creditor) not in used:
                used.add((one.request, creditor))
                proposals.append(Proposal(one.request, creditor, (one.home,), count, returns=True))
                free[one.home] -= count
                needed -= count
    return proposals


FEW_SEQUENCES = 0.75  # workers with less than this share of the mean number borrow (the paper's batch threshold)
LITTLE_USED = 0.9  # workers that use less than this share of their slots lend (the paper's utilization threshold)


class ByThroughput:
    """Infinite-LLM, Algorithm 1: workers with few sequences move part of their longest request to workers with free
    slots, as much as maximises the sum of both workers' tokens per second.

    A worker with b sequences and S tokens to read generates b / (dense(b) + S t) tokens per second (equations 5 to 7).
    Lending k tokens makes the creditor's step k t longer and the debtor's shorter, and the debtor's free slots take
    more sequences of its mean length. A creditor short of slots reclaims what it has lent (section 5.2).
    """

    def propose(self, view: View) -> list[Proposal]:
        loads = view.loads
        mean = sum(load.sequences for load in loads.values()) / max(len(loads), 1)
        debtors = [one for one, load in loads.items() if load.sequences <= FEW_SEQUENCES * mean]
        lent, used = dict.fromkeys(loads, 0), set[tuple[str, str]]()
        free, reads = {one: load.free for one, load in loads.items()}, {one: most_reads(view, one) for one in loads}
        lenders = [one for one, load in loads.items() if load.accepts and load.free > (1 - LITTLE_USED) * load.capacity]
        proposals = recalls(view, free, used)
        for debtor in sorted(debtors, key=lambda one: loads[one].sequences):
            own = [one for one in view.held if one.worker == debtor and (one.request, debtor) not in used]
            if not own:
                continue
            longest, moved = max(own, key=lambda one: one.tokens), 0
            for creditor in sorted(lenders, key=lambda one: (is_far(view, debtor, one), lent[one] - loads[one].free)):
                if creditor == debtor or lent[debtor]:  # no worker both lends and borrows
                    continue
                most = int(
                    min(
                        longest.tokens - moved,
                        free[creditor] - lent[creditor],
                        reads[creditor] / longest.readers,
                    )
                )
                if most < LEAST:
                    continue
                counts = range(0, most + 1, LEAST)
                best = max(counts, key=lambda count: self._rate(view, debtor, creditor, moved, lent[creditor], count))
                if best <= 0:
                    continue
                proposals.append(Proposal(longest.request, debtor, (creditor,), best))
                moved += best
                lent[creditor] += best
                reads[creditor] -= best * longest.readers
        return proposals[:MOST_PROPOSALS]

    @staticmethod
    def _rate(view: View, debtor: str, creditor: str, before: int, lent: int, count: int) -> float:
        """Return the tokens per second of both workers if ``count`` more tokens move from debtor to creditor.

        Before that, proposals already move ``before`` tokens off the debtor, and ``lent`` tokens to the creditor.
        """
        gone = before + count
        borrows, lends = view.loads[debtor], view.loads[creditor]
        length = max(1.0, borrows.reads / max(borrows.sequences, 1))
        batch = borrows.sequences + gone / length
        reads = max(borrows.reads - gone, 0) + (batch - borrows.sequences) * length
        debtor_s = view.dense_s(batch) + reads * borrows.token_s
        creditor_s = view.dense_s(lends.sequences) + (lends.reads + lent + count) * lends.token_s
        return _per_second(batch, debtor_s) + _per_second(lends.sequences, creditor_s)


def _per_second(sequences: float, step_s: float) -> float:
    """Return the tokens per second of a worker. The step of a worker without sequences may take no time at all."""
    return sequences / step_s if sequences else 0.0


LEAST_SWAP = 16  # tokens of the smallest debt in a cycle that is cleared, and of the smallest move that clears it


def _clear_cycles(view: View, free: dict[str, int], used: set[tuple[str, str]]) -> list[Proposal]:
    """Return moves of tokens back home along cycles of debt: each worker in a cycle gets slots back (DGFM).

    If all workers of a cycle are full, but for a few slots on one, its tokens come home first, and the slots that they
    leave are for the next worker's tokens. Arguments are those of ``recalls``.
    """
    import networkx  # slow to import; only this policy needs it

    graph = networkx.DiGraph()
    graph.add_weighted_edges_from((one, other, tokens) for (one, other), tokens in debts(view).items())
    proposals: list[Proposal] = []
    while True:
        try:
            cycle = [(one, other) for one, other, *_ in networkx.find_cycle(graph)]
        except networkx.NetworkXNoCycle:
            return proposals
        least = min(graph.edges[edge]["weight"] for edge in cycle)
        for debtor, creditor in cycle:
            if (count := min(least, free.get(debtor, 0))) >= LEAST_SWAP:
                proposals += _repay(view, debtor, creditor, count, used)
                free[debtor] -= count
        graph.remove_edges_from(
            [edge for edge in cycle if graph.edges[edge]["weight"] <= max(least, LEAST_SWAP)] or cycle
        )
        for edge in cycle:
            if edge in graph.edges:
                graph.edges[edge]["weight"] -= least


def _repay(view: View, debtor: str, creditor: str, tokens: int, used: set[tuple[str, str]]) -> list[Proposal]:
    """Return moves of up to ``tokens`` tokens of the debtor's requests from ``creditor`` back to the debtor.

    ``used``: Pairs of request and creditor that a move names already; extended.
    """
    proposals = []
    for one in view.held:
        if one.home == debtor and one.worker == creditor and tokens > 0 and (one.request, creditor) not in used:
            used.add((one.request, creditor))
            proposals.append(Proposal(one.request, creditor, (debtor,), min(tokens, one.tokens), returns=True))
            tokens -= one.tokens
    return proposals


CREDITORS = 3  # targets proposed for a move, in order
LENT_AT_MOST = 0.5  # share of a worker's slots that it lends


class ByDebt:
    """DistKV-LLM: a worker short of slots gets back what it has lent, and borrows from others for its longest request;
    cycles of debt are cleared."""

    def __init__(self) -> None:
        self._short: dict[str, None] = {}  # workers short of slots, oldest first: they borrow in this order

    def propose(self, view: View) -> list[Proposal]:
        short = {one: None for one, load in view.loads.items() if load.free < SHORT * load.capacity}
        self._short = {one: None for one in self._short if one in short} | short
        free, used = {one: load.free for one, load in view.loads.items()}, set[tuple[str, str]]()
        back = [*_clear_cycles(view, free, used), *recalls(view, free, used)]
        return [*back, *self._borrow(view, free, back)][:MOST_PROPOSALS]

    def _borrow(self, view: View, free: dict[str, int], back: Sequence[Proposal]) -> list[Proposal]:
        """Return moves off short workers. ``back``: Moves already proposed, which free slots too."""
        lent, reads = dict.fromkeys(view.loads, 0), {one: most_reads(view, one) for one in view.loads}
        for (_, creditor), tokens in debts(view).items():
            lent[creditor] = lent.get(creditor, 0) + tokens
        proposals: list[Proposal] = []
        for debtor in self._short:
            own = [one for one in view.held if one.worker == debtor == one.home and one.tokens >= LEAST]
            if not own:
                continue
            longest = max(own, key=lambda one: one.tokens)
            rooms = {
                one: min(
                    free[one] - int(SHORT * other.capacity),
                    int(LENT_AT_MOST * other.capacity) - lent[one],
                    reads[one] / longest.readers,
                )
                for one, other in view.loads.items()
                if one != debtor and one not in self._short and other.accepts
            }
            able = [one for one in rooms if rooms[one] >= LEAST]
            creditors = sorted(able, key=lambda one: (is_far(view, debtor, one), -rooms[one]))[:CREDITORS]
            freed = sum(one.tokens for one in back if one.source == debtor)
            wanted = int(2 * SHORT * view.loads[debtor].capacity) - view.loads[debtor].free - freed
            count = int(min(wanted, longest.tokens, *(rooms[one] for one in creditors))) if creditors else 0
            if count >= LEAST:
                proposals.append(Proposal(longest.request, debtor, tuple(creditors), count))
                for one in creditors:  # any of them may accept
                    free[one] -= count
                    lent[one] += count
                    reads[one] -= count * longest.readers
        return proposals


POLICIES: Mapping[Balance, Callable[[], Policy]] = {
    "bandwidth": ByBandwidth,
    "throughput": ByThroughput,
    "ledger": ByDebt,
}
