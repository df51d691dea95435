"""The prefix cache: KV of earlier requests that memory workers keep, and the requests that share it. Pure.

A cached prefix is a sequence that no request runs. A request that begins with the same tokens is admitted as a fork of
the cached sequence, and computes only the other tokens. Prompts enter the cache once their steps have completed,
completions once no step runs them any more. Requests with different salts share nothing.

Each memory worker has a radix tree over the token ids of the prefixes of requests that were placed on it. Prefixes that
share slots share nodes, so each slot counts once. All tokens of a node are on one worker, which differs from the tree's
worker once they have moved. Radix tree and eviction from the leaves follow SGLang (Zheng et al., NeurIPS 2024), but a
leaf may be evicted in part, since slots are allocated by token.

Cached tokens that a request uses are reserved in ``Placement``. All others are idle: they count as free, and the least
recently used ones are evicted when requests need their slots, where a smaller ``priority`` counts as a later use. So no
request is preempted on a worker with idle tokens.

If layers drop tokens before their sliding window, requests can only continue from ``Checkpoints``.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from lamina.core.requests import Completion, Group, Ids, ids_of
from lamina.core.segments import by_worker, moved
from lamina.core.steps import Fork
from lamina.core.types import Segment
from lamina.kv.placement import CachedPrefix, Placement
from lamina.kv.prefix_tree import GRAIN, Node, PrefixTree, match, matches_tree, most_rows

SHORTEST = 16  # tokens; shorter common prefixes are not worth a fork


class PrefixCache:
    """The cached prefixes of all memory workers. Collects changes for the next plan; ``changes`` returns them.

    Attributes:
        queried: tokens that admitted requests looked up.
        hit: how many of them were found.
        evicted: by worker, tokens that were evicted before a disk had them.
    """

    def __init__(
        self,
        placement: Placement,
        sequences: Iterator[int],
        enabled: bool = True,
        window: int = 0,
        pays: Callable[[Group, int], bool] = lambda group, tokens: True,
    ) -> None:
        """Begin without prefixes.

        Args:
            placement: Where KV is placed.
            sequences: Yields numbers for new sequences.
            enabled: Whether prefixes are cached.
            window: The largest sliding window of layers that drop the tokens before it; 0 if no layer does.
            pays: Whether a request should use a cached prefix of so many tokens. The answer must not change while the
                request is admitted.
        """
        self.queried = self.hit = 0
        self._placement = placement
        self._sequences = sequences
        self._enabled = enabled
        self._window = window
        self._pays = pays
        self._trees = {worker: self._new_tree(worker) for worker in placement.capacities} if enabled else {}
        self._shared: dict[Group, tuple[PrefixTree, Node]] = {}  # by request: the last node that it shares
        self._grown: dict[PrefixTree, None] = {}  # trees with new checkpoints
        self._dealt: dict[Group, Node] = {}  # the entries of ``_shared`` that no plan has admitted yet
        self._branches: dict[Group, int] = {}  # prefix lengths that are in the tree, but that requests recompute
        self._forks: list[Fork] = []
        self._released: list[int] = []
        self._moving: dict[Node, int] = {}  # by last node of a range that moves: the range's first token
        self._kept: list[Node] = []  # leaves added since ``pop_kept``
        self.evicted = Counter[str]()

    def _new_tree(self, worker: str) -> PrefixTree:
        return PrefixTree(self._window, most_rows(self._placement.capacities[worker]))

    @property
    def enabled(self) -> bool:
        """Whether prefixes are cached."""
        return self._enabled

    def on_workers_lost(self, places: Collection[str]) -> None:
        """Remove the KV on these places from the cache. No request may share it.

        Call ``on_places_changed`` next.
        """
        self._branches.clear()  # their last tokens may be forgotten before the next plan
        for tree in self._trees.values():
            tree.remove_lost(places)
        for worker in self._placement.idle:
            self._placement.set_idle(worker, sum(tree.idle[worker] for tree in self._trees.values()))

    def on_places_changed(self) -> None:
        """Adapt the trees to the placement's places."""
        if self._enabled:
            # Requests no longer find the tree of a lost place; its remaining tokens are evicted like others.
            left = {worker: tree for worker, tree in self._trees.items() if tree.sequence_count}
            new = {worker: self._trees.get(worker) or self._new_tree(worker) for worker in self._placement.capacities}
            self._trees = left | new

    def idle(self) -> dict[str, tuple[int, int]]:
        """Return the idle tokens of each memory worker, and how many cached sequences have tokens there.

        Workers without either are left out. Any thread may call this.
        """
        placement, sequences = self._placement, Counter[str]()
        for tree in list(self._trees.values()):
            for places, count in list(tree.held_on.items()):
                for worker in {worker for place in places for worker in placement.workers_at(place)}:
                    sequences[worker] += count
        tokens = {worker: count for worker, count in placement.on_workers(dict(placement.idle)).items() if count}
        return {worker: (tokens.get(worker, 0), sequences[worker]) for worker in {**tokens, **sequences}}

    def sequences(self, worker: str) -> dict[int, int]:
        """Return the length of each cached sequence that has tokens on a worker."""
        ends = self.ends()
        return {end.any_sequence: end.stop for end in ends if any(one.worker == worker for one in end.path())}

    def changes(self) -> tuple[list[Fork], list[int]]:
        """Evict idle tokens whose slots are reserved now; return forks and released sequences for the next plan.

        Workers that are closed to requests keep no idle tokens.
        """
        placement = self._placement
        self._drop_checkpoints()
        while placement.crowded:
            worker = placement.crowded.pop()
            self._evict(worker, placement.excess(worker))
        for worker in placement.closed:
            self._evict(worker, placement.idle[worker])
        forks, released = self._forks, self._released
        self._forks, self._released = [], []
        return forks, released

    # -- requests that share ------------------------------------------------------------------------------------

    def find(self, group: Group) -> dict[str, CachedPrefix]:
        """Return, by worker, the longest cached prefix of a request, without its last token, which must be computed.

        A request that is split over several workers shares no prefix.
        """
        if not self._may_share(group):
            return {}
        found = {}
        for worker, tree in self._trees.items():
            if worker not in self._placement.capacities or worker in self._placement.closed:
                continue
            node, length, _ = match(tree, group, worker, self._placement)
            if node is not None and self._is_used(group, length):
                held = next((one.stop for one in node.path() if one.holders), 0)
                found[worker] = CachedPrefix(length, min(held, length))
        return found

    def _may_share(self, group: Group) -> bool:
        first = group.completions[0]
        return bool(self._trees) and first.goal > SHORTEST and not self._placement.splits(group.to_run)

    def _is_used(self, group: Group, length: int) -> bool:
        return length >= SHORTEST and self._pays(group, length)

    def share(self, group: Group) -> None:
        """Let a request, which has been placed on ``group.home``, share the prefix that ``find`` finds there.

        The caller has reserved slots for its other tokens.
        """
        if not self._trees:
            return
        tree, length, matched = self._trees[group.home], 0, 0
        if self._may_share(group):
            _, length, matched = match(tree, group, group.home, self._placement)
            length = length if self._is_used(group, length) else 0
        group.share(length)
        if self._window and matched >= length + SHORTEST:
            self._branches[group] = matched
        if not length:
            return
        assert group.ids is not None
        node, _ = tree.find(group.request.params.cache_salt, group.ids[:length])
        assert node is not None
        if length < node.stop:
            node = tree.split(node, length)
        tree.use(node, group.request.params.priority)
        if self._window:
            tree.checkpoints.use(node)
        self._shared[group], self._dealt[group] = (tree, node), node
        self.add_user(tree, node)
        for one in node.path():
            if one.worker != group.home:
                for completion in group.completions:
                    part = Segment(completion.sequence, one.worker, group.heads, (one.start, one.stop))
                    completion.segments = moved(completion.segments, part)

    def admit(self, group: Group) -> None:
        """Fork the first sequence of a request that the next plan admits from the prefix that it shares."""
        if not self._trees:
            return
        self.queried += group.completions[0].goal
        self.hit += group.hit
        if group.cached_tokens is None:
            group.cached_tokens = min(group.hit, group.prompt_length)
        self._dealt.pop(group, None)
        if group in self._shared:
            parent = self._shared[group][1].any_sequence
            self._forks.append(Fork(parent, group.completions[0].sequence, group.hit))

    def shared(self, group: Group) -> int:
        """Return the number of a request's tokens that are in the tree, and so not reserved for it alone."""
        return self._shared[group][1].stop if group in self._shared else 0

    def path(self, group: Group) -> list[Node]:
        """Return the nodes that a request shares, from its first token on."""
        return list(self._shared[group][1].path())[::-1] if group in self._shared else []

    def exclusive(self, group: Group, worker: str) -> int:
        """Return the number of cached tokens on a worker that only this request uses."""
        return sum(len(one.tokens) for one in self.path(group) if one.users == 1 and one.worker == worker)

    def on_request_end(self, group: Group) -> None:
        """Record that a request has ended. Call ``release_request`` once its sequences are released."""
        self._dealt.pop(group, None)
        self._branches.pop(group, None)
        if group in self._shared:
            self._leave(self._shared[group][1])

    def _leave(self, node: Node) -> None:
        for one in node.path():
            one.users -= 1
            if not one.users:
                self._placement.will_release(one.worker, len(one.tokens))

    def release_request(self, group: Group) -> None:
        """Make cached tokens that only this ended request used idle, now that its sequences are released."""
        if group in self._shared:
            self._release(*self._shared.pop(group))

    def _release(self, tree: PrefixTree, node: Node) -> None:
        for one in node.path():
            one.holders -= 1
            if not one.holders:
                self._placement.free_slots(one.worker, len(one.tokens))
                self._add_idle(tree, one.worker, len(one.tokens))
        tree.offer_for_eviction(node)

    def add_user(self, tree: PrefixTree, node: Node) -> None:
        """Count one more user of the tokens up to the end of ``node``, and reserve their slots if they were idle."""
        for one in node.path():
            if not one.holders:
                self._add_idle(tree, one.worker, -len(one.tokens))
                self._placement.reserve_on(one.worker, len(one.tokens))
            elif not one.users:
                self._placement.undo_release(one.worker, len(one.tokens))
            one.holders += 1
            one.users += 1

    def _add_idle(self, tree: PrefixTree, worker: str, tokens: int) -> None:
        tree.idle[worker] += tokens
        self._placement.add_idle(worker, tokens)

    # -- ranges that move ---------------------------------------------------------------------------------------

    def begin_move(self, group: Group, node: Node, stop: int) -> tuple[PrefixTree, Node]:
        """Pin the tokens up to ``stop`` of a node that a request shares while they are copied to another worker.

        Splits the node at ``stop``. Returns the tree and the upper part, for ``end_move`` or ``cancel_move``, and
        ``unpin``.
        """
        tree = self._shared[group][0]
        if stop < node.stop:
            node = tree.split(node, stop)
        self.add_user(tree, node)
        self._moving[node] = node.start
        return tree, node

    def is_moving(self, nodes: Collection[Node]) -> bool:
        """Return whether tokens of any of these nodes are being copied to another worker."""
        return any(one in nodes for node, start in self._moving.items() for one in node.path() if one.start >= start)

    def end_move(self, tree: PrefixTree, node: Node, worker: str) -> tuple[dict[Group, int], dict[int, int | None]]:
        """Record that the range that ends with ``node`` is on ``worker`` now. Returns its ``sharers``."""
        start = self._moving.pop(node)
        sharers = self.sharers(tree, node, start)
        tree.move(node, start, worker)
        return sharers

    def cancel_move(self, node: Node) -> None:
        """End the move of the range that ends with ``node``, which stays on its worker."""
        del self._moving[node]

    def unpin(self, tree: PrefixTree, node: Node) -> None:
        """Undo ``begin_move`` or ``pin``: the tokens may be evicted again."""
        self._leave(node)
        self._release(tree, node)

    def sharers(self, tree: PrefixTree, node: Node, start: int) -> tuple[dict[Group, int], dict[int, int | None]]:
        """Return who uses tokens from ``start`` to the end of ``node``: requests, and cached sequences, each with the
        position up to which it uses them; None for a cached sequence that ends within the range."""
        top = next(one for one in node.path() if one.start == start)
        within = {id(one): one.stop for one in node.path() if one.start >= start}

        def shared(leaf: Node) -> int:
            return max((within.get(id(one), 0) for one in leaf.path()), default=0)

        groups = {group: stop for group, (_, end) in self._shared.items() if (stop := shared(end))}
        ends = {leaf: shared(leaf) for leaf in tree.below(top)}
        return groups, {leaf.any_sequence: stop if stop < leaf.stop else None for leaf, stop in ends.items()}

    # -- prefixes that come from elsewhere -----------------------------------------------------------------------

    def ends(self) -> Iterator[Node]:
        """Yield the last nodes of all cached prefixes."""
        return itertools.chain.from_iterable(tree.ends() for tree in self._trees.values())

    def beginning(self, worker: str, salt: str, ids: Ids) -> tuple[PrefixTree, Node | None, int]:
        """Return the tree of a worker, its deepest node with some of these tokens, and how many of them it has."""
        tree = self._trees[worker]
        return tree, *tree.find(salt, ids)

    def pin(self, worker: str, salt: str, ids: Ids) -> tuple[PrefixTree, Node]:
        """Protect cached tokens from eviction until ``unpin``. Returns the tree and the last node."""
        tree, node, _ = self.beginning(worker, salt, ids)
        assert node is not None
        if len(ids) < node.stop:
            node = tree.split(node, len(ids))
        tree.use(node)
        self.add_user(tree, node)
        return tree, node

    def keep_sequence(self, salt: str, ids: Ids, sequence: int, segments: Sequence[Segment]) -> None:
        """Add the tokens ``ids`` of a sequence that no request runs, which has these segments. The caller releases the
        sequence.

        Does nothing if the tree has a beginning of them on other workers than the sequence.
        """
        if not self._enabled:
            return
        tree, node, found = self.beginning(segments[0].worker, salt, ids)
        for one in () if node is None else node.path():
            if by_worker(segments, one.start, one.stop) != {one.worker: len(one.tokens)}:
                return
        if found == len(ids):
            return
        if node is not None and found < node.stop:
            node = tree.split(node, found)
        leaf = self._add(tree, node, salt, ids[found:], sequence, segments, node)
        for one in leaf.path():
            if one.start >= found:
                self._add_idle(tree, one.worker, len(one.tokens))
        tree.use(leaf)
        self._kept.append(leaf)

    def keep_prefix(self, worker: str, salt: str, ids: Ids, sequence: int, heads: tuple[int, int]) -> None:
        """Add the tokens of a sequence that no request runs to the tree of a worker. The caller releases the sequence.

        Does nothing if the tree already has a prefix of them that is partly on other workers.
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
            self._kept.append(node)
        assert node is not None
        tree.use(node)

    def free_unused(self, sequence: int) -> None:
        """Let the next plan release a sequence that no request runs."""
        self._released.append(sequence)

    # -- prefixes that are kept ---------------------------------------------------------------------------------

    def pop_kept(self) -> list[Node]:
        """Return the leaves that were added to trees since the last call."""
        kept, self._kept = self._kept, []
        return kept

    def keep_computed(self, lane: int, prompts: Iterable[Group], ran: Callable[[Completion], int]) -> None:
        """Add computed tokens of requests of a lane: whole ``prompts``, and new checkpoints of prefixes that a request
        had to recompute. ``ran`` returns how many tokens of a completion have run."""
        for group in prompts:
            self._keep_prompt(group)
        for group in [one for one in self._branches if one.lane == lane and not one.completions[0].released]:
            if ran(group.completions[0]) >= self._branches[group]:
                self._keep_branch(group, self._branches.pop(group))

    def _keep_prompt(self, group: Group) -> None:
        """Add the computed prompt of a running request to the tree, so that the request and others share it.

        Does nothing if another request has added some of it; ``keep_completion`` then adds the rest at the end.
        """
        first, stop = group.completions[0], group.prompt_length
        if not self._trees or not group.unshared or not group.alive or first.cached < stop:
            return
        if first.released or first.dropped or self._is_leaving(first):
            return
        if self._window:
            stop -= 1  # the same prompt may come again, and must compute its last token
            ran_on = group.stored_tokens(first) > group.prompt_length + 1  # so the prompt's last window is forgotten
            if stop <= group.hit or ran_on:
                return
        ids = ids_of(group.request.prompt_token_ids[:stop]) if group.ids is None else group.ids[:stop]
        tree, salt = self._tree(group, first), group.request.params.cache_salt
        node, found = tree.find(salt, ids)
        if found != group.hit:
            return
        leaf = self._add(tree, node, salt, ids[found:], first.sequence, first.segments)
        for one in leaf.path():
            if one.start >= found:
                one.users = one.holders = 1
        self._shared[group] = tree, leaf
        tree.use(leaf, group.request.params.priority)
        self._kept.append(leaf)
        group.unshared = group.prompt_length - stop
        group.ids = None

    def _keep_branch(self, group: Group, length: int) -> None:
        """Make the first ``length`` tokens of a request a checkpoint, if the tree still has them."""
        tree, first = self._tree(group, group.completions[0]), group.completions[0]
        ids = ids_of(group.known_tokens(first, 0, length))
        node, found = tree.find(group.request.params.cache_salt, ids)
        if node is not None and found == length and self._is_interchangeable(node, first):
            self._add_checkpoint(tree, node, length, first.sequence)

    def _add_checkpoint(self, tree: PrefixTree, node: Node, length: int, source: int) -> None:
        """Make the first ``length`` tokens up to ``node`` a checkpoint, with the last window of ``source``."""
        if length < node.stop:
            node = tree.split(node, length)
        if node not in tree.checkpoints:
            if node.sequence is None:
                sequence = next(self._sequences)
                self._forks.append(Fork(node.any_sequence, sequence, length))
                tree.give_sequence(node, sequence)
            self._forks.append(Fork(source, node.any_sequence, length))
            self._grown[tree] = None
        tree.checkpoints.use(node)

    def keep_completion(self, group: Group, completion: Completion) -> None:
        """Add the tokens of a completion that is being released to the tree, as far as the tree lacks them.

        Does not change the request's reservations: at least as many of them end with this completion. If the tree has
        the prompt from another request, only the last completion of this request is added.
        """
        length = self.keepable(group, completion)
        if not length or (group.unshared and group.holders > 1):
            return
        ids = ids_of(group.known_tokens(completion, 0, length))
        tree, salt = self._tree(group, completion), group.request.params.cache_salt
        node, found = tree.find(salt, ids)
        if found > self.shared(group) and not self._is_interchangeable(node, completion):
            return
        if node is not None:
            if found < min(node.stop, length):
                node = tree.split(node, found)
            tree.use(node, group.request.params.priority)
        if found == length:
            if self._window and node is not None:
                self._add_checkpoint(tree, node, length, completion.sequence)
            return
        # Tokens computed twice: the kept sequence takes the slots of those in the tree.
        beginning = node if found > self.shared(group) else None
        leaf = self._add(tree, node, salt, ids[found:], completion.sequence, completion.segments, beginning)
        for one in leaf.path():
            if one.start >= found:
                self._add_idle(tree, one.worker, len(one.tokens))
        tree.use(leaf, group.request.params.priority)
        self._kept.append(leaf)

    def _is_interchangeable(self, node: Node | None, completion: Completion) -> bool:
        """True if the tree's KV for the tokens up to ``node`` and the completion's are interchangeable."""
        moving = self._window and node is not None and self.is_moving([*node.path()])
        return not moving and matches_tree(node, completion)

    def keepable(self, group: Group, completion: Completion) -> int:
        """Return the number of tokens of an ended completion that other requests may share."""
        if group.suspect or completion.dropped or not self._trees or self._is_leaving(completion):
            return 0
        length = group.stored_tokens(completion)
        exists = completion is group.completions[0] or length > group.prompt_length
        return length if exists else 0

    def _is_leaving(self, completion: Completion) -> bool:
        """True if some of the completion's KV is on a closed worker, which keeps no idle tokens."""
        return any(segment.worker in self._placement.closed for segment in completion.segments)

    def _tree(self, group: Group, completion: Completion) -> PrefixTree:
        """Return the tree for a completion: that of the prefix that its request shares, else that of its worker."""
        return self._shared[group][0] if group in self._shared else self._trees[completion.segments[0].worker]

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
        """Add ``tokens`` of sequence ``source``, which has these ``segments``, as a child of ``node``. For earlier
        tokens, the new sequence uses the slots of ``beginning``; None: those of ``source``."""
        sequence = next(self._sequences)
        if beginning is not None:
            self._forks.append(Fork(beginning.any_sequence, sequence, beginning.stop))
        leaf, superseded = tree.insert_leaf(node, salt, tokens, sequence, segments)
        self._forks.append(Fork(source, sequence, leaf.stop))
        if self._window:
            self._grown[tree] = None
        if superseded is not None:
            self._released.append(superseded)
        return leaf

    def _evict(self, worker: str, lacking: int) -> None:
        """Evict at least ``lacking`` idle tokens on a worker, first from its own tree, then from other trees. Tokens
        that follow them, on any worker, are evicted first."""
        while lacking > 0:
            trees = (self._trees[worker], *self._trees.values())
            tree = next(one for one in trees if one.idle[worker] > 0)
            leaf = tree.oldest()
            amount = max(lacking, GRAIN)
            if leaf.worker == worker and len(leaf.tokens) > amount + GRAIN and not self._window:
                tree.split(leaf, leaf.stop - amount)
            lacking -= self._drop(tree, leaf)[worker]

    def _drop(self, tree: PrefixTree, leaf: Node) -> Counter[str]:
        """Evict an idle leaf and, with a window, the idle nodes above it up to a checkpoint. Returns the evicted tokens
        by worker."""
        sequence, dropped = leaf.any_sequence, Counter[str]()
        self._released.append(sequence)
        while True:
            if leaf.home is not None and not leaf.copied:
                self.evicted[leaf.worker] += len(leaf.tokens)
            dropped[leaf.worker] += len(leaf.tokens)
            self._add_idle(tree, leaf.worker, -len(leaf.tokens))
            parent = tree.remove_leaf(leaf)
            if parent is None:
                return dropped
            if parent.sequence is not None or parent.holders or not self._window:
                break
            leaf = parent
        if parent.sequence is None:
            tree.give_sequence(parent, next(self._sequences))
            self._forks.append(Fork(sequence, parent.any_sequence, parent.stop))
        tree.offer_for_eviction(parent)
        parent.copied = parent.copied or leaf.copied
        self._kept.append(parent)
        return dropped

    def _drop_checkpoints(self) -> None:
        """Drop the least recently used checkpoints until the others fit into the available rows."""
        while self._grown:
            tree, _ = self._grown.popitem()
            while (node := tree.checkpoints.oldest(self._dealt.values())) is not None:
                if node.children:
                    self._released.append(node.any_sequence)
                    tree.take_sequence(node)
                else:
                    self._drop(tree, node)
