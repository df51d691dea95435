"""Reads the sampling defaults that a model recommends in its generation_config.json."""

from collections.abc import Mapping

from lamina.core.errors import ModelError
from lamina.core.types import GenerationConfig, SamplingParams
from lamina.models.directory import GENERATION_CONFIG, ModelDirectory

Defaults = Mapping[str, int | float]
"""Values of ``SamplingParams`` by name."""

_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Name in ``SamplingParams`` by name in generation_config.json, for the fields that vLLM reads."""


def sampling_defaults(model: ModelDirectory, choice: GenerationConfig) -> Defaults:
    """Return the defaults of generation_config.json; none if ``choice`` is "none".

    Raises:
        ModelError: a value has the wrong type or is out of range.
    """
    if choice == "none":
        return {}
    given = model.generation_config
    found = {ours: given[theirs] for theirs, ours in _NAMES.items() if given.get(theirs) is not None}
    try:
        SamplingParams(**found)
    except ValueError as error:
        raise ModelError(
            f"{model.path / GENERATION_CONFIG}: {error}. Correct the file, or ignore it with generation_config none"
        ) from None
    return found


def described(defaults: Defaults) -> str:
    """Return the defaults as text, such as "temperature 0.6, top_k 20"."""
    return ", ".join(f"{name} {value:g}" for name, value in defaults.items())
