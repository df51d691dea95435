"""Ranks of a tensor-parallel replica, in threads of one process, compute what transformers computes."""

import itertools

import pytest
import torch
from torch import fx

from lamina.core.errors import UnsupportedModelError
from lamina.core.types import DType
from lamina.splitter import SplitModel, shard
from lamina.splitter import assemble as assembly
from lamina.splitter.assemble import assemble, capture_clean
from lamina.splitter.capture import Capture
from lamina.splitter.markers import ALL_REDUCE
from lamina.splitter.parts import Indices, Rank
from tests.support.random_models import NAMES, variant
from tests.support.split_ranks import assert_ranks_same_logits
from tests.support.sweep import sweep


@pytest.fixture(scope="module")
def llama() -> Capture:
    return capture_clean(variant("llama"), DType.FLOAT32)


def assert_all_is_held(models: list[SplitModel]) -> None:
    """Between them the ranks hold every weight."""
    for name, weight in models[0].weights.items():
        held = torch.zeros(weight.shape)
        for model in models:
            shard = model.shards.get(name, {})
            ranges = [shard.get(dim, ((0, size),)) for dim, size in enumerate(weight.shape)]
            for corner in itertools.product(*ranges):
                held[tuple(slice(*bounds) for bounds in corner)] = 1
        assert held.all(), name


@pytest.mark.parametrize("name", sweep(NAMES, ["qwen2_moe"]))
def test_two_ranks_compute_the_model(name: str) -> None:
    assert_all_is_held(assert_ranks_same_logits(variant(name), 2))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name != "bloom-6-heads"])
def test_four_ranks_compute_the_model(name: str) -> None:
    """Some with fewer KV heads than ranks, which share them."""
    assert_all_is_held(assert_ranks_same_logits(variant(name), 4))


def test_a_rank_has_half_of_a_llama(llama: Capture) -> None:
    """One sum after each row-wise layer; norms alone are whole; K and V of each rank's own heads."""
    model = assemble(variant("llama"), DType.FLOAT32, llama, Rank(1, 2))
    assert {name for name in model.weights if name not in model.shards} == {
        name for name in model.weights if "norm" in name
    }
    assert model.shards["model.layers.1.self_attn.o_proj.weight"] == {1: ((16, 32),)}
    assert model.shards["model.layers.1.mlp.up_proj.weight"] == {0: ((24, 48),)}
    assert [(spec.query_heads, spec.kv_heads) for spec in model.attentions] == [(2, 1)] * 2
    assert [(spec.query_heads, spec.kv_heads) for spec in model.whole] == [(4, 2)] * 2
    assert [len(part.graph.graph.find_nodes(op="call_function", target=ALL_REDUCE)) for part in model.slices] == [
        *(1, 2, 3),  # the embedding; o_proj and down_proj; these and the head
    ]


def test_what_cannot_be_divided_is_refused(llama: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    config = variant("llama")
    with pytest.raises(UnsupportedModelError, match="4 query heads and 2 KV heads cannot be divided among 3 ranks"):
        assemble(config, DType.FLOAT32, llama, Rank(0, 3))
    monkeypatch.setattr(shard, "_Plan", NothingByRows)
    with pytest.raises(
        UnsupportedModelError, match=r"goes through \['unsqueeze'\] to an operator that needs the heads"
    ):
        assemble(config, DType.FLOAT32, llama, Rank(0, 2))


class NothingByRows(shard._Plan):
    def _find_rows(self) -> dict[fx.Node, Indices]:
        return {}


def test_a_plan_that_shards_little_is_refused(llama: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "shard", lambda captured, rank: (shard.shard(captured, rank)[0], {}))
    with pytest.raises(UnsupportedModelError, match="each of 2 ranks would hold 100% of the weights of this 'llama'"):
        assemble(variant("llama"), DType.FLOAT32, llama, Rank(0, 2))
