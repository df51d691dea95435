"""The Python SDK.

::

    from lamina import Lamina, SamplingParams

    with Lamina(compute="cpu:1", memory="cpu:2") as lamina:
        for output in lamina.generate(["def fibonacci(n):", "import os"], SamplingParams(max_tokens=64)):
            print(output.prompt, output.outputs[0].text)
"""

import logging
import uuid
import weakref
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from typing import Self, cast

from lamina.config import EngineConfig
from lamina.engine.streams import AsyncOutputs, Outputs
from lamina.engine.updates import Whole
from lamina.errors import RequestError
from lamina.frontend.prompts import Message, Prompt, as_prompts, chat_prompt
from lamina.launch import launch
from lamina.models.tokenizer import Tokenizer
from lamina.observe.progress import BatchProgress, loading_progress
from lamina.settings import keywords_of
from lamina.types import RequestOutput, SamplingParams

logger = logging.getLogger(__name__)

PART = 8192
"""Prompts submitted together: a longer list must not take all places of the engine."""


class Lamina:
    """A model running on a pool of compute workers and a pool of memory workers of this machine.

    The workers start here and end with :meth:`close`, with the ``with`` block, with this object or with the process.
    All methods may be called from several threads.

    Takes the settings of :class:`lamina.config.EngineConfig` as arguments, all but ``model`` by keyword.

    Raises:
        ConfigError: an invalid pool or setting.
        ModelError: the model directory cannot be used.
        WorkerError: a worker did not start.
    """

    @keywords_of(EngineConfig)
    def __init__(self, config: EngineConfig) -> None:
        self._start(config)

    @classmethod
    def from_config(cls, config: EngineConfig) -> Self:
        """As the constructor, with settings that are already a config."""
        made = cls.__new__(cls)
        made._start(config)
        return made

    def _start(self, config: EngineConfig) -> None:
        with loading_progress() as on_progress:
            self.engine = launch(config, on_progress)
        self._close = weakref.finalize(self, self.engine.close)  # also runs when the interpreter exits

    def generate(
        self,
        prompts: str | list[int] | Sequence[str] | Sequence[list[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete all prompts, texts or token ids, and return when the last has ended.

        Args:
            sampling_params: one for all prompts or one per prompt; None is ``SamplingParams()``.
            use_tqdm: show a progress bar if standard error is a terminal.

        Returns:
            One output per prompt, in the order of the prompts. ``error`` of an output says why the runtime could
            not finish it; that is also logged as a warning.

        Raises:
            RequestError: a prompt is empty, too long or not text. Prompts are checked before any is run, in parts
                of ``PART`` if there are more.
            EngineDeadError: the engine has stopped.
        """
        wanted = as_prompts(prompts)
        params = _params_of(sampling_params, len(wanted))
        wholes = [Whole(self.tokenizer) for _ in wanted]
        with BatchProgress(len(wanted), enabled=use_tqdm) as progress:
            for part in _parts(len(wanted)):
                with Outputs(self.engine, _new_id(), wanted[part], params[part]) as outputs:
                    for index, update in outputs:
                        progress.update(update.tokens, update.finished)
                        wholes[part.start + index].add(update)
        return _outputs(wholes)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, with the model's chat template; otherwise as :meth:`generate`.

        Without ``sampling_params`` an answer has at most ``default_max_tokens`` tokens.

        Raises:
            RequestError: also when the model has no chat template or the template refuses the messages.
        """
        conversations = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        prompts = [
            chat_prompt(self.tokenizer, cast(Sequence[Message], turns), self.engine.max_model_len)
            for turns in conversations
        ]
        if sampling_params is None:
            sampling_params = SamplingParams(max_tokens=self.engine.default_max_tokens)
        return self.generate(prompts, sampling_params, use_tqdm)

    def stream(
        self, prompt: str | list[int], sampling_params: SamplingParams | None = None
    ) -> Generator[RequestOutput, None, None]:
        """Yield the growing output of one prompt; each holds the whole text so far.

        Closing the iterator early cancels the request. Errors as :meth:`generate`, raised by the first ``next``.
        """
        with Outputs(self.engine, _new_id(), [_one(prompt)], _params_of(sampling_params, 1)) as outputs:
            whole = Whole(self.tokenizer)
            for _, update in outputs:
                whole.add(update)
                yield whole.output()

    def stream_batch(
        self, prompts: Sequence[str] | Sequence[list[int]], sampling_params: SamplingParams | None = None
    ) -> Generator[tuple[int, RequestOutput], None, None]:
        """As :meth:`stream`, for several prompts that run together: yields (index of the prompt, its output so far)."""
        wanted = as_prompts(prompts)
        params = _params_of(sampling_params, len(wanted))
        wholes = [Whole(self.tokenizer) for _ in wanted]
        for part in _parts(len(wanted)):
            with Outputs(self.engine, _new_id(), wanted[part], params[part]) as outputs:
                for index, update in outputs:
                    whole = wholes[part.start + index]
                    whole.add(update)
                    yield part.start + index, whole.output()

    async def generate_async(
        self,
        prompts: str | list[int] | Sequence[str] | Sequence[list[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """As :meth:`generate`, for an event loop; cancelling the task cancels the requests."""
        wanted = as_prompts(prompts)
        params = _params_of(sampling_params, len(wanted))
        wholes = [Whole(self.tokenizer) for _ in wanted]
        for part in _parts(len(wanted)):
            async with await AsyncOutputs.submit(self.engine, _new_id(), wanted[part], params[part]) as outputs:
                async for index, update in outputs:
                    wholes[part.start + index].add(update)
        return _outputs(wholes)

    async def stream_async(
        self, prompt: str | list[int], sampling_params: SamplingParams | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """As :meth:`stream`, for an event loop; closing the iterator or cancelling the task cancels the request."""
        params = _params_of(sampling_params, 1)
        async with await AsyncOutputs.submit(self.engine, _new_id(), [_one(prompt)], params) as outputs:
            whole = Whole(self.tokenizer)
            async for _, update in outputs:
                whole.add(update)
                yield whole.output()

    def scale(self, *, compute: int | str = 0, memory: int | str = 0) -> list[str]:
        """Let workers join the pools, or leave where a number is negative, while requests run.

        A text names their kind: "rtx3090:+2". Without one, workers of the pool's first kind join on a Ray cluster, else
        workers on CPUs; those that leave are of any kind.

        Returns their names once all have. What a memory worker holds moves to others before it leaves.

        Raises:
            ConfigError: so many workers cannot join or leave; says why, with the figures.
            WorkerError: a worker did not start. EngineDeadError: the engine has stopped.
        """
        return self.engine.scale(compute=compute, memory=memory).result()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.engine.tokenizer

    def close(self) -> None:
        """Stop all workers; unfinished requests end with an error. Idempotent."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _new_id() -> str:
    return uuid.uuid4().hex


def _one(prompt: str | list[int]) -> Prompt:
    prompts = as_prompts(prompt)
    if prompts[0] is not prompt:
        raise RequestError("stream takes one prompt, a text or a list of token ids; use generate for several")
    return prompts[0]


def _params_of(given: SamplingParams | Sequence[SamplingParams] | None, prompts: int) -> list[SamplingParams]:
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * prompts
    if len(given) != prompts:
        raise RequestError(f"{len(given)} sampling_params for {prompts} prompts; give one for all or one per prompt")
    return list(given)


def _parts(prompts: int) -> list[slice]:
    return [slice(start, start + PART) for start in range(0, prompts, PART)]


def _outputs(wholes: Sequence[Whole]) -> list[RequestOutput]:
    outputs = [whole.output() for whole in wholes]
    failed = [output for output in outputs if output.error is not None]
    if failed:
        logger.warning("%d of %d requests failed; the first: %s", len(failed), len(outputs), failed[0].error)
    return outputs
