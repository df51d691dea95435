"""Where requests may continue from cached prefixes if layers forget the tokens before their sliding window. Pure.

Such layers have the K and V of a cached prefix only just before *checkpoints*: nodes of the tree with a sequence of
their own. Memory workers keep the last window of every cached sequence (``lamina.memory.device.windows``). A request
whose first tokens are cached continues from the last checkpoint among them, and recomputes the tokens after it.

Checkpoints are made at the ends of prompts and of answers, and where a request diverges from a cached prefix: the first
request that diverges there recomputes the common tokens and leaves a checkpoint for the next. The least recently used
checkpoints are given up once those of a tree need more rows than ``most_rows``. Marconi (Pan et al., MLSys 2025) places
checkpoints in the same way, for layers with a recurrent state.
"""

import collections
from collections.abc import Collection, Iterable, Iterator

from lamina.placement.prefix_node import Node

SHARE = 4


def most_rows(slots: int) -> int:
    """Rows of each layer with a window for the checkpoints of a memory worker with so many token slots."""
    return slots // SHARE


class Checkpoints:
    """The checkpoints of one tree. ``window``: the largest of layers that forget; 0 if no layer forgets.

    Attributes:
        rows: upper bound of the rows that each such layer needs for all checkpoints.
    """

    def __init__(self, window: int = 0, most: int = 0) -> None:
        """``most``: limit of ``rows``."""
        self.window = window
        self.rows = 0
        self._most = most
        self._nodes: collections.OrderedDict[Node, int] = collections.OrderedDict()  # rows of each, LRU first

    def __contains__(self, node: Node) -> bool:
        return node in self._nodes

    def oldest(self, fixed: Collection[Node]) -> Node | None:
        """The least recently used checkpoint if all need too many rows, else None. Skips those in ``fixed`` and leaves
        that requests hold."""
        if self.rows <= self._most:
            return None
        return next((one for one in self._nodes if one not in fixed and (one.children or not one.holders)), None)

    def last(self, node: Node | None, most: int) -> int:
        """Tokens up to the last checkpoint on the path to ``node``, among the first ``most``; 0 without one."""
        path = [] if node is None else node.path()
        return next((one.stop for one in path if one.stop <= most and one in self._nodes), 0)

    def use(self, node: Node) -> None:
        """Make a node a checkpoint, or note that it has been used as one."""
        new = node not in self._nodes
        self._nodes[node] = self._nodes.get(node, 0)
        self._nodes.move_to_end(node)
        if new:
            self._count([node, *self._next(node)])

    def discard(self, node: Node) -> None:
        """Make a node an ordinary one, if it was a checkpoint."""
        if node in self._nodes:
            self.rows -= self._nodes.pop(node)
            self._count(self._next(node))

    def _next(self, node: Node) -> Iterator[Node]:
        """The first checkpoint on every path down from a node."""
        nodes = [*node.children.values()]
        while nodes:
            node = nodes.pop()
            if node in self._nodes:
                yield node
            else:
                nodes += node.children.values()

    def _count(self, nodes: Iterable[Node]) -> None:
        """Count the rows of checkpoints: for a window each, or for the tokens since the checkpoint before, if fewer."""
        for node in list(nodes):
            before = self.last(node.parent, node.stop)
            rows = min(self.window, node.stop - before)
            self.rows += rows - self._nodes[node]
            self._nodes[node] = rows
