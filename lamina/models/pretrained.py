"""Asks transformers for a model's configuration, and for the names, types, ties and conversions of its weights."""

from collections.abc import Iterable, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Literal, cast

import torch
from transformers.configuration_utils import PretrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.configuration_auto import AutoConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from lamina.core.errors import ModelError, UnsupportedModelError
from lamina.core.types import DType, LoadFormat
from lamina.models import tensors
from lamina.models.directory import CONFIG, LANGUAGE_MODEL, ModelDirectory, stated_tie
from lamina.models.quantisation.codes import plain
from lamina.models.tensors import Progress, Read, Recipe, WeightPlan
from lamina.splitter.adapters import keep_in_float32

_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")


def read_config(directory: ModelDirectory) -> PretrainedConfig:
    """Return the directory's config, as transformers reads it from local files, without running the directory's code.

    Raises:
        UnsupportedModelError: transformers does not know the family.
        ModelError: a value in config.json is invalid for its family.
    """
    file = _config_file(directory)
    family = directory.config.get("model_type")
    if family is None:
        raise ModelError(f"{file} has no model_type: copy the whole config.json of the model")
    try:
        config = AutoConfig.from_pretrained(directory.path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers and its validators raise any type
        if "does not recognize" in str(error) or "trust_remote_code" in str(error):
            raise UnsupportedModelError(
                f"{directory.path}: transformers does not know the family {family!r}, and Lamina runs no code from a "
                "model directory. Give a model of a family that transformers has, or upgrade transformers"
            ) from error
        raise ModelError(f"{file} is not valid for the family {family!r}: {error}") from error
    return cast(PretrainedConfig, config)


def _config_file(directory: ModelDirectory) -> Path:
    return directory.path if directory.path.is_file() else directory.path / CONFIG


def load_config(directory: ModelDirectory) -> PretrainedConfig:
    """Return the config of a causal language model; of a multimodal model, that of its language model.

    Raises:
        UnsupportedModelError: transformers does not know the family, or the family has no causal language model.
        ModelError: a value in config.json is invalid for its family.
    """
    config = _language_config(directory)
    if type(config) not in AutoModelForCausalLM._model_mapping:
        family = directory.config.get("model_type")
        part = "" if family == config.model_type else f", the text part of {family!r},"
        raise UnsupportedModelError(
            f"{directory.path}: {config.model_type!r}{part} is not a causal language model in transformers; give a "
            "decoder-only model"
        )
    for name in _SIZES:
        size = getattr(config, name, None)
        if isinstance(size, int) and size < 1:
            raise ModelError(f"{_config_file(directory)} says {name} is {size}; a model has at least 1")
    vars(config).pop("quantization_config", None)  # Lamina reads quantised weights itself
    return config


def _language_config(directory: ModelDirectory) -> PretrainedConfig:
    """Return the config, or the part of a multimodal one that describes the language model.

    The element type, and whether the head is the embedding, may be stated for the whole model.
    """
    config = read_config(directory)
    if directory.text_config is directory.config:
        return config
    text = cast(PretrainedConfig, config.get_text_config())
    if (tied := stated_tie(directory.config)) is not None:
        text.tie_word_embeddings = tied
    text.dtype = text.dtype or config.dtype
    return text


def resolve_dtype(config: PretrainedConfig, requested: DType | Literal["auto"]) -> DType:
    """Return ``requested``, or for "auto" the config's element type; float32 if the config gives none.

    Raises:
        UnsupportedModelError: the config's element type is not a DType.
    """
    if requested != "auto":
        return requested
    stated = getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None) or torch.float32
    name = str(stated).removeprefix("torch.")
    try:
        return DType(name)
    except ValueError:
        choices = ", ".join(dtype.value for dtype in DType)
        raise UnsupportedModelError(f"the config's dtype is {name}; choose one with --dtype: {choices}") from None


def meta_model(config: PretrainedConfig, dtype: DType) -> PreTrainedModel:
    """Return the model without weights, on the meta device: names, shapes, element types and ties of every parameter.

    Raises:
        UnsupportedModelError: transformers cannot build this model.
    """
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch_dtype(dtype))
    except Exception as error:
        raise UnsupportedModelError(f"transformers cannot build a {config.model_type} model: {error}") from error
    keep_in_float32(model, dtype)
    return cast(PreTrainedModel, model)


def count_matrices(directory: ModelDirectory) -> int | None:
    """Return the elements of all matrices of the text model; None if it is not a causal language model.

    Raises the errors of ``read_config`` and ``meta_model``.
    """
    config = _language_config(directory).get_text_config()
    if type(config) not in AutoModelForCausalLM._model_mapping:
        return None
    vars(config).pop("quantization_config", None)
    return int(sum(one.numel() for one in meta_model(config, DType.BFLOAT16).parameters() if one.dim() > 1))


def torch_dtype(dtype: DType) -> torch.dtype:
    return {DType.FLOAT32: torch.float32, DType.BFLOAT16: torch.bfloat16, DType.FLOAT16: torch.float16}[dtype]


def recipes(model: PreTrainedModel, checkpoint: Iterable[str]) -> dict[str, Recipe]:
    """Return recipes, by state-dict name, of the tensors of ``model`` that can be made from names in ``checkpoint``.

    The names of a multimodal model's other parts are ignored.
    """
    expected = model.state_dict()
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix = model.base_model_prefix
    found: dict[str, Recipe] = {}
    for name in sorted(checkpoint, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, expected)
        if target not in expected and name not in expected:
            inner = LANGUAGE_MODEL.sub(r"\1", name)
            target, pattern = rename_source_key(inner, renamings, converters, prefix, expected)
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
    """Load dense weights by ``tensors.load`` for the model that ``config`` describes."""
    loaded = tensors.load(directory, names, plan(directory, config, dtype), load_format, seed, on_progress)
    return {name: plain(weight) for name, weight in loaded.items()}
