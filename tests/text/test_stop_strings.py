"""The stop checker against a brute-force search of the whole text."""

import re
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lamina.core.sampling import MAX_STOP_LENGTH, MAX_STOP_STRINGS, SamplingParams
from lamina.text.stop_strings import StopChecker, StopDecision, StopStrings


def brute_force(pieces: list[str], stops: list[str], *, include: bool, min_tokens: int) -> tuple[int, str, str | None]:
    """(tokens taken, final text, stop string): look at every prefix of the text, character by character."""
    text = ""
    for tokens, piece in enumerate(pieces, start=1):
        for character in piece:
            text += character
            ending = [stop for stop in stops if text.endswith(stop)]
            if ending and tokens > min_tokens:
                stop = max(ending, key=len)
                return tokens, text if include else text[: -len(stop)], stop
    return len(pieces), text, None


@given(
    pieces=st.lists(st.text("ab\u00e9", max_size=4), max_size=12),
    stops=st.lists(st.text("ab\u00e9", min_size=1, max_size=5), max_size=3)
    | st.lists(st.text("ab", min_size=1, max_size=9), min_size=20, max_size=MAX_STOP_STRINGS),
    include=st.booleans(),
    min_tokens=st.integers(0, 4),
)
@example(pieces=["a", "b", "c"], stops=["abcd", "bc"], include=False, min_tokens=0)
@example(pieces=["aab", "aaab"], stops=["aabaaab", "aaab"], include=False, min_tokens=0)
def test_pieces_equal_a_search_of_the_whole_text(
    pieces: list[str], stops: list[str], include: bool, min_tokens: int
) -> None:
    params = SamplingParams(stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens, max_tokens=None)
    checker = StopChecker(params)
    tokens, text, stop = brute_force(pieces, stops, include=include, min_tokens=min_tokens)
    streamed = ""
    decision = StopDecision("")
    for number, piece in enumerate(pieces, start=1):
        decision = checker.append(piece)
        streamed += decision.text
        assert text.startswith(streamed), "text was streamed that is not in the output"
        if decision.stop is not None:
            assert number == tokens
            break
    assert decision.stop == stop
    assert streamed + checker.flush() == text
    assert checker.flush() == ""


@given(st.text("ab", max_size=10), st.lists(st.text("ab", min_size=1, max_size=5), max_size=3))
def test_no_more_is_held_back_than_a_stop_string_could_need(text: str, stops: list[str]) -> None:
    checker = StopChecker(SamplingParams(stop=stops, max_tokens=None, min_tokens=100))
    streamed = checker.append(text).text
    beginnings = {stop[:length] for stop in stops for length in range(len(stop))}
    longest = max((length for length in range(len(text) + 1) if text[len(text) - length :] in beginnings), default=0)
    assert streamed == text[: len(text) - longest]


def test_a_stop_string_across_pieces_is_cut_out() -> None:
    checker = StopChecker(SamplingParams(stop="\n\nUser:"))
    assert checker.append("fine.\n") == StopDecision("fine.")
    assert checker.append("\nUse") == StopDecision("")
    assert checker.append("r: and more") == StopDecision("", "\n\nUser:")


def test_a_false_alarm_is_streamed_as_soon_as_it_is_decided() -> None:
    checker = StopChecker(SamplingParams(stop=["</s>"]))
    assert checker.append("a </").text == "a "
    assert checker.append("b> c").text == "</b> c"


def test_nothing_is_held_back_when_the_stop_string_is_wanted() -> None:
    checker = StopChecker(SamplingParams(stop=["</s>"], include_stop_str_in_output=True))
    assert checker.append("a </").text == "a </"
    assert checker.append("s> b") == StopDecision("s>", "</s>")


@pytest.mark.parametrize(("include", "text"), [(False, "held <"), (True, "held <end")])
def test_end_of_sequence_releases_what_was_held_back(include: bool, text: str) -> None:
    checker = StopChecker(SamplingParams(stop=["<|stop|>"], include_stop_str_in_output=include))
    assert checker.append("held <").text + checker.append_last("end", "").text == text


class Counted(frozenset[str]):
    """A set that counts how often it is asked."""

    asked = 0

    def __contains__(self, item: object) -> bool:
        Counted.asked += 1
        return super().__contains__(item)


