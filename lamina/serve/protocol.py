"""Parses request bodies: OpenAI's fields, plus further sampling fields under vLLM's names.

A body may hold megabytes of arbitrary JSON. It is therefore first split into its fields without building any Python
object (``msgspec.Raw``), and each field is then decoded as the type it must have: an unknown field ends parsing at
once, and a list with elements of a wrong type is never built. Decoding holds the GIL: 40 to 140 ms for the worst bodies
of 4 MiB (a million short texts), where decoding them as generic JSON takes a second.
"""

import abc
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, SkipValidation, ValidationError, WithJsonSchema
from pydantic import model_validator as validator
from pydantic_core import PydanticCustomError

from lamina.errors import RequestError
from lamina.frontend.defaults import Defaults
from lamina.frontend.prompts import Prompt, as_prompts
from lamina.models.chat import joined_text
from lamina.schedule.waiting import MAX_WAITING
from lamina.serve import fields
from lamina.serve.errors import APIError, from_validation
from lamina.types import MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS, SamplingParams

MOST_BYTES_BESIDES = 64 * 1024
"""Limit on all fields but the prompt or the messages, together; and on all parts of messages but their content."""

COMPLETION_TOKENS = 16
"""Limit of a completion that gives none, as OpenAI's and vLLM's."""

MOST_MESSAGES = 16_384
"""Messages per conversation."""

_SAMPLING = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "ignore_eos",
    "min_tokens",
    "cache_salt",
    "use_beam_search",
    "length_penalty",
    "early_stopping",
)


def _few(name: str, most: int) -> BeforeValidator:
    """Reject a long list before it is validated: pydantic would record an error for each of a million wrong values."""

    def check(value: Any) -> Any:
        if isinstance(value, list) and len(value) > most:
            message = "{param} has {count} entries; give at most {most}"
            raise PydanticCustomError("too_many", message, {"param": name, "count": len(value), "most": most})
        return value

    return BeforeValidator(check)


class StreamOptions(BaseModel):
    """``include_usage``: one more chunk at the end, with the token counts."""

    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool | None = None

    @validator(mode="after")
    def _refuse_unsupported(self) -> Self:
        _refuse_unsupported(self.model_extra or {}, fields.STREAM_OPTIONS, "stream_options.")
        return self


class GenerationRequest(BaseModel):
    """Fields of both endpoints. A missing or null field has its default; an unknown one is rejected."""

    model_config = ConfigDict(strict=True, extra="allow")

    unused: ClassVar[Mapping[str, Sequence[Any]]] = {}
    large: ClassVar[str]  # the field that may hold more than MOST_BYTES_BESIDES

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: Annotated[
        list[str] | None,
        BeforeValidator(lambda v: [v] if isinstance(v, str) else v),
        _few("stop", MAX_STOP_STRINGS),
    ] = None
    stop_token_ids: Annotated[list[int] | None, _few("stop_token_ids", MAX_STOP_TOKEN_IDS)] = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    cache_salt: str | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: SkipValidation[bool | Literal["never"] | None] = None  # SamplingParams checks it

    @validator(mode="after")
    def _refuse_unsupported(self) -> Self:
        _refuse_unsupported(self.model_extra or {}, self.unused)
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError(
                "stream_options", "stream_options needs stream to be true", {"param": "stream_options"}
            )
        return self

    @classmethod
    @abc.abstractmethod
    def large_value(cls, raw: msgspec.Raw) -> Any:
        """The value of the field ``large``. Raises RequestError or what msgspec raises."""

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def limit(self) -> tuple[str, int | None]:
        """The field that limits the tokens of an answer, and its value."""
        return "max_tokens", self.max_tokens

    def check_room(self, prompts: Sequence[Prompt], max_model_len: int) -> None:
        """Raise APIError 400 if a prompt and the limit of its answer exceed ``max_model_len`` together."""
        name, limit = self.limit
        room = max_model_len - max(map(len, prompts))
        if limit is not None and 0 < room < limit:  # a prompt that leaves no room at all is refused as such
            raise APIError(
                400,
                f"{name} is {limit}, but the prompt has {max_model_len - room} tokens, which leave room for {room} "
                f"(max_model_len {max_model_len}). Shorten the prompt, lower {name}, or leave it out",
                param=name,
            )

    def _sampling_params(self, defaults: Defaults, api_names: Mapping[str, str], **given: Any) -> SamplingParams:
        """``defaults``: of the model. ``api_names``: the API's name of a parameter, where it differs from ours."""
        given = {**({} if self.use_beam_search else defaults), **given}
        given |= {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        try:
            return SamplingParams(**given)
        except ValueError as error:  # its messages begin with the parameter's name
            name, rest = str(error).split(maxsplit=1)
            name = api_names.get(name, name)
            raise APIError(400, f"{name} {rest}", param=name) from error


class CompletionRequest(GenerationRequest):
    """Body of ``POST /v1/completions``."""

    unused = fields.COMPLETION
    large = "prompt"

    prompt: Annotated[
        SkipValidation[list[Prompt]],
        WithJsonSchema(
            {
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "items": {"type": "string"}},
                    {"type": "array", "items": {"type": "integer"}},
                    {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
                ]
            }
        ),
    ]
    echo: bool | None = None
    logprobs: int | None = None

    @classmethod
    def large_value(cls, raw: msgspec.Raw) -> list[Prompt]:
        """One or several texts, or lists of token ids."""
        prompts = as_prompts(_decode_prompt(bytes(raw)))
        if len(prompts) > MAX_WAITING:  # more would never fit: trying again later would not help
            raise RequestError(f"prompt holds {len(prompts)} prompts; give at most {MAX_WAITING} at once")
        return prompts

    def sampling_params(self, defaults: Defaults) -> SamplingParams:
        """The sampling parameters; ``defaults`` are the model's. Raises APIError 400 for values out of range.

        Without a limit, OpenAI's 16 tokens are the limit, whatever the model's default is.
        """
        if self.echo and self.logprobs is not None:
            raise APIError(400, "logprobs of the prompt are not supported; leave out echo or logprobs", param="echo")
        limit = COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        return self._sampling_params(defaults, {}, logprobs=self.logprobs, max_tokens=limit)


