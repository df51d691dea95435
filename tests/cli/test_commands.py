"""What every `lamina` command does alike: mistakes are one line, and help needs no torch."""

import subprocess
import sys
from pathlib import Path

import pytest

import lamina
from tests.support.commands import assert_refused, run, run_here


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("generate",), "no prompt. Give one"),
        (("generate", ""), "empty"),
        (("generate", "x", "--memory", "rtx3090:6"), "rtx3090:6 asks for 6 GPUs; this machine has"),
        (("generate", "x", "--compute", "toaster"), "unknown kind"),
        (("generate", "x", "--memory", "cpu:0"), "give a whole number from 1"),
        (("generate", "x", "--temperature", "nan"), "temperature is nan; give a number from 0.0"),
        (("generate", "x", "--temperature", "-1"), "temperature is -1.0"),
        (("generate", "x", "--model", "/nowhere/model"), "/nowhere/model"),
        (("chat", "--model", "/nowhere/model"), "/nowhere/model"),
        (("launch", "--host", "not an address"), "cannot listen on"),
        (("launch", "--port", "0", "--compute", "a100:2"), "a100:2 asks for 2 GPUs"),
        (("worker", "--role", "memory", "--engine", "x:1", "--kind", "remote"), "unknown kind 'remote'"),
        (("worker", "--role", "memory", "--engine", "x:1", "--kind", "h100"), "no GPU"),
        (("split", "--output", "/nowhere/cut.svg"), "folder that does not exist"),
    ],
)
def test_mistakes_are_one_line_and_exit_status_2(
    arguments: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAMINA_SECRET", "0" * 64)
    assert_refused(run_here(*arguments), said)


def test_a_log_level_that_does_not_exist_is_one_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAMINA_LOG_LEVEL", "verbose")
    assert_refused(run("split"), "LAMINA_LOG_LEVEL is 'VERBOSE'; give DEBUG")


def test_a_text_file_is_no_model(tmp_path: Path) -> None:
    text = tmp_path / "model.txt"
    text.write_text("hello")
    assert_refused(run("generate", "x", "--model", str(text)), str(text))


def test_version_and_help_do_not_wait_for_torch() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"lamina {lamina.__version__}\n")
    code = "import sys, lamina.cli; sys.exit('torch' in sys.modules or 'lamina.sdk' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    shown = run("--help").stdout
    for command in ("generate", "chat", "launch", "split", "plan", "bench", "doctor"):
        assert f" {command} " in shown
