"""The radix tree of cached prefixes (SGLang, Zheng et al., NeurIPS 2024), and its checkpoints. Pure.

A checkpoint is a node of which layers with a sliding window have the last window of tokens, so that requests can
continue from it. Without such layers, requests can continue from any token.
"""

import collections
import heapq
import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from lamina.core.requests import Completion, Group, Ids, ids_of
from lamina.core.segments import by_worker, holding
from lamina.core.types import Segment
from lamina.kv.placement import Placement

LONG_AGO = -(2**62)
"""``Node.used`` of a node that was never used."""


@dataclass(eq=False, slots=True)
class Node:
    """Tokens [stop - len(tokens), stop) of all prefixes below.

    Attributes:
        key: key in the parent's children: the first token, or the salt.
        worker: worker that holds the tokens.
        sequence: cached sequence that ends with this node. Only leaves and checkpoints have one.
        users: number of running requests that share the node.
        holders: number of users, and of ended requests that have not been released yet.
        used: time of the last use, counted in uses, later for requests of smaller ``priority``.
        copied: True if all blocks are on the worker's disk.
        fixed: number of fetches from a disk that extend the prefix, which must not move meanwhile.
    """

    key: int | str
    tokens: Ids
    parent: "Node | None" = None
    stop: int = 0
    worker: str = ""
    children: dict[int | str, "Node"] = field(default_factory=dict)
    sequence: int | None = None
    users: int = 0
    holders: int = 0
    used: int = LONG_AGO
    copied: bool = False
    fixed: int = 0

    @property
    def start(self) -> int:
        return self.stop - len(self.tokens)

    @property
    def any_sequence(self) -> int:
        """A cached sequence with these tokens: that of the node, or of a node below."""
        node = self
        while node.sequence is None:
            node = next(iter(node.children.values()))
        return node.sequence

    @property
    def home(self) -> str | None:
        """The worker that has all tokens up to the end of the node; None if several workers have them."""
        workers = {node.worker for node in self.path()}
        return workers.pop() if len(workers) == 1 else None

    def whole(self) -> tuple[str, Ids]:
        """Return the salt, and all tokens up to the end of the node."""
        *_, first = nodes = list(self.path())
        assert first.parent is not None
        ids = ids_of([])
        for node in reversed(nodes):
            ids += node.tokens
        return str(first.parent.key), ids

    def path(self) -> "Iterator[Node]":
        """Yield the node and its ancestors that have tokens, from the node upwards."""
        node: Node | None = self
        while node is not None and node.stop:
            yield node
            node = node.parent


CHECKPOINT_SHARE = 4
"""Slots of a memory worker for each row that a layer with a window has for checkpoints."""


def most_rows(slots: int) -> int:
    """Return the rows that each layer with a window has for checkpoints, on a memory worker with ``slots`` slots."""
    return slots // CHECKPOINT_SHARE


class Checkpoints:
    """The checkpoints of one tree.

    Attributes:
        window: the largest window of layers that drop the tokens before it; 0 if no layer does.
        rows: upper bound of the rows that each such layer needs for all checkpoints.
    """

    def __init__(self, window: int, most: int) -> None:
        """``most`` is the limit of ``rows``."""
        self.window = window
        self.rows = 0
        self._most = most
        self._nodes: collections.OrderedDict[Node, int] = collections.OrderedDict()  # rows of each, LRU first

    def __contains__(self, node: Node) -> bool:
        return node in self._nodes

    def oldest(self, fixed: Collection[Node]) -> Node | None:
        """Return the least recently used checkpoint if ``rows`` exceeds its limit, else None. Skips nodes in ``fixed``,
        and leaves that requests hold."""
        if self.rows <= self._most:
            return None
        return next((one for one in self._nodes if one not in fixed and (one.children or not one.holders)), None)

    def last(self, node: Node | None, most: int) -> int:
        """Return the end of the last checkpoint on the path to ``node``, at most ``most``; 0 without one."""
        path = [] if node is None else node.path()
        return next((one.stop for one in path if one.stop <= most and one in self._nodes), 0)

    def use(self, node: Node) -> None:
        """Make a node a checkpoint, or mark the checkpoint as just used."""
        new = node not in self._nodes
        self._nodes[node] = self._nodes.get(node, 0)
        self._nodes.move_to_end(node)
        if new:
            self._count([node, *self._next(node)])

    def discard(self, node: Node) -> None:
        """Forget a checkpoint. Does nothing for another node."""
        if node in self._nodes:
            self.rows -= self._nodes.pop(node)
            self._count(self._next(node))

    def _next(self, node: Node) -> Iterator[Node]:
        """Yield the first checkpoint on every path down from a node."""
        nodes = [*node.children.values()]
        while nodes:
            node = nodes.pop()
            if node in self._nodes:
                yield node
            else:
                nodes += node.children.values()

    def _count(self, nodes: Iterable[Node]) -> None:
        """Count the rows of checkpoints: a window each, or the tokens since the previous checkpoint if fewer."""
        for node in list(nodes):
            before = self.last(node.parent, node.stop)
            rows = min(self.window, node.stop - before)
            self.rows += rows - self._nodes[node]
            self._nodes[node] = rows


