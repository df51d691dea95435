"""Checkpoints for tests that launch workers."""

from pathlib import Path

from transformers import PretrainedConfig, PreTrainedModel

from lamina.compute.preparation import prepare
from lamina.lowering import Target
from lamina.models import directory
from lamina.splitter.parts import Rank
from lamina.types import DType
from tests.random_models import write_checkpoint


def write_prepared(
    config: PretrainedConfig,
    place: Path,
    dtype: DType = DType.FLOAT32,
    target: Target = Target.CPU,
    ranks: int = 1,
) -> PreTrainedModel:
    """As ``write_checkpoint``, and the model is split here, once, for an engine with this ``dtype`` and replicas of so
    many ``ranks``.

    This process has imported transformers anyway. Workers, each of which would import it and split, recall the result;
    tests/cli and tests/compute start workers that split.
    """
    model = write_checkpoint(config, place)
    for number in range(ranks):
        prepare(directory.find(str(place)), dtype, lambda: None, target, Rank(number, ranks))
    return model
