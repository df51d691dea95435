"""The radix tree over token ids that says which prefixes are kept (SGLang, Zheng et al., NeurIPS 2024). Pure."""

import heapq
import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from lamina.groups import Ids, ids_of
from lamina.segments import holding
from lamina.types import Segment

GRAIN = 64  # tokens evicted at once, at least


@dataclass(eq=False, slots=True)
class Node:
    """Tokens [stop - len(tokens), stop) of every prefix that goes through it.

    Attributes:
        key: in the parent's children: the first token, or the salt. worker: that holds its tokens.
        sequence: with these tokens on the worker; leaves have one, the others share that of any leaf below.
        users: requests that share it and go on. holders: the same with those that have ended but not been released.
        used: when it was used last, counted in uses. copied: all of its blocks are on the worker's disk.
        fixed: how many fetches from a disk continue it: its tokens may not move meanwhile.
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
    used: int = 0
    copied: bool = False
    fixed: int = 0

    @property
    def start(self) -> int:
        """Position of its first token."""
        return self.stop - len(self.tokens)

    @property
    def any_sequence(self) -> int:
        """A sequence with its tokens on the worker."""
        node = self
        while node.sequence is None:
            node = next(iter(node.children.values()))
        return node.sequence

    @property
    def home(self) -> str | None:
        """The worker that alone has its tokens and all before them, if there is one."""
        workers = {node.worker for node in self.path()}
        return workers.pop() if len(workers) == 1 else None

    def whole(self) -> tuple[str, Ids]:
        """Its salt, and its tokens with all before them."""
        *_, first = nodes = list(self.path())
        assert first.parent is not None
        ids = ids_of([])
        for node in reversed(nodes):
            ids += node.tokens
        return str(first.parent.key), ids

    def path(self) -> "Iterator[Node]":
        """It and those above it that have tokens."""
        node: Node | None = self
        while node is not None and node.stop:
            yield node
            node = node.parent


class PrefixTree:
    """The prefixes kept for requests placed on one memory worker; ``leaf_count`` sequences hold them.

    ``idle``: by worker, the tokens that no request uses.
    """

    def __init__(self) -> None:
        self._top = Node("", ids_of([]))
        self._uses = itertools.count(1)
        self._tickets = itertools.count()
        self._oldest: list[tuple[int, int, Node]] = []  # a heap of (used, ticket, idle leaf); some are out of date
        self.leaf_count = 0
        self.idle = Counter[str]()

    def find(self, salt: str, ids: Ids) -> tuple[Node | None, int]:
        """The deepest node with tokens of ``ids``, and how many of these the tree has; (None, 0) without any."""
        node, found = self._top.children.get(salt), 0
        while node is not None and found == node.stop and found < len(ids):
            child = node.children.get(ids[found])
            if child is None:
                break
            found += _common(child.tokens, ids, found)
            node = child
        return (node, found) if found else (None, 0)

    def split(self, node: Node, stop: int) -> Node:
        """Divide a node at position ``stop``; returns the new upper part. ``node`` stays what it was at its end."""
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

    def add(
        self, node: Node | None, salt: str, tokens: Ids, sequence: int, segments: Sequence[Segment]
    ) -> tuple[Node, int | None]:
        """A new leaf with ``sequence``, which has these ``segments``, behind ``node``, which has none that begins like
        it; None: the beginning. A leaf on several workers becomes several nodes.

        Returns the leaf, and the sequence of ``node`` if it is not needed any more.
        """
        if node is None:
            node = self._top.children.setdefault(salt, Node(salt, ids_of([]), self._top))
        leaf = Node(tokens[0], tokens, node, node.stop + len(tokens), sequence=sequence)
        node.children[leaf.key] = leaf
        superseded, node.sequence = node.sequence, None
        self.leaf_count += superseded is None
        for segment in segments:
            if leaf.start < segment.tokens[0] < leaf.stop:
                upper = self.split(leaf, segment.tokens[0])
                upper.worker = holding(segments, upper.start).worker
        leaf.worker = holding(segments, leaf.start).worker
        return leaf, superseded

    def remove(self, leaf: Node) -> Node | None:
        """Remove a leaf. Returns its parent if that is a leaf now, and so needs a sequence."""
        node, parent = leaf, leaf.parent
        assert parent is not None and not leaf.children
        leaf.sequence = None
        del parent.children[node.key]
        while not parent.children and not parent.stop and parent.parent is not None:  # the last of its salt
            node, parent = parent, parent.parent
            del parent.children[node.key]
        if parent.stop and not parent.children:
            return parent
        self.leaf_count -= 1
        return None

    def cut(self, lost: Collection[str]) -> None:
        """Forget the tokens of these workers, and all behind them, which no request uses. A sequence whose end is
        forgotten may go on as that of what came before."""
        leaves = list(self.leaves())
        while leaves:
            leaf = leaves.pop()
            if not any(node.worker in lost for node in leaf.path()):
                continue
            self.idle[leaf.worker] -= len(leaf.tokens)
            sequence = leaf.sequence
            parent = self.remove(leaf)
            if parent is not None:
                parent.sequence = sequence
                self.note(parent)
                leaves.append(parent)

    def below(self, node: Node) -> Iterator[Node]:
        """The leaves that begin with the tokens of ``node``."""
        nodes = [node]
        while nodes:
            node = nodes.pop()
            nodes += node.children.values()
            if node.sequence is not None:
                yield node

    def use(self, node: Node) -> None:
        """A prefix has been used: it and what it begins with are evicted last."""
        now = next(self._uses)
        for one in node.path():
            one.used = now
        self.note(node)

    def note(self, node: Node) -> None:
        """A node may be an idle leaf now: then it can be evicted."""
        if not node.children and not node.holders:
            heapq.heappush(self._oldest, (node.used, next(self._tickets), node))
            if len(self._oldest) > 4 * self.leaf_count + GRAIN:
                idle = (leaf for leaf in self.leaves() if not leaf.holders)
                self._oldest = [(leaf.used, next(self._tickets), leaf) for leaf in idle]
                heapq.heapify(self._oldest)

    def oldest(self) -> Node:
        """The idle leaf used least recently, which the caller removes. There must be one."""
        while True:
            used, _, node = heapq.heappop(self._oldest)
            if not node.children and not node.holders and node.used == used and node.sequence is not None:
                return node

    def leaves(self) -> Iterator[Node]:
        """All leaves."""
        return self.below(self._top)


def _common(edge: Ids, ids: Ids, start: int) -> int:
    """How many tokens of ``edge`` are those of ``ids`` from ``start`` on."""
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
