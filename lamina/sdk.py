"""The Python SDK.

::

    from lamina import Lamina, SamplingParams

    with Lamina(compute="cpu:1", memory="cpu:2") as lamina:
        for output in lamina.generate(["def fibonacci(n):", "import os"], SamplingParams(max_tokens=64)):
            print(output.prompt, output.outputs[0].text)
"""

import contextlib
import dataclasses
import logging
import uuid
import weakref
from collections.abc import AsyncGenerator, Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, cast

from lamina.config.engine_config import EngineConfig
from lamina.config.settings import keywords_of
from lamina.core.errors import LaminaError, RequestError
from lamina.core.outputs import RequestOutput
from lamina.core.sampling import SamplingParams
from lamina.launch import launch
from lamina.text.prompts import Message, Prompt, as_prompts, plain_prompts
from lamina.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # what only a running engine needs is imported while its workers start
    import asyncio

    from pydantic import BaseModel

    from lamina.engine.updates import UpdateSum
    from lamina.text.chats import Chat

logger = logging.getLogger(__name__)

Params = SamplingParams | Mapping[str, Any]
"""Sampling parameters, or some of them by name."""

Prompts = str | Mapping[str, Any] | Iterable[str | Mapping[str, Any]] | Iterable[int] | Iterable[Iterable[int]]
"""A text, token ids, or any number of either; also vLLM's ``{"prompt": ...}`` and ``{"prompt_token_ids": ...}``."""

PART = 8192
"""Prompts submitted together: a longer list must not take all places of the engine."""


