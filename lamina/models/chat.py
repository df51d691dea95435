"""Renders chat messages to a prompt with the model's template, as transformers does, in a sandbox."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from lamina.errors import RequestError

DEFAULT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
"""Used when a model has no template: one ``role: content`` line per message, then ``assistant:``."""


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
    ) -> str:
        """The prompt for ``messages``, OpenAI style: role, and content as a string or a list of text parts.

        Args:
            tools: the functions that the model may call, OpenAI style.

        Raises:
            RequestError: a message is malformed, or the template rejects it or uses no tools.
        """
        if tools and not self._uses_tools:
            raise RequestError("the model's chat template has no place for tools; describe them in a message instead")
        plain = [_plain_message(index, message) for index, message in enumerate(messages)]
        if not plain:
            raise RequestError("messages is empty; give at least one message")
        try:
            return self._template.render(
                messages=plain,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except Exception as error:  # a template is a program from the model's author: it may raise anything
            raise RequestError(f"the model's chat template refuses these messages: {error}") from error


def _plain_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of one message without empty fields, its text parts joined by line breaks."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"messages[{index}] is {message!r}; give an object with a string role and content")
    plain = {key: value for key, value in message.items() if value is not None}
    content = plain.get("content")
    if isinstance(content, list):
        try:
            plain["content"] = joined_text(content)
        except RequestError as error:
            raise RequestError(f"messages[{index}].content: {error}") from None
    elif content is None and "tool_calls" not in plain:
        raise RequestError(f"messages[{index}] has no content; give a string")
    elif content is not None and not isinstance(content, str):
        raise RequestError(f"messages[{index}].content is a {type(content).__name__}; give a string or text parts")
    return plain


def joined_text(parts: Sequence[Any]) -> str:
    """The text of OpenAI style text parts, joined by line breaks. Raises RequestError for any other part."""
    return "\n".join(map(_text_of, parts))


def _text_of(part: Any) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise RequestError(f"a content part of type {kind!r} is not supported; give text parts")


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