_NULL = msgspec.Raw(b"null")


class _Part(msgspec.Struct, gc=False):
    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One message; fields other than role and content are passed to the chat template."""

    role: str
    content: str | list[_Part] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: msgspec.Raw = _NULL
    function_call: msgspec.Raw = _NULL
    reasoning_content: msgspec.Raw = _NULL
    reasoning: msgspec.Raw = _NULL
    refusal: msgspec.Raw = _NULL
    audio: msgspec.Raw = _NULL
    annotations: msgspec.Raw = _NULL


class ChatRequest(GenerationRequest):
    """Body of ``POST /v1/chat/completions``."""

    unused = fields.CHAT
    large = "messages"

    messages: Annotated[
        SkipValidation[list[dict[str, Any]]],
        WithJsonSchema(
            {
                "type": "array",
                "minItems": 1,
                "items": {
                    "type": "object",
                    "required": ["role", "content"],
                    "properties": {
                        "role": {"type": "string"},
                        "content": {
                            "anyOf": [
                                {"type": "string"},
                                {
                                    "type": "array",
                                    "items": {
                                        "type": "object",
                                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                                    },
                                },
                            ]
                        },
                    },
                },
            }
        ),
    ]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @classmethod
    def large_value(cls, raw: msgspec.Raw) -> list[dict[str, Any]]:
        """The messages as chat templates take them: null fields left out, text parts joined."""
        if (count := bytes(raw).count(b'"role"')) > MOST_MESSAGES:  # before they are decoded, see the module docstring
            raise RequestError(f"messages holds about {count} messages; give at most {MOST_MESSAGES}")
        messages = _MESSAGES.decode(raw)
        if not messages:
            raise RequestError("messages is empty; give at least one message")
        besides = 0
        plain = []
        for index, message in enumerate(messages):
            plain.append(_plain_message(index, message))
            besides += sum(len(bytes(v)) for v in _raw_fields(message).values())
            if besides > MOST_BYTES_BESIDES:
                raise _too_much("messages hold, besides their content,", besides)
        return plain

    @property
    def limit(self) -> tuple[str, int | None]:
        """The field that limits the tokens of an answer, and its value."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return super().limit

    def sampling_params(self, defaults: Defaults) -> SamplingParams:
        """The sampling parameters; ``defaults`` are the model's. Raises APIError 400 for values out of range.

        Without a limit, and if the model has no default, an answer may take the rest of the context.
        """
        if self.top_logprobs is not None and not self.logprobs:
            raise APIError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        name, limit = self.limit
        if limit is None and "max_tokens" in defaults:
            limit = max(int(defaults["max_tokens"]), self.min_tokens or 0)
        api_names = {"logprobs": "top_logprobs", "max_tokens": name}
        return self._sampling_params(defaults, api_names, logprobs=logprobs, max_tokens=limit)


_NO_OBJECT = "the body must be a JSON object, sent with Content-Type: application/json"

R = TypeVar("R", bound=GenerationRequest)


def parse(kind: type[R], body: bytes) -> R:
    """Parse ``body``. Raises APIError 400."""
    values = _fields(kind, body)
    large = values.pop(kind.large, None)
    besides = sum(map(len, values.values()))
    if besides > MOST_BYTES_BESIDES:
        raise APIError(400, str(_too_much(f"the fields besides {kind.large} have", besides)))
    decoded: dict[str, Any] = {}
    for name, raw in values.items():
        decoded[name] = _decoded(name, msgspec.json.decode, raw)
    if large is not None:
        decoded[kind.large] = _decoded(kind.large, kind.large_value, msgspec.Raw(large))
    try:
        return kind.model_validate(decoded)
    except ValidationError as error:
        raise from_validation(error.errors(include_input=False, include_url=False)) from None


