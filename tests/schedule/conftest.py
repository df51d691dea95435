"""What tests of the scheduler share."""

from collections.abc import Iterator

import pytest

from lamina.kv import prefix_cache
from lamina.schedule import admission, growth, moves


@pytest.fixture(scope="module")
def impatient() -> Iterator[None]:
    """Room is sought soon and few tokens are worth a move, so that requests of these tests' size move."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admission, "PAUSE", 0)
        patch.setattr(admission, "PATIENCE", 1)
        patch.setattr(growth, "CHEAP", 3)
        yield


@pytest.fixture(scope="module")
def short_prefixes() -> Iterator[None]:
    """Prefixes of any length are kept and evicted token by token."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_cache, "SHORTEST", 1)
        patch.setattr(prefix_cache, "GRAIN", 1)
        yield


@pytest.fixture
def unbounded_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of tokens may move in a step."""
    monkeypatch.setattr(moves, "TOKENS_PER_STEP", 1000)
