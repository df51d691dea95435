"""The engine's options on the command line, and the configuration a command receives for them."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, get_args

import pytest
import typer
from typer.testing import CliRunner

from lamina.cli import app
from lamina.cli.options import engine_options
from lamina.config.engine_config import EngineConfig
from lamina.config.settings import Group
from lamina.core.errors import ConfigError
from lamina.core.types import DType, DTypeName
from tests.support.commands import run_here

GIVEN: dict[str, Any] = {
    "model": "M",
    "served_model_name": "a,b",
    "compute": "cpu:2",
    "tensor_parallel": 4,
    "pipeline_parallel": 2,
    "prefill": "cpu:1",
    "memory": "cpu:3",
    "load_format": "dummy",
    "dtype": "float16",
    "max_restarts": 3,
    "autoscale": "memory=1:4",
    "max_model_len": 5,
    "generation_config": "none",
    "kv_cache_memory_bytes": 6,
    "quantization": "int4",
    "activation_dtype": "int8",
    "kv_cache_dtype": "int8",
    "gpu_memory_utilization": 0.75,
    "kv_tokens_per_worker": 77,
    "partition": "token",
    "balance": "ledger",
    "slo_tbt_ms": 60,
    "slo_ttft_ms": 900,
    "prompt_attention": "compute",
    "policy": "shortest",
    "kv_overcommit": 2.5,
    "kv_spill_dir": "/folder",
    "threads": 7,
    "lanes": 8,
    "pipelining": "fixed",
    "polling": "host",
    "prefix_cache": False,
    "plan_ahead": False,
    "transport": "tcp",
    "tls": True,
    "secret_file": "s",
    "listen": "10.0.0.1:7070",
    "advertise": "10.0.0.2",
    "ray": "auto",
    "kind": "far=zone:b",
    "compute_cores": "0-1",
    "memory_cores": "2",
    "max_num_seqs": 300,
    "max_num_batched_tokens": 3000,
    "trace": "t.json",
    "chat_template": "t.jinja",
    "tool_call_parser": "hermes",
    "reasoning_parser": "none",
    "seed": 11,
}


def call(*arguments: str) -> tuple[EngineConfig, int]:
    """What a command with one option of its own receives."""
    got: list[tuple[EngineConfig, int]] = []

    @engine_options
    def command(config: EngineConfig, own: Annotated[int, typer.Option(max=99)] = 3) -> None:
        got.append((config, own))

    under_test = typer.Typer()
    under_test.command()(command)
    result = CliRunner().invoke(under_test, arguments)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return got[0]


def test_without_options_a_command_gets_the_configuration_s_own_defaults() -> None:
    assert call() == (EngineConfig(), 3)
    assert call("--lanes", "auto", "--dtype", "auto", "--threads", "auto")[0] == EngineConfig()


def test_a_file_has_the_command_s_own_options_too(tmp_path: Path) -> None:
    file = tmp_path / "lamina.yaml"
    file.write_text("own: 5\nlanes: 2\n")
    assert call("--config", str(file)) == (EngineConfig(lanes=2), 5)
    assert call("--config", str(file), "--own", "6", "--lanes", "3") == (EngineConfig(lanes=3), 6)
    for text, said in (
        ("own: 100", "own is 100: Invalid value for '--own'"),
        ("own: many", "own is 'many': Invalid value"),
        ("own: true", "own is True: Invalid value"),
        ("port: 8000", "port is a setting of `lamina launch` alone; leave it out here"),
        ("owm: 1", "there is no setting 'owm'; the nearest name is 'own'"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=f"lamina.yaml: {said}"):
            call("--config", str(file))


def test_launch_reads_its_address_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "lamina.yaml").write_text("host: not an address\nport: 8123\n")
    refused = run_here("launch", "--config", str(tmp_path / "lamina.yaml"))
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "cannot listen on" in refused.stderr and "8123" in refused.stderr


def test_every_element_type_has_its_name() -> None:
    assert get_args(DTypeName) == ("auto", *(dtype.value for dtype in DType))


def test_every_option_reaches_its_field() -> None:
    assert all(getattr(EngineConfig(), name) != value for name, value in GIVEN.items())
    words = ["--own", "4"]
    for name, value in GIVEN.items():
        option = f"--{name.replace('_', '-')}"
        words += [option if value else f"--no-{option[2:]}"] if isinstance(value, bool) else [option, str(value)]
    assert call(*words) == (EngineConfig(**GIVEN), 4)


def test_lanes_are_a_number_or_auto() -> None:
    with pytest.raises(ConfigError, match="lanes is 'many'; give a whole number of at least 1"):
        call("--lanes", "many")


@pytest.mark.parametrize("command", ["generate", "chat", "launch", "bench"])
def test_every_command_that_runs_a_model_has_all_of_them(command: str) -> None:
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "80"}).output
    shown = shown.replace("--[no-]", "--")
    assert [name for name in GIVEN if f"--{name.replace('_', '-')}" not in shown] == []
    panels = re.findall(r"^(\w+):$", shown, re.MULTILINE)
    assert [name for name in panels if name in get_args(Group)] == list(get_args(Group))


def test_the_help_of_launch_is_two_screens_of_50_lines() -> None:
    shown = CliRunner().invoke(app, ["launch", "-h"], env={"COLUMNS": "80"}).output
    assert len(shown.splitlines()) <= 100


def test_every_setting_has_an_option() -> None:
    assert set(GIVEN) == {field.name for field in fields(EngineConfig)}


def test_a_command_s_own_option_hides_the_setting_of_its_name() -> None:
    seeds: list[tuple[int, int]] = []

    @engine_options
    def command(config: EngineConfig, seed: int = 3) -> None:
        seeds.append((config.seed, seed))

    under_test = typer.Typer()
    under_test.command()(command)
    assert CliRunner().invoke(under_test, ["--seed", "5"]).exit_code == 0
    assert seeds == [(EngineConfig().seed, 5)]
