"""What a caller is told of a request, as tokens and as text: news only, one terminal state, given once."""

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.control.packed_logprobs import drawn_token, pack, unpack
from lamina.core.outputs import FinishReason, Logprob, RequestOutput
from lamina.core.requests import Completion, Group
from lamina.core.sampling import SamplingParams
from lamina.core.types import Request
from lamina.engine.tracking import TrackedRequest
from lamina.engine.updates import PlainTokens, RequestText, RequestUpdate, TokenUpdate, UpdateSum
from lamina.kv.placement import Placement
from lamina.models import directory
from lamina.schedule.limits import Limits
from lamina.schedule.scheduler import Scheduler
from lamina.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer(directory.find(None))


def tracked(params: SamplingParams, published: list[RequestUpdate]) -> tuple[TrackedRequest, Group]:
    scheduler = Scheduler(Limits(4, 64, 256), Placement({"memory0": 1000}), lanes=1, attentions=1, kv_heads=1)
    request = Request("r", None, [5, 6], params)
    reading = RequestText(request, TOKENIZER, published.append, lambda _, index: under_test.end_completion(index))
    under_test = TrackedRequest(request, TOKENIZER.eos_token_ids, reading.on_update)
    group = scheduler.submit(request)
    under_test.start(group)
    return under_test, group


def text_of(tokens: list[int]) -> str:
    return TOKENIZER.decode([5, 6, *tokens])[len(TOKENIZER.decode([5, 6])) :]


def until_stopped(tokens: list[int], stop: list[str]) -> list[int]:
    """The tokens up to the one that completes a stop string: any drawn later are discarded."""
    for count in range(len(tokens) + 1):
        if any(end in text_of(tokens[:count]).rstrip("\N{REPLACEMENT CHARACTER}") for end in stop):
            return tokens[:count]
    return tokens


def added_up(updates: list[RequestUpdate]) -> RequestOutput:
    whole = UpdateSum(TOKENIZER)
    for update in updates:
        whole.append_update(update)
    return whole.output()


def test_an_error_that_comes_after_the_end_changes_nothing() -> None:
    published: list[RequestUpdate] = []
    under_test, group = tracked(SamplingParams(max_tokens=1, n=2), published)
    assert under_test.append(group.completions[0], 300)
    under_test.end_all(FinishReason.ABORT)
    under_test.end_all(FinishReason.ERROR, "the engine has stopped")
    under_test.publish()
    (update,) = published
    assert update.finished and update.error is None
    assert [part.finish_reason for part in update.completions] == [FinishReason.LENGTH, FinishReason.ABORT]


def ends_of(updates: list[TokenUpdate]) -> set[tuple[int, FinishReason | None, int | None]]:
    parts = [part for update in updates for part in update.completions]
    return {(part.index, part.finish_reason, part.stop_token) for part in parts if part.finish_reason is not None}


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(2, 9), st.booleans()), max_size=60))
def test_tokens_that_are_passed_on_at_once_are_those_of_updates(draws: list[tuple[int, int, bool]]) -> None:
    """The third of ``draws``: a turn ends, after which a frontend reads tokens first and updates then."""
    request = Request("r", None, [5], SamplingParams(max_tokens=20, n=2, stop_token_ids=[9]))
    at_once, updates = list[int](), list[TokenUpdate]()
    under_test = TrackedRequest(request, [8], updates.append, plain=PlainTokens(at_once, 7))
    reference = TrackedRequest(request, [8], (expected := list[TokenUpdate]()).append)
    group = Group(request, 20, [Completion(0, 0), Completion(1, 1)])
    under_test.start(group)
    reference.start(group)
    heard: list[list[int]] = [[], []]
    for index, token, ends_turn in [*draws, (0, 2, True)]:
        completion, one = group.completions[index], under_test.plain.get(index)
        is_plain = one is not None and one.append_plain(token)
        assert (not is_plain and under_test.append(completion, token)) == reference.append(completion, token)
        if ends_turn and under_test.has_news:
            under_test.publish()
        if ends_turn:
            for number, place, each in zip(*[iter(at_once)] * 3, strict=True):
                assert number == 7
                heard[place].append(each)
            at_once.clear()
            for part in (part for update in updates for part in update.completions):
                heard[part.index] += part.token_ids
                part.token_ids = []
    reference.publish()
    assert ends_of(updates) == ends_of(expected)
    whole = {part.index: part.token_ids for part in expected[0].completions}
    assert heard == [whole.get(index, []) for index in range(2)]
    assert len(updates) <= 3, "the first, and one with the end of each completion"


