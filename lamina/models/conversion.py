"""From the names a checkpoint stores to the names a model has.

A checkpoint may store experts one by one where the model stacks them, may have been saved without the prefix of its
base model, or use names of an older release. transformers knows these conversions, family by family; this module
applies them to chosen tensors instead of to a whole model.
"""

from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, field

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key


@dataclass
class Recipe:
    """How some of the model's tensors are made from some of the checkpoint's.

    ``outputs`` are state-dict names. ``inputs`` are (source pattern, checkpoint name), in the order the converter
    needs; without a converter there is one output and one input.
    """

    outputs: list[str]
    converter: WeightConverter | None
    inputs: list[tuple[str, str]] = field(default_factory=list)

    def make(
        self, read: Callable[[str], torch.Tensor], model: PreTrainedModel, config: PretrainedConfig
    ) -> dict[str, torch.Tensor]:
        """The outputs by name; ``read`` gives a tensor of the checkpoint. May return views of what was read."""
        if self.converter is None:
            return {self.outputs[0]: read(self.inputs[0][1])}
        converter = deepcopy(self.converter)
        for pattern, name in self.inputs:
            converter.add_tensor(self.outputs[0], name, pattern, read(name))  # type: ignore[arg-type]  # or a Future
        made = converter.convert(self.outputs[0], model=model, config=config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def recipes(model: PreTrainedModel, checkpoint: Iterable[str]) -> dict[str, Recipe]:
    """The recipe of every tensor of ``model`` that can be made from the names in ``checkpoint``, by state-dict name."""
    expected = model.state_dict()
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix = model.base_model_prefix
    found: dict[str, Recipe] = {}
    for name in sorted(checkpoint, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, expected)
        if target not in expected and name in expected:  # a converted name that an old rule happens to match
            target, pattern = name, None
        if target not in expected:
            continue
        converter = by_pattern[pattern] if pattern is not None else None
        recipe = found.get(target) or Recipe(_outputs(target, converter), converter)
        recipe.inputs.append((pattern or name, name))
        found.update(dict.fromkeys(recipe.outputs, recipe))
    return found


def _outputs(first: str, converter: WeightConverter | None) -> list[str]:
    """All names that a converter makes, given the one for its first target pattern."""
    if converter is None:
        return [first]
    patterns = converter.target_patterns
    return [first.replace(patterns[0], pattern, 1) for pattern in patterns]
