"""Prepares a conversation for the engine, and reads the answer: reasoning, tool calls and objects."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from lamina.core.errors import RequestError
from lamina.core.outputs import CompletionOutput, FinishReason, ToolCall
from lamina.core.sampling import SamplingParams, StructuredOutputs
from lamina.text.grammars import compile_grammar
from lamina.text.prompts import Message, encode_chat
from lamina.text.tokenizer import Tokenizer
from lamina.text.tool_calls import AnswerParser, CallArguments, CallBegins, Content, Reasoning
from lamina.text.tools import (
    GivenChoice,
    Tools,
    calls_parser,
    forced_calls,
    plain_tools,
    require_calls,
    usable_tools,
)
from lamina.text.written_json import read_written


@dataclass(frozen=True)
class Chat:
    """A conversation as the engine answers it.

    Attributes:
        prompt: Token ids, up to where the answer begins.
        wanted: Constraint that the answer must match; None: none.
        needs_special: True if the text must include special tokens, which mark tool calls or reasoning.
        make_parser: Makes the parser of one answer.
        read_object: Parses the answer's content; None if ``response_format`` was not given.
    """

    prompt: list[int]
    wanted: StructuredOutputs | None
    needs_special: bool
    make_parser: Callable[[], AnswerParser]
    read_object: Callable[[str], Any] | None

    def params(self, given: SamplingParams) -> SamplingParams:
        """Return ``given`` with the chat's constraint. Raises RequestError if ``given`` has another constraint."""
        changes: dict[str, Any] = {}
        if self.wanted is not None:
            if given.structured_outputs is not None:
                raise RequestError(
                    "structured_outputs and the chat's tool_choice or response_format both say what the answer must "
                    "match; give one"
                )
            changes["structured_outputs"] = self.wanted
        if self.needs_special:
            changes["skip_special_tokens"] = False
        try:
            return dataclasses.replace(given, **changes)
        except ValueError as error:
            raise RequestError(str(error)) from error

    def read(self, answer: CompletionOutput) -> None:
        """Set ``reasoning``, ``content``, ``tool_calls`` and ``parsed`` of an answer."""
        parser = self.make_parser()
        names, arguments = dict[int, str](), dict[int, str]()
        for event in parser.append(answer.text) + parser.flush():
            match event:
                case Content(text):
                    answer.content += text
                case Reasoning(text):
                    answer.reasoning += text
                case CallBegins(index, name):
                    names[index] = name
                case CallArguments(index, text):
                    arguments[index] = arguments.get(index, "") + text
        answer.tool_calls = [ToolCall(name, _object(arguments.get(index, ""))) for index, name in names.items()]
        if self.read_object is not None and answer.finish_reason is FinishReason.STOP:
            # A stop string may have cut the object off, or the model's own validators may refuse it.
            with contextlib.suppress(ValueError):
                answer.parsed = self.read_object(answer.content)


def prepare_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    max_model_len: int,
    tools: Sequence[Mapping[str, Any]] = (),
    tool_choice: str | Mapping[str, Any] = "auto",
    response_format: Any = None,
) -> Chat:
    """Prepare a conversation.

    Args:
        tools: Functions that the model may call, as OpenAI's API takes them.
        tool_choice: "auto", "none", "required", or a function or allowed tools in the form of OpenAI's API.
        response_format: A pydantic model or a JSON schema that the answer must match, also as OpenAI's API takes it.

    Raises:
        RequestError: The template rejects the messages or uses no tools, a tool or the choice is malformed, or both a
            call and an object are wanted.
    """
    try:
        given = msgspec.convert(tool_choice, GivenChoice)
        plain_tools(msgspec.convert(tools, Tools))
    except msgspec.ValidationError as error:
        raise RequestError(f"tools or tool_choice: {error}") from error
    shown, choice = usable_tools(tools, given)
    text = tokenizer.apply_chat_template(messages, tools=shown or None)
    form = tokenizer.chat_format
    wanted = forced_calls(shown, choice, True, form, text)
    if wanted is not None:
        require_calls(wanted, shown)
    read_object: Callable[[str], Any] | None = None
    if response_format is not None:
        if wanted is not None:
            raise RequestError("tool_choice and response_format both say what the answer must match; give one")
        try:
            plain = StructuredOutputs(json=_schema_of(response_format))
        except ValueError as error:
            raise RequestError(f"response_format: {error}") from error
        compile_grammar(plain)  # within the grammar of a whole answer, not all that is wrong with a schema is found
        wanted = form.constrain(plain, text, shown, tokenizer.special_texts)
        read_object = getattr(response_format, "model_validate_json", read_written)
    return Chat(
        encode_chat(tokenizer, text, max_model_len),
        wanted,
        form.needs_special(tokenizer.special_texts.values(), bool(shown)),
        form.parser(text, calls_parser(choice, form.tools, shown) if shown else None),
        read_object,
    )


def _schema_of(response_format: Any) -> Any:
    """Return the schema of a ``response_format``, which may have the form of OpenAI's API."""
    if isinstance(response_format, Mapping) and response_format.get("type") in ("json_object", "json_schema"):
        within = response_format.get("json_schema")
        schema = (within if isinstance(within, Mapping) else response_format).get("schema")
        return {"type": "object"} if schema is None else schema
    return response_format


def _object(text: str) -> dict[str, Any] | None:
    with contextlib.suppress(ValueError):
        found = read_written(text or "{}")
        return found if isinstance(found, dict) else None
    return None