class Lamina:
    """A model running on a pool of compute workers and a pool of memory workers of this machine.

    The workers start here and end with :meth:`close`, with the ``with`` block, with this object or with the process.
    All methods may be called from several threads.

    Takes the settings of :class:`lamina.config.engine_config.EngineConfig` as arguments, all but ``model`` by keyword.

    Raises:
        ConfigError: an invalid pool or setting.
        ModelError: the model directory cannot be used.
        WorkerError: a worker did not start.

    >>> with Lamina(memory="cpu:2") as lamina:
    ...     (output,) = lamina.generate("def __init__(self, name):", {"temperature": 0.0, "max_tokens": 6})
    >>> output.outputs[0].text, output.placement[0].worker
    ('\\n        self.name = name', 'memory0')
    """

    @keywords_of(EngineConfig)
    def __init__(self, config: EngineConfig) -> None:
        self._start(config)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of ``generate`` without ``sampling_params``: those of the model's
        generation_config.json."""
        return _params_of(None, 1, self.engine.sampling_defaults)[0]

    @classmethod
    def from_config(cls, config: EngineConfig) -> Self:
        """Start an engine with settings that are already a config."""
        made = cls.__new__(cls)
        made._start(config)
        return made

    def _start(self, config: EngineConfig) -> None:
        from lamina.observe.progress import loading_progress

        with loading_progress() as on_progress:
            self.engine = launch(config, on_progress)
        self._close = weakref.finalize(self, self.engine.close)  # also runs when the interpreter exits

    def generate(
        self,
        prompts: Prompts,
        sampling_params: Params | Sequence[Params | None] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete all prompts, texts or token ids, and return when the last has ended.

        Args:
            prompts: One prompt or any number of prompts, also from a generator; token ids may be NumPy arrays.
            sampling_params: One for all prompts or one per prompt. Fields missing in a dict have the model's defaults,
                as with None; a ``SamplingParams`` is used as it is.
            use_tqdm: Show a progress bar, in a terminal or a notebook (which needs ipywidgets).

        Returns:
            One output per prompt, in the order of the prompts. An output's ``error`` says why the runtime could not
            finish it; the error is also logged as a warning.

        Raises:
            RequestError: A prompt is empty, too long or not text. Prompts are checked before any is run, in parts of
                ``PART`` prompts.
            EngineDeadError: The engine has stopped.
        """
        from lamina.engine.streams import Outputs
        from lamina.engine.updates import UpdateSum
        from lamina.observe.progress import BatchProgress

        wanted = _prompts_of(prompts)
        params = _params_of(sampling_params, len(wanted), self.engine.sampling_defaults)
        wholes = [UpdateSum(self.tokenizer) for _ in wanted]
        with BatchProgress(len(wanted), enabled=use_tqdm) as progress:
            for part in _parts(len(wanted)):
                with Outputs(self.engine, _new_id(), wanted[part], params[part]) as outputs:
                    for index, update in outputs:
                        progress.update(update.tokens, update.finished)
                        wholes[part.start + index].append_update(update)
        return _outputs(wholes)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params | Sequence[Params | None] | None = None,
        use_tqdm: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] = "auto",
        response_format: "type[BaseModel] | Mapping[str, Any] | None" = None,
    ) -> list[RequestOutput]:
        """Answer one or several conversations with the model's chat template. See also :meth:`generate`.

        Without a limit from ``sampling_params`` or the model, an answer may take the rest of the context. Each output's
        completions have ``content``, ``reasoning``, ``tool_calls`` and ``parsed`` beside their whole ``text``.

        Args:
            messages: One conversation or several, each a list of messages in OpenAI's form.
            sampling_params: See :meth:`generate`.
            use_tqdm: See :meth:`generate`.
            tools: Functions that the model may call, in the form of OpenAI's API. Calls are recognised in the form of
                the model's template, or of the setting ``tool_call_parser``.
            tool_choice: "auto"; "none" (the model is not shown the tools); "required", or a function in the form of
                OpenAI's API: a grammar enforces calls.
            response_format: A pydantic model or a JSON schema that answers match; the schema may also be in the form of
                OpenAI's API. ``parsed`` is then an instance of the model, or the answer's JSON value; None if the
                answer is cut off, or if the model's validators refuse it.

        Raises:
            RequestError: Also if the template rejects the messages, or has no tools.

        >>> from pydantic import BaseModel, Field
        >>> class Answer(BaseModel):
        ...     total: int = Field(ge=0, le=9)
        >>> with Lamina() as lamina:
        ...     (output,) = lamina.chat([{"role": "user", "content": "1 + 2?"}], {"seed": 1}, response_format=Answer)
        >>> output.outputs[0].parsed.total in range(10)
        True
        """
        chats, params = self._chats(messages, sampling_params, tools, tool_choice, response_format)
        outputs = self.generate([chat.prompt for chat in chats], params, use_tqdm)
        return _read_answers(chats, outputs)

    def _chats(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params | Sequence[Params | None] | None,
        tools: Sequence[Mapping[str, Any]] | None,
        tool_choice: str | Mapping[str, Any],
        response_format: "type[BaseModel] | Mapping[str, Any] | None",
    ) -> "tuple[list[Chat], list[SamplingParams]]":
        """Return the conversations with rendered prompts, and their parameters."""
        from lamina.text.chats import prepare_chat

        several = [messages] if messages and isinstance(messages[0], Mapping) else messages
        context = self.engine.max_model_len
        chats = [
            prepare_chat(
                self.tokenizer, cast(Sequence[Message], turns), context, tools or (), tool_choice, response_format
            )
            for turns in several
        ]
        defaults: dict[str, Any] = {"max_tokens": None, **self.engine.sampling_defaults}
        given = _params_of(sampling_params, len(chats), defaults)
        return chats, [chat.params(one) for chat, one in zip(chats, given, strict=True)]

    def stream(
        self, prompt: str | Iterable[int], sampling_params: Params | None = None
    ) -> Generator[RequestOutput, None, None]:
        """Yield the growing output of one prompt; each holds the whole text so far.

        Closing the iterator early cancels the request. The first ``next`` raises the errors of :meth:`generate`.
        """
        from lamina.engine.streams import Outputs
        from lamina.engine.updates import UpdateSum

        params = _params_of(sampling_params, 1, self.engine.sampling_defaults)
        with Outputs(self.engine, _new_id(), [_one(prompt)], params) as outputs:
            whole = UpdateSum(self.tokenizer)
            for _, update in outputs:
                whole.append_update(update)
                yield whole.output()

    def stream_batch(
        self, prompts: Prompts, sampling_params: Params | None = None
    ) -> Generator[tuple[int, RequestOutput], None, None]:
        """Stream several prompts that run together: yields (index of the prompt, its output so far)."""
        from lamina.engine.streams import Outputs
        from lamina.engine.updates import UpdateSum

        wanted = _prompts_of(prompts)
        params = _params_of(sampling_params, len(wanted), self.engine.sampling_defaults)
        wholes = [UpdateSum(self.tokenizer) for _ in wanted]
        for part in _parts(len(wanted)):
            with Outputs(self.engine, _new_id(), wanted[part], params[part]) as outputs:
                for index, update in outputs:
                    whole = wholes[part.start + index]
                    whole.append_update(update)
                    yield part.start + index, whole.output()

    async def generate_async(
        self,
        prompts: Prompts,
        sampling_params: Params | Sequence[Params | None] | None = None,
    ) -> list[RequestOutput]:
        """Generate in an event loop; cancelling the task cancels the requests."""
        from lamina.engine.streams import AsyncOutputs
        from lamina.engine.updates import UpdateSum

        wanted = _prompts_of(prompts)
        params = _params_of(sampling_params, len(wanted), self.engine.sampling_defaults)
        wholes = [UpdateSum(self.tokenizer) for _ in wanted]
        for part in _parts(len(wanted)):
            async with await AsyncOutputs.submit(self.engine, _new_id(), wanted[part], params[part]) as outputs:
                async for index, update in outputs:
                    wholes[part.start + index].append_update(update)
        return _outputs(wholes)

    async def stream_async(
        self, prompt: str | Iterable[int], sampling_params: Params | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream in an event loop; closing the iterator or cancelling the task cancels the request."""
        from lamina.engine.streams import AsyncOutputs
        from lamina.engine.updates import UpdateSum

        params = _params_of(sampling_params, 1, self.engine.sampling_defaults)
        async with await AsyncOutputs.submit(self.engine, _new_id(), [_one(prompt)], params) as outputs:
            whole = UpdateSum(self.tokenizer)
            async for _, update in outputs:
                whole.append_update(update)
                yield whole.output()

    def scale(self, *, compute: int | str = 0, memory: int | str = 0, prefill: int | str = 0) -> list[str]:
        """Add workers to the pools while requests run, or remove some if a number is negative.

        A text may name the kind: "rtx3090:+2"; without a sign, it is the size of the pool: "3". Without a kind, workers
        of the pool's first kind join on a Ray cluster, and workers on CPUs elsewhere; workers of any kind leave. A
        memory worker's KV moves to others before it leaves. Workers of ``prefill`` only run prompts: with prefill=1 and
        compute=-1, a compute worker changes to prompts without loading weights again.

        Returns the workers' names once all have joined or left.

        Raises:
            ConfigError: The change is impossible; the error gives the figures.
            WorkerError: A worker did not start.
            EngineDeadError: The engine has stopped.
        """
        return self.engine.scale(compute=compute, memory=memory, prefill=prefill).result()

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


class AsyncLamina:
    """Runs a model in an event loop, also in a running one such as a notebook's.

    Takes the settings of :class:`Lamina`. Workers start in ``async with`` or at the first request, in a thread, and end
    with the block or with :meth:`close`. Requests of several tasks run together; cancelling a task cancels its request.

    >>> import asyncio
    >>> async def main():
    ...     async with AsyncLamina() as lamina:
    ...         async for output in lamina.generate("def __init__(self, name):", {"temperature": 0.0, "max_tokens": 6}):
    ...             text = output.outputs[0].text
    ...         return text
    >>> asyncio.run(main())
    '\\n        self.name = name'
    """

    @keywords_of(EngineConfig)
    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._starting: asyncio.Task[Lamina] | None = None

    async def start(self) -> Lamina:
        """Start the workers, unless they have been started. Raises the errors of :class:`Lamina`."""
        import asyncio

        if self._starting is None:
            self._starting = asyncio.create_task(asyncio.to_thread(Lamina.from_config, self._config))
        return await asyncio.shield(self._starting)

    async def generate(
        self, prompt: str | Iterable[int], sampling_params: Params | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the growing output of one prompt, each with the whole text so far. Raises like ``Lamina.generate``."""
        lamina = await self.start()
        async with contextlib.aclosing(lamina.stream_async(prompt, sampling_params)) as outputs:
            async for output in outputs:
                yield output

    async def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params | Sequence[Params | None] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] = "auto",
        response_format: "type[BaseModel] | Mapping[str, Any] | None" = None,
    ) -> list[RequestOutput]:
        """Answer one or several conversations; see ``Lamina.chat``."""
        import asyncio

        lamina = await self.start()
        chats, params = await asyncio.to_thread(
            lamina._chats, messages, sampling_params, tools, tool_choice, response_format
        )
        return _read_answers(chats, await lamina.generate_async([chat.prompt for chat in chats], params))

    async def close(self) -> None:
        """Stop all workers; unfinished requests end with an error. Idempotent."""
        import asyncio

        if self._starting is None:
            return
        try:
            lamina = await asyncio.shield(self._starting)
        except LaminaError:  # ``start`` has raised it, and nothing runs
            return
        await asyncio.to_thread(lamina.close)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _read_answers(chats: "Sequence[Chat]", outputs: list[RequestOutput]) -> list[RequestOutput]:
    for chat, output in zip(chats, outputs, strict=True):
        for answer in output.outputs:
            chat.read(answer)
    return outputs


