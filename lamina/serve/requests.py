"""Defines ``GenerationRequest``, the form of requests common to all APIs, and reads it from OpenAI's bodies."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from lamina.core.errors import RequestError
from lamina.core.sampling import SAMPLING_RANGES, SamplingParams, StructuredOutputs, require_in_range
from lamina.engine.streams import Runtime
from lamina.models.directory import Defaults
from lamina.serve.bodies import Body, ChatBody, CompletionBody, parse
from lamina.serve.http_errors import APIError
from lamina.text.answer_reader import AnswerReader
from lamina.text.chat_template import joined_text
from lamina.text.grammars import compile_grammar
from lamina.text.prompts import encode_chat, prompt_tokens
from lamina.text.tool_calls import PlainText
from lamina.text.tools import calls_parser, forced_calls, require_calls, usable_tools

COMPLETION_TOKENS = 16
"""Limit of a completion that gives none, as OpenAI's and vLLM's."""

UsageReports = Literal["none", "last", "every"]
"""Which chunks of a stream have token counts: none, one more at the end, or each."""


@dataclass(frozen=True)
class GenerationRequest:
    """The prompts to run, and how to send the answer.

    Attributes:
        prompts: Token ids of each prompt.
        params: Sampling parameters of all prompts.
        stream: Send the answer as a stream of events.
        usage: Which events have token counts.
        echo_logprobs: Whether log-probabilities of prompts precede those of their completions.
        prompt_logprobs: Whether the answer has log-probabilities of prompts in a separate field.
        token_ids: Whether the answer has the token ids of prompts and completions.
        echo: For each prompt, the text to put before its completions; empty for none.
        echoes_alone: Whether the answer has nothing but the echo: the token that the engine draws is left out.
        ignored: Names of the body's fields that have no effect.
        make_reader: Makes a parser that divides a choice's text into content, reasoning and tool calls.
        repeated: Fields of the body that the answer repeats.
    """

    prompts: Sequence[list[int]]
    params: SamplingParams
    stream: bool = False
    usage: UsageReports = "none"
    echo_logprobs: bool = False
    prompt_logprobs: bool = False
    token_ids: bool = False
    echo: Sequence[str] = ()
    echoes_alone: bool = False
    ignored: Sequence[str] = ()
    make_reader: Callable[[], AnswerReader] = lambda: AnswerReader(PlainText())
    repeated: Mapping[str, Any] = field(default_factory=dict)

    def submissions(self, max_model_len: int) -> list[tuple[list[int], SamplingParams]]:
        """Return each prompt with its parameters; the context bounds ``max_tokens`` and ``min_tokens``."""
        return [self._submission(prompt, max_model_len - len(prompt)) for prompt in self.prompts]

    def _submission(self, prompt: list[int], room: int) -> tuple[list[int], SamplingParams]:
        params = self.params
        least = min(params.min_tokens, room) if room > 0 else params.min_tokens
        return prompt, params if least == params.min_tokens else replace(params, min_tokens=least)


def read_completion(engine: Runtime, raw: bytes) -> GenerationRequest:
    """Translate the body of a completion. Raises APIError, RequestError.

    Without a limit, OpenAI's 16 tokens are the limit, whatever the model's default is. With ``echo``, it may be 0.
    """
    body = parse(CompletionBody, raw)
    require_model(engine, body.model)
    echoes_alone = bool(body.echo) and _limit(body)[1] == 0
    if echoes_alone:
        body.max_tokens, body.max_completion_tokens = 1, None  # the engine always draws a token
    echo_logprobs = bool(body.echo) and body.logprobs is not None
    _, limit = _limit(body)
    limit = COMPLETION_TOKENS if limit is None else limit
    params = _sampling_params(body, engine.sampling_defaults, {}, logprobs=body.logprobs, max_tokens=limit)
    if echo_logprobs:
        if params.structured_outputs is not None:
            message = "logprobs of the prompt are not supported with structured outputs; leave out echo"
            raise APIError(400, message, param="echo")
        params = replace(params, prompt_logprobs=max(params.logprobs or 0, params.prompt_logprobs or 0))
    tokenizer = engine.tokenizer
    prompts = [prompt_tokens(tokenizer, p, params, engine.max_model_len) for p in body.prompt]
    skip = params.skip_special_tokens
    echo = [p if isinstance(p, str) else tokenizer.decode(p, skip) for p in body.prompt] if body.echo else ()
    if echo_logprobs:
        echo = [tokenizer.decode(prompt[:1], skip) for prompt in prompts]
    return _generation(body, engine, prompts, params, echo=echo, echo_logprobs=echo_logprobs, echoes_alone=echoes_alone)


def read_chat(engine: Runtime, raw: bytes) -> GenerationRequest:
    """Translate the body of a chat request. Raises APIError, RequestError."""
    return chat_generation(engine, parse(ChatBody, raw))


CHAT_NAMES: Mapping[str, str] = {"logprobs": "top_logprobs"}
"""The chat API's names of sampling parameters that ``SamplingParams`` names differently."""


