"""Plans and loads a model's weights with transformers: names, conversions, tensors."""

from collections.abc import Iterable, Sequence
from copy import deepcopy
from functools import partial

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from lamina.core.types import DType, LoadFormat
from lamina.models import tensors
from lamina.models.configuration import meta_model
from lamina.models.directory import ModelDirectory
from lamina.models.quantisation.codes import plain
from lamina.models.tensors import Progress, Read, Recipe, WeightPlan


def recipes(model: PreTrainedModel, checkpoint: Iterable[str]) -> dict[str, Recipe]:
    """Return the recipe of every tensor of ``model`` that can be made from the names in ``checkpoint``, by state-dict
    name."""
    expected = model.state_dict()
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix = model.base_model_prefix
    found: dict[str, Recipe] = {}
    for name in sorted(checkpoint, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, expected)
        if target not in expected and name in expected:  # a new name that an old rule also matches
            target, pattern = name, None
        if target not in expected:
            continue
        converter = by_pattern[pattern] if pattern is not None else None
        convert = None if converter is None else partial(_convert, converter, model)
        recipe = found.get(target) or Recipe(_outputs(target, converter), convert)
        recipe.inputs.append((pattern or name, name))
        found.update(dict.fromkeys(recipe.outputs, recipe))
    return found


def _convert(original: WeightConverter, model: PreTrainedModel, recipe: Recipe, read: Read) -> dict[str, torch.Tensor]:
    converter = deepcopy(original)
    for pattern, name in recipe.inputs:
        converter.add_tensor(recipe.outputs[0], name, pattern, read(name))
    made = converter.convert(recipe.outputs[0], model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _outputs(first: str, converter: WeightConverter | None) -> list[str]:
    """Return all names that a converter makes, given the name for its first target pattern."""
    if converter is None:
        return [first]
    patterns = converter.target_patterns
    return [first.replace(patterns[0], pattern, 1) for pattern in patterns]


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
