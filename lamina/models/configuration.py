"""Reads a model's configuration with transformers: its family, weights' names and shapes, and element type."""

from typing import Literal, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from lamina.core.errors import ModelError, UnsupportedModelError
from lamina.core.types import DType
from lamina.models.directory import CONFIG, ModelDirectory
from lamina.splitter.precision import keep_in_float32

_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")


def load_config(directory: ModelDirectory) -> PretrainedConfig:
    """Return the directory's config as transformers reads it, from local files only and without running code from
    there.

    Raises:
        UnsupportedModelError: transformers does not know the family, or the family has no causal language model.
        ModelError: a value in config.json is invalid for its family.
    """
    file = directory.path if directory.path.is_file() else directory.path / CONFIG
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
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise UnsupportedModelError(
            f"{directory.path}: {family!r} is not a causal language model in transformers; give a decoder-only model"
        )
    text = config.get_text_config()
    for name in _SIZES:
        size = getattr(text, name, None)
        if isinstance(size, int) and size < 1:
            raise ModelError(f"{file} says {name} is {size}; a model has at least 1")
    for part in (config, text):  # what runs has dense weights, or those that --quantization makes
        vars(part).pop("quantization_config", None)
    return cast(PretrainedConfig, config)


def resolve_dtype(config: PretrainedConfig, requested: DType | Literal["auto"]) -> DType:
    """``requested``, or for "auto" the config's element type; float32 if it does not give one.

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


def torch_dtype(dtype: DType) -> torch.dtype:
    """torch's name for ``dtype``."""
    return {DType.FLOAT32: torch.float32, DType.BFLOAT16: torch.bfloat16, DType.FLOAT16: torch.float16}[dtype]
