"""Asks transformers about a config.json: the sizes that it leaves out, and the number of weights.

transformers takes seconds to import, so only models that are given as files are compared with it.
"""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from lamina.core.errors import ModelError, UnsupportedModelError
from lamina.models.directory import ModelDirectory, read_json

MOST_OFF = 0.03
"""Largest relative difference of both numbers of weights: the cost model leaves out norms, biases and routers."""


def completed(file: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config with what it leaves out: types of layers and, in a multimodal one, values of the text model."""
    from lamina.models import pretrained

    try:
        defaults = pretrained.read_config(_directory(file)).get_text_config().to_dict()
    except ModelError:  # the config is then read as it is written
        return config
    nested = config.get("text_config")
    if isinstance(nested, dict):
        return {**config, "text_config": {**defaults, **nested}}
    return {"layer_types": defaults.get("layer_types"), **config}


def require_equal(file: Path, name: str, parameters: int) -> None:
    """Raise UnsupportedModelError unless transformers' text model has as many weights in matrices.

    Nothing is compared if transformers has no such model.
    """
    counted = _matrices(file, file.read_bytes())
    if counted is not None and abs(parameters / counted - 1) > MOST_OFF:
        raise UnsupportedModelError(
            f"{name} has {counted / 1e9:.3g} billion weights in transformers, and {parameters / 1e9:.3g} billion by "
            "the formulas of the cost model, which do not cover this architecture; plan for another model"
        )


@lru_cache(maxsize=16)
def refusal(file: Path) -> str:
    """Return why `lamina launch` does not read a model; empty if transformers has it."""
    from lamina.models import pretrained

    directory = _directory(file)
    try:
        pretrained.load_config(directory)
    except UnsupportedModelError:
        return f"models of the family {directory.config.get('model_type')}"
    except ModelError:
        return ""
    return ""


@lru_cache(maxsize=16)
def _matrices(file: Path, text: bytes) -> int | None:
    """Return the elements of a text model's matrices; None if transformers has none. ``text``: what the file holds."""
    from lamina.models import pretrained

    try:
        return pretrained.count_matrices(_directory(file))
    except ModelError:
        return None


def _directory(file: Path) -> ModelDirectory:
    return ModelDirectory(
        path=file.parent if file.name == "config.json" else file, name=file.stem, config=read_json(file)
    )
