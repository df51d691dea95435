"""How much of a request a tree of cached prefixes has. Pure."""

from collections import Counter

from lamina.groups import Completion, Group, ids_of
from lamina.placement.map import Placement
from lamina.placement.prefix_node import Node
from lamina.placement.prefix_tree import PrefixTree
from lamina.segments import by_worker


def match(tree: PrefixTree, group: Group, home: str, placement: Placement) -> tuple[Node | None, int]:
    """The deepest node of the tree of worker ``home`` with tokens of a request, and how many of these it has for it:
    its last token is computed in any case."""
    first = group.completions[0]
    if group.ids is None:
        group.ids = ids_of(group.known_tokens(first, 0, first.goal))
    most = first.goal - 1
    if group.request.params.penalizes:
        most = min(most, group.prompt_length)  # replicas learn from the chunks that run what has been generated
    node, length = tree.find(group.request.params.cache_salt, group.ids)
    return node, min(length, most, _usable(node, home, placement))


def _usable(node: Node | None, home: str, placement: Placement) -> int:
    """How many tokens up to ``node`` a request on ``home`` could share, as far as other workers are concerned: what is
    idle there needs room again, and some may be about to leave."""
    rooms = Counter[str]()
    for one in reversed(list(node.path())) if node is not None else ():
        if one.worker != home:
            rooms[one.worker] += 0 if one.holders else len(one.tokens)
            if one.worker in placement.closed or (not one.holders and rooms[one.worker] > placement.room(one.worker)):
                return one.start
    return 0 if node is None else node.stop


def alike(node: Node | None, completion: Completion) -> bool:
    """True if a completion has the tokens up to ``node`` on the same workers, if not in the same slots."""
    return node is None or all(
        by_worker(completion.segments, one.start, one.stop) == {one.worker: len(one.tokens)} for one in node.path()
    )