def _new_id() -> str:
    return uuid.uuid4().hex


def _prompts_of(given: Prompts) -> list[Prompt]:
    plain = plain_prompts(given)
    return as_prompts(plain) if plain != [] else []


def _one(given: str | Iterable[int]) -> Prompt:
    plain = plain_prompts(given)
    prompts = as_prompts(plain)
    if prompts != [plain]:
        raise RequestError("stream takes one prompt, a text or a list of token ids; use generate for several")
    return prompts[0]


def _params_of(
    given: Params | Sequence[Params | None] | None, prompts: int, defaults: Mapping[str, Any]
) -> list[SamplingParams]:
    if given is None or isinstance(given, SamplingParams | Mapping):
        return [_filled(given or {}, defaults)] * prompts
    if len(given) != prompts:
        raise RequestError(f"{len(given)} sampling_params for {prompts} prompts; give one for all or one per prompt")
    return [_filled(each or {}, defaults) for each in given]


def _filled(given: Params, defaults: Mapping[str, Any]) -> SamplingParams:
    if isinstance(given, SamplingParams):
        return given
    known = [field.name for field in dataclasses.fields(SamplingParams)]
    for name in given:
        if name not in known:
            raise RequestError(f"sampling_params has no field {name!r}; its fields are {', '.join(known)}")
    # Beam search has no use for parameters of sampling.
    used = {name: value for name, value in defaults.items() if name == "max_tokens" or not given.get("use_beam_search")}
    try:
        return SamplingParams(**{**used, **given})
    except ValueError as error:
        raise RequestError(str(error)) from error


def _parts(prompts: int) -> list[slice]:
    return [slice(start, start + PART) for start in range(0, prompts, PART)]


def _outputs(wholes: "Sequence[UpdateSum]") -> list[RequestOutput]:
    outputs = [whole.output() for whole in wholes]
    failed = [output for output in outputs if output.error is not None]
    if failed:
        logger.warning("%d of %d requests failed; the first: %s", len(failed), len(outputs), failed[0].error)
    return outputs
