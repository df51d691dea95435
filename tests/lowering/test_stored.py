"""Lowered models compute what split ones do, survive being stored and restored, and records cannot run other code."""

import operator
from typing import Any

import msgspec
import pytest
import torch
from torch import fx

from lamina.core.types import DType
from lamina.lowering import LoweredModel, lower
from lamina.lowering.records import (
    NotStorableError,
    StoredNode,
    decode,
    encode,
    restore_graph,
    store_graph,
)
from lamina.splitter import split
from tests.support.lowered_runner import LoweredRunner
from tests.support.random_models import NAMES, VOCABULARY, variant
from tests.support.split_oracle import Runner
from tests.support.sweep import sweep


def written_and_read(model: LoweredModel) -> LoweredModel:
    content = msgspec.msgpack.encode(model, enc_hook=encode)
    return msgspec.msgpack.decode(content, type=LoweredModel, dec_hook=decode)


def assert_same(name: str, dtype: DType) -> None:
    """Restored and lowered models give the same logits, and in float32 those of the split model; and the same facts."""
    model = split(variant(name), dtype)
    torch.manual_seed(0)
    weights = {key: 0.25 * torch.randn(weight.shape).to(weight.dtype) for key, weight in model.weights.items()}
    lowered = lower(model)
    restored = written_and_read(lowered)
    fresh, recalled = LoweredRunner(model, weights, lowered), LoweredRunner(model, weights, restored)
    as_split = Runner(model, weights)
    for batch in ({0: [5, 6, 7], 1: [3]}, {0: [9], 1: [8, 4]}, {0: [1], 1: [1]}):
        tokens = {sequence: torch.tensor(ids) % VOCABULARY for sequence, ids in batch.items()}
        expected = fresh.step(tokens, last_rows_only=True)
        assert torch.equal(recalled.step(tokens, last_rows_only=True), expected)
        if dtype is DType.FLOAT32:
            torch.testing.assert_close(as_split.step(tokens, last_rows_only=True), expected, rtol=1e-5, atol=1e-4)
    for fact in ("dtype", "contexts", "attentions", "sinks", "weights", "positions"):
        assert getattr(restored, fact) == getattr(lowered, fact)
    assert restored.constants.keys() == lowered.constants.keys()
    assert all(torch.equal(restored.constants[key], value) for key, value in lowered.constants.items())


@pytest.mark.parametrize("name", sweep(NAMES, ["gemma2", "deepseek_v3"]))
def test_every_family_is_the_same_when_read_again(name: str) -> None:
    assert_same(name, DType.FLOAT32)


@pytest.mark.parametrize("name", sweep(["llama", "gemma2", "gpt_oss", "deepseek_v3"], ["gpt_oss"]))
def test_low_precision_is_the_same_when_read_again(name: str) -> None:
    assert_same(name, DType.BFLOAT16)


def test_equal_slices_still_share_their_graphs() -> None:
    restored = written_and_read(lower(split(variant("llama", layers=6))))
    assert [part.graphs == restored.parts[1].graphs for part in restored.parts] == [False, *[True] * 5, False]


@pytest.fixture(scope="module")
def llama() -> LoweredModel:
    return lower(split(variant("llama")))


@pytest.mark.parametrize(
    ("position", "node"),
    [
        (0, StoredNode("placeholder", "x=__import__('os')", [], {})),
        (0, StoredNode("placeholder", "lambda", [], {})),
        (0, StoredNode("get_attr", "weight", [], {})),
        (-1, StoredNode("call_function", "system", ["true"], {})),
        (-1, StoredNode("call_function", "torch.load", ["file"], {})),
        (-1, StoredNode("call_function", "aten.nothing.default", [], {})),
        (-1, StoredNode("call_function", "aten.add.nothing", [], {})),
        (-1, StoredNode("call_function", "aten.__class__.mro", [], {})),
        (-1, StoredNode("call_method", "__reduce__", [["node", 0]], {})),
        (-1, StoredNode("call_method", "view", [["node", 0]], {"size=print(1)": 1})),
        (-1, StoredNode("call_method", "view", [["node", 10_000]], {})),
        (-1, StoredNode("call_method", "view", [["node", -1]], {})),
        (-1, StoredNode("call_method", "view", [["dtype", "nn"]], {})),
        (-1, StoredNode("call_method", "view", [["unknown", 1]], {})),
        (-1, StoredNode("call_method", "view", [{"a": 1}], {})),
    ],
    ids=lambda value: f"{value.op} {value.target}" if isinstance(value, StoredNode) else "",
)
def test_a_record_cannot_call_anything_else(llama: LoweredModel, position: int, node: StoredNode) -> None:
    stored = store_graph(llama.graphs[0].main.graph)
    stored.insert(position, node)
    with pytest.raises(NotStorableError, match="lowered graphs have no"):
        restore_graph(stored)


@pytest.mark.parametrize(
    ("function", "argument"),
    [(torch.sin, 1.0), (operator.xor, 1), (torch.ops.prims.sin.default, 1.0), (operator.add, 1j), (operator.add, {})],
)
def test_what_cannot_be_written_is_refused(llama: LoweredModel, function: Any, argument: Any) -> None:
    graph = llama.graphs[-1].main.graph
    with graph.inserting_before(graph.output_node()):
        node: fx.Node = graph.call_function(function, (argument,))
    try:
        with pytest.raises(NotStorableError):
            msgspec.msgpack.encode(llama, enc_hook=encode)
    finally:
        graph.erase_node(node)
