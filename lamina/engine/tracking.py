"""What the caller of a request sees of it: text, stop conditions, one terminal state."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from lamina.engine.groups import Completion, Group
from lamina.engine.stop import StopChecker
from lamina.models.tokenizer import IncrementalDetokenizer, Tokenizer
from lamina.transport.messages import Draw
from lamina.types import CompletionOutput, FinishReason, Logprob, Request, RequestOutput, Segment

OnOutput = Callable[[RequestOutput], None]


@dataclass
class _Text:
    """One completion's output so far and what decides its end."""

    output: CompletionOutput
    detokenizer: IncrementalDetokenizer
    stop: StopChecker


class TrackedRequest:
    """A request between its submission and its terminal state. One thread at a time uses it."""

    def __init__(self, request: Request, tokenizer: Tokenizer, on_output: OnOutput) -> None:
        self.request = request
        self._tokenizer = tokenizer
        self._on_output = on_output
        logprobs = request.params.logprobs is not None
        self._outputs = [
            CompletionOutput(index, logprobs=[] if logprobs else None) for index in range(request.params.n)
        ]
        self._texts: list[_Text] = []
        self._error: str | None = None
        self._group: Group | None = None

    def start(self, group: Group) -> None:
        """The scheduler knows the request; its completions may now draw tokens."""
        self._group = group
        params = dataclasses.replace(self.request.params, max_tokens=group.max_tokens)
        for output in self._outputs:
            self._texts.append(
                _Text(
                    output,
                    IncrementalDetokenizer(self._tokenizer, self.request.prompt_token_ids),
                    StopChecker(params, self._tokenizer.eos_token_ids),
                )
            )

    @property
    def finished(self) -> bool:
        """True when every completion has its finish reason."""
        return all(output.finish_reason is not None for output in self._outputs)

    def append(self, completion: Completion, draw: Draw) -> bool:
        """Take in one drawn token; True if it ends the completion."""
        text = self._texts[completion.index]
        output = text.output
        output.token_ids.append(draw.token)
        if output.logprobs is not None:
            output.logprobs.append([self._named(entry) for entry in draw.logprobs])
        decision = text.stop.append(draw.token, text.detokenizer.append([draw.token]))
        output.text += decision.text
        if decision.finish_reason is FinishReason.LENGTH:
            output.text += text.detokenizer.flush()  # what an unfinished character leaves
        output.finish_reason, output.stop_reason = decision.finish_reason, decision.stop_reason
        return decision.finish_reason is not None

    def _named(self, entry: Logprob) -> Logprob:
        return dataclasses.replace(entry, text=self._tokenizer.decode([entry.token_id], skip_special_tokens=False))

    def end(self, reason: FinishReason, error: str | None = None) -> None:
        """Give every completion that has none this finish reason; nothing changes if there are none.

        They have it even if this raises, and before ``start`` too.
        """
        if self.finished:
            return
        self._error = error
        open_ones = [text for text in self._texts if text.output.finish_reason is None]
        for output in self._outputs:
            output.finish_reason = output.finish_reason or reason
        for text in open_ones:
            text.output.text += text.stop.flush() + text.detokenizer.flush()

    def publish(self) -> None:
        """Call the caller back with a copy of everything so far."""
        outputs = [
            dataclasses.replace(
                output,
                token_ids=list(output.token_ids),
                logprobs=None if output.logprobs is None else list(output.logprobs),
            )
            for output in self._outputs
        ]
        self._on_output(
            RequestOutput(
                request_id=self.request.request_id,
                prompt=self.request.prompt,
                prompt_token_ids=self.request.prompt_token_ids,
                outputs=outputs,
                finished=self.finished,
                error=self._error,
                placement=self._placement(),
            )
        )

    def _placement(self) -> tuple[Segment, ...]:
        group = self._group
        if group is None or group.lane < 0:
            return ()
        heads = group.heads
        return tuple(
            Segment(completion.sequence, group.memory, heads, (0, group.kept(completion)))
            for completion in group.completions
        )
