"""Renders chat messages to a prompt with the model's template, as transformers does, in a sandbox."""

import contextlib
import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from lamina.core.errors import RequestError
from lamina.text.written_json import read_written

DEFAULT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
"""Used when a model has no template: one ``role: content`` line per message, then ``assistant:``."""

Parts = Literal["joined", "single", "given"]
"""Form of a content of several text parts: their text; a list with one part that has their text; the list as given."""

_PROBE = "lamina-probe"


@dataclass(frozen=True)
class _Form:
    """How messages with tool calls are written for a template.

    Attributes:
        fills_content: The content of a message that has only tool calls is an empty string.
        arguments_as_text: The arguments of tool calls are JSON text, not objects.
        short_ids: Ids of tool calls have nine letters and digits.
    """

    fills_content: bool = False
    arguments_as_text: bool = False
    short_ids: bool = False


_USUAL = _Form()
_OTHER_FORMS = tuple(
    _Form(fills_content, arguments_as_text, short_ids)
    for short_ids in (False, True)
    for fills_content, arguments_as_text in ((False, False), (True, False), (True, True))
)[1:]
"""Forms for templates that fail on the usual one: some join contents and arguments to texts, Mistral's accept no other
ids than their own."""


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}`` marks assistant text for training; here it renders as its content."""

    tags = {"generation"}  # noqa: RUF012 - the name and type jinja2 declares

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class ChatTemplate:
    """A compiled template. ``special_tokens`` (bos_token, eos_token, ...) are variables of the template.

    Raises:
        RequestError: the template is not valid Jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise RequestError(
                f"the model's chat template is not valid Jinja: {error}. Use completions, or fix chat_template.jinja"
            ) from error
        self._special_tokens = dict(special_tokens)
        self._uses_tools = "tools" in source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> str:
        """Return the prompt for ``messages``, OpenAI style: role, and content as a string or a list of text parts.

        Templates get what transformers gives them, with the arguments of tool calls as objects. A template that does
        not read lists of parts gets the texts of the parts, joined by line breaks. A message of the role "developer"
        is one of the role "system" for templates that would leave it out. If a template fails on tool calls, it is
        rendered again with an empty string for missing content, with arguments as JSON text, which some templates
        concatenate, and with ids of nine characters, which Mistral's templates require. If it refuses system messages
        after the first message, as Qwen3.5's does, their texts are put into the messages before them.

        Args:
            tools: the functions that the model may call, OpenAI style.
            variables: further variables of the template.
            continue_final_message: end with the last message's content.

        Raises:
            RequestError: a message is malformed, or the template rejects it or uses no tools.
        """
        if tools and not self._uses_tools:
            raise RequestError("the model's chat template has no place for tools; describe them in a message instead")
        if isinstance(messages, str):
            raise RequestError('messages is a text; give a list such as [{"role": "user", "content": "..."}]')
        for index, message in enumerate(messages):
            _check_message(index, message)
        if not messages:
            raise RequestError("messages is empty; give at least one message")
        if continue_final_message:
            messages = [*messages[:-1], _with_tag(messages[-1])]
        given = (tools, add_generation_prompt, variables or {})
        try:
            prompt = self._in_any_form(messages, *given)
        except RequestError as refusal:
            folded = _fold_instructions(messages)
            if folded == messages:
                raise
            try:
                prompt = self._in_any_form(folded, *given)
            except RequestError:
                raise refusal from None
        return _cut_at_tag(prompt) if continue_final_message else prompt

    def _in_any_form(self, messages: Sequence[Mapping[str, Any]], *given: Any) -> str:
        """Return the prompt in the first form of messages that the template takes. Raises RequestError for the usual
        form."""
        render = functools.partial(self._render, messages, *given)
        try:
            return _render_parts(render, messages)
        except RequestError:
            raise
        except Exception as error:  # a template is a program from the model's author: it may raise anything
            return _render_calls(render, messages, error)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
        form: _Form = _USUAL,
        parts: Parts = "joined",
    ) -> str:
        given = {"documents": None, **self._special_tokens, **variables}
        plain = [_plain_message(message, form) for message in messages]
        for message in plain:
            if message["role"] == "developer" and not self._shows_developers:
                message["role"] = "system"
            if "content" in message:
                message["content"] = self._content(message["content"], parts)
        return self._template.render(
            given,
            messages=plain,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
        )

    def _content(self, content: str | list[Any], parts: Parts) -> str | list[Any]:
        if self._reads_parts_alone and isinstance(content, str):
            return _single(content)
        if isinstance(content, str):
            return content
        if parts == "given" or self._reads_parts_alone:
            return [part if part["type"] == "text" else _single(text_of(part))[0] for part in content]
        text = joined_text(content)
        return text if parts == "joined" else _single(text)

    @functools.cached_property
    def _reads_parts_alone(self) -> bool:
        """Whether the template leaves out contents that are texts, and shows those that are lists of parts."""
        text, parts = ({"role": "user", "content": content} for content in (_PROBE, _single(_PROBE)))
        return not self._shows(text) and self._shows(parts)

    @functools.cached_property
    def _shows_developers(self) -> bool:
        """Whether the template shows messages of the role "developer"."""
        content = _single(_PROBE) if self._reads_parts_alone else _PROBE
        return self._shows({"role": "developer", "content": content}, {"role": "user", "content": content[:0]})

    def _shows(self, *messages: Mapping[str, Any]) -> bool:
        """Return whether the template shows the probe that ``messages`` hold."""
        with contextlib.suppress(Exception):  # such as a refusal of conversations without a system message
            return _PROBE in self._template.render(self._special_tokens, messages=messages, tools=None)
        return False


