"""How a stream's updates reach its reader, or what writes them before it."""

import asyncio

import pytest

from lamina.core.sampling import SamplingParams
from lamina.core.types import Client, Request
from lamina.engine.streams import AsyncOutputs, Submission, Update
from lamina.engine.updates import CompletionUpdate, OnUpdate, RequestUpdate

REQUEST = Request("r", None, [5], SamplingParams())
END_S = 30.0


class FakeEngine:
    """Takes one request."""

    dead = None

    def submit_all(self, submissions: list[Submission], client: Client) -> None:
        self.tell: OnUpdate = submissions[0].on_update

    def abort(self, request_id: str) -> None:
        """Do nothing."""


def news(*tokens: int, finished: bool = False) -> RequestUpdate:
    return RequestUpdate(REQUEST, [CompletionUpdate(0, list(tokens))], finished)


def tokens_of(updates: list[Update]) -> list[list[int]]:
    return [update.completions[0].token_ids for _, update in updates]


class Stream:
    """A reader of a stream, and a ``push`` that takes what it may while ``open``."""

    def __init__(self, outputs: AsyncOutputs) -> None:
        self.read: list[Update] = []
        self.pushed: list[Update] = []
        self.open = True
        self._outputs = outputs
        outputs.push = self._push

    def _push(self) -> bool:
        updates = self._outputs.pop_middle(4) if self.open else []
        self.pushed += updates
        return bool(updates)

    async def read_all(self) -> None:
        async for update in self._outputs:
            self.read.append(update)


async def begin() -> tuple[FakeEngine, Stream, "asyncio.Task[None]"]:
    engine = FakeEngine()
    outputs = await AsyncOutputs.submit(engine, "r", ["a"], [SamplingParams()])  # type: ignore[arg-type]
    stream = Stream(outputs)
    return engine, stream, asyncio.create_task(stream.read_all())


async def test_updates_in_the_middle_are_pushed_and_the_last_is_read() -> None:
    engine, stream, reader = await begin()
    engine.tell(news(1))  # nobody waits for it yet
    assert not stream.pushed
    await asyncio.sleep(0.01)
    engine.tell(news(2))
    engine.tell(news(3, 4))
    engine.tell(news(5, 6, 7, 8, 9))  # more than it takes at once
    engine.tell(news(10))  # it would overtake
    await asyncio.sleep(0.01)
    stream.open = False
    engine.tell(news(11))
    stream.open = True
    engine.tell(news(12))  # both
    engine.tell(news(13, finished=True))
    await asyncio.wait_for(reader, END_S)
    assert tokens_of(stream.pushed) == [[2], [3, 4], [11, 12]]
    assert tokens_of(stream.read) == [[1], [5, 6, 7, 8, 9, 10], [13]]


async def test_the_reader_hears_of_a_push_that_fails() -> None:
    engine, stream, reader = await begin()

    def fail() -> bool:
        raise RuntimeError("it cannot be written")

    stream._outputs.push = fail
    await asyncio.sleep(0.01)
    engine.tell(news(1))
    with pytest.raises(RuntimeError, match="it cannot be written"):
        await asyncio.wait_for(reader, END_S)