@given(
    draws=st.lists(st.tuples(st.integers(0, 1), st.integers(2, 2000), st.booleans()), max_size=60),
    unread=st.lists(st.booleans(), min_size=60, max_size=60),
    stop=st.sampled_from([[], ["e"], ["ab", "\n"]]),
)
def test_updates_add_up_to_the_same_whole_however_they_are_read(
    draws: list[tuple[int, int, bool]], unread: list[bool], stop: list[str]
) -> None:
    published: list[RequestUpdate] = []
    params = SamplingParams(max_tokens=40, n=2, stop=stop, logprobs=2, ignore_eos=True)
    under_test, group = tracked(params, published)
    drawn: list[list[int]] = [[], []]
    for index, token, publish in draws:
        completion = group.completions[index]
        if completion.finished:
            continue
        drawn[index].append(token)
        entries = [Logprob(token, -1.5, 7), Logprob(3, -0.25, 1), Logprob(4, -0.5, 2)]
        completion.finished = under_test.append(completion, token, pack(entries))
        if publish:
            under_test.publish()
    under_test.end_all(FinishReason.ABORT)
    under_test.publish()
    drawn = [until_stopped(tokens, stop) for tokens in drawn]
    assert sum(update.tokens for update in published) == sum(map(len, drawn))
    merged: list[RequestUpdate] = []  # as a slow reader gets them
    for update, late in zip(published, unread, strict=False):
        copy = RequestUpdate(update.request, update.completions, update.finished, update.error)
        if late and merged:
            merged[-1].extend(copy)
        else:
            merged.append(copy)
    for update in published[len(unread) :]:
        merged.append(update)
    whole = added_up(merged)
    assert whole.finished and [part.token_ids for part in whole.outputs] == drawn
    for part in whole.outputs:
        text = text_of(part.token_ids)
        found = min((text.find(end) for end in stop if end in text), default=-1)
        assert part.text == (text if found < 0 else text[:found])
        assert part.logprobs is not None
        assert [[(entry.token_id, entry.logprob, entry.rank) for entry in at] for at in part.logprobs] == [
            [(token, -1.5, 7), (3, -0.25, 1), (4, -0.5, 2)] for token in part.token_ids
        ]


@given(
    st.lists(st.tuples(st.integers(0, 2047), st.floats(width=32, max_value=0)), max_size=20), st.integers(1, 2**31 - 1)
)
def test_packed_logprobs_come_out_as_they_went_in(entries: list[tuple[int, float]], rank: int) -> None:
    given = [Logprob(9, -2.0, rank), *(Logprob(token, value, n) for n, (token, value) in enumerate(entries, 1))]
    packed = pack(given)
    assert len(packed) == 4 + 8 * len(given)
    back = unpack(packed, lambda token: (str(token), (token % 256,)))
    assert [(e.token_id, e.logprob, e.rank) for e in back] == [(e.token_id, e.logprob, e.rank) for e in given]
    assert all((e.text, e.bytes) == (str(e.token_id), (e.token_id % 256,)) for e in back)
    assert drawn_token(packed) == 9
    assert unpack(pack([])) == []


def test_what_is_kept_does_not_grow_with_what_was_drawn() -> None:
    published: list[RequestUpdate] = []
    under_test, group = tracked(SamplingParams(max_tokens=200, logprobs=1, ignore_eos=True), published)
    for _ in range(100):
        under_test.append(group.completions[0], 300, pack([Logprob(300, -1.0, 1)]))
        under_test.publish()
    assert [update.tokens for update in published] == [1] * 100


