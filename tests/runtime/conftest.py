"""Fixtures of tests of the whole runtime.

They import what makes models when they run: the virtual machine of ``tests/rdma`` has no transformers, and loads this
file with its tests.
"""

from pathlib import Path

import pytest

from lamina.core.outputs import CompletionOutput
from lamina.launch import launch


def _llama(place: Path, **changes: int) -> Path:
    """Write a checkpoint whose slices for one and for two ranks are cached."""
    from tests.support.prepared_checkpoints import write_prepared
    from tests.support.random_models import served

    for ranks in (1, 2):
        write_prepared(served("llama", **changes), place, ranks=ranks)
    return place


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def undisturbed(checkpoint: Path) -> list[list[CompletionOutput]]:
    """The outputs of ``REQUESTS`` when nothing happens, which do not depend on the number of workers."""
    from tests.support.running import REQUESTS, Streams, config

    engine = launch(config(checkpoint, 1, 1))
    try:
        results = Streams(engine, REQUESTS).results()
    finally:
        engine.close()
    assert all(part.token_ids for each in results for part in each), "an answer is empty, and shows nothing"
    return results


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with room for the turns of a chat."""
    return _llama(tmp_path_factory.mktemp("llama"), max_position_embeddings=256)
