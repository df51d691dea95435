"""Maps every failure to the HTTP status and body that an OpenAI client expects."""

import http
import logging
from collections.abc import Callable, Mapping
from typing import Any, cast

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from lamina.core.errors import DeadlineError, EngineDeadError, OverloadedError, UserError
from lamina.serve.request_log import request_id

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 5


class APIError(Exception):
    """An error response: HTTP status, message, and the fields of an OpenAI error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.headers = headers

    def body(self) -> dict[str, Any]:
        """Return ``{"error": {"message", "type", "param", "code"}}``."""
        kind = {429: "rate_limit_error", 500: "server_error", 501: "server_error", 503: "server_error"}.get(self.status)
        fields = {"message": str(self), "type": kind or "invalid_request_error", "param": self.param, "code": self.code}
        return {"error": fields}

    def response(self) -> Response:
        """Return the HTTP response."""
        return JSONResponse(self.body(), status_code=self.status, headers=self.headers)


def as_api_error(error: Exception) -> APIError:
    """Return the response for ``error``; unexpected exceptions are logged."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, UserError):
        return APIError(400, str(error))
    if isinstance(error, OverloadedError):
        return APIError(429, str(error), code="overloaded", headers={"Retry-After": str(RETRY_AFTER_S)})
    if isinstance(error, EngineDeadError):
        return APIError(503, first_line(str(error)), code="engine_dead")
    if isinstance(error, DeadlineError):
        return APIError(503, str(error), code="engine_silent")
    logger.error("request %s failed", request_id.get(), exc_info=error)
    return APIError(500, f"{type(error).__name__}: {error}", code="internal_error")


def first_line(reason: str) -> str:
    """Return a worker's error without its traceback, which is in the server's log."""
    return reason.partition("\n")[0]


def install(app: FastAPI, in_form_of: Callable[[str, APIError], APIError]) -> None:
    """Register handlers on ``app`` so that every failure is answered in the form that ``in_form_of`` gives it for a
    path."""

    def answer(request: Request, error: APIError) -> Response:
        path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
        return in_form_of(path, error).response()

    async def known(request: Request, error: Exception) -> Response:
        return answer(request, as_api_error(error))

    async def http_error(request: Request, error: Exception) -> Response:
        return answer(request, _from_http(request, cast(HTTPException, error)))

    async def disconnected(_: Request, __: Exception) -> Response:
        return Response(status_code=499)  # never sent: the client has left

    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(ClientDisconnect, disconnected)
    for kind in (APIError, UserError, OverloadedError, EngineDeadError, DeadlineError, Exception):
        app.add_exception_handler(kind, known)


def _from_http(request: Request, error: HTTPException) -> APIError:
    where = f"{request.method} {request.url.path}"
    if error.status_code == http.HTTPStatus.NOT_FOUND:
        return APIError(404, f"{where} does not exist; the routes are listed at /openapi.json", code="not_found")
    if error.status_code == http.HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = (error.headers or {}).get("Allow", "another method")
        return APIError(405, f"{where} is not allowed; use {allowed}", code="method_not_allowed", headers=error.headers)
    return APIError(error.status_code, str(error.detail), headers=error.headers)
