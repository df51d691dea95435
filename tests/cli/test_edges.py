"""Commands under adverse conditions: full disks, early Ctrl-C, wrong names."""

import io
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from lamina.cli import app, bench, options
from lamina.cluster import pool
from lamina.config.engine_config import EngineConfig
from lamina.control.messages import LoadProgress
from lamina.core.errors import ConfigError, ModelError, TransportError
from lamina.core.sampling import SamplingParams
from lamina.models.directory import BUNDLED
from lamina.observe import progress
from lamina.observe.timing import Share
from lamina.planning.plan import hardware

LAMINA = [sys.executable, "-m", "lamina"]
RUN_S = 120.0
PLAN = ("plan", "--model", "Llama-3-70B", "--compute", "a100-80g:2", "--memory", "rtx3090:4")
PLAN_DECODING = (*PLAN, "--context", "1024")


def run(*arguments: str, stdout: int = subprocess.PIPE, before: Callable[[], None] | None = None) -> tuple[int, str]:
    """Exit status and standard error."""
    command = [*LAMINA, *arguments]
    done = subprocess.run(
        command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=RUN_S, check=False, preexec_fn=before
    )
    return done.returncode, done.stderr


# -- system errors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [("--version",), ("plan", "-h"), PLAN_DECODING])
def test_a_full_disk_is_one_line(arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        status, said = run(*arguments, stdout=full.fileno())
    assert (status, said) == (1, "error: No space left on device: standard output\n")


def test_a_reader_that_leaves_ends_a_command_without_a_word() -> None:
    near, far = os.pipe()
    os.close(near)
    try:
        assert run(*PLAN_DECODING, stdout=far) == (1, "")
    finally:
        os.close(far)


def test_too_few_open_files_are_one_line_with_the_remedy() -> None:
    status, said = run("generate", "x", before=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16)))
    assert status == 2 and said.count("\n") == 1
    assert "the limit of open files is 16" in said and "ulimit -n" in said


def test_ctrl_c_while_the_command_is_imported_leaves_no_traceback() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "lamina", "generate", "x"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = ""
    while "click" not in said:  # of typer, which is imported by ours and long before it is done
        said = process.stderr.readline()
        assert said, "it ended without importing typer"
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=RUN_S)
    assert process.returncode == -signal.SIGINT and "Traceback" not in rest


# -- invalid input ---------------------------------------------------------------------------------------------------


def test_split_reads_a_configuration_of_any_name(tmp_path: Path) -> None:
    config = json.loads((BUNDLED / "config.json").read_text())
    file = tmp_path / "my.json"
    file.write_text(json.dumps(config))
    shown = CliRunner().invoke(app, ["split", str(file), "--format", "json"])
    assert shown.exit_code == 0
    assert len(json.loads(shown.stdout)["slices"]) == config["num_hidden_layers"] + 1
    for name in ("num_hidden_layers", "hidden_size", "vocab_size"):
        file.write_text(json.dumps({**config, name: 0}))
        refused = CliRunner().invoke(app, ["split", str(file)])
        assert isinstance(refused.exception, ModelError)
        assert str(refused.exception).startswith(f"{file} ")


def test_a_model_that_does_not_exist_is_refused_before_anything_slow_is_imported() -> None:
    code = (
        "import sys, lamina.cli\n"
        "try: lamina.cli.app(sys.argv[1:])\n"
        "except lamina.cli.LaminaError as error:\n"
        " print(type(error).__name__, 'zmq' in sys.modules, 'torch' in sys.modules)"
    )
    for command in (["split", "/nowhere"], ["generate", "x", "--model", "/nowhere"], ["bench", "--model", "/nowhere"]):
        done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, check=False)
        assert done.stdout == "ModelError False False\n", done.stderr


def test_a_closed_port_is_told_at_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        where = "{}:{}".format(*closed.getsockname())
    begin = time.monotonic()
    with (
        pytest.raises(TransportError, match=f"cannot connect to {where} .*bench transport --listen"),
        bench._remote(where, str(tmp_path / "secret")),
    ):
        pass
    assert time.monotonic() - begin < bench.CONNECT_S


def test_more_workers_than_a_machine_can_start_are_refused() -> None:
    devices = pool.Devices(2, 24 << 30)
    pool.assign("memory", pool.parse("cpu:64"), devices)
    with pytest.raises(ConfigError, match=r"cpu:1000 asks for 1000 processes; this machine has .* enough for 64"):
        pool.assign("memory", pool.parse("cpu:1000"), devices)


def test_launch_and_plan_know_the_same_kinds() -> None:
    catalogue = hardware.load()
    devices = pool.Devices(2, 24 << 30)
    for kind in (*catalogue.kinds, *hardware.ALIASES):
        with pytest.raises(ConfigError, match=r"no GPU|no worker runs on it"):
            pool.assign("compute", pool.parse(kind), devices)
    for kind in (pool.CPU, *pool.GPUS):
        try:
            catalogue.pool(kind, 1)
        except ConfigError as error:
            assert "no figures for" in str(error) and "--hardware" in str(error)


@pytest.mark.parametrize("command", [[], ["plan"], ["bench"], ["bench", "transport"]])
def test_h_is_help(command: list[str]) -> None:
    shown = CliRunner().invoke(app, [*command, "-h"])
    assert shown.exit_code == 0 and "Usage: " in shown.stdout and "-h, --help" in shown.stdout


def test_every_run_draws_with_a_seed_of_its_own_unless_one_is_given() -> None:
    seeds = {options.sampling_params(EngineConfig(), 8, 1.0, 1.0, None).seed for _ in range(4)}
    assert len(seeds) == 4 and None not in seeds
    assert options.sampling_params(EngineConfig(), 8, 1.0, 1.0, 7).seed == 7


def test_options_come_before_the_model_s_defaults_and_those_before_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_k": 3, "top_p": 0.9, "max_new_tokens": 30}))
    config = EngineConfig(model=tmp_path)
    chosen = options.sampling_params(config, None, None, 0.5, 1)
    assert chosen == SamplingParams(temperature=0.7, top_k=3, top_p=0.5, max_tokens=30, seed=1)
    assert "generation_config.json: top_k 3, max_tokens 30." in capsys.readouterr().err
    ignored = options.sampling_params(EngineConfig(model=tmp_path, generation_config="none"), None, None, None, 1)
    assert ignored == SamplingParams(temperature=0.7, max_tokens=None, seed=1)
    assert capsys.readouterr().err == ""


# -- messages --------------------------------------------------------------------------------------------------------


def test_bench_names_no_bottleneck_beside_a_larger_rest() -> None:
    slow = [Share("compute0", "other", 0.83, 0.83), Share("compute0", "slice", 0.16, 0.16)]
    assert bench.verdict(slow).startswith("No stage is the bottleneck: compute0 spends 83% of the time outside")
    busy = [
        Share("compute0", "slice", 0.7, 0.7),
        Share("compute0", "other", 0.3, 0.3),
        Share("memory0", "other", 1, 1.0),
    ]
    assert bench.verdict(busy) == "The bottleneck is slice on compute0: 70% of the time."


def test_a_slow_start_is_told_without_a_terminal_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "REPORT_S", 0.02)
    written = io.StringIO()
    with progress.loading_progress(Console(file=written, width=80)) as show:
        show("compute0", LoadProgress("weights", 3, 9))
        deadline = time.monotonic() + 20
        while "compute0" not in written.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert re.search(r"after \d+ s, workers are still starting: compute0 weights 3 of 9\n", written.getvalue())
