"""Fixtures of tests of the whole runtime."""

from pathlib import Path

import pytest

from lamina.core.types import CompletionOutput
from lamina.launch import launch
from tests.support.prepared_checkpoints import write_prepared
from tests.support.random_models import served
from tests.support.running import REQUESTS, Streams, config


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("llama")
    write_prepared(served("llama"), place)
    return place


@pytest.fixture(scope="session")
def undisturbed(checkpoint: Path) -> list[list[CompletionOutput]]:
    """The outputs of ``REQUESTS`` when nothing happens, which do not depend on the number of workers."""
    engine = launch(config(checkpoint, 1, 1))
    try:
        return Streams(engine, REQUESTS).results()
    finally:
        engine.close()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with room for the turns of a chat."""
    place = tmp_path_factory.mktemp("llama")
    write_prepared(served("llama", max_position_embeddings=256), place)
    return place
