"""Several engines behind one address, by Ray Serve: ``serve run --app-dir deploy/ray lamina_serve:app engines=2 ...``.

Every engine is a replica of a deployment, with a model and workers of its own: by default beside it on its node, with
``ray=auto`` wherever Ray places them. ``Gateway`` takes HTTP requests and passes each on, unread, to one engine;
``PrefixRouter`` chooses which. What an engine answers, errors and streams included, is what `lamina launch` answers,
with one header more that says which engine it was.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import routing
import yaml
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from lamina import Lamina
from lamina.config.engine_config import EngineConfig
from lamina.config.settings import settings
from lamina.core.errors import ConfigError
from lamina.serve.app import create_app

MOST_NBYTES = 1 << 26  # of a request; engines refuse smaller ones that are too long for them
MOST_ONGOING = 4096  # requests of one engine, which has a queue of its own and refuses what does not fit there
STATS_S = 1.0
END_S = 10.0  # for a request whose client has left to end

ENGINE = b"x-lamina-engine"  # header of every answer: which one it is from

Head = tuple[int, list[tuple[bytes, bytes]]]
"""Status and headers of an answer."""


class PrefixRouter(FIFOMixin, RequestRouter):
    """Sends a request to the engine that has computed the beginning of its prompt, unless others are less busy.

    An engine's load is the number of requests that it has from all gateways: as it has told this one with its latest
    answer, or if that is long ago, as it reports every ``STATS_S``.
    """

    def initialize_state(self, **_: Any) -> None:
        """Nothing was sent to anybody."""
        self._prefixes = routing.Prefixes()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """All of them, the best first."""
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        loads = {name: self._load(replica) for name, replica in by_id.items()}
        found = _blocks(pending_request)
        return [[by_id[name]] for name in self._prefixes.order(found, loads)]

    def _load(self, replica: RunningReplica) -> float:
        known = self.replica_queue_len_cache.get(replica.replica_id)
        return float((replica.routing_stats or {}).get("requests", 0) if known is None else known)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: Any, result: Any) -> None:
        """Remember what was sent where."""
        self._prefixes.note(_blocks(pending_request), replica_id.unique_id)


def _blocks(request: PendingRequest | None) -> list[bytes]:
    return routing.blocks(request.args[3]) if request is not None and len(request.args) > 3 else []


@serve.deployment(
    max_ongoing_requests=MOST_ONGOING,
    graceful_shutdown_timeout_s=60.0,
    request_router_config=RequestRouterConfig(
        request_router_class=PrefixRouter, request_routing_stats_period_s=STATS_S
    ),
)
class Engine:
    """One engine, with the HTTP application of `lamina launch` in front of it. ``settings``: of ``EngineConfig``."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._lamina = Lamina.from_config(EngineConfig(**settings))
        self._app = create_app(self._lamina.engine)
        self._name = serve.get_replica_context().replica_id.unique_id.encode()

    async def answer(
        self, method: str, path: str, headers: Sequence[tuple[bytes, bytes]], body: bytes, client: tuple[str, int]
    ) -> AsyncIterator[Head | bytes]:
        """Status and headers of the answer, then its body in parts. If the caller stops reading, the request ends."""
        name, _, query = path.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": name,
            "raw_path": name.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": list(headers),
            "client": client,
            "server": None,
            "state": {},
        }
        parts: asyncio.Queue[Head | bytes | None] = asyncio.Queue(maxsize=16)
        incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        incoming.put_nowait({"type": "http.request", "body": body, "more_body": False})

        async def send(message: Mapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                await parts.put((message["status"], [*message["headers"], (ENGINE, self._name)]))
            elif part := message.get("body", b""):
                await parts.put(part)

        async def run() -> None:
            try:
                await self._app(scope, incoming.get, send)
            finally:
                await parts.put(None)

        running = asyncio.create_task(run())
        try:
            while (part := await parts.get()) is not None:
                yield part
            await running
        finally:
            if not running.done():
                incoming.put_nowait({"type": "http.disconnect"})
                running.cancel()
                with contextlib.suppress(asyncio.CancelledError, TimeoutError):
                    await asyncio.wait_for(running, END_S)

    def check_health(self) -> None:
        """Ray Serve replaces an engine that has stopped."""
        if (dead := self._lamina.engine.dead) is not None:
            raise RuntimeError(f"the engine has stopped: {dead}")

    def record_routing_stats(self) -> dict[str, Any]:
        """What routers of all gateways learn of this engine, every ``STATS_S``."""
        stats = self._lamina.engine.stats()
        return {"requests": stats.running + stats.waiting}

    def __del__(self) -> None:
        if hasattr(self, "_lamina"):
            self._lamina.close()


@serve.deployment(max_ongoing_requests=MOST_ONGOING)
class Gateway:
    """Takes HTTP requests and passes them on to an engine. It has no state: any number may run."""

    def __init__(self, engines: DeploymentHandle) -> None:
        self._engines = engines.options(stream=True)

    async def __call__(self, request: Request) -> Response:
        """Answer with what the engine answers, as it comes."""
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > MOST_NBYTES:
                return Response(f"a request may have {MOST_NBYTES} bytes", 413)
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        client = (request.client.host, request.client.port) if request.client else ("", 0)
        parts = self._engines.answer.remote(request.method, path, request.headers.raw, bytes(body), client)
        status, headers = await anext(parts)

        async def rest() -> AsyncIterator[bytes]:
            try:
                async for part in parts:
                    yield part
            finally:
                parts.cancel()  # does nothing once all of it is here

        answer = StreamingResponse(rest(), status)
        answer.raw_headers = headers
        return answer


def app(arguments: Mapping[str, str]) -> serve.Application:
    """The application. ``engines``: how many (1); ``cpus``, ``gpus``: that each takes from its node, beside what its
    workers take where ``ray`` places them (1, 0); ``gateways``: how many (1); all others are settings, as in a --config
    file."""
    given = dict(arguments)
    engines, gateways = int(given.pop("engines", 1)), int(given.pop("gateways", 1))
    takes = {"num_cpus": float(given.pop("cpus", 1)), "num_gpus": float(given.pop("gpus", 0))}
    values = _settings(given)
    engine = Engine.options(num_replicas=engines, ray_actor_options=takes).bind(values)
    return Gateway.options(num_replicas=gateways).bind(engine)


def _settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """As ``EngineConfig`` takes them, from texts, as on a command line, or values. Raises ConfigError."""
    known = {setting.name: setting for setting in settings(EngineConfig)}
    if unknown := given.keys() - known.keys():
        raise ConfigError(f"there is no setting {', '.join(sorted(unknown))}; lamina launch --help lists them")
    values = {
        name: yaml.safe_load(value) if isinstance(value, str) and str not in known[name].kinds else value
        for name, value in given.items()
    }
    EngineConfig(**values)  # what is wrong is said here, before an actor starts
    return values
