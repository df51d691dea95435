"""The model that ``test_network.py`` runs, and what it must say: made outside of an emulated machine.

    LAMINA_CACHE_DIR=FOLDER/cache python -m tests.support.network_model FOLDER

An emulated machine takes minutes to import torch and transformers, so ``tests/rdma/run.sh`` makes all of it outside:
checkpoint, Hugging Face's tokens, and the split model in a cache of its own.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from lamina import _native
from lamina.core.types import DType

TOKENS = 60
PROMPTS = [list(range(3, 63)), list(range(13, 73)), [5, 6, 7], [8, 9, 10], list(range(23, 83))]
KV_TOKENS = 245
"""Of each of two memory workers. The first four requests need 119, 119, 62 and 62; before the last, which needs 119,
gets room, one of 62 must move to the other worker."""
DTYPE = DType.FLOAT32
EXPECTED = "expected.json"
CACHE = "cache"


@dataclass(frozen=True)
class Model:
    """A checkpoint, and the tokens that Hugging Face draws greedily after each of the prompts."""

    path: str
    expected: list[list[int]]


def make(place: Path) -> Model:
    """Write it all to a folder, whose part CACHE is the cache of this process by then."""
    from tests.support.prepared_checkpoints import write_prepared
    from tests.support.random_models import greedy, served

    reference = write_prepared(served("llama"), place, DTYPE)
    expected = [greedy(reference, prompt, TOKENS) for prompt in PROMPTS]
    (place / EXPECTED).write_text(json.dumps(expected))
    return Model(str(place), expected)


def load(place: Path) -> Model:
    """What ``make`` wrote."""
    return Model(str(place), json.loads((place / EXPECTED).read_text()))


def main() -> None:
    paths = [
        path
        for path in _native.attention_paths()
        if path in (_native.AttentionPath.PORTABLE, _native.AttentionPath.AVX2)
    ]  # the emulated processor's
    with patch.object(_native, "attention_paths", lambda: paths):
        make(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
