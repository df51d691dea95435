"""Wide sweeps of which the ordinary suite runs a few cases."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pytest
from hypothesis import settings

MANY_EXAMPLES = settings(max_examples=2 * settings().max_examples)
"""Twice the examples of the profile, for properties of whole schedules."""


def sweep(cases: Mapping[str, Any] | Iterable[str], ordinary: Collection[str]) -> list[Any]:
    """Parameters with the cases' names as ids; every case that ``ordinary`` does not name is marked slow."""
    named = cases if isinstance(cases, Mapping) else {name: name for name in cases}
    assert set(ordinary) <= named.keys(), f"no such cases: {set(ordinary) - named.keys()}"
    return [
        pytest.param(value, id=name, marks=() if name in ordinary else pytest.mark.slow)
        for name, value in named.items()
    ]
