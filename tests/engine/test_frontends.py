"""The two ends between the engine and a frontend, over their real sockets: a scripted engine, the real tokenizer."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import msgspec
import pytest
import zmq

from lamina.control.frontend_messages import (
    AnswerBatch,
    CompletionTokens,
    FromFrontend,
    FrontendBootstrap,
    FrontendHello,
    RequestTokens,
    Resume,
    Stopped,
    Submit,
    Welcome,
    pack_tokens,
)
from lamina.control.packed_logprobs import pack
from lamina.control.timeline import Span
from lamina.core.errors import DeadlineError, EngineDeadError, LaminaError, OverloadedError, RequestError
from lamina.core.outputs import FinishReason, Logprob
from lamina.core.sampling import SamplingParams
from lamina.core.types import Client
from lamina.engine import frontends, remote_engine
from lamina.engine.frontends import Frontends
from lamina.engine.lives import Event, Life
from lamina.engine.remote_engine import RemoteEngine
from lamina.engine.stats import StatsOf
from lamina.engine.streams import Submission
from lamina.engine.updates import RequestUpdate, TokenUpdate, UpdateSum
from lamina.models.directory import find
from lamina.text.tokenizer import Tokenizer
from tests.support.recording_engine import STATS, RecordingEngine
from tests.support.waiting import END_S

TOKENIZER = Tokenizer(find(None))
CLIENT = Client("key", "127.0.0.1:5")


@pytest.fixture
def engine() -> RecordingEngine:
    return RecordingEngine()


@pytest.fixture
def room(engine: RecordingEngine, tmp_path: Path) -> Iterator[Frontends]:
    made = Frontends(engine, tmp_path, os.getpid())  # type: ignore[arg-type]
    yield made
    made.close()


def named(room: Frontends, name: str = "frontend0") -> FrontendBootstrap:
    return msgspec.structs.replace(room.bootstrap, name=name)


@pytest.fixture
async def remote(room: Frontends) -> AsyncIterator[RemoteEngine]:
    made = await RemoteEngine.connect(named(room), TOKENIZER)
    yield made
    made.disconnect()


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + END_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


class Caller:
    """What one request's callbacks bring."""

    def __init__(self) -> None:
        self.whole = UpdateSum(TOKENIZER)
        self.updates: list[RequestUpdate] = []

    def __call__(self, update: RequestUpdate) -> None:
        assert not self.finished
        self.updates.append(update)
        self.whole.append_update(update)

    @property
    def finished(self) -> bool:
        return bool(self.updates) and self.updates[-1].finished


async def submit(remote: RemoteEngine, *submissions: Submission) -> None:
    await asyncio.to_thread(remote.submit_all, submissions, CLIENT)


async def test_requests_go_one_way_and_tokens_the_other(engine: RecordingEngine, remote: RemoteEngine) -> None:
    first, second = Caller(), Caller()
    params = SamplingParams(n=2, seed=2**63 - 1, stop=["zz"], stop_token_ids=[9], logprobs=2, max_tokens=None)
    await submit(remote, Submission("a", "import os", params, first), Submission("b", [5, 6], SamplingParams(), second))
    (one, (tokens, sent, _, client)), (other, ids) = engine.queued.items()
    assert (tokens, sent, client) == (TOKENIZER.encode("import os"), params, CLIENT)
    assert ids[:2] == ([5, 6], SamplingParams())
    text = TOKENIZER.encode("a longer line")
    logprobs = [pack([Logprob(token, -1.5, 4), Logprob(3, -0.5, 1)]) for token in text]
    engine.tell(one, CompletionTokens(1, text[:2], logprobs[:2]))
    engine.tell(
        one,
        CompletionTokens(1, text[2:], logprobs[2:], FinishReason.LENGTH),
        CompletionTokens(0, [9], [pack([Logprob(9, -2.0, 1)])], FinishReason.STOP, 9),
        finished=True,
    )
    await until(lambda: first.finished)
    output = first.whole.output()
    assert [part.text for part in output.outputs] == ["", "a longer line"] and output.prompt == "import os"
    assert [part.finish_reason for part in output.outputs] == [FinishReason.STOP, FinishReason.LENGTH]
    assert [part.stop_reason for part in output.outputs] == [9, None]
    assert output.outputs[1].logprobs is not None
    assert [(at[0].token_id, at[0].rank, at[1].logprob) for at in output.outputs[1].logprobs] == [
        (token, 4, -0.5) for token in text
    ]
    assert not second.updates
    assert remote.sampling_defaults == engine.sampling_defaults
    remote.abort("b")
    remote.abort("unknown")
    await until(lambda: engine.aborted == [other])
    assert await asyncio.to_thread(remote.stats) == STATS


