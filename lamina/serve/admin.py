"""Administration over HTTP: changes the pools of a running server, or stops it. Needs a key that other clients do not
have."""

import asyncio
import hmac
import json
import logging
import os
import signal
from typing import Any

from fastapi import FastAPI, Request
from starlette.background import BackgroundTask
from starlette.responses import JSONResponse, Response

from lamina.cluster.pool import parse_change
from lamina.config.environment import environment
from lamina.core.errors import EngineDeadError, LaminaError, UserError
from lamina.engine.streams import Runtime
from lamina.serve.http_errors import APIError, first_line

log = logging.getLogger(__name__)

SCALE_PATH, STOP_PATH = "/admin/scale", "/admin/stop"
MOST_NBYTES = 1024  # of a body
POOLS = ("compute", "memory", "prefill")


def install(app: FastAPI, engine: Runtime, owner: int | None) -> None:
    """Add the routes to ``app``. ``owner``: the server's process, which SIGTERM stops; None: nothing can stop it."""

    @app.post(SCALE_PATH)
    async def scale(request: Request) -> Response:
        """Add or remove workers, as {"memory": "cpu:+2", "compute": "-1"}; answers once they have joined or left.

        {"memory": "3"} adds or removes as many as the pool needs to have 3.
        {"prefill": "+1", "compute": "-1"} changes the role of a replica instead.
        """
        _authorize(request)
        changes = _changes(await request.body())
        done = asyncio.wrap_future(engine.scale(**changes))
        try:
            workers = await asyncio.shield(done)  # a client that leaves does not undo it
        except (UserError, EngineDeadError):
            raise
        except LaminaError as error:  # a worker did not start
            raise APIError(503, first_line(str(error)), code="not_scaled") from error
        return JSONResponse({"workers": workers})

    @app.post(STOP_PATH)
    async def stop(request: Request) -> Response:
        """Stop the server; answers with the workers that end with it."""
        _authorize(request)
        if owner is None:
            raise APIError(
                404, "this server runs inside another program; stop that program instead", code="not_stoppable"
            )
        stats = await asyncio.to_thread(engine.stats)
        log.warning("%s was called: the server stops", STOP_PATH)
        return JSONResponse(
            {"workers": sorted({**stats.workers, **stats.memory})},
            background=BackgroundTask(os.kill, owner, signal.SIGTERM),
        )


def _authorize(request: Request) -> None:
    """Raises APIError unless the request has the key of ``LAMINA_ADMIN_KEY``."""
    key = environment().admin_key
    if not key:
        raise APIError(
            403,
            f"{request.url.path} is off: start the server with the variable LAMINA_ADMIN_KEY set",
            code="no_admin_key",
        )
    given = request.headers.get("authorization", "").removeprefix("Bearer ")
    if not hmac.compare_digest(given.encode(), key.encode()):
        raise APIError(
            401,
            "the key is missing or wrong; send the server's LAMINA_ADMIN_KEY as Authorization: Bearer KEY",
            code="invalid_admin_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def _changes(body: bytes) -> dict[str, str]:
    """Return the change of each pool, as ``parse_change`` takes it. Raises APIError, ConfigError."""
    example = 'give an object such as {"memory": "+2", "compute": "-1"}'
    if len(body) > MOST_NBYTES:
        raise APIError(413, f"the body has {len(body)} bytes; {example}")
    try:
        wanted: Any = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise APIError(400, f"the body is not JSON ({error}); {example}") from error
    if not isinstance(wanted, dict) or not wanted or not wanted.keys() <= set(POOLS):
        raise APIError(400, f"the body names no pool, or one that does not exist; {example}")
    for pool, change in wanted.items():
        if not isinstance(change, str):
            raise APIError(400, f"{pool} is {change!r}; {example}", param=pool)
        parse_change(pool, change)
    return wanted
