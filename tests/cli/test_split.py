"""`lamina split`: the three formats agree with the split and with each other, and errors are clear."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import typer
from transformers import GPTJConfig
from typer.testing import CliRunner

from lamina.cli.models import split as command
from lamina.core.errors import ModelError, UnsupportedModelError
from lamina.splitter import SplitModel, split
from lamina.splitter.describe import svg

CONFIG = GPTJConfig(vocab_size=96, n_positions=64, n_embd=32, n_layer=5, n_head=4, rotary_dim=4)
CODE = """
from pathlib import Path
from transformers import PretrainedConfig

Path("{ran}").touch()

class Warp9Config(PretrainedConfig):
    model_type = "warp9"
"""

app = typer.Typer()
app.command()(command)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration alone: no weights, no tokenizer."""
    path = tmp_path_factory.mktemp("model")
    CONFIG.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model() -> SplitModel:
    return split(CONFIG)


def run(*arguments: str) -> str:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_table_has_a_row_per_kind(directory: Path) -> None:
    text = run(str(directory))
    assert "gptj, float32: 5 attentions, 6 slices" in text
    assert "1-4" in text and "transformer.h.1.mlp.fc_out: linear [32]" in text


def test_json_counts_bytes(directory: Path) -> None:
    shown = json.loads(run(str(directory / "config.json"), "--format", "json", "--dtype", "bfloat16"))
    assert len(shown["slices"]) == 6 and len(shown["cuts"]) == 5
    # 4 heads of 8 for q, k, v and out; hidden size 32; two tensors cross because the blocks are parallel; 2 bytes each
    assert shown["cuts"][2]["bytes_per_token"] == {"q": 64, "kv": 128, "out": 64, "context": 128}
    assert shown["bytes_per_token"] == {"q": 320, "kv": 640, "out": 320, "context": 640}


def test_svg_is_a_picture_of_one_period(directory: Path, model: SplitModel, tmp_path: Path) -> None:
    target = tmp_path / "cut.svg"
    assert run(str(directory), "--format", "svg", "--output", str(target)) == ""
    texts = [element.text for element in ElementTree.parse(target).iter("{http://www.w3.org/2000/svg}text")]
    assert [text for text in texts if text and text.startswith("Slice")] == ["Slice 0", "Slices 1-4", "Slice 5"]
    assert target.read_text() == svg(model)


@pytest.mark.parametrize(
    ("content", "error", "said"),
    [
        (None, ModelError, "has no config.json"),
        ("not json", ModelError, "is not JSON"),
        ('{"hidden_size": 32}', ModelError, "has no model_type"),
        ('{"model_type": "llama", "hidden_size": "wide"}', ModelError, "not valid for the family 'llama'"),
        ('{"model_type": "vit"}', UnsupportedModelError, "not a causal language model"),
        (
            '{"model_type": "warp9", "auto_map": {"AutoConfig": "configuration_warp9.Warp9Config"}}',
            UnsupportedModelError,
            "runs no code",
        ),
    ],
)
def test_what_cannot_be_split_is_refused_and_runs_no_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None, error: type[ModelError], said: str
) -> None:
    monkeypatch.setattr("builtins.input", lambda question: "yes")  # what transformers asks before it runs code
    (tmp_path / "configuration_warp9.py").write_text(CODE.format(ran=tmp_path / "ran"))
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(error, match=said):
        run(str(tmp_path))
    assert not (tmp_path / "ran").exists()
