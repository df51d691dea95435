"""`lamina status`: what a running server does, and how its workers are linked, from its metrics."""

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Annotated

import typer

from lamina.errors import ConfigError, EngineDeadError, TransportError

TIMEOUT_S = 5.0

Sample = tuple[Mapping[str, str], float]


def status(
    url: Annotated[str, typer.Option(help="Where `lamina launch` serves.")] = "http://127.0.0.1:8000",
) -> None:
    """Show a running server: requests, KV in use, and which transport links its workers and why.

    Exit status 1: it cannot be reached, its engine has stopped, or a worker does not answer.
    """
    from lamina.cli.console import print_text

    server = url.rstrip("/")
    _, metrics = _fetch(server + "/metrics")
    print_text("\n".join(lines(metrics)) + "\n")
    code, health = _fetch(server + "/health")
    if code != http.HTTPStatus.OK:
        raise EngineDeadError(_trouble(health))


def _trouble(health: str) -> str:
    """What a server that is not well says of it."""
    try:
        told = json.loads(health)
        if "error" in told:
            return str(told["error"]["message"])
        return ", ".join(f"worker {worker} has not answered for {s} s" for worker, s in told["silent_s"].items())
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"the server is not well: {health}"


def _fetch(url: str) -> tuple[int, str]:
    """Status, 200 or 503, and body. Raises ConfigError for another answer, TransportError if there is none."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url!r} is no address of a server; give --url http://HOST:PORT")
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
        remedy = "give --url what `lamina launch` says"
        raise ConfigError(f"no server of Lamina answers at {url}: {error}; {remedy}") from error
    except OSError as error:  # URLError and TimeoutError too
        raise TransportError(f"no server answers at {url}: {error}; is it running there?") from error


def lines(metrics: str) -> list[str]:
    """What is shown of a scrape. Raises ConfigError if it is not Lamina's."""
    from prometheus_client.parser import text_string_to_metric_families

    samples: dict[str, list[Sample]] = {}
    try:
        for family in text_string_to_metric_families(metrics):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    except ValueError as error:
        raise ConfigError(f"the answer is no metrics of Prometheus ({error}): is this a server of Lamina?") from error
    try:
        running, waiting, steps = (
            samples[f"lamina_{name}"][0][1] for name in ("requests_running", "requests_waiting", "steps_total")
        )
        totals = {labels["worker"]: value for labels, value in samples.get("lamina_kv_slots", [])}
        return [
            f"requests  {running:.0f} running, {waiting:.0f} waiting, {steps:.0f} steps so far",
            *(
                f"{labels['worker']:<8}  {used:.0f} of {totals[labels['worker']]:.0f} token slots in use"
                for labels, used in samples.get("lamina_kv_slots_used", [])
            ),
            *(
                f"network   {labels['transport']} between {pairs:.0f} pair{'s' * (pairs > 1)} of workers "
                f"({labels['reason']})"
                for labels, pairs in samples.get("lamina_links", [])
            ),
        ]
    except KeyError as error:
        raise ConfigError(f"there is no {error} among these metrics: is this a server of Lamina?") from error
