"""The examples in the docstrings of the main public objects run, and give what they show."""

import doctest
import importlib

import pytest

PUBLIC = [
    "lamina.sdk.Lamina",
    "lamina.core.types.SamplingParams",
    "lamina.kernels.attention.partial",
    "lamina.splitter.assemble.split",
    "lamina.transport.base.Endpoint",
    "lamina.planning.plan",
]


@pytest.mark.parametrize("name", PUBLIC)
def test_the_example_gives_what_it_shows(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    if name == "lamina.planning.plan":
        module, attribute = name, ""
    there = importlib.import_module(module)
    shown = getattr(there, attribute) if attribute else there
    (example,) = doctest.DocTestFinder(recurse=False).find(shown, name, there, globs=dict(vars(there)))
    assert example.examples
    printed: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=printed.append)
    assert not printed, "".join(printed)
