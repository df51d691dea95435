"""Plans and loads a model's weights with transformers: its tensors, and how they are made from a checkpoint's."""

from collections.abc import Sequence

import torch
from transformers import PretrainedConfig

from lamina.models import tensors
from lamina.models.codes import plain
from lamina.models.config import meta_model
from lamina.models.conversion import recipes
from lamina.models.directory import ModelDirectory
from lamina.models.tensors import Progress, WeightPlan
from lamina.types import DType, LoadFormat


def plan(directory: ModelDirectory, config: PretrainedConfig, dtype: DType) -> WeightPlan:
    """Plan how the tensors of the model that ``config`` describes are made from the checkpoint, without reading data.

    Element types are those of ``from_pretrained(dtype=...)``: ``dtype``, except for tensors that a family keeps in
    float32.
    """
    model = meta_model(config, dtype)
    expected = model.state_dict()
    ties = {name: source for name, source in model.all_tied_weights_keys.items() if name in expected}
    return WeightPlan(config.model_type, expected, ties, recipes(model, directory.weight_names))


def load(
    directory: ModelDirectory,
    names: Sequence[str],
    config: PretrainedConfig,
    dtype: DType,
    load_format: LoadFormat = "auto",
    seed: int = 0,
    on_progress: Progress | None = None,
) -> dict[str, torch.Tensor]:
    """``tensors.load`` of the model that ``config`` describes, as tensors."""
    loaded = tensors.load(directory, names, plan(directory, config, dtype), load_format, seed, on_progress)
    return {name: plain(weight) for name, weight in loaded.items()}