GRAIN = 64  # least number of tokens evicted at once


PRIORITY_USES = 1_000
"""Uses of a tree that one step of a request's priority is worth when prefixes are evicted."""

MOST_STEPS = 10
"""Steps of a priority that count, so that a prefix that nobody uses any more is evicted in the end."""


class PrefixTree:
    """The cached prefixes of requests that were placed on one memory worker.

    Attributes:
        held_on: by set of workers: how many cached sequences have tokens on exactly these workers.
        idle: by worker: tokens that no request uses.
        checkpoints: the nodes from which requests may continue; not used without a window.
    """

    def __init__(self, window: int = 0, most_rows: int = 0) -> None:
        self._top = Node("", ids_of([]))
        self._uses = itertools.count(1)
        self._tickets = itertools.count()
        self._oldest: list[tuple[int, int, Node]] = []  # a heap of (used, ticket, idle leaf); some are out of date
        self.held_on = Counter[frozenset[str]]()
        self.idle = Counter[str]()
        self.checkpoints = Checkpoints(window, most_rows)

    @property
    def sequence_count(self) -> int:
        return self.held_on.total()

    def find(self, salt: str, ids: Ids) -> tuple[Node | None, int]:
        """Return the deepest node with tokens of ``ids``, and how many of ``ids`` the tree has; (None, 0) for none."""
        node, found = self._top.children.get(salt), 0
        while node is not None and found == node.stop and found < len(ids):
            child = node.children.get(ids[found])
            if child is None:
                break
            found += _common(child.tokens, ids, found)
            node = child
        return (node, found) if found else (None, 0)

    def split(self, node: Node, stop: int) -> Node:
        """Divide a node at position ``stop``; returns the new upper part. ``node`` keeps its end and its sequence."""
        cut = stop - node.start
        upper = Node(
            node.key,
            node.tokens[:cut],
            node.parent,
            stop,
            node.worker,
            users=node.users,
            holders=node.holders,
            used=node.used,
            copied=node.copied,
            fixed=node.fixed,
        )
        assert node.parent is not None
        node.parent.children[node.key] = upper
        node.tokens = node.tokens[cut:]
        node.key, node.parent = node.tokens[0], upper
        upper.children[node.key] = node
        return upper

    def insert_leaf(
        self, node: Node | None, salt: str, tokens: Ids, sequence: int, segments: Sequence[Segment]
    ) -> tuple[Node, int | None]:
        """Add a leaf with ``sequence``, which has these ``segments``, below ``node``; None: below the salt.

        No child of ``node`` may begin with the same token. A leaf on several workers becomes several nodes. With a
        window, it becomes a checkpoint. Returns the leaf, and the sequence of ``node`` if it is no longer needed.
        """
        if node is None:
            node = self._top.children.setdefault(salt, Node(salt, ids_of([]), self._top))
        leaf = Node(tokens[0], tokens, node, node.stop + len(tokens), sequence=sequence)
        node.children[leaf.key] = leaf
        superseded = None if node in self.checkpoints else self.take_sequence(node)
        for segment in segments:
            if leaf.start < segment.tokens[0] < leaf.stop:
                upper = self.split(leaf, segment.tokens[0])
                upper.worker = holding(segments, upper.start).worker
        leaf.worker = holding(segments, leaf.start).worker
        self._count(leaf, 1)
        if self.checkpoints.window:
            self.checkpoints.use(leaf)
        return leaf, superseded

    def give_sequence(self, node: Node, sequence: int) -> None:
        """Set the sequence of ``node``, which must have none."""
        node.sequence = sequence
        self._count(node, 1)

    def take_sequence(self, node: Node) -> int | None:
        """Remove and return the sequence of ``node``; None if it had none. The node ceases to be a checkpoint."""
        if node.sequence is not None:
            self._count(node, -1)
        sequence, node.sequence = node.sequence, None
        self.checkpoints.discard(node)
        return sequence

    def move(self, node: Node, start: int, worker: str) -> None:
        """Record that the tokens from ``start``, where a node begins, to the end of ``node`` are on ``worker``."""
        moved = [one for one in node.path() if one.start >= start]
        ends = list(self.below(moved[-1]))
        for end in ends:
            self._count(end, -1)
        for one in moved:
            one.worker = worker
        for end in ends:
            self._count(end, 1)

    def _count(self, end: Node, change: int) -> None:
        workers = frozenset(node.worker for node in end.path())
        self.held_on[workers] += change
        if not self.held_on[workers]:
            del self.held_on[workers]

    def remove_leaf(self, leaf: Node) -> Node | None:
        """Remove a leaf. Returns its parent if that is a leaf now, to which the caller must give a sequence."""
        node, parent = leaf, leaf.parent
        assert parent is not None and not leaf.children
        self.take_sequence(leaf)
        del parent.children[node.key]
        while not parent.children and not parent.stop and parent.parent is not None:  # the last of its salt
            node, parent = parent, parent.parent
            del parent.children[node.key]
        return parent if parent.stop and not parent.children else None

    def remove_lost(self, lost: Collection[str]) -> None:
        """Remove the tokens of ``lost`` workers, and all tokens after them. No request may use them.

        The sequence of a removed leaf goes to its parent if the parent needs one.
        """
        leaves = [node for node in self.ends() if not node.children]
        while leaves:
            leaf = leaves.pop()
            if not any(node.worker in lost for node in leaf.path()):
                continue
            self.idle[leaf.worker] -= len(leaf.tokens)
            sequence = leaf.sequence
            parent = self.remove_leaf(leaf)
            if parent is not None:
                if parent.sequence is None and sequence is not None:
                    self.give_sequence(parent, sequence)
                self.offer_for_eviction(parent)
                leaves.append(parent)

    def below(self, node: Node) -> Iterator[Node]:
        """Yield ``node`` and the nodes below it, as far as they have a sequence."""
        nodes = [node]
        while nodes:
            node = nodes.pop()
            nodes += node.children.values()
            if node.sequence is not None:
                yield node

    def use(self, node: Node, priority: int = 0) -> None:
        """Mark a node and its ancestors as just used: they are evicted last.

        Args:
            priority: Of the request. Each step below 0 counts as a use ``PRIORITY_USES`` uses from now, each step above
                0 as one that long ago. A node keeps the latest of its uses.
        """
        used = next(self._uses) - PRIORITY_USES * min(max(priority, -MOST_STEPS), MOST_STEPS)
        for one in node.path():
            one.used = max(one.used, used)
        self.offer_for_eviction(node)

    def offer_for_eviction(self, node: Node) -> None:
        """Make a node a candidate for eviction if it is an idle leaf now."""
        if not node.children and not node.holders:
            heapq.heappush(self._oldest, (node.used, next(self._tickets), node))
            if len(self._oldest) > 4 * self.sequence_count + GRAIN:
                idle = (leaf for leaf in self.ends() if not leaf.children and not leaf.holders)
                self._oldest = [(leaf.used, next(self._tickets), leaf) for leaf in idle]
                heapq.heapify(self._oldest)

    def oldest(self) -> Node:
        """Return the least recently used idle leaf, which must exist. The caller removes it."""
        while True:
            used, _, node = heapq.heappop(self._oldest)
            if not node.children and not node.holders and node.used == used and node.sequence is not None:
                return node

    def ends(self) -> Iterator[Node]:
        """Yield all nodes with a sequence: leaves and checkpoints."""
        return self.below(self._top)


