"""Which engine gets a request, given what each was sent before and how busy it is."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from deploy.ray.routing import BLOCK, MOST_BLOCKS, WORTH, Prefixes, blocks


def chat(*turns: str) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": turn} for turn in turns]}).encode()


def completion(prompt: Any) -> bytes:
    return json.dumps({"prompt": prompt}).encode()


@given(st.lists(st.integers(0, 9), max_size=5 * BLOCK), st.lists(st.integers(0, 9), max_size=5 * BLOCK))
def test_blocks_are_shared_as_far_as_prompts_begin_alike(one: list[int], other: list[int]) -> None:
    alike = next((place for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
    alike = min(len(one), len(other)) if alike is None else alike
    for first, second in ((completion(one), completion(other)), (completion([one]), completion([other]))):
        mine, theirs = blocks(first), blocks(second)
        same = sum(a == b for a, b in zip(mine, theirs, strict=False))
        assert same in {alike // BLOCK, -(-alike // BLOCK)}
        assert mine[:same] == theirs[:same]
        assert (same == len(mine) == len(theirs)) == (one == other)


def test_what_is_not_a_request_has_no_blocks() -> None:
    for body in (b"", b"{", b"[]", b"3", b'{"prompt": 3}', b'{"messages": 1}', completion(""), completion([])):
        assert blocks(body) == []


def test_a_conversation_stays_where_it_began_and_others_go_elsewhere() -> None:
    prefixes, long = Prefixes(), "a long system prompt " * 40
    first = blocks(chat(long, "hello"))
    prefixes.note(first, "one")
    later = blocks(chat(long, "hello", "and then?"))
    assert len(set(first) & set(later)) == len(first) - 1, "all but the last, which was cut short"
    assert prefixes.order(later, {"one": 1.0, "two": 0.0}) == ["one", "two"]
    assert prefixes.order(blocks(chat("another")), {"one": 1.0, "two": 0.0}) == ["two", "one"]


def test_an_engine_with_too_many_requests_loses_even_its_own() -> None:
    prefixes = Prefixes()
    found = blocks(completion("x" * 10 * BLOCK))
    prefixes.note(found, "one")
    assert prefixes.order(found, {"one": WORTH - 0.5, "two": 0.0})[0] == "one"
    assert prefixes.order(found, {"one": WORTH + 0.5, "two": 0.0})[0] == "two"
    prefixes.note(found, "two")
    assert prefixes.order(found, {"one": 3.0, "two": 1.0}) == ["two", "one"], "both have it: the idler one"


def test_engines_that_are_idle_share_what_is_new() -> None:
    prefixes, sent = Prefixes(), []
    for number in range(8):
        found = blocks(completion(f"{number} " + "y" * BLOCK))
        sent.append(prefixes.order(found, {"one": 0.0, "two": 0.0, "three": 0.0})[0])
        prefixes.note(found, sent[-1])
    assert {sent.count(engine) for engine in ("one", "two", "three")} == {2, 3}


def test_the_oldest_prefixes_are_forgotten() -> None:
    prefixes = Prefixes()
    old, new = blocks(completion("old")), blocks(completion("new"))
    prefixes.note(old, "one")
    prefixes.note([number.to_bytes(4) for number in range(MOST_BLOCKS - 1)], "two")
    assert prefixes.share(old, "one") == 1.0
    prefixes.note(new, "one")
    assert prefixes.share(old, "one") == 0.0 and prefixes.share(new, "one") == 1.0
