"""`lamina status`: shows the load of a running server and how its workers are linked, from its metrics."""

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from lamina.core.errors import ConfigError, EngineDeadError, TransportError

TIMEOUT_S = 5.0

Sample = tuple[Mapping[str, str], float]


def status(
    url: Annotated[str, typer.Option(help="Address of the server.")] = "http://127.0.0.1:8000",
    placement: Annotated[
        bool, typer.Option(help="Show the KV on each memory worker by request, and moves under way.")
    ] = False,
) -> None:
    """Show the state of a running server.

    Lists requests, KV in use, and which transport links its workers and why. Exit status 1 if the server cannot be
    reached, its engine has stopped, or a worker does not respond.
    """
    from lamina.cli.console import print_text

    server = url.rstrip("/")
    if placement:
        _, answer = _fetch(server + "/placement")
        print_text("\n".join(placement_lines(answer)) + "\n")
        return
    _, metrics = _fetch(server + "/metrics")
    print_text("\n".join(lines(metrics)) + "\n")
    code, health = _fetch(server + "/health")
    if code != http.HTTPStatus.OK:
        raise EngineDeadError(_unhealthy(health))


def _unhealthy(health: str) -> str:
    """Why a server is unhealthy, from its answer to /health."""
    try:
        answer = json.loads(health)
        if "error" in answer:
            return str(answer["error"]["message"])
        return ", ".join(f"worker {worker} has not answered for {s} s" for worker, s in answer["silent_s"].items())
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"the server is unhealthy: {health}"


def _fetch(url: str) -> tuple[int, str]:
    """Status (200 or 503) and body. Raises ConfigError for any other answer, TransportError if no server answers."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url!r} is not the URL of a server; give --url http://HOST:PORT")
    try:
        try:
            response = urllib.request.urlopen(url, timeout=TIMEOUT_S)
        except urllib.error.HTTPError as error:
            if error.code != http.HTTPStatus.SERVICE_UNAVAILABLE:
                raise
            response = error
        with response:
            return response.status, response.read().decode()
    except (urllib.error.HTTPError, http.client.HTTPException, UnicodeDecodeError) as error:
        remedy = "give --url the address that `lamina launch` printed"
        raise ConfigError(f"{url} is not a Lamina server: {error}; {remedy}") from error
    except OSError as error:  # URLError and TimeoutError too
        reason = getattr(error, "reason", error)
        raise TransportError(
            f"no server answers at {url}: {reason}; start one with `lamina launch`, or give --url its address"
        ) from error


BAR = 20  # characters of a memory worker's slots


def placement_lines(answer: str) -> list[str]:
    """The answer to ``GET /placement``: a bar of slots for each memory worker, its largest requests, and moves. Raises
    ConfigError if it is not Lamina's."""
    try:
        found = json.loads(answer)
        shown = [line for worker, one in found["workers"].items() for line in _worker_lines(worker, one)]
        moves, cache = found["moves"], found["prefix_cache"]
        going = [f"{one['tokens']} tokens {one['source']} -> {one['target']}" for one in moves["in_progress"]]
        share = f" ({cache['hit'] / cache['queried']:.0%})" if cache["queried"] else ""
        return [
            *shown,
            f"imbalance {found['imbalance']:.2f} (fullest over mean)",
            f"moves     {moves['completed']} completed, {moves['refused']} refused, {moves['cancelled']} cancelled"
            + (f"; now {', '.join(going)}" if going else ""),
            f"prefixes  {cache['hit']} of {cache['queried']} tokens found{share}",
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"the answer is not a placement ({error!r}); is this a Lamina server of this release?"
        ) from error


def _worker_lines(worker: str, one: Mapping[str, Any]) -> list[str]:
    capacity, used, cached = max(one["capacity"], 1), one["used"], one["cached"]
    full = -(-BAR * used // capacity)
    bar = "#" * full + "+" * min(-(-BAR * cached // capacity), BAR - full)
    largest = ", ".join(f"{request} {tokens}" for request, tokens in list(one["largest_requests"].items())[:4])
    return [
        f"{worker:<9} [{bar:.<{BAR}}] {used} used, {cached} cached of {one['capacity']} slots",
        *([f"{'':<9} {largest}"] if largest else []),
    ]


def lines(metrics: str) -> list[str]:
    """The report on a scrape of metrics. Raises ConfigError if they are not Lamina's."""
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
        return [
            f"requests  {running:.0f} running, {waiting:.0f} waiting, {steps:.0f} steps so far",
            *(
                f"{worker:<8}  {state}"
                + (f", {used[worker]:.0f} of {totals[worker]:.0f} token slots in use" if worker in used else "")
                for worker, state in (dict.fromkeys(used, "serving") | states).items()
            ),
            *_scaling_lines(samples),
            *(
                f"network   {labels['transport']} between {pairs:.0f} pair{'s' * (pairs > 1)} of workers "
                f"({labels['reason']})"
                for labels, pairs in samples.get("lamina_links", [])
            ),
        ]
    except KeyError as error:
        raise ConfigError(f"these metrics lack {error}; is this a Lamina server?") from error


def _scaling_lines(samples: Mapping[str, list[Sample]]) -> list[str]:
    """A line for each pool that scales by load."""
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
