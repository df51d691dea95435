"""Commands for a running server: `lamina status`, `lamina scale`, `lamina down`, and `lamina chat --url`."""

import http.client
import json
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Generator, Mapping, Sequence
from http import HTTPStatus
from typing import Annotated, Any, cast

import typer

from lamina.cluster.pool import parse_change
from lamina.config.environment import environment
from lamina.core.errors import ConfigError, EngineDeadError, RequestError, TransportError, UserError

STATUS_S = 5.0
ADMINISTER_S = 1800.0  # the server answers once workers have joined: compute workers load weights before
TOKEN_S = 600.0
"""Longest wait for the next token. The first token waits for the queue and the prompt too."""

END_S = 180.0  # longest time from the answer to "stop" until the server stops listening
POLL_S = 0.2
BAR = 20  # characters of the bar that shows a memory worker's slots

Url = Annotated[str, typer.Option(help="Address of the server.")]
LOCAL_URL = "http://127.0.0.1:8000"

ROLES = {"prefill": ", runs prompts", "decode": ", decodes"}
"""What a status line adds for a compute worker that only runs prompts, or only decodes."""

Sample = tuple[Mapping[str, str], float]


def open_url(
    server: str, path: str, timeout_s: float, body: Any = None, *, headers: Mapping[str, str]
) -> http.client.HTTPResponse:
    """Return the response of a server, also if its status is an error. ``body``: sent as JSON with POST.

    Raises ConfigError if ``server`` is not the URL of an HTTP server, TransportError if none answers there.
    """
    if not server.startswith(("http://", "https://")):
        raise ConfigError(f"{server!r} is not the URL of a server; give --url http://HOST:PORT")
    url = server.rstrip("/") + path
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers})
    try:
        return cast(http.client.HTTPResponse, urllib.request.urlopen(request, timeout=timeout_s))
    except urllib.error.HTTPError as error:
        return cast(http.client.HTTPResponse, error)
    except (http.client.HTTPException, ValueError) as error:
        raise not_a_server(url, error) from error
    except OSError as error:  # URLError and TimeoutError too
        reason = getattr(error, "reason", error)
        raise TransportError(
            f"no server answers at {url}: {reason}; start one with `lamina launch`, or give --url its address"
        ) from error


