"""A node of the radix tree of cached prefixes. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from lamina.groups import Ids, ids_of


@dataclass(eq=False, slots=True)
class Node:
    """Tokens [stop - len(tokens), stop) of every prefix that goes through it.

    Attributes:
        key: the node's key in the parent's children: its first token, or the salt. worker: holds its tokens.
        sequence: that has these tokens on the worker. Only leaves and checkpoints have their own; for other nodes, see
            ``any_sequence``.
        users: running requests that share it. holders: users, and ended requests that have not been released yet.
        used: time of the last use, counted in uses. copied: all of its blocks are on the worker's disk.
        fixed: number of fetches from a disk that continue it; its tokens must not move while there are any.
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
        """A sequence that has its tokens on the worker: its own, or that of a node below."""
        node = self
        while node.sequence is None:
            node = next(iter(node.children.values()))
        return node.sequence

    @property
    def home(self) -> str | None:
        """The worker that has its tokens and all before them; None if they are on several."""
        workers = {node.worker for node in self.path()}
        return workers.pop() if len(workers) == 1 else None

    def whole(self) -> tuple[str, Ids]:
        """Its salt, and all tokens from the first to its last."""
        *_, first = nodes = list(self.path())
        assert first.parent is not None
        ids = ids_of([])
        for node in reversed(nodes):
            ids += node.tokens
        return str(first.parent.key), ids

    def path(self) -> "Iterator[Node]":
        """The node and its ancestors that have tokens, from the node upwards."""
        node: Node | None = self
        while node is not None and node.stop:
            yield node
            node = node.parent
