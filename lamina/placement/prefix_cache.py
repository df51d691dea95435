"""Prefixes of earlier requests whose KV memory workers keep, and the requests that share them. Pure.

A cached prefix is a sequence that nobody runs. A request whose first tokens it has is admitted as a fork of it, and
computes only the rest. Prefixes come from prompts once their steps have completed, and from completions once no step
runs them any more. For each memory worker, a radix tree over token ids says which tokens it keeps; slots shared on the
worker are nodes shared in the tree, so every slot that is kept counts once. Trees of requests with different salts have
nothing in common.

Tokens that some request shares are reserved in ``Placement``. All others are idle: they count as free, and the least
recently used ones are evicted as soon as a request's own tokens need their slots. So KV is dropped only where nothing
idle is left.

The radix tree and its eviction from the leaves: SGLang (Zheng et al., NeurIPS 2024). Here a leaf may be evicted in
part, since slots are allocated by token.
"""

import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from lamina.groups import Completion, Group, Ids, ids_of
from lamina.placement.map import Found, Placement
from lamina.topology import Topology
from lamina.types import Fork

SHORTEST = 16  # tokens: a shorter prefix, as the first words of every chat, is not worth a fork
GRAIN = 64  # tokens evicted at once, at least


@dataclass(eq=False, slots=True)
class Node:
    """Tokens [stop - len(tokens), stop) of every prefix that goes through it.

    Attributes:
        key: in the parent's children: the first token, or the salt.
        sequence: with these tokens on the worker; leaves have one, the others share that of any leaf below.
        users: requests that share it and go on. holders: the same with those that have ended but not been released.
        used: when it was used last, counted in uses. copied: all of its blocks are on the worker's disk.
    """

    key: int | str
    tokens: Ids
    parent: "Node | None" = None
    stop: int = 0
    children: dict[int | str, "Node"] = field(default_factory=dict)
    sequence: int | None = None
    users: int = 0
    holders: int = 0
    used: int = 0
    copied: bool = False

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
    """The prefixes that one memory worker keeps; ``leaf_count`` sequences hold them."""

    def __init__(self) -> None:
        self._top = Node("", ids_of([]))
        self._uses = itertools.count(1)
        self._tickets = itertools.count()
        self._oldest: list[tuple[int, int, Node]] = []  # a heap of (used, ticket, idle leaf); some are out of date
        self.leaf_count = 0

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
            users=node.users,
            holders=node.holders,
            used=node.used,
            copied=node.copied,
        )
        assert node.parent is not None
        node.parent.children[node.key] = upper
        node.tokens = node.tokens[cut:]
        node.key, node.parent = node.tokens[0], upper
        upper.children[node.key] = node
        return upper

    def add(self, node: Node | None, salt: str, tokens: Ids, sequence: int) -> tuple[Node, int | None]:
        """A new leaf with ``sequence`` behind ``node``, which has none that begins like it; None: the beginning.

        Returns the leaf, and the sequence of ``node`` if it is not needed any more.
        """
        if node is None:
            node = self._top.children.setdefault(salt, Node(salt, ids_of([]), self._top))
        leaf = Node(tokens[0], tokens, node, node.stop + len(tokens), sequence=sequence)
        node.children[leaf.key] = leaf
        superseded, node.sequence = node.sequence, None
        self.leaf_count += superseded is None
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
        nodes = [self._top]
        while nodes:
            node = nodes.pop()
            nodes += node.children.values()
            if node.sequence is not None:
                yield node


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


def _end(completion: Completion, length: int) -> int:
    """How many of the first ``length`` tokens of a completion are in its first segment."""
    _, stop = completion.segments[0].tokens
    return length if stop is None else min(length, stop)


