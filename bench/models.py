"""Random Llamas that several benchmarks share."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from lamina.core.types import DType
from lamina.models import directory, pretrained
from lamina.models.pretrained import load_config, meta_model

MODELS: dict[str, dict[str, int]] = {
    "3m": {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    | {"intermediate_size": 704, "head_dim": 64, "vocab_size": 2048},
    # 250m with a quarter of its layers and of its vocabulary: what one layer takes is the same
    "60m": {"hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 4}
    | {"intermediate_size": 2816, "head_dim": 64, "vocab_size": 8000},
    "250m": {"hidden_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 4}
    | {"intermediate_size": 2816, "head_dim": 64},
    "1.1b": {"hidden_size": 2048, "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4}
    | {"intermediate_size": 5632, "head_dim": 64},
    # the shape of Llama-3-8B, for GPUs
    "8b": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    | {"intermediate_size": 14336, "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 40960},
}
COMMON: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


@contextmanager
def model_directory(name: str) -> Iterator[Path]:
    """A config and the bundled tokenizer, for dummy weights."""
    with tempfile.TemporaryDirectory(prefix="lamina-bench-") as place:
        path = Path(place)
        _write_description(name, path)
        yield path


def checkpoint(name: str, place: Path) -> Path:
    """The model directory ``place``/``name`` with random weights, the same for every engine; made if not there."""
    path = place / name
    if not path.exists():
        place.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(dir=place))
        _write_description(name, part)
        model = directory.find(part, weights=False)
        config = load_config(model)
        names = sorted(meta_model(config, DType.BFLOAT16).state_dict())
        save_file(
            pretrained.load(model, names, config, DType.BFLOAT16, "dummy"), part / "model.safetensors", {"format": "pt"}
        )
        part.rename(path)
    return path


def _write_description(name: str, path: Path) -> None:
    (path / "config.json").write_text(json.dumps(COMMON | MODELS[name]))
    bundled = directory.find(None).path
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (path / file).write_bytes((bundled / file).read_bytes())


def weight_bytes(name: str, bits: int = 16) -> float:
    """Return the bytes of weights that a decode step reads: all layers and the output layer, one row of the embedding.

    bits: of a weight of a layer, as Lamina quantises it; the output layer is in bfloat16. int4 has a scale and a zero
        point in float32 for every 128 inputs.
    """
    shape = MODELS[name]
    hidden, heads, groups, dim = (
        shape[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    layer = hidden * dim * (2 * heads + 2 * groups) + 3 * hidden * shape["intermediate_size"]
    vocabulary: int = shape.get("vocab_size", COMMON["vocab_size"])
    stored = bits + (2 * 32 / 128 if bits == 4 else 0)
    return shape["num_hidden_layers"] * layer * stored / 8 + 2 * vocabulary * hidden


def kv_bytes_per_token(name: str) -> int:
    shape = MODELS[name]
    return 2 * 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
