"""Records a span of OpenTelemetry for each request that generates, if the standard ``OTEL_*`` variables ask for it.

The variables also say where spans go, which are kept and what resource they belong to; the SDK reads them. Attributes
are those of the semantic conventions for HTTP servers and generative AI, without prompts and answers.
"""

import importlib.util
import logging
import os
import threading
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

import lamina
from lamina.core.errors import ConfigError
from lamina.serve.messages_api import MESSAGES_PATH
from lamina.serve.openapi import CHAT_PATH, COMPLETIONS_PATH
from lamina.serve.responses_api import RESPONSES_PATH

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

    from lamina.serve.generation import Generation

log = logging.getLogger(__name__)

ENABLING = ("OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""Variables of which one makes a server record spans."""
OPERATIONS = {
    COMPLETIONS_PATH: "text_completion",
    CHAT_PATH: "chat",
    RESPONSES_PATH: "chat",
    MESSAGES_PATH: "chat",
}
"""``gen_ai.operation.name`` by path."""
CLOSE_S = 5.0


def provider_from_environment() -> "TracerProvider | None":
    """Return a provider that exports spans as the ``OTEL_*`` variables say; None if they ask for none.

    Raises ConfigError if ``OTEL_TRACES_EXPORTER`` names an exporter that is not installed.
    """
    asking = [name for name in ENABLING if os.environ.get(name)]
    names = os.environ.get("OTEL_TRACES_EXPORTER", "").strip() or "otlp"
    disabled = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if not asking or disabled or names == "none":
        return None
    if importlib.util.find_spec("opentelemetry") is None or importlib.util.find_spec("opentelemetry.sdk") is None:
        log.warning("%s is set, but no traces are recorded: pip install 'lamina[otel]'", asking[0])
        return None
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create()  # of OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES
    if str(resource.attributes.get(SERVICE_NAME, "unknown_service")).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "lamina"}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    for name in names.split(","):
        provider.add_span_processor(BatchSpanProcessor(_exporter(name.strip())))
    return provider


def _exporter(name: str) -> Any:
    """Return the exporter of a name of ``OTEL_TRACES_EXPORTER``. ``otlp`` is OTLP over HTTP. Raises ConfigError."""
    from importlib.metadata import entry_points

    protocols = [os.environ.get(f"OTEL_EXPORTER_OTLP_{each}PROTOCOL") for each in ("TRACES_", "")]
    grpc = next((protocol for protocol in protocols if protocol), "http/protobuf") == "grpc"
    wanted = {"otlp": "otlp_proto_grpc" if grpc else "otlp_proto_http"}.get(name, name)
    found = {each.name: each for each in entry_points(group="opentelemetry_traces_exporter")}
    if wanted not in found:
        raise ConfigError(
            f"OTEL_TRACES_EXPORTER: the exporter {wanted!r} is not installed; installed are "
            f"{', '.join(sorted(found)) or 'none'}. Install it, or set OTEL_TRACES_EXPORTER=none"
        )
    return found[wanted].load()()


def close(provider: "TracerProvider") -> None:
    """Export the spans that wait, for at most ``CLOSE_S``: a collector that does not answer delays no shutdown."""
    closing = threading.Thread(target=provider.shutdown, name="lamina-traces", daemon=True)
    closing.start()
    closing.join(CLOSE_S)
    if closing.is_alive():
        log.warning("the last spans could not be exported within %.0f s", CLOSE_S)


class Tracing:
    """ASGI middleware: records a span from the arrival of a generating request to the end of its answer.

    ``traceparent``, or what ``OTEL_PROPAGATORS`` names, makes the span a child of the client's.
    """

    def __init__(self, app: ASGIApp, provider: "TracerProvider", model: str, root_path: str) -> None:
        self._app = app
        self._tracer = provider.get_tracer("lamina", lamina.__version__)
        self._model = model
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").removeprefix(self._root_path)
        operation = OPERATIONS.get(path) if scope["type"] == "http" and scope["method"] == "POST" else None
        if operation is None:
            await self._app(scope, receive, send)
            return
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind, StatusCode

        sent = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        about = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "lamina",
            "gen_ai.request.model": self._model,
            "http.request.method": "POST",
            "http.route": path,
            "url.path": scope["path"],
            "url.scheme": scope["scheme"],
        }
        span = self._tracer.start_span(f"{operation} {self._model}", extract(sent), SpanKind.SERVER, about)
        status = 0

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, note)
        finally:
            generation: Generation | None = scope.get("state", {}).get("generation")
            if status:  # else the client has left before an answer
                span.set_attribute("http.response.status_code", status)
            if generation is not None:
                span.set_attributes(_attributes_of(generation))
                status = generation.failed or status
            if status >= 400:
                span.set_attribute("error.type", str(status))
            if status >= 500:
                span.set_status(StatusCode.ERROR)
            span.end()


def _attributes_of(generation: "Generation") -> dict[str, Any]:
    """Return the ``gen_ai`` attributes of a request's parameters and its answer so far."""
    wanted, params, usage = generation.wanted, generation.wanted.params, generation.usage
    first_s = generation.timing.first_token_s
    stops = [params.stop] if isinstance(params.stop, str) else list(params.stop)
    given = {
        "gen_ai.request.choice.count": params.n if params.n > 1 else None,
        "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.presence_penalty": params.presence_penalty or None,
        "gen_ai.request.seed": params.seed,
        "gen_ai.request.stop_sequences": stops or None,
        "gen_ai.request.stream": wanted.stream,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_k": params.top_k if params.top_k > 0 else None,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.response.finish_reasons": [usage.ends[key] for key in sorted(usage.ends)] or None,
        "gen_ai.response.model": generation.model,
        "gen_ai.response.time_to_first_chunk": first_s if wanted.stream else None,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.drawn,
    }
    return {name: value for name, value in given.items() if value is not None}