@pytest.mark.parametrize("at_once", [1, 2, 5])
@pytest.mark.parametrize(
    ("params", "tokens", "text", "reason", "stop_reason"),
    [
        ({"stop": ["bc"]}, "xab|cd|ef", "xa", FinishReason.STOP, "bc"),
        ({"stop": ["bc"], "include_stop_str_in_output": True}, "xab|cd|ef", "xabc", FinishReason.STOP, "bc"),
        ({"stop": ["bc"], "max_tokens": 2}, "xa|b|c", "xab", FinishReason.LENGTH, None),
        ({"stop": ["b"], "max_tokens": 2}, "xa|b|c", "xa", FinishReason.STOP, "b"),
        ({"stop": ["bc"], "min_tokens": 3}, "bc|bc|x|bc|y", "bcbcx", FinishReason.STOP, "bc"),
        ({"stop": ["bcd"]}, "ab|c|$|e", "abc", FinishReason.STOP, None),
        ({"stop": ["bcd"], "include_stop_str_in_output": True}, "ab|c|$", "abc$", FinishReason.STOP, None),
        ({"stop_token_ids": [ord("q")]}, "ab|q|c", "ab", FinishReason.STOP, ord("q")),
    ],
)
def test_what_ends_a_completion_and_what_is_left_of_its_text(
    params: dict[str, Any], tokens: str, text: str, reason: FinishReason, stop_reason: str | int | None, at_once: int
) -> None:
    """Whether its tokens come one by one, or some that were drawn before a stop string was noticed come along."""
    pieces = tokens.split("|")
    tokenizer = Pieces(pieces)
    published: list[RequestUpdate] = []
    request = Request("r", None, [5], SamplingParams(**{"max_tokens": None, "logprobs": 0, **params}))
    reading = RequestText(request, tokenizer, published.append, lambda _, index: under_test.end_completion(index))  # type: ignore[arg-type]
    under_test = TrackedRequest(request, [ord("$")], reading.on_update)
    group = Group(request, request.params.max_tokens or 100, [Completion(0, 0)])
    under_test.start(group)
    ended = 0
    for number, piece in enumerate(pieces, 1):
        token = tokenizer.ids[piece]
        if under_test.append(group.completions[0], token, pack([Logprob(token, -1.0, 1)])):
            ended = number
            break
        if number % at_once == 0:
            under_test.publish()
    if not published or not published[-1].finished:
        under_test.publish()
    assert [update.finished for update in published] == [False] * (len(published) - 1) + [True]
    completions = [update.completions[0] for update in published]
    assert "".join("".join(one.texts) + one.rest for one in completions) == text
    assert (completions[-1].finish_reason, completions[-1].stop_reason) == (reason, stop_reason)
    assert ended or at_once > 1 or isinstance(stop_reason, str)
    assert all(len(one.token_ids) == len(one.texts) == len(one.logprobs or []) for one in completions)
    count = len(published)
    under_test.publish()
    assert len(published) == count, "told once that it has ended"


class Pieces:
    """A tokenizer whose tokens are pieces of text: a piece of one character has its code as id."""

    special_texts: ClassVar[dict[int, str]] = {}

    def __init__(self, pieces: list[str]) -> None:
        self.ids = {piece: ord(piece) if len(piece) == 1 else 1000 + number for number, piece in enumerate(pieces)}
        self._texts = {token: piece for piece, token in self.ids.items()}

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(self._texts.get(token, "") for token in ids)

    def has_text(self, token: int) -> bool:
        return token in self._texts

    def fixed_text(self, token: int) -> None:
        return None

    def byte_of(self, token: int) -> None:
        return None

    def context(self, prompt: Sequence[int]) -> list[int]:
        return []


def test_a_tokenizer_that_fails_ends_the_request_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(tokenizer: Tokenizer, token_id: int) -> bool:
        raise OverflowError(f"{token_id} is out of range")

    published: list[RequestUpdate] = []
    under_test, group = tracked(SamplingParams(max_tokens=5, n=2), published)
    monkeypatch.setattr(Tokenizer, "fixed_text", fail)
    under_test.append(group.completions[0], 5)
    under_test.publish()
    (update,) = published
    assert update.finished and "cannot be decoded" in (update.error or "")
    assert [part.finish_reason for part in update.completions] == [FinishReason.ERROR] * 2
    assert under_test.finished, "the engine ends it too"