def _common(edge: Ids, ids: Ids, start: int) -> int:
    """Return the length of the common prefix of ``edge`` and ``ids[start:]``."""
    most = min(len(edge), len(ids) - start)
    if edge[:most] == ids[start : start + most]:
        return most
    low, high = 0, most  # equal up to low, different before high
    while high - low > 1:
        middle = (low + high) // 2
        if edge[low:middle] == ids[start + low : start + middle]:
            low = middle
        else:
            high = middle
    return low


def match(tree: PrefixTree, group: Group, home: str, placement: Placement) -> tuple[Node | None, int, int]:
    """Return the deepest node of the tree of worker ``home`` with tokens of a request; how many tokens the request can
    share, without its last token, which must be computed; and how many it could share without a window."""
    first = group.completions[0]
    if group.ids is None:
        group.ids = ids_of(group.known_tokens(first, 0, first.goal))
    node, length = tree.find(group.request.params.cache_salt, group.ids)
    matched = min(length, group.most_shared, _usable(node, home, placement))
    return node, tree.checkpoints.last(node, matched) if tree.checkpoints.window else matched, matched


def _usable(node: Node | None, home: str, placement: Placement) -> int:
    """Return how many tokens up to ``node`` a request on ``home`` can share. Idle tokens on another worker count only
    if that worker has room to reserve them, and is not closed."""
    rooms = Counter[str]()
    for one in reversed(list(node.path())) if node is not None else ():
        if one.worker != home:
            rooms[one.worker] += 0 if one.holders else len(one.tokens)
            if one.worker in placement.closed or (not one.holders and rooms[one.worker] > placement.room(one.worker)):
                return one.start
    return 0 if node is None else node.stop


def matches_tree(node: Node | None, completion: Completion) -> bool:
    """True if a completion has each token up to ``node`` on the same worker as the tree."""
    return node is None or all(
        by_worker(completion.segments, one.start, one.stop) == {one.worker: len(one.tokens)} for one in node.path()
    )