@functools.cache
def _decoder(kind: type[GenerationRequest]) -> msgspec.json.Decoder[Any]:
    names = dict.fromkeys((*kind.model_fields, *kind.unused, *sorted(fields.WITHOUT_EFFECT)))
    cut = msgspec.defstruct(kind.__name__, [(name, msgspec.Raw, None) for name in names], forbid_unknown_fields=True)
    return msgspec.json.Decoder(cut)


def _fields(kind: type[GenerationRequest], body: bytes) -> dict[str, bytes]:
    """The undecoded value of every field in ``body``."""
    if not body:
        raise APIError(400, _NO_OBJECT)
    decoder = _decoder(kind)
    try:
        cut = decoder.decode(body)
    except msgspec.ValidationError as error:
        _, _, unknown = str(error).partition("unknown field `")
        if not unknown:
            raise APIError(400, _NO_OBJECT) from None
        raise _unknown_field(unknown.rpartition("`")[0], decoder.type.__struct_fields__) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise APIError(400, f"the body is not JSON: {_why(error)}{_surrogates(body)}") from None
    given = {name: getattr(cut, name) for name in cut.__struct_fields__}
    return {name: bytes(raw) for name, raw in given.items() if raw is not None}


def _unknown_field(name: str, known: Sequence[str]) -> APIError:
    name = name if len(name) <= 64 else f"{name[:64]}..."
    hint = f"; did you mean {name.lower()}?" if name.lower() in known else "; leave it out"
    return APIError(400, f"{name} is not a field of this request{hint}", param=name)


def _decoded(name: str, decode: Any, raw: Any) -> Any:
    try:
        return decode(raw)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$")
        raise APIError(400, f"{name}{path.rstrip('`')}: {text}", param=name) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise APIError(400, f"the body is not JSON: {name}: {_why(error)}", param=name) from None
    except RequestError as error:
        raise APIError(400, str(error), param=name) from None


def _why(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return str(error).removeprefix("JSON is malformed: ")


def _surrogates(body: bytes) -> str:
    """A hint at half a surrogate pair, which JSON can express but Unicode text cannot; msgspec does not name it."""
    found = re.search(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}", body)
    return f"; is {found[0].decode()} half of a surrogate pair?" if found else ""


_TEXT = msgspec.json.Decoder(str)
_TOKENS = msgspec.json.Decoder(list[int])
_TEXTS = msgspec.json.Decoder(list[str])
_TOKEN_LISTS = msgspec.json.Decoder(list[list[int]])
_MESSAGES = msgspec.json.Decoder(list[ChatMessage])


def _decode_prompt(raw: bytes) -> Any:
    """Decode a prompt as the type that its first characters indicate."""
    first, second = raw[:1], raw[1:].lstrip()[:1]
    if first == b'"':
        return _TEXT.decode(raw)
    if first != b"[":
        return None  # not a valid prompt: as_prompts raises the error
    if second == b"[":
        if (lists := raw.count(b"[") - 1) > MAX_WAITING:
            raise RequestError(f"prompt holds {lists} prompts; give at most {MAX_WAITING} at once")
        return _TOKEN_LISTS.decode(raw)
    return (_TEXTS if second == b'"' else _TOKENS).decode(raw)


def _raw_fields(message: ChatMessage) -> dict[str, msgspec.Raw]:
    given = {name: getattr(message, name) for name in message.__struct_fields__}
    return {name: v for name, v in given.items() if isinstance(v, msgspec.Raw) and v is not _NULL}


def _plain_message(index: int, message: ChatMessage) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": message.role}
    if isinstance(message.content, list):
        parts = [{"type": part.type, "text": part.text} for part in message.content]
        plain["content"] = joined_text(parts)
    elif message.content is not None:
        plain["content"] = message.content
    elif message.tool_calls is _NULL and message.function_call is _NULL:
        raise APIError(400, f"messages[{index}] has no content; give a text", param=f"messages.{index}.content")
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            plain[name] = value
    for name, raw in _raw_fields(message).items():
        if len(bytes(raw)) > MOST_BYTES_BESIDES:
            raise _too_much(f"messages[{index}].{name} has", len(bytes(raw)))
        if (value := msgspec.json.decode(raw)) is not None:
            plain[name] = value
    return plain


def _too_much(what: str, size: int) -> RequestError:
    return RequestError(f"{what} {size} bytes; give at most {MOST_BYTES_BESIDES}")


def _refuse_unsupported(given: Mapping[str, Any], unused: Mapping[str, Sequence[Any]], prefix: str = "") -> None:
    for name, value in given.items():
        if name in fields.WITHOUT_EFFECT and not prefix:
            continue
        if name not in unused:
            raise PydanticCustomError(
                "unknown", "{param} is not a field of this request; leave it out", {"param": prefix + name}
            )
        if not fields.has_no_effect(value, unused[name]):
            raise PydanticCustomError("unsupported", "{param} is not supported; leave it out", {"param": prefix + name})