async def test_tokens_alone_join_those_with_news(engine: RecordingEngine, remote: RemoteEngine) -> None:
    one, two = Caller(), Caller()
    await submit(remote, Submission("a", [5], SamplingParams(n=2), one), Submission("b", [5], SamplingParams(), two))
    a, b = engine.queued
    engine.tell(a, CompletionTokens(0, [7]), CompletionTokens(1, [8]), cached_tokens=1)
    engine.tell(b, CompletionTokens(0, [9]))
    engine.tell_tokens((a, 0, 10), (b, 0, 11), (a, 1, 12), (a, 0, 13))
    engine.tell_tokens((b, 0, 14))
    await until(lambda: len(two.updates) == 3)
    assert one.updates[-1].cached_tokens == 1
    engine.put_token(a, 1, 15)  # in the same turn as what follows
    engine.tell(a, *(CompletionTokens(i, [16 + i], [], FinishReason.LENGTH) for i in range(2)), finished=True)
    await until(lambda: one.finished)
    assert [part.token_ids for part in one.whole.output().outputs] == [[7, 10, 13, 16], [8, 12, 15, 17]]
    assert two.whole.output().outputs[0].token_ids == [9, 11, 14]


async def test_the_workers_timeline_and_requests_lives_come_from_the_engine(remote: RemoteEngine) -> None:
    assert await asyncio.to_thread(remote.timeline) == {"compute0": [Span("slice", 1, 2, 3)]}
    assert await asyncio.to_thread(remote.lives) == [Life("chat-1", 1e9, 5, [Event(0.0, "queued")])]


async def test_a_stop_string_is_found_here_and_the_engine_is_told(
    engine: RecordingEngine, remote: RemoteEngine
) -> None:
    caller = Caller()
    await submit(remote, Submission("a", [5], SamplingParams(stop=["on"], max_tokens=None, n=2), caller))
    (name,) = engine.queued
    text = TOKENIZER.encode("import json, os")
    for token in text:  # the engine draws on until it has heard
        engine.tell(name, CompletionTokens(0, [token]))
    await until(lambda: engine.finished == [(name, 0)])
    assert not caller.finished
    engine.tell(name, CompletionTokens(1, text, [], FinishReason.LENGTH))
    await until(lambda: caller.finished)
    outputs = caller.whole.output().outputs
    assert [(part.text, part.stop_reason) for part in outputs] == [("import js", "on")] * 2
    await until(lambda: engine.finished == [(name, 0), (name, 1)])


async def test_of_requests_submitted_together_none_is_left_if_one_is_refused(
    engine: RecordingEngine, remote: RemoteEngine
) -> None:
    def submissions(*prompts: str | list[int]) -> list[Submission]:
        return [Submission(str(number), each, SamplingParams(), Caller()) for number, each in enumerate(prompts)]

    with pytest.raises(RequestError, match=r"^99 is too long$"):
        await submit(remote, *submissions([5], [6], [5] * 99))
    assert set(engine.queued) <= set(engine.aborted)
    with pytest.raises(OverloadedError, match="three are enough"):
        await submit(remote, *submissions([5], [6], [7]))
    with pytest.raises(RequestError, match="outside the vocabulary"):
        await submit(remote, *submissions([2**40]))
    with pytest.raises(RequestError, match="not valid Unicode"):
        await submit(remote, *submissions("\ud800"))


