"""The prefix cache against dictionaries: which prefixes it has, which sequence holds them, what is evicted."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from lamina.core.requests import Ids, ids_of
from lamina.core.types import Segment
from lamina.kv.prefix_tree import Node, PrefixTree
from tests.support.sweep import MANY_EXAMPLES


class BruteForce:
    """Every token kept, by salt and all the tokens up to it, with the time at which it was used last."""

    def __init__(self) -> None:
        self.used: dict[tuple[str, bytes], int] = {}
        self._now = 0

    def find(self, salt: str, ids: Ids) -> int:
        return next(
            (length for length in range(len(ids), 0, -1) if (salt, ids[:length].tobytes()) in self.used),
            0,
        )

    def use(self, salt: str, ids: Ids, priority: int) -> None:
        self._now += 1
        for length in range(1, len(ids) + 1):
            key = salt, ids[:length].tobytes()
            self.used[key] = max(self.used.get(key, -(10**6)), self._now - 1_000 * priority)

    def oldest(self) -> set[tuple[str, bytes]]:
        """The ends of prefixes that were used least recently, with nothing kept behind them."""
        begun = {(salt, key[:-4]) for salt, key in self.used}
        ends = {end: used for end, used in self.used.items() if end not in begun}
        return {end for end, used in ends.items() if used == min(ends.values())}

    def remove(self, end: tuple[str, bytes], tokens: int) -> None:
        salt, key = end
        for _ in range(tokens):
            del self.used[salt, key]
            key = key[:-4]


def whole(node: Node) -> Ids:
    """The tokens of a node and of those above it."""
    return sum((one.tokens for one in reversed(list(node.path()))), start=array("i"))


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=12).map(ids_of)
calls = st.lists(
    st.tuples(
        st.sampled_from("uuue"), st.sampled_from(["", "a"]), prompts, st.integers(1, 12), st.sampled_from([0, 0, -1, 1])
    ),
    max_size=40,
)


@MANY_EXAMPLES
@given(calls)
def test_the_tree_has_what_a_dictionary_has_and_evicts_what_was_used_least_recently(calls: list) -> None:
    tree, brute, held = PrefixTree(), BruteForce(), dict[int, Ids]()  # by sequence: its tokens on the worker
    for number, (call, salt, ids, amount, priority) in enumerate(calls):
        node, found = tree.find(salt, ids)
        assert found == brute.find(salt, ids) and (node is None) == (found == 0)
        if call == "u":
            if node is not None and found < min(node.stop, len(ids)):
                node = tree.split(node, found)
            if found < len(ids):
                node, superseded = tree.insert_leaf(
                    node, salt, ids[found:], number, [Segment(number, "memory0", (0, 1), (0, None))]
                )
                held[number] = ids
                if superseded is not None:
                    del held[superseded]
            assert node is not None
            if found == len(ids) < node.stop:
                node = tree.split(node, found)
            tree.use(node, priority)
            brute.use(salt, ids, priority)
        elif brute.used:
            leaf = tree.oldest()
            if amount < len(leaf.tokens):
                tree.split(leaf, leaf.stop - amount)
            (end,) = {end for end in brute.oldest() if end[1] == whole(leaf).tobytes()}
            brute.remove(end, len(leaf.tokens))
            held.pop(leaf.any_sequence)
            parent = tree.remove_leaf(leaf)
            if parent is not None:
                tree.give_sequence(parent, 1000 + number)
                held[1000 + number] = whole(parent)
                tree.offer_for_eviction(parent)
        leaves = {leaf.any_sequence: whole(leaf) for leaf in tree.ends()}
        assert leaves == held
        assert {ids[:length].tobytes() for ids in held.values() for length in range(1, len(ids) + 1)} == {
            key for _, key in brute.used
        }
