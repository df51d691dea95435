"""Builds the OpenAPI description of the HTTP interface, served at /openapi.json."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from lamina.serve.protocol import ChatRequest, CompletionRequest

COMPLETIONS_PATH, CHAT_PATH = "/v1/completions", "/v1/chat/completions"

_ERRORS = {
    400: "The request is invalid; the message says why.",
    401: "The administrator's key is missing or wrong.",
    403: "The server has no administrator's key.",
    404: "This server does not serve that model.",
    408: "The body arrived too slowly.",
    413: "The body is too large.",
    429: "Too many requests are in progress; Retry-After says when to try again.",
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


def interface(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document: FastAPI's routes, plus the bodies they decode themselves and every error."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schemas = schema.setdefault("components", {}).setdefault("schemas", {})
        schemas.clear()  # FastAPI's validation errors, which this server never returns
        schemas["Error"] = _ERROR_SCHEMA
        for path, kind in ((COMPLETIONS_PATH, CompletionRequest), (CHAT_PATH, ChatRequest)):
            body = kind.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas.update(body.pop("$defs", {}))
            schemas[kind.__name__] = body | {"additionalProperties": False}
            content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}
            schema["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
        for path, methods in schema["paths"].items():
            for operation in methods.values():
                operation["responses"].pop("422", None)
                operation["responses"] |= {str(status): _described(_ERRORS[status]) for status in _statuses(path)}
        app.openapi_schema = schema
    return app.openapi_schema


def _statuses(path: str) -> list[int]:
    """The errors that a path answers with."""
    if path in (COMPLETIONS_PATH, CHAT_PATH):
        return [400, 404, 408, 413, 429, 503]
    return {
        "/health": [503],
        "/v1/models/{name}": [404],
        "/admin/scale": [400, 401, 403, 413, 503],
        "/admin/stop": [401, 403, 404],
    }.get(path, [])


def _described(description: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {"description": description, "content": content}
