"""Restores float32 for parameters that a family keeps in float32 whatever the model's element type."""

import re

from transformers import PreTrainedModel

from lamina.core.types import DType


def keep_in_float32(model: PreTrainedModel, dtype: DType) -> None:
    """Convert these parameters of ``model`` (mutated), built in ``dtype``, to float32, as ``from_pretrained`` does.

    ``_keep_in_fp32_modules`` applies to float16 only (bfloat16 has float32's range), the strict list to both.
    """
    kept = set(model._keep_in_fp32_modules_strict or ()) if dtype is not DType.FLOAT32 else set()
    if dtype is DType.FLOAT16:
        kept |= set(model._keep_in_fp32_modules or ())
    patterns = [re.compile(pattern.replace("*", ".*")) for pattern in kept]
    for name, tensor in model.state_dict(keep_vars=True).items():
        if any(pattern.search(name) for pattern in patterns):
            tensor.data = tensor.data.float()
