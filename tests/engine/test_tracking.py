"""A request's terminal state is given once and stays."""

from lamina.engine.placement import Placement
from lamina.engine.scheduler import Limits, Scheduler
from lamina.engine.tracking import TrackedRequest
from lamina.models import directory
from lamina.models.tokenizer import Tokenizer
from lamina.transport.messages import Draw
from lamina.types import FinishReason, Request, RequestOutput, SamplingParams


def test_an_error_that_comes_after_the_end_changes_nothing() -> None:
    published: list[RequestOutput] = []
    scheduler = Scheduler(Limits(4, 64, 64), Placement({"memory0": 100}), lanes=1, attentions=1, kv_heads=1)
    request = Request("r", None, [5, 6], SamplingParams(max_tokens=1, n=2))
    tracked = TrackedRequest(request, Tokenizer(directory.find(None)), published.append)
    group = scheduler.add(request)
    tracked.start(group)
    assert tracked.append(group.completions[0], Draw(0, 300))
    tracked.end(FinishReason.ABORT)
    tracked.end(FinishReason.ERROR, "the engine has stopped")
    tracked.publish()
    (output,) = published
    assert output.finished and output.error is None
    assert [part.finish_reason for part in output.outputs] == [FinishReason.LENGTH, FinishReason.ABORT]
