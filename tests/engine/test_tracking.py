"""What a caller is told of a request: news only, one terminal state, given once."""

from hypothesis import given
from hypothesis import strategies as st

from lamina.engine.tracking import TrackedRequest
from lamina.engine.updates import RequestUpdate, Whole, pack, unpack
from lamina.groups import Group
from lamina.models import directory
from lamina.models.tokenizer import Tokenizer
from lamina.placement.map import Placement
from lamina.protocol.messages import Draw
from lamina.schedule.limits import Limits
from lamina.schedule.scheduler import Scheduler
from lamina.types import FinishReason, Logprob, Request, RequestOutput, SamplingParams

TOKENIZER = Tokenizer(directory.find(None))


def tracked(params: SamplingParams, published: list[RequestUpdate]) -> tuple[TrackedRequest, Group]:
    scheduler = Scheduler(Limits(4, 64, 256), Placement({"memory0": 1000}), lanes=1, attentions=1, kv_heads=1)
    request = Request("r", None, [5, 6], params)
    under_test = TrackedRequest(request, TOKENIZER, published.append)
    group = scheduler.add(request)
    under_test.start(group)
    return under_test, group


def added_up(updates: list[RequestUpdate]) -> RequestOutput:
    whole = Whole(TOKENIZER)
    for update in updates:
        whole.add(update)
    return whole.output()


def test_an_error_that_comes_after_the_end_changes_nothing() -> None:
    published: list[RequestUpdate] = []
    under_test, group = tracked(SamplingParams(max_tokens=1, n=2), published)
    assert under_test.append(group.completions[0], Draw(0, 300))
    under_test.end(FinishReason.ABORT)
    under_test.end(FinishReason.ERROR, "the engine has stopped")
    under_test.publish()
    (update,) = published
    assert update.finished and update.error is None
    assert [part.finish_reason for part in update.completions] == [FinishReason.LENGTH, FinishReason.ABORT]


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
        completion.finished = under_test.append(completion, Draw(0, token, entries))
        if publish:
            under_test.publish()
    under_test.end(FinishReason.ABORT)
    under_test.publish()
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
        text = TOKENIZER.decode([5, 6, *part.token_ids])[len(TOKENIZER.decode([5, 6])) :]
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
    back = unpack(packed, TOKENIZER)
    assert [(e.token_id, e.logprob, e.rank) for e in back] == [(e.token_id, e.logprob, e.rank) for e in given]
    assert all(e.text == TOKENIZER.decode([e.token_id], skip_special_tokens=False) for e in back)
    assert unpack(pack([]), TOKENIZER) == []


def test_what_is_kept_does_not_grow_with_what_was_drawn() -> None:
    published: list[RequestUpdate] = []
    under_test, group = tracked(SamplingParams(max_tokens=200, logprobs=1, ignore_eos=True), published)
    for _ in range(100):
        under_test.append(group.completions[0], Draw(0, 300, [Logprob(300, -1.0, 1)]))
        under_test.publish()
    assert [update.tokens for update in published] == [1] * 100
