"""Checkpoints for tests that launch workers."""

from pathlib import Path

from transformers import PretrainedConfig, PreTrainedModel

from lamina.compute.split_cache import prepare
from lamina.core.types import DType
from lamina.lowering import Target
from lamina.models import directory
from lamina.splitter.parts import Rank
from tests.support.random_models import write_checkpoint


def write_prepared(
    config: PretrainedConfig,
    place: Path,
    dtype: DType = DType.FLOAT32,
    target: Target = Target.CPU,
    ranks: int = 1,
) -> PreTrainedModel:
    """Write a checkpoint as ``write_checkpoint`` does, and split the model into the cache, so that workers need not.

    ``dtype``, ``ranks``: of the engine. Saves time: this process has imported transformers already, and each worker
    would import it to split. tests/cli and tests/compute cover workers that split.
    """
    model = write_checkpoint(config, place)
    for number in range(ranks):
        prepare(directory.find(str(place)), dtype, lambda: None, target, Rank(number, ranks))
    return model
