"""Prefixes of earlier requests whose KV memory workers keep, and the requests that share them. Pure.

A cached prefix is a sequence that nobody runs. A request whose first tokens it has is admitted as a fork of it, and
computes only the rest. Prefixes come from prompts once their steps have completed, and from completions once no step
runs them any more. For each memory worker, a radix tree over token ids says which tokens are kept for requests placed
there; shared slots are nodes shared in the tree, so every slot that is kept counts once. The tokens of a node are on
one worker: usually that of the tree, unless they have moved. Trees of requests with different salts have nothing in
common.

Tokens that some request shares are reserved in ``Placement``. All others are idle: they count as free, and the least
recently used ones are evicted as soon as a request's own tokens need their slots. So KV is dropped only where nothing
idle is left.

The radix tree and its eviction from the leaves: SGLang (Zheng et al., NeurIPS 2024). Here a leaf may be evicted in
part, since slots are allocated by token.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence

from lamina.groups import Completion, Group, Ids, ids_of
from lamina.placement.map import Found, Placement
from lamina.placement.prefix_tree import GRAIN, Node, PrefixTree
from lamina.segments import by_worker, moved
from lamina.steps import Fork
from lamina.types import Segment

SHORTEST = 16  # tokens: a shorter prefix, as the first words of every chat, is not worth a fork


class PrefixCache:
    """The prefixes of all memory workers. Changes are collected for the next plan; ``changes`` hands them over.

    Attributes:
        queried: tokens of requests that were admitted. hit: those of them that were found.
        on_kept, on_evicted: called with each new leaf of a tree, and each that is given up.
    """

    def __init__(self, placement: Placement, sequences: Iterator[int], enabled: bool = True) -> None:
        """``sequences``: numbers of new sequences. Without ``enabled`` nothing is kept and nothing found."""
        self.queried = self.hit = 0
        self._placement = placement
        self._sequences = sequences
        self._enabled = enabled
        self._trees = {worker: PrefixTree() for worker in placement.capacities} if enabled else {}
        self._shared: dict[Group, tuple[PrefixTree, Node]] = {}  # the end of what each request shares
        self._forks: list[Fork] = []
        self._released: list[int] = []
        self.on_kept: Callable[[Node], None] = _ignore
        self.on_evicted: Callable[[Node], None] = _ignore

    def lose(self, places: Collection[str]) -> None:
        """KV on these places of the placement is lost, and no request may share any of it. ``follow`` comes next."""
        idle = self._placement.idle
        for tree in self._trees.values():
            tree.cut(places)
        for worker in idle:
            idle[worker] = sum(tree.idle[worker] for tree in self._trees.values())

    def follow(self) -> None:
        """The places of the placement have changed."""
        if self._enabled:
            # What is left of the tree of a lost place is found no more, and goes once its slots are needed.
            left = {worker: tree for worker, tree in self._trees.items() if tree.leaf_count}
            new = {worker: self._trees.get(worker) or PrefixTree() for worker in self._placement.capacities}
            self._trees = left | new

    def idle(self, worker: str) -> tuple[int, int]:
        """Tokens that a worker keeps although no request uses them, and the sequences that hold what it keeps."""
        trees = [tree for place in self._placement.places_on(worker) if (tree := self._trees.get(place)) is not None]
        return self._placement.idle_on(worker), sum(tree.leaf_count for tree in trees)

    def sequences(self, worker: str) -> dict[int, int]:
        """What a worker keeps some of: tokens by sequence."""
        leaves = self.leaves()
        return {leaf.any_sequence: leaf.stop for leaf in leaves if any(one.worker == worker for one in leaf.path())}

    def changes(self) -> tuple[list[Fork], list[int]]:
        """Forks and released sequences for the next plan; first, what is idle makes way for what is reserved.

        Workers that take no more requests keep nothing.
        """
        placement = self._placement
        while placement.crowded:
            worker = placement.crowded.pop()
            self._evict(worker, placement.excess(worker))
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
            if worker not in self._placement.capacities or worker in self._placement.closed:
                continue
            node, length = tree.find(group.request.params.cache_salt, group.ids)
            length = min(length, most, self._usable(node, worker))
            if node is not None and length >= SHORTEST:
                held = next((one.stop for one in node.path() if one.holders), 0)
                found[worker] = Found(length, min(held, length))
        return found

    def _usable(self, node: Node | None, home: str) -> int:
        """How many tokens up to ``node`` a request on ``home`` could share, as far as other workers are concerned: what
        is idle there needs room again, and some may be about to leave."""
        placement, rooms = self._placement, Counter[str]()
        for one in reversed(list(node.path())) if node is not None else ():
            if one.worker != home:
                rooms[one.worker] += 0 if one.holders else len(one.tokens)
                if one.worker in placement.closed or (
                    not one.holders and rooms[one.worker] > placement.room(one.worker)
                ):
                    return one.start
        return 0 if node is None else node.stop

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
        self._shared[group] = tree, node
        self.hold(tree, node)
        for one in node.path():
            if one.worker != group.home:
                for completion in group.completions:
                    part = Segment(completion.sequence, one.worker, group.heads, (one.start, one.stop))
                    completion.segments = moved(completion.segments, part)

    def admit(self, group: Group) -> None:
        """A plan admits a request: its first sequence begins with what it shares."""
        if not self._trees:
            return
        self.queried += group.completions[0].goal
        self.hit += group.hit
        if group.cached_tokens is None:
            group.cached_tokens = min(group.hit, group.prompt_length)
        if group in self._shared:
            parent = self._shared[group][1].any_sequence
            self._forks.append(Fork(parent, group.completions[0].sequence, group.hit))

    def shared(self, group: Group) -> int:
        """Tokens of a request that are in the tree: not reserved for it alone."""
        return self._shared[group][1].stop if group in self._shared else 0

    def path(self, group: Group) -> list[Node]:
        """What a request shares, its first tokens first."""
        return list(self._shared[group][1].path())[::-1] if group in self._shared else []

    def exclusive(self, group: Group, worker: str) -> int:
        """Tokens in the tree that would be idle on a worker without this request."""
        return sum(len(one.tokens) for one in self.path(group) if one.users == 1 and one.worker == worker)

    def leave(self, group: Group) -> None:
        """A request has ended; ``let_go`` follows once it is released."""
        if group in self._shared:
            self._leave(self._shared[group][1])

    def _leave(self, node: Node) -> None:
        for one in node.path():
            one.users -= 1
            if not one.users:
                self._placement.will_release(one.worker, len(one.tokens))

    def let_go(self, group: Group) -> None:
        """A request that has left is released: what only it shared is idle."""
        if group in self._shared:
            self._let_go(*self._shared.pop(group))

    def _let_go(self, tree: PrefixTree, node: Node) -> None:
        for one in node.path():
            one.holders -= 1
            if not one.holders:
                self._placement.release(one.worker, len(one.tokens))
                self._add_idle(tree, one.worker, len(one.tokens))
        tree.note(node)

    def hold(self, tree: PrefixTree, node: Node) -> None:
        """One more uses the tokens up to ``node``."""
        for one in node.path():
            if not one.holders:
                self._add_idle(tree, one.worker, -len(one.tokens))
                self._placement.reserve_on(one.worker, len(one.tokens))
            elif not one.users:
                self._placement.returning[one.worker] -= len(one.tokens)
            one.holders += 1
            one.users += 1

    def _add_idle(self, tree: PrefixTree, worker: str, tokens: int) -> None:
        tree.idle[worker] += tokens
        self._placement.idle[worker] += tokens
        self._placement.note_crowded(worker)

    # -- ranges that move ---------------------------------------------------------------------------------------

    def pin(self, group: Group, node: Node, stop: int) -> tuple[PrefixTree, Node]:
        """Keep the tokens up to ``stop`` of a node that a request shares, which becomes a node of its own, until
        ``unpin``."""
        tree = self._shared[group][0]
        if stop < node.stop:
            node = tree.split(node, stop)
        self.hold(tree, node)
        return tree, node

    def unpin(self, tree: PrefixTree, node: Node) -> None:
        """Undo ``pin``."""
        self._leave(node)
        self._let_go(tree, node)

    def sharers(self, tree: PrefixTree, node: Node, start: int) -> tuple[dict[Group, int], dict[int, int | None]]:
        """Who has tokens from ``start`` on of those that end with ``node``, and up to which: requests, and sequences of
        cached prefixes; None: these are the last of a prefix."""
        top = next(one for one in node.path() if one.start == start)
        within = {id(one): one.stop for one in node.path() if one.start >= start}

        def shared(leaf: Node) -> int:
            return max((within.get(id(one), 0) for one in leaf.path()), default=0)

        groups = {group: stop for group, (_, end) in self._shared.items() if (stop := shared(end))}
        ends = {leaf: shared(leaf) for leaf in tree.below(top)}
        return groups, {leaf.any_sequence: stop if stop < leaf.stop else None for leaf, stop in ends.items()}

    def relocate(self, node: Node, start: int, worker: str) -> None:
        """The tokens from ``start`` on that end with ``node`` are on another worker now; the caller reserves there."""
        for one in node.path():
            if one.start >= start:
                one.worker = worker

    # -- prefixes that come from elsewhere -----------------------------------------------------------------------

    def leaves(self) -> Iterator[Node]:
        """The ends of all prefixes that are kept."""
        return itertools.chain.from_iterable(tree.leaves() for tree in self._trees.values())

    def beginning(self, worker: str, salt: str, ids: Ids) -> tuple[PrefixTree, Node | None, int]:
        """The tree of a worker, and what it has of these tokens: the end, and how many."""
        tree = self._trees[worker]
        return tree, *tree.find(salt, ids)

    def take(self, worker: str, salt: str, ids: Ids) -> tuple[PrefixTree, Node]:
        """Keep these tokens, which the tree of a worker has, until ``unpin``. Returns their end."""
        tree, node, _ = self.beginning(worker, salt, ids)
        assert node is not None
        if len(ids) < node.stop:
            node = tree.split(node, len(ids))
        tree.use(node)
        self.hold(tree, node)
        return tree, node

    def adopt(self, worker: str, salt: str, ids: Ids, sequence: int, heads: tuple[int, int]) -> None:
        """Keep the tokens of a sequence that no request has, and that a worker lacks. The caller releases it.

        If the worker's tree has got some of them on other workers meanwhile, it goes on with these.
        """
        tree, node, found = self.beginning(worker, salt, ids)
        if node is not None and node.home != worker:
            return
        if node is not None and found < min(node.stop, len(ids)):
            node = tree.split(node, found)
        if found < len(ids):
            here = [Segment(sequence, worker, heads, (0, None))]
            node = self._add(tree, node, salt, ids[found:], sequence, here, node)
            self._add_idle(tree, worker, len(ids) - found)
            self.on_kept(node)
        assert node is not None
        tree.use(node)

    def release(self, sequence: int) -> None:
        """Let the next plan release a sequence that no request has."""
        self._released.append(sequence)

    # -- prefixes that are kept ---------------------------------------------------------------------------------

    def keep_prompt(self, group: Group) -> None:
        """The prompt of a running request has been computed: others may share it now, and it does so itself.

        If the tree has got some of it from another request meanwhile, it waits until this one ends.
        """
        first, stop = group.completions[0], group.prompt_length
        if not self._trees or not group.unshared or not group.alive or first.cached < stop:
            return
        if self._is_leaving(first):
            return
        ids = ids_of(group.request.prompt_token_ids) if group.ids is None else group.ids[:stop]
        tree, salt = self._tree(group), group.request.params.cache_salt
        node, found = tree.find(salt, ids)
        if found != group.hit:
            return
        leaf = self._add(tree, node, salt, ids[found:], first.sequence, first.segments)
        for one in leaf.path():
            if one.start >= found:
                one.users = one.holders = 1
        self._shared[group] = tree, leaf
        tree.use(leaf)
        self.on_kept(leaf)
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
        tree, salt = self._tree(group), group.request.params.cache_salt
        node, found = tree.find(salt, ids)
        if found > self.shared(group) and not _alike(node, completion):
            return
        if node is not None:
            if found < min(node.stop, length):
                node = tree.split(node, found)
            tree.use(node)
        if found == length:
            return
        beginning = (
            node if found > self.shared(group) else None
        )  # computed twice: what the tree has takes the place of the other
        leaf = self._add(tree, node, salt, ids[found:], completion.sequence, completion.segments, beginning)
        for one in leaf.path():
            if one.start >= found:
                self._add_idle(tree, one.worker, len(one.tokens))
        tree.use(leaf)
        self.on_kept(leaf)

    def keepable(self, group: Group, completion: Completion) -> int:
        """Tokens of an ended completion that others may share."""
        if group.suspect or not self._trees or self._is_leaving(completion):
            return 0
        length = group.kept(completion)
        exists = completion is group.completions[0] or length > group.prompt_length
        return length if exists else 0

    def _is_leaving(self, completion: Completion) -> bool:
        """True if some of its workers keep nothing."""
        return any(segment.worker in self._placement.closed for segment in completion.segments)

    def _tree(self, group: Group) -> PrefixTree:
        return self._shared[group][0] if group in self._shared else self._trees[group.home]

    def _add(
        self,
        tree: PrefixTree,
        node: Node | None,
        salt: str,
        tokens: Ids,
        source: int,
        segments: Sequence[Segment],
        beginning: Node | None = None,
    ) -> Node:
        """Keep ``tokens`` of sequence ``source``, which has these ``segments``, behind ``node``, with the slots of
        ``beginning`` for those before."""
        sequence = next(self._sequences)
        if beginning is not None:
            self._forks.append(Fork(beginning.any_sequence, sequence, beginning.stop))
        leaf, superseded = tree.add(node, salt, tokens, sequence, segments)
        self._forks.append(Fork(source, sequence, leaf.stop))
        if superseded is not None:
            self._released.append(superseded)
        return leaf

    def _evict(self, worker: str, lacking: int) -> None:
        """Drop at least so many idle tokens of a worker: first those of its own tree; what is idle elsewhere, and comes
        after them, goes first."""
        while lacking > 0:
            trees = (self._trees[worker], *self._trees.values())
            tree = next(one for one in trees if one.idle[worker] > 0)
            leaf = tree.oldest()
            amount = max(lacking, GRAIN)
            if leaf.worker == worker and len(leaf.tokens) > amount + GRAIN:
                tree.split(leaf, leaf.stop - amount)
            gone = len(leaf.tokens)
            sequence = leaf.any_sequence
            self.on_evicted(leaf)
            parent = tree.remove(leaf)
            if parent is not None:
                parent.sequence = next(self._sequences)
                self._forks.append(Fork(sequence, parent.sequence, parent.stop))
                tree.note(parent)
                parent.copied = parent.copied or leaf.copied
                self.on_kept(parent)
            self._released.append(sequence)
            self._add_idle(tree, leaf.worker, -gone)
            lacking -= gone if leaf.worker == worker else 0


def _alike(node: Node | None, completion: Completion) -> bool:
    """True if a completion has the tokens up to ``node`` on the same workers, if not in the same slots."""
    return node is None or all(
        by_worker(completion.segments, one.start, one.stop) == {one.worker: len(one.tokens)} for one in node.path()
    )


def _ignore(leaf: Node) -> None:
    """Nobody wants to know."""
