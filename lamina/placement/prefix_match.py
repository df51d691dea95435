"""How many tokens of a request a tree of cached prefixes can serve. Pure."""

from collections import Counter

from lamina.groups import Completion, Group, ids_of
from lamina.placement.map import Placement
from lamina.placement.prefix_node import Node
from lamina.placement.prefix_tree import PrefixTree
from lamina.segments import by_worker


def match(tree: PrefixTree, group: Group, home: str, placement: Placement) -> tuple[Node | None, int, int]:
    """The deepest node of the tree of worker ``home`` with tokens of a request; how many tokens the request can share,
    never its last one, which must be computed; and how many it could if no layer had forgotten any."""
    first = group.completions[0]
    if group.ids is None:
        group.ids = ids_of(group.known_tokens(first, 0, first.goal))
    most = first.goal - 1
    if group.request.params.penalizes:
        most = min(most, group.prompt_length)  # replicas count generated tokens for penalties as they run
    node, length = tree.find(group.request.params.cache_salt, group.ids)
    matched = min(length, most, _usable(node, home, placement))
    return node, tree.checkpoints.last(node, matched) if tree.checkpoints.window else matched, matched


def _usable(node: Node | None, home: str, placement: Placement) -> int:
    """How many tokens up to ``node`` a request on ``home`` can share, given that some are on other workers: those that
    are idle need room there, and a worker may be about to leave."""
    rooms = Counter[str]()
    for one in reversed(list(node.path())) if node is not None else ():
        if one.worker != home:
            rooms[one.worker] += 0 if one.holders else len(one.tokens)
            if one.worker in placement.closed or (not one.holders and rooms[one.worker] > placement.room(one.worker)):
                return one.start
    return 0 if node is None else node.stop


def alike(node: Node | None, completion: Completion) -> bool:
    """True if a completion has each token up to ``node`` on the same worker as the tree, perhaps in another slot."""
    return node is None or all(
        by_worker(completion.segments, one.start, one.stop) == {one.worker: len(one.tokens)} for one in node.path()
    )
