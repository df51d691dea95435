"""`lamina batch`: every request of a file is answered once, also after a kill."""

import asyncio
import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lamina.cli import batch
from lamina.core.errors import ConfigError, EngineDeadError
from lamina.serve.app import create_app
from tests.support.commands import LAMINA, run_here
from tests.support.scripted_engine import COMPLETION, FakeEngine


def request(number: int, url: str = COMPLETION, **body: Any) -> dict[str, Any]:
    return {"custom_id": f"r{number}", "method": "POST", "url": url, "body": {"prompt": "a"} | body}


def write(file: Path, *requests: dict[str, Any]) -> Path:
    file.write_text("".join(json.dumps(one) + "\n" for one in requests))
    return file


def answers_in(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_each_answer_is_the_server_s() -> None:
    app = create_app(FakeEngine())  # type: ignore[arg-type]
    answer = asyncio.run(batch._answer(app, request(3)))
    assert answer["custom_id"] == "r3" and answer["error"] is None
    assert answer["response"]["status_code"] == 200
    assert answer["response"]["body"]["choices"][0]["text"] == " one two three"
    refused = asyncio.run(batch._answer(app, request(4, prompt="too long")))["response"]
    assert refused["status_code"] == 400 and "8 tokens" in refused["body"]["error"]["message"]
    assert asyncio.run(batch._answer(app, request(5, "/v1/nothing")))["response"]["status_code"] == 404


def test_only_so_many_requests_are_read_ahead(tmp_path: Path) -> None:
    """Memory does not grow with the file: a request is read when another has been answered."""
    begun, ended = 0, list[int]()

    def requests() -> Iterator[dict[str, Any]]:
        nonlocal begun
        for number in range(100):
            begun += 1
            assert begun - len(answers_in(tmp_path / "out")) <= 8 + 8  # running, and answered but not yet written
            yield request(number)

    app = create_app(FakeEngine())  # type: ignore[arg-type]
    with (tmp_path / "out").open("ab") as file:
        assert asyncio.run(batch._answer_all(app, requests(), file, 8, 0, ended.append)) == 0
    assert ended == list(range(1, 101))
    assert sorted(answer["custom_id"] for answer in answers_in(tmp_path / "out")) == sorted(f"r{i}" for i in range(100))


def test_an_engine_that_has_stopped_leaves_its_requests_for_the_next_run(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.dead = "memory0 was killed"
    with pytest.raises(EngineDeadError, match=r"memory0 was killed.*it continues"):
        asyncio.run(batch._answer(create_app(engine), request(1)))  # type: ignore[arg-type]


def test_a_request_that_fails_alone_ends_no_batch() -> None:
    """Nor would it be the end of the next run, and of every other."""
    app = create_app(FakeEngine())  # type: ignore[arg-type]
    answer = asyncio.run(batch._answer(app, request(6, prompt="break")))["response"]
    assert answer["status_code"] == 503 and answer["body"]["error"]["code"] == "engine_failed"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"custom_id": "a", "body": {"seed": %s}}' % ("1" * 5000), "line 2 cannot be read"),
        ("{", "line 2 is not JSON"),
        ("[]", "line 2: give an object with a text custom_id"),
        ('{"custom_id": 3}', "text custom_id"),
        ('{"custom_id": "\\ud800"}', "text custom_id"),
        ('{"custom_id": "a", "method": "GET", "url": "/v1/models"}', "method must be POST"),
        ('{"custom_id": "a", "url": "/admin/stop", "body": {}}', "url a path such as"),
        ('{"custom_id": "a", "url": "/v1/completions", "body": {"stream": true}}', "without stream"),
        (json.dumps(request(0)), "custom_id 'r0' twice"),
    ],
)
def test_a_file_with_a_bad_line_is_refused_before_the_engine_starts(tmp_path: Path, line: str, said: str) -> None:
    source = write(tmp_path / "in", request(0))
    source.write_text(source.read_text() + line)
    refused = run_here("batch", str(source), str(tmp_path / "out"))
    assert refused.returncode == 2 and said in refused.stderr and refused.stderr.count("\n") == 1


def test_no_engine_starts_where_nothing_is_to_be_answered(tmp_path: Path) -> None:
    source, out = write(tmp_path / "in", request(0), request(1)), write(tmp_path / "out", request(1), request(0))
    command = ("batch", str(source), str(out), "--model", "/nowhere")  # an engine would end with an error
    done = run_here(*command)
    assert done.returncode == 0 and "2, all from earlier runs" in done.stderr
    write(out, request(1))
    assert "/nowhere does not exist" in run_here(*command).stderr
    source.write_text("\n")
    empty = run_here(*command)
    assert empty.returncode == 2 and "has no requests" in empty.stderr


def test_a_torn_last_line_is_asked_for_again(tmp_path: Path) -> None:
    out = write(tmp_path / "out", {"custom_id": "a"}, {"custom_id": "b"})
    whole = out.read_bytes()
    for torn in (b"", b'{"custom_id": "c"', b'{"custom_id": "c"}'):
        out.write_bytes(whole + torn)
        assert batch._recover(out) == {"a", "b"}
        assert out.read_bytes() == whole
    out.write_text("no answers\n")
    with pytest.raises(ConfigError, match="something other than answers"):
        batch._recover(out)
    assert batch._recover(tmp_path / "none") == set()


def test_a_batch_that_is_killed_continues(tmp_path: Path) -> None:
    body: dict[str, Any] = {"prompt": "def f(", "max_tokens": 64, "temperature": 0.0, "ignore_eos": True}
    source = write(tmp_path / "in", *(request(number, **body) for number in range(60)))
    out = tmp_path / "out"
    command = [*LAMINA, "batch", str(source), str(out), "--max-num-seqs", "2"]
    first = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 100
    while not (out.exists() and out.read_bytes().count(b"\n") >= 3) and time.monotonic() < deadline:
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.wait()
    before = out.read_bytes().count(b"\n")
    assert 3 <= before < 60
    assert subprocess.run(command, stderr=subprocess.DEVNULL, timeout=200, check=False).returncode == 0
    answers = answers_in(out)
    assert sorted(answer["custom_id"] for answer in answers) == sorted(f"r{number}" for number in range(60))
    assert len({answer["response"]["body"]["choices"][0]["text"] for answer in answers}) == 1
