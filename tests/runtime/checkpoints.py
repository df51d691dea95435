"""Checkpoints for tests that launch workers."""

from pathlib import Path

from transformers import PretrainedConfig, PreTrainedModel

from lamina.compute.preparation import prepare
from lamina.lowering import Target
from lamina.models import directory
from lamina.types import DType
from tests.random_models import write_checkpoint


def write_prepared(
    config: PretrainedConfig, place: Path, dtype: DType = DType.FLOAT32, target: Target = Target.CPU
) -> PreTrainedModel:
    """As ``write_checkpoint``, and the model is split here, once, for an engine with this ``dtype``.

    This process has imported transformers anyway. Workers, each of which would import it and split, recall the result;
    tests/cli and tests/compute start workers that split.
    """
    model = write_checkpoint(config, place)
    prepare(directory.find(str(place)), dtype, lambda: None, target)
    return model
