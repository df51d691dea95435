"""Settings are defined once: what is derived from the definition, and the checks of values."""

import inspect
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from typer.testing import CliRunner

from lamina import Lamina
from lamina.cli.options import options_of
from lamina.config.engine_config import EngineConfig
from lamina.config.settings import Meaning, keywords_of, read_settings, settings
from lamina.core.errors import ConfigError
from lamina.core.types import DType
from tools.settings_page import settings_page


@dataclass(frozen=True, kw_only=True)
class Extended(EngineConfig):
    """The settings, and two more."""

    spares: Annotated[int | None, Meaning("Idle workers kept warm.", unit="workers per pool", ge=2, le=9)] = None
    colour: Annotated[Literal["red", "blue"], Meaning("Of nothing.")] = "red"


class Host:
    """Something with the settings as keywords, as the SDK has them."""

    @keywords_of(Extended)
    def __init__(self, config: Extended) -> None:
        self.config = config


def run(*arguments: str) -> Extended:
    """The config of a command that has the options of ``Extended``."""
    got: list[Extended] = []

    @options_of(Extended)
    def command(config: Extended) -> None:
        got.append(config)

    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return got[0]


def help_text() -> str:
    @options_of(Extended)
    def command(config: Extended) -> None: ...

    app = typer.Typer(rich_markup_mode=None)
    app.command()(command)
    return " ".join(CliRunner().invoke(app, ["--help"], env={"COLUMNS": "300"}).output.split())


def test_a_new_setting_appears_on_the_command_line(tmp_path: Path) -> None:
    assert run("--spares", "4", "--colour", "blue") == Extended(spares=4, colour="blue")
    with pytest.raises(ConfigError, match="spares is 10; give a whole number from 2 to 9, or leave it out"):
        run("--spares", "10")
    shown = help_text()
    assert "--spares <int|auto> Idle workers kept warm." in shown
    assert "--colour <red|blue>" in shown


def test_a_new_setting_appears_in_the_sdk() -> None:
    signature = inspect.signature(Host)
    assert signature.parameters["spares"].default is None
    assert signature.parameters["spares"].annotation == int | None
    assert signature.parameters["spares"].kind is inspect.Parameter.KEYWORD_ONLY
    assert "    spares: Idle workers kept warm. (workers per pool, 2 to 9)" in (Host.__init__.__doc__ or "").split("\n")
    assert Host("M", spares=3, tls=True).config == Extended(model="M", spares=3, tls=True)
    with pytest.raises(ConfigError, match="no setting 'spare'; the nearest name is 'spares'"):
        Host(spare=3)  # type: ignore[call-arg]


def test_a_new_setting_appears_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("spares: 5\ncolour: blue\n")
    assert run("--config", str(file)) == Extended(spares=5, colour="blue")
    assert run("--config", str(file), "--spares", "6") == Extended(spares=6, colour="blue")
    assert run("--config", str(file), "--spares", "auto") == Extended(colour="blue")


def test_a_new_setting_appears_on_the_page() -> None:
    page = settings_page(Extended)
    assert "### `spares`\n\n`int`, 2 to 9, workers per pool\n\nIdle workers kept warm.\n" in page
    assert "### `colour`\n\n`red` or `blue`, default `red`\n\nOf nothing.\n" in page
    headings = re.findall("^##+ (.*)", page, re.MULTILINE)
    assert len(headings) == len(set(headings))  # each is an anchor
    assert "### `LAMINA_ADMIN_KEY`" in page


def test_the_page_in_the_documentation_is_current() -> None:
    page = (Path(__file__).parents[2] / "docs" / "settings.md").read_text(encoding="utf-8")
    assert page == settings_page(), "run: python -m tools.settings_page > docs/settings.md"


def test_lamina_takes_the_settings_as_keywords() -> None:
    parameters = inspect.signature(Lamina).parameters
    assert list(parameters) == [field.name for field in fields(EngineConfig)]
    assert {name: parameter.default for name, parameter in parameters.items()} == {
        field.name: field.default for field in fields(EngineConfig)
    }


