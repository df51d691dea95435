"""Ranks of a tensor-parallel replica in threads of one process."""

import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor
from transformers import PretrainedConfig

from lamina.core.types import DType
from lamina.splitter import SplitModel
from lamina.splitter.assemble import assemble, capture_clean
from lamina.splitter.markers import Reduce, bind
from lamina.splitter.parts import Rank
from lamina.splitter.split_model import cut
from tests.support.random_models import VOCABULARY, random_model
from tests.support.split_oracle import Runner

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


def assert_ranks_same_logits(
    config: PretrainedConfig, count: int, make_runners: Callable[..., list[Runner]] = runners
) -> list[SplitModel]:
    """Compare ranks with transformers; returns what each of them has of the model."""
    model, ranks = random_model(config), Ranks(count)
    each = make_runners(config, model.state_dict(), ranks, count)
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