@pytest.mark.parametrize("text", ["zzzz", "xxxx", "xxyx"])
@pytest.mark.parametrize(
    "stops",
    [
        ["x"],
        ["x" * MAX_STOP_LENGTH],
        [chr(0x100 + n) + "y" * 99 for n in range(MAX_STOP_STRINGS)],
        ["x" * (MAX_STOP_LENGTH - 1) + chr(0x100 + n) for n in range(MAX_STOP_STRINGS)],
    ],
)
def test_a_character_costs_two_look_ups_however_many_and_long_the_stop_strings_are(stops: list[str], text: str) -> None:
    prepared = StopStrings(stops)
    prepared.__dict__ |= {"beginnings": Counted(prepared.beginnings), "prefixes": Counted(prepared.prefixes)}
    checker = StopChecker(SamplingParams(stop=stops, max_tokens=None, min_tokens=1000), prepared)
    Counted.asked = 0
    for _ in range(200):
        checker.append(text)
    assert Counted.asked <= 2 * 200 * len(text)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"stop": ["x"] * (MAX_STOP_STRINGS + 1)}, "stop has 33 strings; give at most 32"),
        ({"stop": [5] * 10**6}, "stop has 1000000 strings; give at most 32"),
        ({"stop": ["x" * 10**6]}, "of 1000000 characters; every stop string must be valid Unicode of 1 to 128"),
        ({"stop": [""]}, "stop has '' of 0 characters"),
        ({"stop": ["\ud800"]}, "valid Unicode"),
        ({"stop": [None]}, "stop has None; every stop string"),
        ({"stop": 7}, "stop is 7; give a list of at most 32 strings"),
        ({"stop_token_ids": [1] * 257}, "stop_token_ids has 257 token ids; give at most 256"),
        ({"stop_token_ids": ["x" * 10**6]}, "stop_token_ids is 'xxx"),
        ({"temperature": "9" * 10**6}, "temperature is '999"),
        ({"temperature": 10**400}, "give a number from 0.0 to 100.0"),
        ({"top_k": 10**5000}, "top_k is an integer of very many digits"),
        ({"temperature": float("nan")}, "temperature is nan"),
    ],
)
def test_what_cannot_be_is_refused_in_few_words(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        SamplingParams(**given)
    assert len(str(caught.value)) < 250


SPECIAL = ["<x>", "<yy>"]


def written_out(
    pieces: list[tuple[str, str]], stops: list[str], *, include: bool, min_tokens: int
) -> tuple[int, str, str | None]:
    """(tokens taken, final text, stop string), by a search of every prefix of both texts.

    ``pieces``: of each token, its text and how it is written if it is special.
    """
    plain, written, shown = "", "", list[str]()
    with_special = [stop for stop in stops if any(special in stop for special in SPECIAL)]
    for tokens, (text, special) in enumerate(pieces, start=1):
        for character in text + special:
            written += character
            shown.append(character if text else "")
            plain += shown[-1]
            ending = [stop for stop in stops if shown[-1] and plain.endswith(stop)]
            ending_written = [stop for stop in with_special if written.endswith(stop)]
            if tokens <= min_tokens or not ending + ending_written:
                continue
            stop = max(ending + ending_written, key=len)
            before = plain[: -len(stop)] if stop in ending else "".join(shown[: -len(stop)])
            return tokens, before + stop if include else before, stop
    return len(pieces), plain, None


@given(
    pieces=st.lists(
        st.tuples(st.text("ab<x>", min_size=1, max_size=3), st.just(""))
        | st.tuples(st.just(""), st.sampled_from(SPECIAL)),
        max_size=10,
    ),
    stops=st.lists(
        st.lists(st.sampled_from(["a", "b", "<", *SPECIAL]), min_size=1, max_size=4).map("".join),
        min_size=1,
        max_size=3,
    ),
    include=st.booleans(),
    min_tokens=st.integers(0, 3),
)
@example(pieces=[("", "<x>")], stops=["<x>"], include=False, min_tokens=0)
@example(pieces=[("a", ""), ("", "<x>"), ("b", ""), ("a", "")], stops=["ab", "<x>bb"], include=False, min_tokens=0)
@example(pieces=[("a", ""), ("", "<x>"), ("b", ""), ("b", "")], stops=["a<x>bb"], include=True, min_tokens=0)
@example(pieces=[("a", ""), ("", "<x>"), ("b", ""), ("a", "")], stops=["a<x>bb"], include=True, min_tokens=0)
def test_stop_strings_are_found_across_special_tokens(
    pieces: list[tuple[str, str]], stops: list[str], include: bool, min_tokens: int
) -> None:
    params = SamplingParams(stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens, max_tokens=None)
    checker = StopChecker(params, StopStrings(stops, SPECIAL))
    tokens, text, stop = written_out(pieces, stops, include=include, min_tokens=min_tokens)
    streamed, decision = "", StopDecision("")
    for number, (piece, special) in enumerate(pieces, start=1):
        decision = checker.append(piece, special)
        streamed += decision.text
        assert text.startswith(streamed), "text was streamed that is not in the output"
        if decision.stop is not None:
            assert number == tokens
            break
    assert decision.stop == stop
    assert streamed + checker.flush() == text
    assert checker.flush() == ""


@pytest.mark.parametrize(
    ("include", "stop", "text", "found"),
    [
        (False, "held<x>", "", "held<x>"),
        (True, "held<x>", "held<x>", "held<x>"),
        (False, "<x>", "held", "<x>"),
        (False, "<x> no", "held", None),
        (True, "<x> no", "held", None),
    ],
)
def test_the_special_token_that_ends_a_completion_may_complete_a_stop_string(
    include: bool, stop: str, text: str, found: str | None
) -> None:
    params = SamplingParams(stop=[stop], include_stop_str_in_output=include)
    checker = StopChecker(params, StopStrings([stop], SPECIAL))
    streamed = checker.append("held").text
    decision = checker.append_last("", "<x>")
    assert (streamed + decision.text, decision.stop) == (text, found)
