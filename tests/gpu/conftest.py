"""Tests that need a GPU: elsewhere they are skipped, and say what is missing."""

import os

import pytest

from lamina.core.errors import ConfigError
from lamina.kernels.gpu.device import find, require


def missing() -> str | None:
    """Why no GPU can be used in this process; None if one can."""
    try:
        require(0, find())
    except ConfigError as error:
        return str(error)
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET=1: kernels are interpreted in this process; run `make test-gpu`"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and (reason := missing()):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))