def chat_generation(
    engine: Runtime, body: ChatBody, clamped: bool = False, names: Mapping[str, str] = CHAT_NAMES
) -> GenerationRequest:
    """Translate a chat request. Raises APIError, RequestError.

    Without a limit, and if the model has no default, an answer may take the rest of the context.

    Args:
        clamped: A token limit beyond the context is reduced to the rest of the context instead of being an error.
        names: Names that another API has for the fields of a chat, for its errors.
    """
    require_model(engine, body.model)
    if body.top_logprobs and not body.logprobs:
        raise APIError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    defaults, (_, limit) = engine.sampling_defaults, _limit(body)
    if limit is None and "max_tokens" in defaults:
        limit = max(int(defaults["max_tokens"]), _min_tokens(body))
    with _api_error("tool_choice"):
        tools, choice = usable_tools(body.tools, body.tool_choice)
    text = _render(engine, body, tools, names)
    form = engine.tokenizer.chat_format
    continued = _text_of_last(body.messages) if body.continue_final_message else ""
    with _api_error("tool_choice"):
        calls = forced_calls(tools, choice, body.parallel_tool_calls is not False, form, text, continued)
    if calls is not None:
        with _api_error("tools"):
            require_calls(calls, tools)
    if tools and calls is None and form.tools is None:
        raise APIError(
            400,
            "the model's chat template does not show how it writes tool calls; start the server with "
            '--tool-call-parser, or give tool_choice "required" or a function',
            param="tools",
        )
    given: dict[str, Any] = {"logprobs": logprobs, "max_tokens": limit}
    if form.needs_special(engine.tokenizer.special_texts.values(), bool(tools)):
        skips = body.sampling.pop("skip_special_tokens", False)
        given["skip_special_tokens"] = False if isinstance(skips, bool) else skips
    params = _sampling_params(body, defaults, names, calls, **given)
    if params.structured_outputs is not None and calls is None:
        instead = tools if body.response_format is not None else ()
        special = engine.tokenizer.special_texts
        wanted = form.constrain(params.structured_outputs, text, instead, special, continued)
        params = replace(params, structured_outputs=wanted)
        if instead:
            with _api_error("tools"):  # the form alone has been compiled
                require_calls(wanted, instead)
        _require_grammar(params, "response_format", names)
    if params.truncate_prompt_tokens is None:
        prompt = encode_chat(engine.tokenizer, text, engine.max_model_len)
    else:
        tokens = engine.tokenizer.encode(text, add_special_tokens=False)
        prompt = prompt_tokens(engine.tokenizer, tokens, params, engine.max_model_len)
    make_parser = form.parser(text, calls_parser(choice, form.tools, tools) if tools else None, continued)

    def reader() -> AnswerReader:
        return AnswerReader(make_parser(), body.include_reasoning is not False, body.parallel_tool_calls is not False)

    return _generation(body, engine, [prompt], params, clamped=clamped, make_reader=reader)


@contextlib.contextmanager
def _api_error(param: str) -> Iterator[None]:
    """Convert RequestError to APIError 400, which names a field."""
    try:
        yield
    except RequestError as error:
        raise APIError(400, str(error), param=param) from error


