"""`lamina generate`, `chat` and `bench` run as real processes: output, pipes and exit statuses."""

import io
import json
import re
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from lamina.cli.console import output, print_text
from lamina.cli.generate import _standard_input
from lamina.core.errors import RequestError
from tests.support.commands import LAMINA, assert_refused, run, run_here
from tests.support.waiting import END_S


def test_generate_prints_texts_speed_and_where_the_kv_lived() -> None:
    prompts = ["def fibonacci(n):", "import os", "class [bold]Stack:"]
    done = run("generate", "--compute", "cpu:1", "--memory", "cpu:2", "--max-tokens", "8", *prompts)
    assert done.returncode == 0, done.stderr
    assert all(prompt in done.stderr for prompt in prompts)
    assert re.search(r"\d+\.\d tokens/s: \d+ tokens generated after \d+ prompt tokens in \d+\.\d\d s", done.stderr)
    assert re.search(r"seed (\d+); --seed \1 gives the same", done.stderr)
    rows = re.findall(r"(\d) +│ (memory\d) +│ 0 to 1 +│ 0 to \d+ +│ +[\d.]+ KiB", done.stderr)
    assert [request for request, _ in rows] == ["0", "1", "2"]
    assert {worker for _, worker in rows} == {"memory0", "memory1"}
    assert done.stdout.count("\n") >= 3 and not re.search("prompt|tokens/s|request|memory0|─", done.stdout)
    assert "warn" not in done.stderr.lower() and "torch" not in done.stderr


def test_dummy_weights_are_drawn_when_the_split_model_is_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a start that splits the model imports all of torch."""
    monkeypatch.setenv("LAMINA_CACHE_DIR", str(tmp_path))
    for _ in range(2):
        done = run("generate", "--load-format", "dummy", "--max-tokens", "2", "x")
        assert done.returncode == 0, done.stderr


def test_bench_says_where_the_time_went_and_writes_a_timeline(tmp_path: Path) -> None:
    place = tmp_path / "trace.json"
    sizes = ("--batch", "3", "--context", "9", "--tokens", "24", "--lanes", "2")
    done = run("bench", "--memory", "cpu:1", *sizes, "--trace", str(place))
    assert done.returncode == 0, done.stderr
    for stage in (r"compute0 +│ slice", r"compute0 +│ send", r"compute0 +│ receive", r"memory0 +│ attention"):
        assert re.search(stage + r" +│ +\d+\.\d{3} │ +\d+%", done.stdout)
    assert re.search(r"\d+\.\d tokens/s\. (The bottleneck is|No stage is the bottleneck: \w+ spends) ", done.stdout)
    assert re.search(r"From sampling a lane's tokens to its next slice: \d+ us", done.stdout)
    events = json.loads(place.read_text())["traceEvents"]
    assert {event["tid"] for event in events if event.get("name") == "slice"} == {1, 2}  # both lanes


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (("--lanes", "many"), "give a whole number of at least 1"),
        (("--compute", "cpu:2", "--lanes", "1"), "give lanes at least 2, or fewer compute workers"),
        (("--lanes", "3", "--pipelining", "rotational"), "give lanes 2, or leave it out"),
        (("--compute-cores", "0-x"), "give numbers and ranges"),
        (("--memory-cores", "999"), "names 999, but"),
        (("--max-restarts", "-1"), "give a whole number of at least 0"),
        (("--trace", "/nowhere/t.json"), "folder that does not exist"),
        (("--trace", "/"), "cannot be written"),
    ],
)
def test_impossible_pipelines_are_refused_before_anything_starts(option: tuple[str, ...], said: str) -> None:
    assert_refused(run_here("bench", *option), said)


def test_a_prompt_may_come_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("import os\nimport sys\n"))
    assert _standard_input() == "import os\nimport sys"
    monkeypatch.setattr("sys.stdin", None)  # closed, as by a service manager
    with pytest.raises(RequestError, match="no prompt"):
        _standard_input()


def test_text_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    output.cache_clear()  # so that the next use writes to what pytest captures
    text = "if x:\n\treturn [bold]y[/] :smile: " + "z " * 80 + "\r\n"
    print_text(text, "bold")
    assert capsys.readouterr().out == text


def test_chat_answers_each_line_of_a_pipe() -> None:
    done = run(
        "chat", "--max-tokens", "4", "--temperature", "0", stdin="sort a list\n\nreverse it\n/reset\n/exit\nno\n"
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) >= 4 and "error" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", [("generate", *["def"] * 100), ("chat",)], ids=["generate", "chat"])
def test_commands_whose_engine_dies_fail(command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAMINA_LOG_LEVEL", "INFO")
    process = subprocess.Popen(
        [*LAMINA, *command, "--memory", "cpu:1", "--max-tokens", "900", "--max-num-seqs", "1", "--max-restarts", "0"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stderr is not None
    process.stdin.write("def\n/clear\n" * 100)  # to chat: each line is asked
    process.stdin.flush()
    while "compute0 and memory0 are linked" not in (line := process.stderr.readline()):
        assert line, process.wait(END_S)
    time.sleep(0.5)  # requests run, and a conversation is not yet as long as the model allows
    children = psutil.Process(process.pid).children()
    next(child for child in children if "lamina.memory.worker" in child.cmdline()).kill()
    _, said = process.communicate(timeout=END_S)
    assert process.returncode == 1
    assert "error: the engine has stopped: worker memory0 is gone" in said and "Traceback" not in said
