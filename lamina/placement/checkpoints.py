"""Where requests may go on from cached prefixes if layers with a window forget what it has left. Pure.

Such layers have the K and V of a cached prefix only near *checkpoints*: nodes of the tree with a sequence of their own.
Memory workers keep the window before the end of every sequence that nobody runs (``lamina.memory.device.windows``). A
request that finds more of its tokens goes on from the last checkpoint among them, and computes the others again.

Checkpoints are made at the ends of prompts and of answers, and where a request left a prefix that others began with:
the first such request computes these tokens again, and the next one finds a checkpoint. Those used least recently are
given up once all of a tree need more rows than ``most_rows``. Marconi (Pan et al., MLSys 2025) has checkpoints at the
same places, for layers with a recurrent state.
"""

import collections
from collections.abc import Collection, Iterable, Iterator

from lamina.placement.prefix_node import Node

SHARE = 4


def most_rows(slots: int) -> int:
    """Rows of each layer with a window for the checkpoints of a memory worker with so many token slots."""
    return slots // SHARE


class Checkpoints:
    """Those of one tree, for layers whose largest ``window`` is this; with 0, nothing is forgotten.

    Attributes:
        rows: at most so many does each layer need for all of them.
    """

    def __init__(self, window: int = 0, most: int = 0) -> None:
        """``most``: rows that they may need together."""
        self.window = window
        self.rows = 0
        self._most = most
        self._nodes: collections.OrderedDict[Node, int] = collections.OrderedDict()  # rows of each, LRU first

    def __contains__(self, node: Node) -> bool:
        return node in self._nodes

    def oldest(self, fixed: Collection[Node]) -> Node | None:
        """If all need too many rows, the one to give up: that used least recently, but for those ``fixed`` and leaves
        that requests hold."""
        if self.rows <= self._most:
            return None
        return next((one for one in self._nodes if one not in fixed and (one.children or not one.holders)), None)

    def last(self, node: Node | None, most: int) -> int:
        """Tokens up to the last checkpoint among the first ``most`` tokens of those that end with ``node``."""
        path = [] if node is None else node.path()
        return next((one.stop for one in path if one.stop <= most and one in self._nodes), 0)

    def use(self, node: Node) -> None:
        """A node is a checkpoint, or has been used as one."""
        new = node not in self._nodes
        self._nodes[node] = self._nodes.get(node, 0)
        self._nodes.move_to_end(node)
        if new:
            self._count([node, *self._next(node)])

    def discard(self, node: Node) -> None:
        """A node is not a checkpoint any more, if it was one."""
        if node in self._nodes:
            self.rows -= self._nodes.pop(node)
            self._count(self._next(node))

    def _next(self, node: Node) -> Iterator[Node]:
        """The first checkpoints on every way down."""
        nodes = [*node.children.values()]
        while nodes:
            node = nodes.pop()
            if node in self._nodes:
                yield node
            else:
                nodes += node.children.values()

    def _count(self, nodes: Iterable[Node]) -> None:
        """Each needs rows for its window, or those that follow the checkpoint before it."""
        for node in list(nodes):
            before = self.last(node.parent, node.stop)
            rows = min(self.window, node.stop - before)
            self.rows += rows - self._nodes[node]
            self._nodes[node] = rows
