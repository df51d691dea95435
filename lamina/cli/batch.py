"""`lamina batch`: answers the requests of a file in OpenAI's batch format."""

import asyncio
import json
import os
import uuid
from collections.abc import Callable, Iterator, Set
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from lamina.cli import options
from lamina.config.engine_config import EngineConfig, check_writable
from lamina.core.errors import ConfigError, EngineDeadError, RequestError
from lamina.core.sampling import is_unicode

if TYPE_CHECKING:
    from starlette.types import ASGIApp

RETRY_S = 1.0  # wait before a rejected request is sent again
RETRIED = (429,)  # statuses of an engine whose queue is full


@options.engine_options
def batch(
    config: EngineConfig,
    source: Annotated[Path, typer.Argument(help="File of requests: a line of JSON with custom_id, url and body each.")],
    target: Annotated[Path, typer.Argument(help="File for the answers. Requests answered there are skipped.")],
) -> None:
    """Answer a file of requests in OpenAI's batch format.

    Answers are written in the order of completion. To continue an interrupted batch, run the command again.
    """
    check_writable("target", target)
    asked = _validate(source)
    done = _recover(target)
    from lamina.cli.console import notes

    if asked <= done:
        notes().print(f"Answers in {target}: {len(asked)}, all from earlier runs.", soft_wrap=True)
        return
    from lamina.observe.progress import counting_progress
    from lamina.sdk import Lamina
    from lamina.serve.app import create_app

    todo = (one for one in _requests(source) if one["custom_id"] not in done)
    most = 2 * config.max_num_seqs  # so that the engine always has waiting requests
    with (
        Lamina.from_config(config) as lamina,
        target.open("ab") as file,
        counting_progress("Requests", len(asked)) as on_progress,
    ):
        failed = asyncio.run(_answer_all(create_app(lamina.engine), todo, file, most, len(done), on_progress))
    notes().print(f"Answers in {target}: {len(asked)}; errors in this run: {failed}.", soft_wrap=True)


def _requests(source: Path) -> Iterator[dict[str, Any]]:
    """Yield the requests of a file. Raises ConfigError, naming the line, for a line that is not a request."""
    try:
        with source.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    request = json.loads(line.strip())
                except json.JSONDecodeError as error:
                    why = f"{error.msg} at column {error.colno}"
                    raise ConfigError(f"{source}, line {number} is not JSON: {why}") from None
                except UnicodeDecodeError:
                    raise ConfigError(f"{source}, line {number} is not JSON: it is not UTF-8") from None
                except RecursionError:
                    raise ConfigError(f"{source}, line {number} is not JSON: it is nested too deeply") from None
                except ValueError as error:  # an integer of very many digits
                    raise ConfigError(f"{source}, line {number} cannot be read: {error}") from None
                if (fault := _find_error(request)) is not None:
                    raise ConfigError(f"{source}, line {number}: {fault}")
                yield request
    except OSError as error:
        raise ConfigError(f"cannot read {source}: {error.strerror}; give a file of requests") from None


def _find_error(request: Any) -> str | None:
    identifier = request.get("custom_id") if isinstance(request, dict) else None
    if not isinstance(identifier, str) or not is_unicode(identifier):
        return "give an object with a text custom_id"
    if request.get("method", "POST") != "POST" or not str(request.get("url")).startswith("/v1/"):
        return "method must be POST, and url a path such as /v1/chat/completions"
    body = request.get("body")
    if not isinstance(body, dict) or body.get("stream"):
        return "body must be an object, without stream"
    return None


def _validate(source: Path) -> Set[str]:
    """Return the custom_ids of a file. Raises ConfigError for a file that is no batch."""
    seen = set[str]()
    for count, request in enumerate(_requests(source)):
        seen.add(request["custom_id"])
        if len(seen) == count:
            raise ConfigError(f"{source} has custom_id {request['custom_id']!r} twice; give each request its own")
    if not seen:
        raise ConfigError(f"{source} has no requests; give a line of JSON for each")
    return seen


def _recover(target: Path) -> Set[str]:
    """Return the custom_ids of the answers in ``target``, and truncate an incomplete last line."""
    done, whole = set[str](), 0
    if not target.exists():
        return done
    with target.open("rb") as lines:
        for line in lines:
            try:
                if line.endswith(b"\n"):
                    done.add(json.loads(line)["custom_id"])
            except (ValueError, KeyError, TypeError):
                raise ConfigError(f"{target} holds something other than answers; give another file") from None
            whole += len(line) if line.endswith(b"\n") else 0
    os.truncate(target, whole)
    return done


async def _answer_all(
    app: "ASGIApp", todo: Iterator[dict[str, Any]], file: BinaryIO, most: int, count: int, note: Callable[[int], None]
) -> int:
    """Answer requests, ``most`` at once, and write each answer when it is complete. Returns the number of errors.

    ``count``: Answers written by earlier runs; ``note`` is called with the number written so far.
    """
    running = set[asyncio.Task[dict[str, Any]]]()
    failed, left = 0, True
    while left or running:
        while left and len(running) < most:
            request = next(todo, None)
            left = request is not None
            if request is not None:
                running.add(asyncio.create_task(_answer(app, request)))
        if not running:
            break
        ended, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            answer = task.result()
            file.write(json.dumps(answer, ensure_ascii=False).encode() + b"\n")
            failed += answer["response"]["status_code"] >= 400
            note(count := count + 1)
        file.flush()
    return failed


async def _answer(app: "ASGIApp", request: dict[str, Any]) -> dict[str, Any]:
    """Return the output line of a request.

    Raises EngineDeadError if the engine stops; the batch can be continued. Raises RequestError for a path whose answers
    are not JSON.
    """
    own = uuid.uuid4().hex
    content = json.dumps(request["body"]).encode()
    while True:
        status, answered = await _post(app, request["url"], content, own)
        if status not in RETRIED:
            break
        await asyncio.sleep(RETRY_S)
    try:
        body = json.loads(answered)
    except ValueError:
        raise RequestError(f"{request['url']} does not answer with JSON; leave out such requests") from None
    if status == 503 and body["error"]["code"] != "engine_failed":  # which concerns this request alone
        raise EngineDeadError(f"{body['error']['message']}. Run the command again: it continues")
    response = {"status_code": status, "request_id": own, "body": body}
    return {"id": f"batch_req_{own}", "custom_id": request["custom_id"], "response": response, "error": None}


async def _post(app: "ASGIApp", path: str, body: bytes, own: str) -> tuple[int, bytes]:
    import httpx

    headers = {"content-type": "application/json", "x-request-id": own}
    request = httpx.Request("POST", f"http://batch{path}", headers=headers, content=body)
    response = await httpx.ASGITransport(app, client=("batch", 0)).handle_async_request(request)
    return response.status_code, await response.aread()
