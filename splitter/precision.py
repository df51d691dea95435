"""Which parameters a family keeps in float32 whatever the model's element type."""

import re

from transformers import PreTrainedModel

from lamina.types import DType


def keep_in_float32(model: PreTrainedModel, dtype: DType) -> None:
    """Make float32 again what a family keeps so, mutating ``model``, built for ``dtype``: as ``from_pretrained`` does.

    The families whose norms are kept mean float16 alone: bfloat16 has float32's range.
    """
    kept = set(model._keep_in_fp32_modules_strict or ()) if dtype is not DType.FLOAT32 else set()
    if dtype is DType.FLOAT16:
        kept |= set(model._keep_in_fp32_modules or ())
    patterns = [re.compile(pattern.replace("*", ".*")) for pattern in kept]
    for name, tensor in model.state_dict(keep_vars=True).items():
        if any(pattern.search(name) for pattern in patterns):
            tensor.data = tensor.data.float()
