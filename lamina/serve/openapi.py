"""Builds the OpenAPI description of the HTTP interface, served at /openapi.json.

Bodies are described by what parses and checks them: the types and lists of ``bodies`` and the ranges of
``SamplingParams``. A body that fits its schema is answered, unless it is too large for the model or its memory or
names a grammar that cannot be compiled or a best_of below n, and one that does not is rejected.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from lamina.core.sampling import (
    MAX_BAD_WORDS,
    MAX_BIASED_TOKENS,
    MAX_CHOICES,
    MAX_SALT_LENGTH,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SAMPLING_RANGES,
    UNUSED_BY_BEAM_SEARCH,
)
from lamina.engine.streams import Runtime
from lamina.observe.metrics import CONTENT_TYPE
from lamina.schedule.limits import MAX_WAITING
from lamina.serve.bodies import (
    SAMPLING,
    WITHOUT_EFFECT,
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    field_types,
)
from lamina.serve.json_fields import IGNORED_HEADER, MOST_MESSAGES
from lamina.serve.messages_api import COUNT_PATH, MESSAGES_PATH, MessagesBody
from lamina.serve.requests import GUIDED
from lamina.serve.responses_api import RESPONSES_PATH, ResponsesBody
from lamina.text.chat_template import MAY_LACK_CONTENT
from lamina.text.tools import Tools

COMPLETIONS_PATH, CHAT_PATH = "/v1/completions", "/v1/chat/completions"
TOKENIZE_PATH, DETOKENIZE_PATH = "/tokenize", "/detokenize"

Schema = dict[str, Any]

_ERRORS = {
    400: "The request is invalid; the message says why.",
    401: "The administrator's key is missing or wrong.",
    403: "The server has no administrator's key.",
    404: "This server does not serve that model.",
    408: "The body arrived too slowly.",
    413: "The body is too large.",
    415: "The body is compressed.",
    429: "Too many requests are in progress; Retry-After says when to try again.",
    501: "The model cannot do that.",
    503: "The engine has stopped, or could not finish the request.",
}
_ERROR_SCHEMA = {
    "title": "Error",
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_MESSAGES_ERROR_SCHEMA = {
    "title": "MessagesError",
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}


def _range(name: str) -> Schema:
    low, high = SAMPLING_RANGES[name]
    return {"minimum": low, "maximum": high}


_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}
_STRUCTURED: Mapping[str, Schema] = {
    "json": {"type": ["object", "string", "boolean"]},
    "regex": {"type": "string", "minLength": 1},
    "choice": {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": MAX_CHOICES},
    "grammar": {"type": "string", "minLength": 1},
    "json_object": {"const": True},
}


def _only(name: str) -> Schema:
    return {"type": "object", "required": [name], "properties": {name: _STRUCTURED[name]}, "maxProperties": 1}


_BOUNDS: Mapping[str, Schema] = {
    **{name: _range(name) for name in SAMPLING_RANGES},
    "max_completion_tokens": _range("max_tokens"),
    "top_logprobs": _range("logprobs"),
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "cache_salt": {"maxLength": MAX_SALT_LENGTH},
    "stop": {"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOP_STRINGS}, {"type": "null"}]},
    "stop_token_ids": {
        "items": {"type": "integer", **_range("max_tokens"), "minimum": 0},
        "maxItems": MAX_STOP_TOKEN_IDS,
    },
    "truncate_prompt_tokens": {**_range("truncate_prompt_tokens"), "not": {"const": 0}},
    "bad_words": {"type": ["array", "null"], "items": _STOP, "maxItems": MAX_BAD_WORDS},
    "early_stopping": {"enum": [True, False, "never", None]},
    "structured_outputs": {"anyOf": [{"type": "null"}, *map(_only, _STRUCTURED)]},
    "logit_bias": {
        "type": ["object", "null"],
        "propertyNames": {"pattern": "^[0-9]{1,9}$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        "maxProperties": MAX_BIASED_TOKENS,
    },
    "allowed_token_ids": {
        "type": ["array", "null"],
        "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
        "minItems": 1,
        "maxItems": MAX_BIASED_TOKENS,
    },
    "guided_regex": {"minLength": 1},
    "guided_choice": {"items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": MAX_CHOICES},
    "guided_grammar": {"minLength": 1},
    "response_format": {
        "anyOf": [
            {"type": "null"},
            {
                "type": "object",
                "required": ["type"],
                "properties": {
                    "type": {"enum": ["text", "json_object"]},
                    "schema": {"type": ["object", "boolean", "null"]},
                },
            },
            {
                "type": "object",
                "required": ["type", "schema"],
                "properties": {"type": {"const": "json_schema"}, "schema": {"type": ["object", "boolean"]}},
            },
            {
                "type": "object",
                "required": ["type", "json_schema"],
                "properties": {
                    "type": {"const": "json_schema"},
                    "json_schema": {
                        "type": "object",
                        "required": ["schema"],
                        "properties": {"schema": {"type": ["object", "boolean"]}},
                    },
                },
            },
        ]
    },
}
"""What the types of fields do not say."""

_WHOLE = (
    "stop",
    "bad_words",
    "early_stopping",
    "structured_outputs",
    "response_format",
    "logit_bias",
    "allowed_token_ids",
)
"""Fields whose types say nothing that their bounds do not say."""

_TEXT_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_CONTENT = [{"type": "string"}, {"type": "array", "items": _TEXT_PART}]
_TOOL_CALL = {
    "type": "object",
    "required": ["function"],
    "properties": {
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {"name": {"type": "string"}, "arguments": {"type": ["string", "object", "null"]}},
        }
    },
}
_MESSAGE = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"type": "string"},
        "content": {"anyOf": [*_CONTENT, {"type": "null"}]},
        "name": {"type": ["string", "null"]},
        "tool_call_id": {"type": ["string", "null"]},
        "tool_calls": {"anyOf": [{"type": "array", "items": _TOOL_CALL}, {"type": "null"}]},
    },
    "anyOf": [
        {"properties": {"role": {"enum": [*MAY_LACK_CONTENT]}}},
        {"required": ["content"], "properties": {"content": {"anyOf": _CONTENT}}},
    ],
}


def interface(app: FastAPI, engine: Runtime) -> Schema:
    """Return the OpenAPI document: FastAPI's routes, plus the bodies they decode themselves and every error."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schemas = schema.setdefault("components", {}).setdefault("schemas", {})
        schemas.clear()  # FastAPI's validation errors, which this server never returns
        schemas["Error"] = _ERROR_SCHEMA
        schemas["MessagesError"] = _MESSAGES_ERROR_SCHEMA
        for path, kind in ((COMPLETIONS_PATH, CompletionBody), (CHAT_PATH, ChatBody)):
            schemas[kind.__name__], parts = _body_schema(kind, engine)
            schemas.update(parts)
            content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}
            operation = schema["paths"][path]["post"]
            operation["requestBody"] = {"required": True, "content": content}
            operation["responses"]["200"] = _ANSWER
        for path, required, names in (
            (RESPONSES_PATH, ["input"], ResponsesBody.__struct_fields__),
            (MESSAGES_PATH, ["messages", "max_tokens"], MessagesBody.__struct_fields__),
            (COUNT_PATH, ["messages"], MessagesBody.__struct_fields__),
            (TOKENIZE_PATH, [], TokenizeBody.__struct_fields__),
            (DETOKENIZE_PATH, ["tokens"], DetokenizeBody.__struct_fields__),
        ):
            body: Schema = {"type": "object", "required": required, "properties": {name: {} for name in names}}
            content = {"application/json": {"schema": body}}
            schema["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
        metrics = schema["paths"]["/metrics"]["get"]["responses"]["200"]
        metrics["content"] = {CONTENT_TYPE: {"schema": {"type": "string"}}}
        for operation in schema["paths"]["/ping"].values():
            del operation["responses"]["200"]["content"]
        for path, methods in schema["paths"].items():
            form = "MessagesError" if path in (MESSAGES_PATH, COUNT_PATH) else "Error"
            for operation in methods.values():
                operation["responses"].pop("422", None)
                operation["responses"] |= {str(status): _described(_ERRORS[status], form) for status in _statuses(path)}
        app.openapi_schema = schema
    return app.openapi_schema


_ANSWER = {
    "description": "The answer, as one object or as a stream of events.",
    "headers": {
        IGNORED_HEADER: {
            "description": "Fields of the request that have no meaning here.",
            "schema": {"type": "string"},
        }
    },
    "content": {
        "application/json": {"schema": {"type": "object", "required": ["id", "choices", "usage"]}},
        "text/event-stream": {"schema": {"description": "Chunks of the answer; the last event is [DONE]."}},
    },
}


def _body_schema(kind: type[Body], engine: Runtime) -> tuple[Schema, Schema]:
    """Return the JSON schema of a body, and the schemas that it refers to, by name."""
    types = {name: hint for name, hint in field_types(kind).items() if name not in _WHOLE}
    if "tools" in kind.large:
        types["tools"] = Tools | None
    found, parts = msgspec.json.schema_components(types.values(), ref_template="#/components/schemas/{name}")
    properties: Schema = {
        name: schema | ({} if bool in getattr(hint, "__args__", ()) else _BOUNDS.get(name, {}))
        for (name, hint), schema in zip(types.items(), found, strict=True)
    }
    properties |= {name: _BOUNDS[name] for name in _WHOLE}
    properties["model"] = {"enum": [engine.model_name, *engine.model_aliases, None]}
    for name, neutral in kind.unsupported.items():
        properties[name] = {"enum": [None, *neutral], "description": "Not supported."}
    for name in sorted(WITHOUT_EFFECT):
        properties[name] = {"description": "Has no effect."}
    properties[kind.required] = _prompt(engine) if kind is CompletionBody else _messages()
    together = [{"anyOf": branches} for branches in _TOGETHER[kind]]
    return {"type": "object", "required": [kind.required], "properties": properties, "allOf": together}, parts


def _prompt(engine: Runtime) -> Schema:
    text: Schema = {"type": "string", "minLength": 0 if engine.tokenizer.encode("") else 1}
    token = {"type": "integer", "minimum": 0, "maximum": engine.vocab_size - 1}
    tokens = {"type": "array", "items": token, "minItems": 1, "maxItems": engine.max_model_len - 1}
    several: Schema = {"type": "array", "minItems": 1, "description": f"At most {MAX_WAITING} prompts."}
    return {"anyOf": [text, several | {"items": text}, tokens, several | {"items": tokens}]}


def _messages() -> Schema:
    return {"type": "array", "items": _MESSAGE, "minItems": 1, "description": f"At most {MOST_MESSAGES} messages."}


def _given(name: str, *values: Any) -> Schema:
    """Return a body in which a field is one of several values, and not left out."""
    return {"required": [name], "properties": {name: {"enum": [*values]}}}


def _left_out(**neutral: Sequence[Any]) -> Schema:
    """Return a body in which fields are left out, null, or one of their neutral values."""
    return {"properties": {name: {"enum": [None, *values]} for name, values in neutral.items()}}


_STREAM = [_given("stream", True), _left_out(stream_options=())]
_MATCH: Mapping[str, Sequence[Any]] = {
    "structured_outputs": (),
    "response_format": ({"type": "text"},),
    **dict.fromkeys(GUIDED, ()),
}
_UNUSED: dict[str, Sequence[Any]] = {name: values for name, values in UNUSED_BY_BEAM_SEARCH.items() if name in SAMPLING}
_UNUSED |= {"logprobs": (False,), **_MATCH}
_BEAMS = [
    _left_out(use_beam_search=[False], length_penalty=[1], early_stopping=[False]),
    {
        "required": ["use_beam_search", "n"],
        "properties": {
            "use_beam_search": {"const": True},
            "n": {"type": "integer", "minimum": 2},
            **_left_out(**_UNUSED)["properties"],
        },
    },
]
_ONE_MATCH = [_left_out(**{name: neutral for name, neutral in _MATCH.items() if name != kept}) for kept in _MATCH]
_ENDS = [_left_out(min_tokens=[0]), _left_out(**_MATCH)]
_SCORES = [
    _left_out(echo=[False]),
    _left_out(logprobs=()),
    _left_out(**_MATCH),
]
_PROMPT_SCORES = [_left_out(prompt_logprobs=()), _left_out(stream=[False], **_MATCH)]
_TOGETHER: Mapping[type[Body], Sequence[Sequence[Schema]]] = {
    CompletionBody: (_STREAM, _BEAMS, _ONE_MATCH, _ENDS, _SCORES, _PROMPT_SCORES),
    ChatBody: (
        _STREAM,
        _BEAMS,
        _ONE_MATCH,
        _ENDS,
        _PROMPT_SCORES,
        [_left_out(top_logprobs=()), _given("logprobs", True)],
    ),
}
"""What fields ask of each other: one of each group of alternatives."""


def _statuses(path: str) -> list[int]:
    """Return the errors that a path answers with."""
    if path in (COMPLETIONS_PATH, CHAT_PATH, RESPONSES_PATH, MESSAGES_PATH, COUNT_PATH):
        return [400, 404, 408, 413, 415, 429, 503]
    return {
        "/health": [503],
        "/metrics": [503],
        "/placement": [503],
        "/v1/models/{name}": [404],
        TOKENIZE_PATH: [400, 404, 408, 413, 415, 429],
        DETOKENIZE_PATH: [400, 404, 408, 413, 415, 429],
        "/v1/embeddings": [501],
        "/ping": [503],
        "/load": [503],
        "/admin/scale": [400, 401, 403, 413, 503],
        "/admin/stop": [401, 403, 404],
    }.get(path, [])


def _described(description: str, form: str) -> Schema:
    """Return a response that is an error in one of the two forms."""
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{form}"}}}
    return {"description": description, "content": content}