def _render(engine: Runtime, body: ChatBody, tools: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> str:
    """Return the prompt of a conversation. Raises APIError 400."""
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
        variables.setdefault("enable_thinking", body.reasoning_effort != "none")
    continues = bool(body.continue_final_message)
    prompts = body.add_generation_prompt if body.add_generation_prompt is not None else not continues
    if continues and prompts:
        raise APIError(
            400, "continue_final_message needs add_generation_prompt to be false", param="continue_final_message"
        )
    with _api_error(names.get("messages", "messages")):
        return engine.tokenizer.apply_chat_template(body.messages, prompts, tools or None, variables, continues)


def _text_of_last(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of the last message of a conversation, which a template has accepted."""
    content = messages[-1].get("content") or ""
    return content if isinstance(content, str) else joined_text(content)


def require_model(engine: Runtime, name: str | None) -> None:
    """Raise APIError 404 unless ``name`` is None, empty or a name of the model served here."""
    served = (engine.model_name, *engine.model_aliases)
    if name and name not in served:
        message = f"the model {name!r} does not exist; this server serves {', '.join(map(repr, served))}"
        raise APIError(404, message, code="model_not_found", param="model")


def _generation(
    body: Body,
    engine: Runtime,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    clamped: bool = False,
    **own: Any,
) -> GenerationRequest:
    """Return the request of a body. ``own``: further fields of the request, from the endpoint.

    Raises APIError 400 if a prompt and the limit of its answer exceed the context together, unless ``clamped``.
    """
    name, limit = _limit(body)
    longest, context = max(map(len, prompts)), engine.max_model_len
    # A prompt that leaves no room at all is refused as such.
    if limit is not None and not clamped and 0 < context - longest < limit:
        raise APIError(
            400,
            f"{name} is {limit}, but the prompt has {longest} tokens, which leave room for {context - longest} "
            f"(max_model_len {context}). Shorten the prompt, lower {name}, or leave it out",
            param=name,
        )
    scored = body.sampling.get("prompt_logprobs") is not None
    if scored and body.stream:
        raise APIError(400, "prompt_logprobs cannot be streamed; leave out stream", param="prompt_logprobs")
    usage: UsageReports = "none"
    if (options := body.stream_options) is not None and options.include_usage:
        usage = "every" if options.continuous_usage_stats else "last"
    return GenerationRequest(
        prompts,
        params,
        bool(body.stream),
        usage,
        prompt_logprobs=scored,
        token_ids=bool(body.return_token_ids),
        ignored=body.ignored,
        **own,
    )


def _limit(body: Body) -> tuple[str, int | None]:
    """Return the field that limits the tokens of an answer, and its value."""
    if body.max_completion_tokens is not None:
        return "max_completion_tokens", body.max_completion_tokens
    return "max_tokens", body.max_tokens


def _min_tokens(body: Body) -> int:
    """Return ``min_tokens`` of the body; 0 if it is not valid, which ``SamplingParams`` reports."""
    value = body.sampling.get("min_tokens", 0)
    return value if type(value) is int and value <= SAMPLING_RANGES["min_tokens"][1] else 0


GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
"""Older names of the fields of ``structured_outputs``."""


def _structured_outputs(body: Body) -> tuple[str, Any]:
    """Return the body's field that constrains the answer: its name and value. Raises APIError 400."""
    found: dict[str, Any] = {}
    if "structured_outputs" in body.sampling:
        found["structured_outputs"] = body.sampling["structured_outputs"]
    found |= {name: {name.removeprefix("guided_"): v} for name in GUIDED if (v := getattr(body, name)) is not None}
    if (wanted := body.response_format) is not None and wanted.type != "text":
        schema = wanted.schema if wanted.json_schema is None else wanted.json_schema.schema
        if schema is not None:
            found["response_format"] = {"json": schema}
        elif wanted.type == "json_object":
            found["response_format"] = {"json_object": True}
        else:
            raise APIError(400, "response_format.json_schema: Field required", param="response_format")
    first = next(iter(found), "")
    if len(found) > 1:
        raise APIError(400, f"{' and '.join(found)} both say what the answer must match; give one", param=first)
    return next(iter(found.items()), ("structured_outputs", None))


def _require_grammar(params: SamplingParams, name: str, api_names: Mapping[str, str]) -> None:
    """Raise APIError 400 if the answer's grammar cannot be compiled. ``name``: field that gives the grammar."""
    if params.structured_outputs is None:
        return
    try:
        compile_grammar(params.structured_outputs)
    except RequestError as error:
        field, rest = str(error).split(maxsplit=1)
        within = {"structured_outputs": f".{field}", "response_format": ".json_schema.schema"}.get(name, "")
        place = api_names.get(f"{name}{within}", f"{name}{within}")
        raise APIError(400, f"{place} {rest}", param=api_names.get(name, name)) from error


def _sampling_params(
    body: Body,
    defaults: Defaults,
    api_names: Mapping[str, str],
    calls: StructuredOutputs | None = None,
    **given: Any,
) -> SamplingParams:
    """Return the sampling parameters. Raises APIError 400 for values out of range.

    Args:
        defaults: The model's values where the body has none; not used for beam search.
        api_names: The API's names of parameters that ``SamplingParams`` names differently.
        calls: What the answer must match because it has to call tools.
        given: Values that come from fields of the endpoint.
    """
    api_names = {"max_tokens": _limit(body)[0], **api_names}
    given = {**({} if body.sampling.get("use_beam_search") else defaults), **given, **body.sampling}
    structured, given["structured_outputs"] = _structured_outputs(body)
    if calls is not None:
        if given["structured_outputs"] is not None:
            raise APIError(
                400, f"tool_choice and {structured} both say what the answer must match", param="tool_choice"
            )
        structured, given["structured_outputs"] = "tools", calls
    longest = given["max_tokens"]
    if longest is not None and 0 < longest < _min_tokens(body):
        given["min_tokens"] = longest
    try:
        params = SamplingParams(**given)
    except ValueError as error:  # its messages begin with the parameter's name
        name, rest = str(error).split(maxsplit=1)
        within = name.startswith("structured_outputs.") and structured != "structured_outputs"
        name = structured if within else api_names.get(name, name)
        raise APIError(400, f"{name} {rest}", param=name) from error
    _require_grammar(params, structured, api_names)
    if body.max_tokens is not None:  # also if max_completion_tokens takes its place
        try:
            require_in_range("max_tokens", body.max_tokens)
        except ValueError as error:
            raise APIError(400, str(error), param="max_tokens") from error
    return params