@pytest.mark.parametrize("setting", settings(EngineConfig), ids=lambda setting: str(setting.name))
def test_every_setting_says_what_it_is(setting: Any) -> None:
    assert setting.meaning.help.endswith((".", ")."))
    counts = int in setting.kinds
    assert bool(setting.meaning.unit) == (counts and setting.name != "seed")
    setting.validate(setting.default)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"threads": 0}, "threads is 0; give a whole number of at least 1, or leave it out"),
        ({"threads": -1}, "threads is -1"),
        ({"kv_cache_memory_bytes": 0}, "kv_cache_memory_bytes is 0"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0; give a whole number of at least 1$"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 63}, "at least 64"),
        ({"max_model_len": 1}, "at least 2"),
        ({"generation_config": "vllm"}, "give auto or none"),
        ({"served_model_name": "a,"}, "has an empty name"),
        ({"load_format": "Dummy"}, "give auto or dummy"),
        ({"dtype": "int3"}, "dtype is 'int3'; give auto, float32, bfloat16 or float16"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization is 1.5; give a number from 0.1 to 1.0"),
        ({"gpu_memory_utilization": "half"}, "gpu_memory_utilization is 'half'; give a number"),
        ({"kv_cache_memory_bytes": 2e9}, "kv_cache_memory_bytes is 2000000000.0; give a whole number"),
        ({"threads": True}, "threads is True; give a whole number"),
        ({"lanes": "auto"}, "lanes is 'auto'; give a whole number"),
        ({"max_num_seqs": None}, "max_num_seqs is None; give a whole number"),
        ({"tls": 1}, "tls is 1; give True or False"),
        ({"compute": 2}, "compute is 2; give a text"),
        ({"memory_cores": [0, 1]}, "memory_cores is .0, 1.; give a text"),
        ({"tls": True, "transport": "rdma"}, "rdma cannot be encrypted"),
    ],
)
def test_invalid_settings_are_refused_with_the_remedy(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        EngineConfig(**given)


def test_valid_settings_are_kept_as_given() -> None:
    config = EngineConfig(model=Path("M"), dtype=DType.FLOAT16, lanes=3)
    assert (config.model, config.dtype, config.lanes) == (Path("M"), DType.FLOAT16, 3)
    assert EngineConfig(dtype="float16").dtype == "float16"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("max_num_sqs: 3", "there is no setting 'max_num_sqs'; the nearest name is 'max_num_seqs'"),
        ("max-num-seqs: 3", "the nearest name is 'max_num_seqs'"),
        ("3: 4", "there is no setting 3; the nearest name is"),
        ("threads: two", "threads is 'two'; give a whole number"),
        ("tls: 'on'", "tls is 'on'; give True or False"),
        ("compute: [cpu:1]", "compute is .'cpu:1'.; give a text"),
        ("- compute", "holds .'compute'.; give one 'name: value' on each line"),
        ("a: b: c", "is not valid YAML: mapping values are not allowed here"),
        ("\xff", "is not valid YAML"),
        ("x: !!python/object:os.system {}", "is not valid YAML: could not determine a constructor"),
    ],
)
def test_a_bad_file_is_refused_by_its_name(tmp_path: Path, content: str, says: str) -> None:
    file = tmp_path / "settings.yaml"
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=says) as caught:
        read_settings(file, EngineConfig)
    assert str(file) in str(caught.value)


def test_a_file_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none\.yaml: No such file"):
        read_settings(tmp_path / "none.yaml", EngineConfig)


def test_options_may_resolve_what_contradicts_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("max_num_seqs: 4096\nlanes: auto\n")
    with pytest.raises(ConfigError, match="at least 4096"):
        run("--config", str(file))
    assert run("--config", str(file), "--max-num-batched-tokens", "8192").max_num_seqs == 4096
    file.write_text("")
    assert run("--config", str(file)) == Extended()
