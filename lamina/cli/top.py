"""`lamina top`: the dashboard in a terminal."""

import http.client
import json
import sys
import time
from collections import deque
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any

import typer

from lamina.cli.client import LOCAL_URL, Url, not_a_server, open_state
from lamina.core.errors import ConfigError, LaminaError

HISTORY = 300
"""States kept, which are those of five minutes at one a second."""

PRINTED_COLUMNS = 120
"""Width of a view that does not go to a terminal."""

Json = dict[str, Any]


def top(
    url: Url = LOCAL_URL,
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks at the server.")] = 1.0,
) -> None:
    """Watch a running server: requests, latencies, lanes, KV by worker, moves, links, and what limits it now.

    Keys: q ends it, space halts the view, arrows and page keys scroll. Where the output is not a terminal, one view is
    printed. A server with LAMINA_METRICS_KEY wants the same key here.
    """
    if not sys.stdout.isatty():
        from lamina.cli.console import output
        from lamina.cli.top_view import draw

        first, _ = look(url)
        time.sleep(every)  # rates are differences between two states
        state, lanes = look(url)
        console = output()
        console.width = PRINTED_COLUMNS
        console.print(draw([first, state], lanes, PRINTED_COLUMNS))
        return
    try:
        from lamina.cli.top_screen import TopScreen
    except ImportError as error:
        raise ConfigError(f'lamina top needs textual ({error}): pip install "lamina[top]"') from error
    look(url)  # an address without a server is an error, not a screen
    TopScreen(partial(look, url), deque(maxlen=HISTORY), every).run()


def look(url: str) -> tuple[Json, Json]:
    """Return a server's state and the window of its lanes.

    Raises:
        TransportError: Nobody answers.
        ConfigError: What answers is not a Lamina server, or wants a key.
    """
    return _ask(url, "/dashboard/state"), _ask(url, "/dashboard/lanes")


def _ask(url: str, path: str) -> Json:
    try:
        with open_state(url, path) as response:
            if response.status != HTTPStatus.OK:
                raise not_a_server(url, f"{response.status} {response.reason}")
            answer = json.load(response)
    except LaminaError:
        raise
    except (http.client.HTTPException, OSError, ValueError) as error:
        raise not_a_server(url, error) from error
    if not isinstance(answer, dict):
        raise not_a_server(url, f"{path} is not an object")
    return answer
