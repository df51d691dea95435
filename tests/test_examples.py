"""The examples in the docstrings of the main public objects run, and give what they show."""

import doctest
import pkgutil
import sys

import pytest

PUBLIC = [
    "lamina.sdk.Lamina",
    "lamina.sdk.Lamina.chat",
    "lamina.sdk.AsyncLamina",
    "lamina.core.sampling.SamplingParams",
    "lamina.kernels.attention.partial",
    "lamina.splitter.assemble.split",
    "lamina.transport.base.Endpoint",
    "lamina.planning.plan",
]


@pytest.mark.parametrize("name", PUBLIC)
def test_the_example_gives_what_it_shows(name: str) -> None:
    shown = pkgutil.resolve_name(name)
    there = sys.modules[getattr(shown, "__module__", name)]
    (example,) = doctest.DocTestFinder(recurse=False).find(shown, name, there, globs=dict(vars(there)))
    assert example.examples
    printed: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=printed.append)
    assert not printed, "".join(printed)