def _single(text: str) -> list[Any]:
    return [{"type": "text", "text": text}]


def _render_parts(render: Callable[..., str], messages: Sequence[Mapping[str, Any]]) -> str:
    """Render with lists of parts as given if the template reads lists: it renders one part like that part's text."""
    joined = render()
    if any(isinstance(content := message.get("content"), list) and len(content) > 1 for message in messages):
        with contextlib.suppress(Exception):  # a template that takes only texts fails in its own way
            if render(parts="single") == joined:
                return render(parts="given")
    return joined


def _render_calls(render: Callable[..., str], messages: Sequence[Mapping[str, Any]], error: Exception) -> str:
    """Render in other forms messages with tool calls, on which a template has failed with ``error``."""
    if any(message.get("tool_calls") or message.get("tool_call_id") for message in messages):
        for form in _OTHER_FORMS:
            with contextlib.suppress(Exception):
                return render(form=form)
    raise RequestError(f"the model's chat template refuses these messages: {error}") from error


_INSTRUCTIONS = ("system", "developer")


def _fold_instructions(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return messages with system messages at most in the first place.

    The texts of others end the message before them, or begin the user's next message after an assistant's: what comes
    before them stays the same, so that it can be found in the prefix cache.
    """
    folded: list[Mapping[str, Any]] = []
    begun = False  # whether the last message is made of instructions, and the user's may be added to it
    for message in messages:
        instructs = bool(folded) and message["role"] in _INSTRUCTIONS
        if instructs and folded[-1]["role"] == "assistant":
            folded.append({**message, "role": "user"})
            begun = True
        elif instructs or (begun and message["role"] == "user"):
            folded[-1] = {**folded[-1], "content": _joined(folded[-1].get("content"), message.get("content"))}
            begun = begun and instructs
        else:
            folded.append(message)
            begun = False
    return folded


def _joined(first: Any, second: Any) -> str:
    texts = [joined_text(content) if isinstance(content, list) else content or "" for content in (first, second)]
    return "\n\n".join(filter(None, texts))


_TAG = "LAMINA-CONTINUES-HERE "
"""Marks the end of the content that an answer continues. Templates that strip contents strip its space."""


def _with_tag(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message with the tag at the end of its content."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + _TAG}
    if not content:
        raise _not_continued()
    *before, last = content
    return {**message, "content": [*before, *_single(text_of(last) + _TAG)]}


def _cut_at_tag(prompt: str) -> str:
    """Return the prompt up to the tag, as transformers does: where it was stripped, so is the text before it."""
    place = prompt.rfind(_TAG.strip())
    if place < 0:
        raise _not_continued()
    return prompt[:place] if prompt.startswith(_TAG, place) else prompt[:place].rstrip()


def _not_continued() -> RequestError:
    return RequestError("continue_final_message needs a last message whose content the chat template repeats")


MAY_LACK_CONTENT = ("assistant", "tool", "function")
"""Roles of messages whose content may be null or missing."""


REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning. As in transformers, templates find it under each of the first two."""


def _check_message(index: int, message: Mapping[str, Any]) -> None:
    """Raise RequestError if a message is malformed. ``index``: its place in the conversation."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"messages[{index}] is {message!r}; give an object with a string role and content")
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, list):
        try:
            joined_text(content)
        except RequestError as error:
            raise RequestError(f"messages[{index}].content: {error}") from None
    elif content is None:
        if message["role"] not in MAY_LACK_CONTENT:
            raise RequestError(f"messages[{index}] has no content; give a string")
    elif not isinstance(content, str):
        raise RequestError(f"messages[{index}].content is a {type(content).__name__}; give a string or text parts")
    if not isinstance(calls, list | None) or not all(map(_is_call, calls or ())):
        raise RequestError(
            f"messages[{index}].tool_calls is not a list of calls; give objects such as "
            '{"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}'
        )


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return False
    return isinstance(function.get("arguments"), str | Mapping | None)


def _plain_message(message: Mapping[str, Any], form: _Form) -> dict[str, Any]:
    """Return a copy of a message without null and empty fields, since templates test whether fields exist."""
    plain = {key: value for key, value in message.items() if value is not None}
    if calls := plain.pop("tool_calls", None):
        plain["tool_calls"] = [_plain_call(call, form) for call in calls]
    if form.short_ids and isinstance(answered := plain.get("tool_call_id"), str):
        plain["tool_call_id"] = _short_id(answered)
    if "content" not in plain and (form.fills_content or not (calls or "function_call" in plain)):
        plain["content"] = ""
    reasoning = next((plain[key] for key in REASONING if key in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def _plain_call(call: Mapping[str, Any], form: _Form) -> dict[str, Any]:
    function = dict(call["function"])
    arguments = function.get("arguments")
    if form.arguments_as_text:
        function["arguments"] = arguments if isinstance(arguments, str) else _tojson(arguments or {})
    elif not arguments:
        function["arguments"] = {}
    elif isinstance(arguments, str):
        with contextlib.suppress(ValueError):  # a model may have written what is no JSON: it stays text
            if isinstance(parsed := read_written(arguments), dict | list):
                function["arguments"] = parsed
    plain = {**call, "function": function}
    if form.short_ids and isinstance(call.get("id"), str):
        plain["id"] = _short_id(call["id"])
    return plain


_SHORT = 9


def _short_id(call_id: str) -> str:
    """Return nine letters and digits for the id of a tool call: the id itself, if it is of this form."""
    if len(call_id) == _SHORT and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode(errors="replace")).hexdigest()[:_SHORT]


def joined_text(parts: Sequence[Any]) -> str:
    """Return the text of OpenAI style text parts, joined by line breaks. Raises RequestError for any other part."""
    return "\n".join(map(text_of, parts))


TEXT_KEYS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""By type of a part with text: the key of its text."""


def text_of(part: Any) -> str:
    """Return the text of a content part. Raises RequestError for a part of another kind, or without text."""
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if not isinstance(part, Mapping) or not isinstance(kind, str) or kind not in TEXT_KEYS:
        raise RequestError(f"a content part of type {kind!r} is not supported; give text parts")
    text = part.get(TEXT_KEYS[kind])
    if isinstance(text, str):
        return text
    raise RequestError(f"a content part of type {kind!r} has no {TEXT_KEYS[kind]}; give a string")


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment


class _Dict:
    """Jinja's ``dict`` without the attributes of the class. As in transformers, since templates are not trusted."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's ``namespace`` without names that Python reads. As in transformers."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # a template may name an attribute ``self``
        own, args = args[0], args[1:]
        given = dict(*args, **kwargs)
        for name in given:
            _require_plain_name(name)
        jinja2.utils.Namespace.__init__(own, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_plain_name(name)
        super().__setitem__(name, value)


def _require_plain_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace has no attribute {name!r}; rename it")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
