"""A node of the radix tree of cached prefixes. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from lamina.groups import Ids, ids_of


@dataclass(eq=False, slots=True)
class Node:
    """Tokens [stop - len(tokens), stop) of every prefix that goes through it.

    Attributes:
        key: in the parent's children: the first token, or the salt. worker: that holds its tokens.
        sequence: with these tokens on the worker; leaves and checkpoints have one, the others share that of any below.
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
