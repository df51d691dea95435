"""Parses request bodies: OpenAI's fields, plus further sampling fields under vLLM's names."""

import abc
import functools
import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar, get_type_hints

import msgspec

from lamina.core.errors import RequestError
from lamina.core.types import SAMPLING_RANGES, SamplingParams
from lamina.schedule.waiting import MAX_WAITING
from lamina.serve.http_errors import APIError
from lamina.text.chat_template import MAY_LACK_CONTENT, check_message, joined_text
from lamina.text.defaults import Defaults
from lamina.text.prompts import Prompt, as_prompts

logger = logging.getLogger(__name__)

IGNORED_HEADER = "X-Lamina-Ignored-Fields"
MOST_NAMED = 16
"""Most fields that one header names."""

MOST_LOGGED = 256
"""Most different fields that one process logs."""

WITHOUT_EFFECT = frozenset(
    (
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "request_id",
    )
)

_EITHER: dict[str, Sequence[Any]] = {
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "spaces_between_special_tokens": (True,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "prompt_logprobs": (),
    "logits_processors": ([],),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "grammar": (),  # llama.cpp's
    "json_schema": (),  # llama.cpp's and SGLang's
    "regex": (),  # SGLang's, like the next
    "ebnf": (),
    "repetition_detection": (),
    "priority": (0,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "kv_transfer_params": (),
    "vllm_xargs": (),
    "best_of": (1,),
    "suffix": ("",),
    "prompt_embeds": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "moderation": (),
    "reasoning_effort": (),
    "thinking_token_budget": (),
    "include_reasoning": (True,),
    "verbosity": ("medium",),
    "web_search_options": (),
}

UNSUPPORTED_COMPLETION: Mapping[str, Sequence[Any]] = _EITHER | {"add_special_tokens": (True,)}
UNSUPPORTED_CHAT: Mapping[str, Sequence[Any]] = _EITHER | {"add_special_tokens": (False,), "echo": (False,)}


def has_no_effect(value: Any, neutral: Sequence[Any]) -> bool:
    """Return whether ``value`` is null or equals one of ``neutral``. 1 equals 1.0 here, but not true."""
    return value is None or any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral)


def ignored_names(names: Iterable[str], known: Collection[str], prefix: str = "") -> list[str]:
    """Return those ``names`` that are not ``known``, with ``prefix``.

    Raises:
        APIError: 400 for a name that differs from a known one only in case or underscores.
    """
    meant = {_folded(name): name for name in known}
    unknown = sorted(set(names).difference(known))
    for name in unknown:
        if right := meant.get(_folded(name)):
            shown = prefix + _shown(name)
            raise APIError(400, f"{shown} is not a field of this request; did you mean {prefix}{right}?", param=shown)
    return [prefix + name for name in unknown]


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """Return the header that names the ignored fields of a request; empty if there are none."""
    if not names:
        return {}
    more = [f"and {len(names) - MOST_NAMED} more"] if len(names) > MOST_NAMED else []
    return {IGNORED_HEADER: ", ".join([*map(_shown, names[:MOST_NAMED]), *more])}


class IgnoredLog:
    """Logs each ignored field once."""

    def __init__(self) -> None:
        self._logged = set[str]()

    def add(self, names: Sequence[str]) -> None:
        """Log those ``names`` that no earlier call had, in one line."""
        new = [name for name in map(_shown, names[:MOST_NAMED]) if name not in self._logged]
        if new and len(self._logged) < MOST_LOGGED:
            self._logged.update(new)
            logger.warning("requests have fields that are ignored: %s", ", ".join(new))


def _folded(name: str) -> str:
    return name.replace("_", "").lower()


def _shown(name: str) -> str:
    """Return a name from a client, fit for a header or a log line."""
    name = re.sub(r"[^\w.-]", "?", name, flags=re.ASCII)
    return name if len(name) <= 64 else f"{name[:64]}..."


MOST_BYTES_BESIDES = 64 * 1024
"""Limit on all fields but the prompt or the messages, together; and on all parts of messages but their content."""

COMPLETION_TOKENS = 16
"""Limit of a completion that gives none, as OpenAI's and vLLM's."""

MOST_MESSAGES = 16_384
"""Messages per conversation."""

MESSAGE_NBYTES = 64
"""Bytes of a message's JSON that are not counted as its contents: braces, the names of role and content."""

SAMPLING: dict[str, Any] = {
    name: kind | None
    for name, kind in get_type_hints(SamplingParams).items()
    if name not in ("max_tokens", "logprobs")  # the endpoints differ in them
}
"""Type of each sampling field in JSON."""


class StreamOptions(msgspec.Struct):
    """What the chunks of a stream hold besides text.

    Attributes:
        include_usage: One more chunk at the end has the token counts.
        continuous_usage_stats: With ``include_usage``, every chunk has the token counts so far.
        include_obfuscation: Padding that hides the lengths of tokens. It is optional, and never sent.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationRequest(msgspec.Struct, kw_only=True):
    """Fields of both endpoints. A missing or null field has its default.

    Attributes:
        sampling: The fields of ``SAMPLING`` that the body has, with values that are not checked yet.
        ignored: Names of fields that have no meaning here.
    """

    unsupported: ClassVar[Mapping[str, Sequence[Any]]] = {}
    large: ClassVar[str]  # the field that may hold more than MOST_BYTES_BESIDES

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    sampling: dict[str, Any] = {}
    ignored: list[str] = []

    @classmethod
    @abc.abstractmethod
    def large_value(cls, raw: msgspec.Raw) -> tuple[Any, list[str]]:
        """Return the value of the field ``large``, and names that are ignored in it. Raises APIError, RequestError or
        what msgspec raises."""

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream has token counts."""
        options = self.stream_options
        return self.include_usage and options is not None and bool(options.continuous_usage_stats)

    @property
    def limit(self) -> tuple[str, int | None]:
        """The field that limits the tokens of an answer, and its value."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
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

    @property
    def _min_tokens(self) -> int:
        """``min_tokens`` of the body; 0 if it is not valid, which ``SamplingParams`` reports."""
        value = self.sampling.get("min_tokens", 0)
        return value if type(value) is int and value <= SAMPLING_RANGES["min_tokens"][1] else 0

    def _sampling_params(self, defaults: Defaults, api_names: Mapping[str, str], **given: Any) -> SamplingParams:
        """Return the parameters. ``api_names``: the API's names of parameters that have others in ``SamplingParams``.

        The model's ``defaults`` apply where the body has no value, but not to beam search.
        """
        api_names = {**api_names, "max_tokens": self.limit[0]}
        if self.max_completion_tokens is not None:
            low, high = SAMPLING_RANGES["max_tokens"]
            if self.max_tokens is not None and not low <= self.max_tokens <= high:
                raise APIError(
                    400, f"max_tokens is {self.max_tokens}; give an integer from {low} to {high}", param="max_tokens"
                )
        given = {**({} if self.sampling.get("use_beam_search") else defaults), **given, **self.sampling}
        longest = given["max_tokens"]
        if longest is not None and 0 < longest < self._min_tokens:
            given["min_tokens"] = longest
        try:
            return SamplingParams(**given)
        except ValueError as error:  # its messages begin with the parameter's name
            name, rest = str(error).split(maxsplit=1)
            name = api_names.get(name, name)
            raise APIError(400, f"{name} {rest}", param=name) from error


class CompletionRequest(GenerationRequest, kw_only=True):
    """Body of ``POST /v1/completions``."""

    unsupported = UNSUPPORTED_COMPLETION
    large = "prompt"

    prompt: list[Prompt]
    echo: bool | None = None
    logprobs: int | None = None

    @classmethod
    def large_value(cls, raw: msgspec.Raw) -> tuple[list[Prompt], list[str]]:
        """One or several texts, or lists of token ids."""
        prompts = as_prompts(_decode_prompt(bytes(raw)))
        if len(prompts) > MAX_WAITING:  # more would never fit: trying again later would not help
            raise RequestError(f"prompt holds {len(prompts)} prompts; give at most {MAX_WAITING} at once")
        return prompts, []

    def sampling_params(self, defaults: Defaults) -> SamplingParams:
        """Return the sampling parameters; ``defaults`` are the model's. Raises APIError 400 for values out of range.

        Without a limit, OpenAI's 16 tokens are the limit, whatever the model's default is.
        """
        if self.echo and self.logprobs is not None:
            raise APIError(400, "logprobs of the prompt are not supported; leave out echo or logprobs", param="echo")
        _, limit = self.limit
        limit = COMPLETION_TOKENS if limit is None else limit
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
    thinking: msgspec.Raw = _NULL
    reasoning: msgspec.Raw = _NULL
    refusal: msgspec.Raw = _NULL
    audio: msgspec.Raw = _NULL
    annotations: msgspec.Raw = _NULL


class _LenientMessage(ChatMessage, forbid_unknown_fields=False):
    pass


class _Content(msgspec.Struct):
    content: msgspec.Raw = _NULL


class ChatRequest(GenerationRequest, kw_only=True):
    """Body of ``POST /v1/chat/completions``."""

    unsupported = UNSUPPORTED_CHAT
    large = "messages"

    messages: list[dict[str, Any]]
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @classmethod
    def large_value(cls, raw: msgspec.Raw) -> tuple[list[dict[str, Any]], list[str]]:
        """Return the messages as ``ChatTemplate.render`` takes them: null fields left out, text parts joined."""
        if (count := bytes(raw).count(b'"role"')) > MOST_MESSAGES:  # before they are decoded, see the module docstring
            raise RequestError(f"messages holds about {count} messages; give at most {MOST_MESSAGES}")
        messages, ignored = _decode_messages(raw)
        if not messages:
            raise RequestError("messages is empty; give at least one message")
        besides = 0
        plain = []
        for index, message in enumerate(messages):
            plain.append(_plain_message(index, message))
            besides += sum(len(bytes(v)) for v in _raw_fields(message).values())
            if besides > MOST_BYTES_BESIDES:
                raise _too_much("messages hold, besides their content,", besides)
        return plain, ignored

    def sampling_params(self, defaults: Defaults) -> SamplingParams:
        """Return the sampling parameters; ``defaults`` are the model's. Raises APIError 400 for values out of range.

        Without a limit, and if the model has no default, an answer may take the rest of the context.
        """
        if self.top_logprobs is not None and not self.logprobs:
            raise APIError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        _, limit = self.limit
        if limit is None and "max_tokens" in defaults:
            limit = max(int(defaults["max_tokens"]), self._min_tokens)
        return self._sampling_params(defaults, {"logprobs": "top_logprobs"}, logprobs=logprobs, max_tokens=limit)


_NO_OBJECT = "the body must be a JSON object, sent with Content-Type: application/json"

R = TypeVar("R", bound=GenerationRequest)


@functools.cache
def types_of(kind: type[GenerationRequest]) -> Mapping[str, Any]:
    """Return the type in JSON of each supported field of a body, but for its large one."""
    own = {field.name: field.type for field in msgspec.structs.fields(kind)}
    return {name: own[name] for name in own if name not in (kind.large, "sampling", "ignored")} | SAMPLING


def parse(kind: type[R], body: bytes) -> R:
    """Parse ``body``. Raises APIError 400."""
    values, ignored = _split(kind, body)
    large = values.pop(kind.large, None)
    if large is None:
        raise APIError(400, f"{kind.large}: Field required", param=kind.large)
    besides = sum(map(len, values.values()))
    if besides > MOST_BYTES_BESIDES:
        raise _too_much_besides(kind, besides)
    given: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    for name, raw in values.items():
        value = _decoded(name, _decode_small, raw)
        if name in SAMPLING:
            if value is not None:
                sampling[name] = value
        elif name in kind.unsupported:
            if not has_no_effect(value, kind.unsupported[name]):
                raise APIError(400, f"{name} is not supported; leave it out", param=name)
        elif name not in WITHOUT_EFFECT:
            given[name] = _decoded(name, functools.partial(msgspec.convert, type=types_of(kind)[name]), value)
    if (options := given.get("stream_options")) is not None:
        if not given.get("stream"):
            raise APIError(400, "stream_options needs stream to be true", param="stream_options")
        names = msgspec.json.decode(values["stream_options"], type=dict[str, msgspec.Raw])
        ignored += ignored_names(names, options.__struct_fields__, "stream_options.")
    given[kind.large], more = _decoded(kind.large, kind.large_value, msgspec.Raw(large))
    return kind(**given, sampling=sampling, ignored=ignored + more)


@functools.cache
def _splitter(kind: type[GenerationRequest], strict: bool) -> msgspec.json.Decoder[Any]:
    names = dict.fromkeys((kind.large, *types_of(kind), *kind.unsupported, *sorted(WITHOUT_EFFECT)))
    cut = msgspec.defstruct(kind.__name__, [(name, msgspec.Raw, None) for name in names], forbid_unknown_fields=strict)
    return msgspec.json.Decoder(cut)


def _split(kind: type[GenerationRequest], body: bytes) -> tuple[dict[str, bytes], list[str]]:
    """Return the undecoded value of every known field in ``body``, and the names of its other fields."""
    if not body:
        raise APIError(400, _NO_OBJECT)
    unknown: list[str] = []
    try:
        try:
            cut = _splitter(kind, strict=True).decode(body)
        except msgspec.ValidationError as error:
            if "unknown field" not in str(error):
                raise APIError(400, _NO_OBJECT) from None
            cut = _splitter(kind, strict=False).decode(body)
            besides = len(body) - len(bytes(getattr(cut, kind.large) or b""))
            if besides > MOST_BYTES_BESIDES:
                raise _too_much_besides(kind, besides) from None
            names = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
            unknown = ignored_names(names, cut.__struct_fields__)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise APIError(400, f"the body is not JSON: {_why(error)}{_surrogates(body)}") from None
    given = {name: getattr(cut, name) for name in cut.__struct_fields__}
    return {name: bytes(raw) for name, raw in given.items() if raw is not None}, unknown


def _decoded(name: str, decode: Any, raw: Any) -> Any:
    try:
        return decode(raw)
    except msgspec.ValidationError as error:
        text, _, path = str(error).replace(" | null`", "`").partition(" - at `$")
        raise APIError(400, f"{name}{path.rstrip('`')}: {text}", param=name) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise APIError(400, f"the body is not JSON: {name}: {_why(error)}", param=name) from None
    except RequestError as error:
        raise APIError(400, str(error), param=name) from None


def _decode_small(raw: bytes) -> Any:
    return _whole(msgspec.json.decode(raw))


def _whole(value: Any) -> Any:
    """``value`` with integers for floats such as 1.0: JSON has one kind of numbers."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return [_whole(one) for one in value] if isinstance(value, list) else value


def _why(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return str(error).removeprefix("JSON is malformed: ")


def _surrogates(body: bytes) -> str:
    """Return a hint at half a surrogate pair, which JSON can express but Unicode text cannot; msgspec does not name
    it."""
    found = re.search(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}", body)
    return f"; is {found[0].decode()} half of a surrogate pair?" if found else ""


_TEXT = msgspec.json.Decoder(str)
_TOKENS = msgspec.json.Decoder(list[int])
_NUMBERS = msgspec.json.Decoder(list[int | float])
_NUMBER_LISTS = msgspec.json.Decoder(list[list[int | float]])
_TEXTS = msgspec.json.Decoder(list[str])
_TOKEN_LISTS = msgspec.json.Decoder(list[list[int]])
_MESSAGES = msgspec.json.Decoder(list[ChatMessage])
_LENIENT_MESSAGES = msgspec.json.Decoder(list[_LenientMessage])


def _decode_prompt(raw: bytes) -> Any:
    """Decode a prompt as the type that its first characters indicate."""
    first, second = raw[:1], raw[1:].lstrip()[:1]
    if first == b'"':
        return _TEXT.decode(raw)
    if first != b"[":
        return None  # not a valid prompt: as_prompts raises the error
    if second == b"[" and (lists := raw.count(b"[") - 1) > MAX_WAITING:
        raise RequestError(f"prompt holds {lists} prompts; give at most {MAX_WAITING} at once")
    if second == b'"':
        return _TEXTS.decode(raw)
    tokens, numbers = (_TOKEN_LISTS, _NUMBER_LISTS) if second == b"[" else (_TOKENS, _NUMBERS)
    try:
        return tokens.decode(raw)
    except msgspec.ValidationError as error:
        if "got `float`" not in str(error):
            raise
        return msgspec.convert(_whole(numbers.decode(raw)), tokens.type)


def _decode_messages(raw: msgspec.Raw) -> tuple[Sequence[ChatMessage], list[str]]:
    """Decode messages, and name the keys in them that are ignored."""
    try:
        return _MESSAGES.decode(raw), []
    except msgspec.ValidationError as error:
        if "unknown field" not in str(error):
            raise
    messages = _LENIENT_MESSAGES.decode(raw)
    contents = msgspec.json.decode(raw, type=list[_Content])
    besides = len(bytes(raw)) - sum(len(bytes(message.content)) for message in contents)
    if besides > MOST_BYTES_BESIDES + MESSAGE_NBYTES * len(messages):
        raise _too_much("messages hold, besides their content,", besides)
    names = set[str]().union(*msgspec.json.decode(raw, type=list[dict[str, msgspec.Raw]]))
    return messages, ignored_names(names, ChatMessage.__struct_fields__, "messages.")


def _raw_fields(message: ChatMessage) -> dict[str, msgspec.Raw]:
    given = {name: getattr(message, name) for name in message.__struct_fields__}
    return {name: v for name, v in given.items() if isinstance(v, msgspec.Raw) and v is not _NULL}


def _plain_message(index: int, message: ChatMessage) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": message.role}
    if isinstance(message.content, list):
        plain["content"] = joined_text([{"type": part.type, "text": part.text} for part in message.content])
    elif message.content is not None:
        plain["content"] = message.content
    elif message.role not in MAY_LACK_CONTENT:
        raise APIError(400, f"messages[{index}] has no content; give a text", param=f"messages.{index}.content")
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            plain[name] = value
    for name, raw in _raw_fields(message).items():
        if len(bytes(raw)) > MOST_BYTES_BESIDES:
            raise _too_much(f"messages[{index}].{name} has", len(bytes(raw)))
        if (value := msgspec.json.decode(raw)) is not None:
            plain[name] = value
    check_message(index, plain)
    return plain


def _too_much(what: str, size: int) -> RequestError:
    return RequestError(f"{what} {size} bytes; give at most {MOST_BYTES_BESIDES}")


def _too_much_besides(kind: type[GenerationRequest], size: int) -> APIError:
    return APIError(400, str(_too_much(f"the fields besides {kind.large} have", size)))