class PrefixCache:
    """The prefixes of all memory workers. Changes are collected for the next plan; ``changes`` hands them over.

    Attributes:
        queried: tokens of requests that were admitted. hit: those of them that were found.
        on_kept, on_evicted: called with a worker and each new leaf of its tree, and each that it gives up.
    """

    def __init__(self, placement: Placement, sequences: Iterator[int], enabled: bool = True) -> None:
        """``sequences``: numbers of new sequences. Without ``enabled`` nothing is kept and nothing found."""
        self.queried = self.hit = 0
        self._placement = placement
        self._sequences = sequences
        self._enabled = enabled
        self._trees = {worker: PrefixTree() for worker in placement.capacities} if enabled else {}
        self._shared: dict[Group, Node] = {}  # the end of what each request shares
        self._forks: list[Fork] = []
        self._released: list[int] = []
        self.on_kept: Callable[[str, Node], None] = _ignore
        self.on_evicted: Callable[[str, Node], None] = _ignore

    def apply(self, topology: Topology) -> None:
        """The memory workers of ``topology`` keep KV; no request may share any of another."""
        if self._enabled:
            self._trees = {worker: self._trees.get(worker) or PrefixTree() for worker in topology.capacities}

    def idle(self, worker: str) -> tuple[int, int]:
        """Tokens that a worker keeps although no request uses them, and the sequences that hold what it keeps."""
        tree = self._trees.get(worker)
        return (0, 0) if tree is None else (self._placement.idle.get(worker, 0), tree.leaf_count)

    def sequences(self, worker: str) -> dict[int, int]:
        """What a worker keeps: tokens by sequence."""
        tree = self._trees.get(worker)
        return {} if tree is None else {leaf.any_sequence: leaf.stop for leaf in tree.leaves()}

    def changes(self) -> tuple[list[Fork], list[int]]:
        """Forks and released sequences for the next plan; first, what is idle makes way for what is reserved.

        Workers that take no more requests keep nothing.
        """
        placement = self._placement
        while placement.crowded:
            worker = placement.crowded.pop()
            self._evict(worker, placement.reserved[worker] + placement.idle[worker] - placement.capacities[worker])
        for worker in placement.closed:
            self._evict(worker, placement.idle[worker])
        forks, released = self._forks, self._released
        self._forks, self._released = [], []
        return forks, released

    # -- requests that share ------------------------------------------------------------------------------------

    def find(self, group: Group) -> dict[str, Found]:
        """By worker, the longest prefix that a request could share: its last token is computed in any case.

        A request for more than one worker shares none.
        """
        first = group.completions[0]
        if not self._trees or first.goal <= SHORTEST or self._placement.splits(group.to_run):
            return {}
        if group.ids is None:
            group.ids = ids_of(group.known_tokens(first, 0, first.goal))
        found, most = {}, first.goal - 1
        if group.request.params.penalizes:
            most = min(most, group.prompt_length)  # replicas learn from the chunks that run what has been generated
        for worker, tree in self._trees.items():
            node, length = tree.find(group.request.params.cache_salt, group.ids)
            length = min(length, most)
            if node is not None and length >= SHORTEST and worker not in self._placement.closed:
                held = next((one.stop for one in node.path() if one.holders), 0)
                found[worker] = Found(length, min(held, length))
        return found

    def share(self, group: Group) -> None:
        """A request is dealt to ``group.home``, and shares what ``find`` found there.

        The caller has reserved slots for its other tokens.
        """
        if not self._trees:
            return
        found = self.find(group).get(group.home)
        length = 0 if found is None else found.length
        group.share(length)
        if not length:
            return
        assert group.ids is not None
        tree = self._trees[group.home]
        node, _ = tree.find(group.request.params.cache_salt, group.ids[:length])
        assert node is not None
        if length < node.stop:
            node = tree.split(node, length)
        tree.use(node)
        self._shared[group] = node
        self._hold(group.home, node)

    def admit(self, group: Group) -> None:
        """A plan admits a request: its first sequence begins with what it shares."""
        if not self._trees:
            return
        self.queried += group.completions[0].goal
        self.hit += group.hit
        if group.cached_tokens is None:
            group.cached_tokens = min(group.hit, group.prompt_length)
        if group in self._shared:
            parent = self._shared[group].any_sequence
            self._forks.append(Fork(parent, group.completions[0].sequence, group.hit))

    def shared(self, group: Group) -> int:
        """Tokens of a request that are in the tree: not reserved for it alone."""
        return self._shared[group].stop if group in self._shared else 0

    def exclusive(self, group: Group) -> int:
        """Tokens in the tree that would be idle without this request."""
        node = self._shared.get(group)
        return 0 if node is None else sum(len(one.tokens) for one in node.path() if one.users == 1)

    def leave(self, group: Group) -> None:
        """A request has ended; ``let_go`` follows once it is released."""
        if group in self._shared:
            for node in self._shared[group].path():
                node.users -= 1
                if not node.users:
                    self._placement.will_release(group.home, len(node.tokens))

    def let_go(self, group: Group) -> None:
        """A request that has left is released: what only it shared is idle."""
        node = self._shared.pop(group, None)
        if node is not None:
            self._free(group.home, node)

    def _free(self, worker: str, node: Node) -> None:
        """What nobody holds any more, of what a prefix begins with, is idle."""
        for one in node.path():
            one.holders -= 1
            if not one.holders:
                self._placement.release(worker, len(one.tokens))
                self._placement.idle[worker] += len(one.tokens)
        self._trees[worker].note(node)

    def pin(self, worker: str, salt: str, ids: Ids) -> Node:
        """Reserve these tokens, which a worker keeps, until ``unpin``. Returns their end."""
        tree = self._trees[worker]
        node, _ = tree.find(salt, ids)
        assert node is not None
        if len(ids) < node.stop:
            node = tree.split(node, len(ids))
        tree.use(node)
        self._hold(worker, node)
        return node

    def unpin(self, worker: str, node: Node) -> None:
        """Undo ``pin``."""
        for one in node.path():
            one.users -= 1
            if not one.users:
                self._placement.will_release(worker, len(one.tokens))
        self._free(worker, node)

    def _hold(self, worker: str, node: Node) -> None:
        for one in node.path():
            if not one.holders:
                self._placement.idle[worker] -= len(one.tokens)
                self._placement.reserve_on(worker, len(one.tokens))
            elif not one.users:
                self._placement.returning[worker] -= len(one.tokens)
            one.holders += 1
            one.users += 1

    # -- prefixes that are kept ---------------------------------------------------------------------------------

    def keep_prompt(self, group: Group) -> None:
        """The prompt of a running request has been computed: others may share it now, and it does so itself.

        If the tree has got some of it from another request meanwhile, it waits until this one ends.
        """
        first, stop = group.completions[0], group.prompt_length
        if not self._trees or not group.unshared or not group.alive or first.cached < stop:
            return
        if group.home in self._placement.closed or _end(first, stop) < stop:
            return
        ids = ids_of(group.request.prompt_token_ids) if group.ids is None else group.ids[:stop]
        tree, salt = self._trees[group.home], group.request.params.cache_salt
        node, found = tree.find(salt, ids)
        if found != group.hit:
            return
        leaf = self._add(tree, node, salt, ids[found:], first.sequence)
        leaf.users = leaf.holders = 1
        self._shared[group] = leaf
        tree.use(leaf)
        self.on_kept(group.home, leaf)
        group.unshared = 0
        group.ids = None

    def keep(self, group: Group, completion: Completion) -> None:
        """A completion is being released: keep the tokens that it has and that the tree lacks.

        The request's reservations are not changed: at least as many of them end with this completion. A prompt that
        the tree has from elsewhere is the request's until its last completion is released: only that one is kept.
        """
        length = self.keepable(group, completion)
        if not length or (group.unshared and group.holders > 1):
            return
        ids = ids_of(group.known_tokens(completion, 0, length))
        tree, salt = self._trees[group.home], group.request.params.cache_salt
        node, found = tree.find(salt, ids)
        if node is not None:
            if found < min(node.stop, length):
                node = tree.split(node, found)
            tree.use(node)
        if found == length:
            return
        beginning = (
            node if found > self.shared(group) else None
        )  # computed twice: what the tree has takes the place of the other
        leaf = self._add(tree, node, salt, ids[found:], completion.sequence, beginning)
        self._placement.idle[group.home] += length - found
        tree.use(leaf)
        self.on_kept(group.home, leaf)

    def adopt(self, worker: str, salt: str, ids: Ids, sequence: int) -> None:
        """Keep the tokens of a sequence that no request has, and that a worker lacks. The caller releases it."""
        tree = self._trees[worker]
        node, found = tree.find(salt, ids)
        if node is not None and found < min(node.stop, len(ids)):
            node = tree.split(node, found)
        if found < len(ids):
            node = self._add(tree, node, salt, ids[found:], sequence, node)
            self._placement.idle[worker] += len(ids) - found
            self.on_kept(worker, node)
        assert node is not None
        tree.use(node)

    def release(self, sequence: int) -> None:
        """Let the next plan release a sequence that no request has."""
        self._released.append(sequence)

    def keepable(self, group: Group, completion: Completion) -> int:
        """Tokens that an ended completion has in its first segment, and that others may share."""
        if group.suspect or group.home not in self._trees or group.home in self._placement.closed:
            return 0
        length = _end(completion, group.kept(completion))
        exists = completion is group.completions[0] or length > group.prompt_length
        return length if exists else 0

    def _add(
        self,
        tree: PrefixTree,
        node: Node | None,
        salt: str,
        tokens: Ids,
        source: int,
        beginning: Node | None = None,
    ) -> Node:
        """Keep ``tokens`` of sequence ``source`` behind ``node``, with the slots of ``beginning`` for those before."""
        sequence = next(self._sequences)
        if beginning is not None:
            self._forks.append(Fork(beginning.any_sequence, sequence, beginning.stop))
        leaf, superseded = tree.add(node, salt, tokens, sequence)
        self._forks.append(Fork(source, sequence, leaf.stop))
        if superseded is not None:
            self._released.append(superseded)
        return leaf

    def _evict(self, worker: str, lacking: int) -> None:
        """Drop at least so many idle tokens of a worker."""
        while lacking > 0:
            tree = self._trees[worker]
            leaf = tree.oldest()
            amount = max(lacking, GRAIN)
            if len(leaf.tokens) > amount + GRAIN:
                tree.split(leaf, leaf.stop - amount)
            gone = len(leaf.tokens)
            sequence = leaf.any_sequence
            self.on_evicted(worker, leaf)
            parent = tree.remove(leaf)
            if parent is not None:
                parent.sequence = next(self._sequences)
                self._forks.append(Fork(sequence, parent.sequence, parent.stop))
                tree.note(parent)
                parent.copied = parent.copied or leaf.copied
                self.on_kept(worker, parent)
            self._released.append(sequence)
            self._placement.idle[worker] -= gone
            lacking -= gone


def _ignore(worker: str, leaf: Node) -> None:
    """Nobody wants to know."""