async def test_a_message_with_thousands_of_prompts_delays_no_other(
    engine: RecordingEngine, remote: RemoteEngine
) -> None:
    engine.places = 10_000
    many = [Submission(f"many{n}", [5], SamplingParams(), Caller()) for n in range(3_000)]
    engine.accepts.clear()
    large = asyncio.create_task(submit(remote, *many))
    await until(lambda: "many2999" in remote._named)
    small = asyncio.create_task(submit(remote, Submission("small", [6], SamplingParams(), Caller())))
    await until(lambda: "small" in remote._named)
    remote.abort("many2999")  # before it is in the engine
    engine.accepts.set()
    await asyncio.gather(large, small)
    prompts = [tokens for tokens, *_ in engine.queued.values()]
    assert len(prompts) == 3_001 and prompts.index([6]) <= 3 * frontends.MOST_AT_ONCE
    await until(lambda: list(engine.queued)[-1] in engine.aborted)


async def test_when_the_engine_stops_every_request_ends_once(engine: RecordingEngine, remote: RemoteEngine) -> None:
    callers = [Caller() for _ in range(3)]
    await submit(remote, *(Submission(str(n), [5], SamplingParams(n=2), each) for n, each in enumerate(callers)))
    names = list(engine.queued)
    engine.tell(names[0], *(CompletionTokens(i, [7], [], FinishReason.LENGTH) for i in range(2)), finished=True)
    engine.dead = "worker memory0 is gone"
    engine.tell(names[1], *(CompletionTokens(i, [], [], FinishReason.ERROR) for i in range(2)), finished=True)
    await until(lambda: all(caller.finished for caller in callers) and remote.dead is not None)
    errors = [caller.updates[-1].error for caller in callers]
    assert errors[0] is None and "the engine has stopped: worker memory0 is gone" in (errors[2] or "")
    with pytest.raises(EngineDeadError, match="worker memory0 is gone"):
        await submit(remote, Submission("late", [5], SamplingParams(), Caller()))
    assert (await asyncio.to_thread(remote.stats)).dead == "worker memory0 is gone"


async def test_requests_end_also_if_the_engine_stops_right_after_an_answer(
    engine: RecordingEngine, remote: RemoteEngine
) -> None:
    """Before the thread that asked has run again."""
    caller, asked = Caller(), Future[object]()
    await submit(remote, Submission("a", [5], SamplingParams(), caller))
    remote._replies[77] = asked
    remote._dispatch(StatsOf(77, STATS))
    remote._dispatch(Stopped("it was killed"))
    assert caller.finished and asked.result(0) == STATS


async def test_a_question_has_one_deadline_however_many_engines_end_meanwhile(
    room: Frontends, remote: RemoteEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "_reply", lambda *_: None)
    monkeypatch.setattr(remote_engine, "STATS_TIMEOUT_S", 0.3)
    asking = asyncio.create_task(asyncio.to_thread(remote.stats))
    for incarnation in range(1, 300):
        remote._dispatch(Welcome(incarnation))
        await asyncio.sleep(0.01)
        if asking.done():
            break
    remote._dispatch(Stopped("it was killed"))
    with pytest.raises(DeadlineError):
        await asking


async def test_a_frontend_that_connects_after_the_engine_has_stopped_is_told(
    engine: RecordingEngine, room: Frontends
) -> None:
    engine.dead = "worker memory0 is gone"
    engine.end_turn()
    late = await RemoteEngine.connect(named(room, "frontend9"), TOKENIZER)
    await until(lambda: late.dead == "worker memory0 is gone")
    late.disconnect()


async def test_a_caller_that_fails_loses_its_request_alone(engine: RecordingEngine, remote: RemoteEngine) -> None:
    def fail(update: RequestUpdate) -> None:
        raise LaminaError("the callback's own business")

    caller = Caller()
    await submit(remote, Submission("a", [5], SamplingParams(), fail), Submission("b", [5], SamplingParams(), caller))
    bad, good = engine.queued
    for name in (bad, good):
        engine.tell(name, CompletionTokens(0, [7], [], FinishReason.LENGTH), finished=True)
    await until(lambda: caller.finished)
    await until(lambda: engine.aborted == [bad])


