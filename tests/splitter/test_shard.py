"""Ranks of a tensor-parallel replica, in threads of one process, compute what transformers computes."""

import dataclasses
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, fx
from transformers import PretrainedConfig

from lamina.core.errors import UnsupportedModelError
from lamina.core.types import DType
from lamina.splitter import SplitModel, shard
from lamina.splitter import assemble as assembly
from lamina.splitter.assemble import assemble, capture_clean
from lamina.splitter.capture import Capture
from lamina.splitter.collective import ALL_REDUCE, Reduce, bind
from lamina.splitter.parts import Indices, Rank
from lamina.splitter.split_model import cut
from tests.support.random_models import NAMES, VOCABULARY, random_model, variant
from tests.support.split_oracle import Runner
from tests.support.sweep import sweep

TIMEOUT_S = 60.0


class Ranks:
    """Threads that add up tensors, as the ranks of a replica do."""

    def __init__(self, count: int) -> None:
        self._tensors: list[Tensor | None] = [None] * count
        self._barrier = threading.Barrier(count)
        self.sums = [0] * count

    def reduce(self, rank: int) -> Reduce:
        """The sum as rank ``rank`` takes part in it."""

        def add(x: Tensor) -> Tensor:
            self._tensors[rank] = x
            self._barrier.wait(TIMEOUT_S)
            total = torch.stack([tensor for tensor in self._tensors if tensor is not None]).sum(0)
            self._barrier.wait(TIMEOUT_S)
            self.sums[rank] += 1
            return total

        return add

    def run(self, work: Callable[[int], Tensor]) -> list[Tensor]:
        """What each rank returns."""

        def one(rank: int) -> Tensor:
            try:
                with torch.no_grad():
                    return work(rank)
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(len(self._tensors)) as pool:
            return list(pool.map(one, range(len(self._tensors))))


def runners(config: PretrainedConfig, state: dict[str, Tensor], ranks: Ranks, count: int) -> list[Runner]:
    """A reference runtime for every rank, which keeps the K and V of its own heads."""
    found, captured = [], capture_clean(config, DType.FLOAT32)
    for number in range(count):
        model = assemble(config, DType.FLOAT32, captured, Rank(number, count))
        slices = tuple(dataclasses.replace(p, graph=bind(p.graph, ranks.reduce(number))) for p in model.slices)
        weights = {name: cut(state[name], model.shards.get(name, {})) for name in model.weights}
        found.append(Runner(dataclasses.replace(model, slices=slices), weights))
    return found


def assert_same_logits(config: PretrainedConfig, count: int) -> list[SplitModel]:
    model, ranks = random_model(config), Ranks(count)
    each = runners(config, model.state_dict(), ranks, count)
    sequences = {0: torch.randint(3, VOCABULARY, (7,)), 1: torch.randint(3, VOCABULARY, (9,))}
    with torch.no_grad():
        expected = [model(input_ids=ids[None]).logits[0] for ids in sequences.values()]
    first = ranks.run(lambda rank: each[rank].step({name: ids[:5] for name, ids in sequences.items()}))
    then = ranks.run(lambda rank: each[rank].step({name: ids[5:] for name, ids in sequences.items()}))
    wanted = torch.cat([logits[:5] for logits in expected]), torch.cat([logits[5:] for logits in expected])
    for actual, right in zip((first, then), wanted, strict=True):
        for logits in actual:
            assert (logits - right).abs().max() <= 1e-5 * max(1.0, right.abs().max().item())
            assert torch.equal(logits, actual[0])
    assert len(set(ranks.sums)) == 1 and ranks.sums[0]
    return [runner.model for runner in each]


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
    assert_all_is_held(assert_same_logits(variant(name), 2))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name != "bloom-6-heads"])
def test_four_ranks_compute_the_model(name: str) -> None:
    """Some with fewer KV heads than ranks, which share them."""
    assert_all_is_held(assert_same_logits(variant(name), 4))


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
    monkeypatch.setattr(
        assembly, "shard", lambda captured, rank: dataclasses.replace(shard.shard(captured, rank), parts={})
    )
    with pytest.raises(UnsupportedModelError, match="each of 2 ranks would hold 100% of the weights of this 'llama'"):
        assemble(variant("llama"), DType.FLOAT32, llama, Rank(0, 2))
