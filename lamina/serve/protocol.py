"""Request bodies: OpenAI's fields, and sampling fields beyond them as vLLM names them."""

from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from lamina.engine.prompts import Prompt, as_prompts
from lamina.models.chat import joined_text
from lamina.serve.errors import APIError
from lamina.types import MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS, SamplingParams

# Fields that clients send for bookkeeping of their own; they change nothing about the answer.
_WITHOUT_EFFECT = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}

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
    "ignore_eos",
    "min_tokens",
)


def _few(name: str, most: int) -> BeforeValidator:
    """Refuse a list by its length alone: validation would write an error for each of a million wrong values."""

    def check(value: Any) -> Any:
        if isinstance(value, list) and len(value) > most:
            message = "{param} has {count} entries; give at most {most}"
            raise PydanticCustomError("too_many", message, {"param": name, "count": len(value), "most": most})
        return value

    return BeforeValidator(check)


class StreamOptions(BaseModel):
    """``include_usage``: one more chunk at the end, with the token counts."""

    model_config = ConfigDict(strict=True)

    include_usage: bool = False


class GenerationRequest(BaseModel):
    """What both endpoints take. A field left out or null has its default; one that is not known is refused."""

    model_config = ConfigDict(strict=True, extra="allow")

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
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None

    @model_validator(mode="after")
    def _refuse_unknown(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            neutral = not value or value == {"type": "text"}  # an empty list of tools, say, asks for nothing
            if not neutral and name not in _WITHOUT_EFFECT:
                raise PydanticCustomError("unsupported", "{param} is not supported; leave it out", {"param": name})
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError(
                "stream_options", "stream_options needs stream to be true", {"param": "stream_options"}
            )
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def _sampling_params(self, **given: Any) -> SamplingParams:
        given |= {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        try:
            return SamplingParams(**given)
        except ValueError as error:  # its messages begin with the field's name
            raise APIError(400, str(error), param=str(error).split(maxsplit=1)[0]) from error


class CompletionRequest(GenerationRequest):
    """Body of ``POST /v1/completions``."""

    prompt: Annotated[
        list[Prompt], PlainValidator(as_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]])
    ]
    echo: bool | None = None
    logprobs: int | None = None

    def sampling_params(self) -> SamplingParams:
        """The parameters asked for. Raises APIError 400 for values out of range."""
        if self.echo and self.logprobs is not None:
            raise APIError(400, "logprobs of the prompt are not supported; leave out echo or logprobs", param="echo")
        limit = {} if self.max_tokens is None else {"max_tokens": self.max_tokens}
        return self._sampling_params(logprobs=self.logprobs, **limit)


def _text_of(content: Any) -> Any:
    """A list of text parts as one text; anything else is left to validation."""
    return joined_text(content) if isinstance(content, list) else content


class ChatMessage(BaseModel):
    """One turn; fields beyond role and content are handed to the chat template."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: str
    content: Annotated[str, BeforeValidator(_text_of, json_schema_input_type=str | list[dict[str, str]])]


class ChatRequest(GenerationRequest):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def sampling_params(self, default_max_tokens: int) -> SamplingParams:
        """The parameters asked for, with a limit on tokens for those that give none. Raises APIError 400."""
        if self.top_logprobs is not None and not self.logprobs:
            raise APIError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        if limit is None:
            limit = max(default_max_tokens, self.min_tokens or 0)
        return self._sampling_params(logprobs=logprobs, max_tokens=limit)