async def test_a_frontend_that_has_ended_leaves_nothing_in_the_engine(
    engine: RecordingEngine, room: Frontends, remote: RemoteEngine
) -> None:
    await submit(remote, *(Submission(str(n), [5], SamplingParams(), Caller()) for n in range(3)))
    first, second, third = engine.queued
    engine.tell(first, CompletionTokens(0, [7], [], FinishReason.LENGTH), finished=True)
    room.on_frontend_exit("frontend0")
    assert engine.aborted == [second, third]
    engine.tell(second, CompletionTokens(0, [], [], FinishReason.ABORT), finished=True)


def test_what_a_frontend_does_not_take_is_bounded(
    engine: RecordingEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is suspended: its descriptors stay open, and nobody reads."""
    monkeypatch.setattr(frontends, "MOST_UNSENT", 10)
    lost: dict[str, str] = {}
    room = Frontends(engine, tmp_path, os.getpid(), names=["frontend0"], on_lost=lost.__setitem__)  # type: ignore[arg-type]
    context = zmq.Context()
    suspended = context.socket(zmq.DEALER)
    suspended.identity, suspended.rcvhwm, suspended.linger = b"frontend0", 1, 0
    suspended.connect(room.bootstrap.answers)
    member = room._members["frontend0"]
    receive = room._receiver(member, 1)
    deadline = time.monotonic() + END_S
    while member.lost is None or "cannot be reached" in member.lost:
        member.lost = None  # not connected yet
        receive(TokenUpdate([CompletionTokens(0, [7] * 10_000)], False))
        engine.end_turn()
        assert time.monotonic() < deadline
    assert lost["frontend0"] == "it has not taken 10 messages"
    room.close()
    context.destroy(linger=0)


async def test_another_engine_gets_the_requests_that_have_not_ended_with_what_they_have_drawn(
    engine: RecordingEngine, room: Frontends, remote: RemoteEngine, tmp_path: Path
) -> None:
    """What the frontend had sent to the engine before, and it has not read, counts for nothing."""
    several, ended, stopped = Caller(), Caller(), Caller()
    params = SamplingParams(n=3, stop=["zz"], max_tokens=None)
    await submit(remote, Submission("a", [5, 6], params, several), Submission("b", [7], SamplingParams(seed=4), ended))
    await submit(remote, Submission("c", [8], SamplingParams(stop=["on"], max_tokens=None, n=1), stopped))
    first, second, third = engine.queued
    engine.tell(first, CompletionTokens(0, [9, 10]), CompletionTokens(2, [11], [], FinishReason.LENGTH))
    engine.tell(second, CompletionTokens(0, [7], [], FinishReason.LENGTH), finished=True)
    engine.tell(third, CompletionTokens(0, TOKENIZER.encode("on")))
    await until(lambda: stopped.finished and ended.finished)
    seed, _ = engine.begun[first]
    room._closed.set()
    room._thread.join()  # it reads nothing any more
    late = asyncio.create_task(submit(remote, Submission("d", [12], SamplingParams(), Caller())))
    pending = asyncio.create_task(asyncio.to_thread(remote.stats))
    await asyncio.sleep(0.05)
    room.close()

    other = RecordingEngine()
    again = Frontends(other, tmp_path, os.getpid(), 1, ["frontend0"])  # type: ignore[arg-type]
    try:
        await late
        assert await pending == STATS
        await until(lambda: len(other.queued) == 2)
        assert other.queued[first][:2] == ([5, 6], params) and other.begun[first] == (seed, {0: [9, 10], 1: []})
        (new,) = other.queued.keys() - {first}
        assert other.queued[new][0] == [12] and other.begun[new][1] is None
        other.tell(first, CompletionTokens(0, [13], [], FinishReason.LENGTH))
        other.tell(first, CompletionTokens(1, [14], [], FinishReason.LENGTH), finished=True)
        await until(lambda: several.finished)
        assert [list(one.token_ids) for one in several.whole.output().outputs] == [[9, 10, 13], [14], [11]]
        scaling = remote.scale(memory=1)
        await until(lambda: other.scaling > 0)
    finally:
        again.close()
    third_room = Frontends(other, tmp_path, os.getpid(), 2, ["frontend0"])  # type: ignore[arg-type]
    with pytest.raises(EngineDeadError, match="was restarted"):
        await asyncio.wrap_future(scaling)
    third_room.close()


async def test_a_request_that_was_aborted_is_aborted_by_another_engine_too(
    engine: RecordingEngine, room: Frontends, remote: RemoteEngine, tmp_path: Path
) -> None:
    """The engine that was told has ended before it has read or done so."""
    callers = [Caller(), Caller()]
    await submit(
        remote, *(Submission(name, [5], SamplingParams(), one) for name, one in zip("ab", callers, strict=True))
    )
    first, _ = engine.queued
    room._closed.set()
    room._thread.join()  # it reads nothing any more
    remote.abort("a")
    remote.abort("unknown")
    await asyncio.sleep(0.05)
    room.close()

    other = RecordingEngine()
    again = Frontends(other, tmp_path, os.getpid(), 1, ["frontend0"])  # type: ignore[arg-type]
    await until(lambda: bool(other.aborted))
    assert len(other.queued) == 2 and {*other.aborted} == {first}
    again.close()


async def test_a_submission_outlives_an_engine_that_has_ended_its_first_request(
    engine: RecordingEngine, room: Frontends, remote: RemoteEngine, tmp_path: Path
) -> None:
    """The engine queues many prompts in parts, and its answer may follow the end of the first request."""
    callers = [Caller(), Caller()]
    room._closed.set()
    room._thread.join()  # the engine answers no submission
    sent = [Submission(name, [5], SamplingParams(), one) for name, one in zip("ab", callers, strict=True)]
    pending = asyncio.create_task(submit(remote, *sent))
    await until(lambda: len(remote._asked) == 2)
    remote._dispatch(AnswerBatch([RequestTokens(0, [CompletionTokens(0, [7], [], FinishReason.LENGTH)], True)]))
    assert callers[0].finished
    room.close()

    other = RecordingEngine()
    again = Frontends(other, tmp_path, os.getpid(), 1, ["frontend0"])  # type: ignore[arg-type]
    await pending
    await until(lambda: bool(other.queued))
    assert [*other.queued] == ["frontend0-1"] and not other.aborted
    again.close()


def test_the_last_messages_of_a_frontend_that_has_ended_are_ignored(engine: RecordingEngine, room: Frontends) -> None:
    """A frontend greets until it is welcome. The engine may read a greeting and a request after its end."""
    room._closed.set()
    room._thread.join()
    room.on_frontend_exit("frontend0")
    context = zmq.Context()
    ended = context.socket(zmq.DEALER)
    ended.identity, ended.linger = b"frontend0", 0
    ended.connect(room.bootstrap.requests)
    sent = FrontendHello(), Resume(0, []), Submit(0, [pack_tokens([5])], [SamplingParams()], CLIENT, [3])
    decoder = msgspec.msgpack.Decoder(FromFrontend)
    for message in sent:
        ended.send(msgspec.msgpack.encode(message))
    for _ in sent:
        assert room._requests.poll(int(END_S * 1e3))
        room._receive(decoder)
    assert not room._submissions and not room._members
    context.destroy(linger=0)


async def test_a_request_that_another_engine_cannot_serve_ends_with_its_error(
    engine: RecordingEngine, room: Frontends, remote: RemoteEngine, tmp_path: Path
) -> None:
    caller = Caller()
    await submit(remote, Submission("a", [5] * 98, SamplingParams(n=2), caller))
    room.close()
    other = RecordingEngine()
    other.longest = 97
    again = Frontends(other, tmp_path, os.getpid(), 1, ["frontend0"])  # type: ignore[arg-type]
    await until(lambda: caller.finished)
    assert caller.updates[-1].error == "98 is too long"
    again.close()