def bearer(key: str | None) -> dict[str, str]:
    """Return the header that sends a key; empty without a key."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def open_state(server: str, path: str) -> http.client.HTTPResponse:
    """Return the response of a route for the server's state, asked with the key in ``LAMINA_METRICS_KEY``.

    Raises ConfigError, TransportError, like ``open_url``, and ConfigError if the key is missing or wrong.
    """
    response = open_url(server, path, STATUS_S, headers=bearer(environment().metrics_key))
    if response.status == HTTPStatus.UNAUTHORIZED:
        response.close()
        raise ConfigError(f"{server} wants a key; set LAMINA_METRICS_KEY to the server's")
    return response


def not_a_server(url: str, why: object) -> ConfigError:
    """Return the error for a URL where something other than Lamina answers."""
    return ConfigError(f"{url} is not a Lamina server: {why}; give --url the address that `lamina launch` printed")


def status(
    url: Url = LOCAL_URL,
    placement: Annotated[
        bool, typer.Option(help="Show the KV on each memory worker by request, and moves under way.")
    ] = False,
) -> None:
    """Show the state of a running server.

    Lists requests, KV in use, and which transport links its workers and why. Exit status 1 if the server cannot be
    reached, its engine has stopped, or a worker does not respond. A server with LAMINA_METRICS_KEY wants the same key
    here.
    """
    from lamina.cli.console import print_lines

    if placement:
        _, answer = _fetch(url, "/placement")
        print_lines(placement_lines(answer))
        return
    _, metrics = _fetch(url, "/metrics")
    print_lines(status_lines(metrics))
    code, health = _fetch(url, "/health")
    if code != HTTPStatus.OK:
        raise EngineDeadError(_unhealthy(health))


def _unhealthy(health: str) -> str:
    try:
        answer = json.loads(health)
        if "error" in answer:
            return str(answer["error"]["message"])
        return ", ".join(f"worker {worker} has not answered for {s} s" for worker, s in answer["silent_s"].items())
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"the server is unhealthy: {health}"


def _fetch(server: str, path: str) -> tuple[int, str]:
    """Return the status (200 or 503) and body of a response. Raises ConfigError for any other status."""
    try:
        with open_state(server, path) as response:
            if response.status not in (HTTPStatus.OK, HTTPStatus.SERVICE_UNAVAILABLE):
                raise not_a_server(server, f"{response.status} {response.reason}")
            return response.status, response.read().decode()
    except (http.client.HTTPException, UnicodeDecodeError) as error:
        raise not_a_server(server, error) from error


def placement_lines(answer: str) -> list[str]:
    """Return lines for an answer of ``GET /placement``: memory workers' slots, their largest requests, and moves.

    Raises ConfigError if the answer is not Lamina's.
    """
    try:
        found = json.loads(answer)
        shown = [line for worker, use in found["workers"].items() for line in _worker_lines(worker, use)]
        moves, cache = found["moves"], found["prefix_cache"]
        going = [f"{move['tokens']} tokens {move['source']} -> {move['target']}" for move in moves["in_progress"]]
        share = f" ({cache['hit'] / cache['queried']:.0%})" if cache["queried"] else ""
        return [
            *shown,
            f"imbalance {found['imbalance']:.2f} (fullest worker over mean)",
            f"moves     {moves['completed']} completed, {moves['refused']} refused, {moves['cancelled']} cancelled"
            + (f"; now {', '.join(going)}" if going else ""),
            f"prefixes  {cache['hit']} of {cache['queried']} tokens found{share}",
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"the answer is not a placement ({error!r}); is this a Lamina server of this release?"
        ) from error


def _worker_lines(worker: str, use: Mapping[str, Any]) -> list[str]:
    capacity, used, cached = max(use["capacity"], 1), use["used"], use["cached"]
    full = -(-BAR * used // capacity)
    bar = "#" * full + "+" * min(-(-BAR * cached // capacity), BAR - full)
    largest = ", ".join(f"{request} {tokens}" for request, tokens in list(use["largest_requests"].items())[:4])
    return [
        f"{worker:<9} [{bar:.<{BAR}}] {used} used, {cached} cached of {use['capacity']} slots",
        *([f"{'':<9} {largest}"] if largest else []),
    ]


def status_lines(metrics: str) -> list[str]:
    """Return the lines of `lamina status` for an answer of ``GET /metrics``.

    Raises ConfigError if the answer is not Lamina's.
    """
    from prometheus_client.parser import text_string_to_metric_families

    samples: dict[str, list[Sample]] = {}
    try:
        for family in text_string_to_metric_families(metrics):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    except ValueError as error:
        raise ConfigError(f"the answer is not Prometheus metrics ({error}); is this a Lamina server?") from error
    try:
        running, waiting, steps = (
            samples[f"lamina_{name}"][0][1] for name in ("requests_running", "requests_waiting", "steps_total")
        )
        states = {labels["worker"]: labels["state"] for labels, _ in samples.get("lamina_workers", [])}
        used = {labels["worker"]: value for labels, value in samples.get("lamina_kv_slots_used", [])}
        totals = {labels["worker"]: value for labels, value in samples.get("lamina_kv_slots", [])}
        places = {labels["worker"]: labels for labels, _ in samples.get("lamina_worker_roles", [])}
        return [
            f"requests  {running:.0f} running, {waiting:.0f} waiting, {steps:.0f} steps so far",
            *(
                f"{worker:<8}  {state}{place_words(places.get(worker, {}))}"
                + (f", {used[worker]:.0f} of {totals[worker]:.0f} token slots in use" if worker in used else "")
                for worker, state in (dict.fromkeys(used, "serving") | states).items()
            ),
            *_prompt_lines(samples),
            *_scaling_lines(samples),
            *(
                f"network   {labels['transport']} between {pairs:.0f} pair{'s' * (pairs > 1)} of workers "
                f"({labels['reason']})"
                for labels, pairs in samples.get("lamina_links", [])
            ),
        ]
    except KeyError as error:
        raise ConfigError(f"these metrics lack {error}; is this a Lamina server?") from error


def place_words(place: Mapping[str, str]) -> str:
    """Return what a status line adds for a compute worker: its role, stage and rank. ``place``: labels of a metric or
    fields of ``Place``; empty for a memory worker."""
    within = [f"{name} {place[name]}" for name in ("stage", "rank") if place.get(name)]
    where = f", {', '.join(within)} of replica {place['replica']}" if within else ""
    return where + ROLES.get(place.get("role", "both"), "")


def _prompt_lines(samples: Mapping[str, list[Sample]]) -> list[str]:
    """Return a line about prompts that run apart from decoding or in several lanes; none without such prompts."""
    from lamina.cli.console import show_size

    handed, scratch, parked, nbytes = (
        sum(value for _, value in samples.get(f"lamina_{name}", []))
        for name in ("handovers_total", "scratch_tokens", "parked_total", "parked_bytes_total")
    )
    found = (
        f"{handed:.0f} handed over to decode" if handed else "",
        f"{scratch:.0f} tokens in scratch memory" if scratch else "",
        f"{parked:.0f} waits for earlier chunks ({show_size(nbytes)})" if parked else "",
    )
    return [f"prompts   {', '.join(filter(None, found))}"] if any(found) else []


def _scaling_lines(samples: Mapping[str, list[Sample]]) -> list[str]:
    bounds = {(one["pool"], one["bound"]): value for one, value in samples.get("lamina_autoscale_bound", [])}
    latest = {one["pool"]: (one["why"], at) for one, at in samples.get("lamina_autoscale_latest_seconds", [])}
    lines = []
    for labels, load in samples.get("lamina_autoscale_load", []):
        pool = labels["pool"]
        why, at = latest.get(pool, ("", 0.0))
        last = f"; {time.strftime('%H:%M:%S', time.localtime(at))}: {why}" if why else ""
        least, most = bounds[pool, "least"], bounds[pool, "most"]
        lines.append(f"autoscale {pool} {least:.0f} to {most:.0f} workers, load of {load:.2f}{last}")
    return lines


def administer(server: str, path: str, body: Any) -> list[str]:
    """POST ``body`` with the key in LAMINA_ADMIN_KEY. Returns the names of the workers concerned.

    Raises ConfigError, TransportError.
    """
    key = environment().admin_key
    if not key:
        raise ConfigError("LAMINA_ADMIN_KEY is not set; set it to the key that the server was started with")
    try:
        with open_url(server, path, ADMINISTER_S, body, headers=bearer(key)) as response:
            if response.status == HTTPStatus.UNAUTHORIZED:
                raise ConfigError(
                    f"{server} has another LAMINA_ADMIN_KEY; set it to the key that the server was started with"
                )
            answer = json.load(response)
            refusal = str(answer["error"]["message"]) if response.status != HTTPStatus.OK else ""
            workers: list[str] = [] if refusal else answer["workers"]
    except UserError:
        raise
    except (http.client.HTTPException, ValueError, KeyError, TypeError) as error:
        raise not_a_server(server, error) from error
    if refusal:
        failed = response.status >= HTTPStatus.INTERNAL_SERVER_ERROR
        raise TransportError(refusal) if failed else ConfigError(refusal)
    return workers


def scale(
    memory: Annotated[
        str | None,
        typer.Option(
            help="Memory workers to add or remove: +2 or -1, or with their kind: rtx3090:+2; or the pool's size: 3."
        ),
    ] = None,
    compute: Annotated[str | None, typer.Option(help="Compute workers to add or remove: whole replicas.")] = None,
    prefill: Annotated[
        str | None, typer.Option(help="Compute workers that only run prompts, to add or remove: whole replicas.")
    ] = None,
    url: Url = LOCAL_URL,
) -> None:
    """Add workers to a running server, or remove some, while it answers requests.

    A number with a sign changes a pool; a number without is the size that the pool is to have. Returns once all have
    joined or left. Before a memory worker leaves, its KV moves to others, or is computed again there. On a Ray cluster,
    Ray places new workers, and its autoscaler may start nodes for them. The server and this command need the same key
    in LAMINA_ADMIN_KEY.

    If you add to one of the pools prefill and compute and remove from the other, workers change pools and keep their
    weights: with --prefill +1 --compute -1, a replica that decodes runs prompts from the next step on.
    """
    from lamina.cli.console import print_text
    from lamina.observe.progress import waiting

    options = {"memory": memory, "compute": compute, "prefill": prefill}
    changes = {pool: change for pool, change in options.items() if change is not None}
    if not changes:
        raise ConfigError("nothing to change; give --memory, --compute or --prefill, such as --memory +2")
    for pool, change in changes.items():
        parse_change(pool, change)
    with waiting("Waiting for workers to join or leave"):
        workers = administer(url, "/admin/scale", changes)
    print_text(f"done: {', '.join(workers) or 'the pools have these sizes already'}\n")


def down(
    url: Url = LOCAL_URL,
) -> None:
    """Stop a running server: its engine, its frontends and all its workers.

    Requests in progress have a few seconds to finish. Workers on other machines end too: each `lamina worker` exits;
    on a Ray cluster, the workers' actors and placement groups are removed, and the Ray cluster itself goes on. Returns
    once the server has stopped listening. The server and this command need the same key in LAMINA_ADMIN_KEY.
    """
    from lamina.cli.console import print_text
    from lamina.observe.progress import waiting

    with waiting("Waiting for requests and workers to finish"):
        workers = administer(url, "/admin/stop", {})
        where = urllib.parse.urlsplit(url)
        address = where.hostname or "", where.port or (443 if where.scheme == "https" else 80)
        deadline = time.monotonic() + END_S
        while _listens(address):
            if time.monotonic() > deadline:
                raise TransportError(f"the server at {url} was told to stop, but still listens after {END_S:.0f} s")
            time.sleep(POLL_S)
    print_text(f"stopped: {', '.join(workers)}\n")


def _listens(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, 5.0).close()
    except OSError:
        return False
    return True


class RemoteModel:
    """The model of a running server.

    Args:
        url: Address of the server.
        sampling: Sampling fields of each request; the server has defaults for the others.
        key: Key that the server asks for; None: none.

    Raises:
        ConfigError: ``url`` is not that of a server with an OpenAI-compatible API, or the key is missing or wrong.
        TransportError: No server answers.
    """

    def __init__(self, url: str, sampling: Mapping[str, float], key: str | None = None) -> None:
        self._url, self._sampling = url.rstrip("/").removesuffix("/v1"), sampling
        self._headers = bearer(key)
        with open_url(self._url, "/v1/models", TOKEN_S, headers=self._headers) as response:
            if response.status == HTTPStatus.UNAUTHORIZED:
                raise ConfigError(f"{self._url} wants a key; give it as --api-key, or set OPENAI_API_KEY")
            try:
                self.name = str(json.load(response)["data"][0]["id"])
            except (http.client.HTTPException, ValueError, LookupError, TypeError) as error:
                raise self._not_openai(error) from error

    def answer(self, messages: Sequence[Mapping[str, str]]) -> Generator[str, None, None]:
        """Yield the answer in pieces; closing the iterator cancels it.

        Raises:
            RequestError: The server rejects the conversation or fails to answer it.
            TransportError: The connection is lost.
        """
        body = {"model": self.name, "messages": list(messages), "stream": True, **self._sampling}
        with open_url(self._url, "/v1/chat/completions", TOKEN_S, body, headers=self._headers) as response:
            try:
                if response.status != HTTPStatus.OK:
                    raise _refusal(response)
                for line in response:
                    if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                        yield self._text(data)
            except (OSError, http.client.HTTPException) as error:
                raise TransportError(
                    f"the connection to the server at {self._url} was lost before the end of its answer: {error}"
                ) from error

    def _text(self, data: bytes) -> str:
        """Return the text in one event of a streamed answer. Raises RequestError if the event is an error."""
        try:
            event = json.loads(data)
            failed = str(event["error"]["message"]) if "error" in event else ""
            text = "".join(choice["delta"].get("content") or "" for choice in event.get("choices", []))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise self._not_openai(error) from error
        if failed:
            raise RequestError(failed)
        return text

    def _not_openai(self, error: Exception) -> ConfigError:
        return ConfigError(f"{self._url} has no OpenAI-compatible API: {error!r}; give --url a server's address")


def _refusal(response: http.client.HTTPResponse) -> RequestError:
    try:
        return RequestError(str(json.load(response)["error"]["message"]))
    except (ValueError, LookupError, TypeError):
        return RequestError(f"the server answers with status {response.status}")
