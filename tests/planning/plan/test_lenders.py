"""Copies of a model that lend each other KV memory, as the cost report plays them."""

from collections import Counter

import numpy as np
import pytest

from bench.cost import elastic, pooled
from bench.cost.lamina_paper import cost_model
from bench.cost.pooled import OUTPUT, Lender, Pooled, lengths, ranges
from lamina.planning.plan import hardware, model_shapes
from lamina.planning.simulate import Arrivals, Deployment, Result, State, System
from lamina.planning.simulate.baseline_instance import BLOCK, Batch, Chunk, Running
from lamina.planning.simulate.baselines import BaselineSimulation

A100 = hardware.load()["a100"]
SMALL = model_shapes.find("Llama-2-7B")


def run(kind: type[BaselineSimulation], prompts: list[int], output: int) -> tuple[Result, list[Lender]]:
    """Requests that come at once to two copies."""
    deployment = Deployment(model=SMALL, compute=A100, compute_workers=2)
    count = len(prompts)
    arrivals = Arrivals(np.zeros(count), np.array(prompts), np.full(count, output))
    simulation = kind(System.TENSOR_PARALLEL, deployment, arrivals, ())
    result = simulation.simulate()
    return result, [one for one in simulation._first if isinstance(one, Lender)]


def test_long_requests_take_what_others_have_free_and_give_it_back() -> None:
    prompts = [150_000, 1000, 110_000, 30_000, 90_000, 2000]
    served, lenders = run(Pooled, prompts, 20)
    assert served.log.count(State.FINISHED) == len(prompts)
    for one in lenders:
        assert one.free == one.blocks and not one.away and one.stuck is None
    refused, _ = run(BaselineSimulation, prompts, 20)
    assert refused.log.count(State.REFUSED) == 1


def test_every_block_is_free_or_used_by_one_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """With four copies."""

    class Watched(Lender):
        def plan(self) -> Batch | None:
            batch = super().plan()
            for one in (self, *self.others):
                own = sum(held.blocks - one.away.get(held, Counter()).total() for held in one.running)
                assert one.free + own + sum(other.borrowed(one) for other in one.others) == one.blocks
            return batch

    monkeypatch.setattr(pooled, "Lender", Watched)
    deployment = Deployment(model=SMALL, compute=A100, compute_workers=4, prefix_cache=False)
    contexts = ranges(120_000, 400_000, 0.2, 24)
    arrivals = Arrivals(np.zeros(24), contexts - 8, np.full(24, 8))
    result = Pooled(System.TENSOR_PARALLEL, deployment, arrivals, ()).simulate()
    assert result.log.count(State.FINISHED) == 24


def test_a_request_longer_than_all_copies_is_refused() -> None:
    result, (one, other) = run(Pooled, [10], 5)
    longest = BLOCK * (one.blocks + other.blocks)
    result, _ = run(Pooled, [longest + 1, 10], 5)
    assert result.log.states == [State.REFUSED, State.FINISHED]


def test_copies_with_room_of_their_own_are_what_they_are_without_lending() -> None:
    prompts = [3000, 200, 9000, 700, 50, 12_000]
    with_, without = (run(kind, prompts, 30)[0] for kind in (Pooled, BaselineSimulation))
    np.testing.assert_array_max_ulp(with_.log.end_s, without.log.end_s, maxulp=2)  # sums, not products


def test_a_step_waits_for_the_longer_attention_and_the_lender_works_for_it() -> None:
    """By hand: a third of 90,000 tokens lies elsewhere."""
    model = cost_model(SMALL, A100)
    debtor, lender = (Lender(model, 1, 16, 2048) for _ in range(2))
    debtor.others, lender.others = [lender], [debtor]
    sequence = Running(0, 90_000)
    sequence.cached = 90_000
    batch = Batch([sequence], [])
    alone = debtor.step_seconds(batch)
    taken = {sequence: Counter({lender: 30_000 // BLOCK})}
    debtor.away = taken
    there = SMALL.layers * (float(model.attention_seconds(60_001, 1)) - float(model.attention_seconds(90_001, 1)))
    assert debtor.step_seconds(batch) == pytest.approx(alone + there)
    helped = SMALL.layers * float(model.attention_seconds(30_000, 1))
    decoding, computing = lender.step_seconds(batch), debtor.step_s
    assert decoding == pytest.approx(alone + helped)
    # A short prompt shares all of its time with the debtor; a long one, only while that decodes.
    for tokens, busy in ((2000, helped / computing), (90_000, 0.0)):
        prompt = Batch([], [Chunk(sequence, 0, tokens)])
        debtor.away = {}
        usual = lender.step_seconds(prompt)
        debtor.away = taken
        slower = usual / (1 - busy) if busy else usual + OUTPUT * helped
        assert lender.step_seconds(prompt) == pytest.approx(slower)
    debtor.step_seconds(prompt)  # while it computes a prompt, it decodes nothing
    assert lender.step_seconds(batch) == pytest.approx(alone)


def test_drawn_contexts_are_as_published() -> None:
    drawn = lengths(56_362, 28_788, 200_000, 200)
    assert drawn.mean() == pytest.approx(56_362, rel=0.1) and drawn.std() == pytest.approx(28_788, rel=0.2)
    some = ranges(100_000, 200_000, 0.3, 200)
    assert (some >= 100_000).mean() == pytest.approx(0.3, abs=0.08) and some.max() < 200_000


def test_scaling_is_what_instances_write_and_send() -> None:
    """One instance has no messages; many sequences on two take half the time, and one sequence two messages a layer."""
    model = cost_model(SMALL, hardware.load()["a800"])
    alone = float(model.pass_seconds(64, 2)) + SMALL.layers * float(model.attention_seconds(64_000, 64, 1 / 2))
    assert elastic.iteration(model, 64, 1000, 2, 1) == pytest.approx(alone)
    most, one = (
        elastic.iteration(model, batch, 1000, 2, 1) / elastic.iteration(model, batch, 1000, 2, 2) for batch in (2048, 1)
    )
    assert 1.8 < most < 2 and 0.8 < one < 1
    kept, all_kept = (elastic.scaling_down(model, 10_000, 2, 4, left) for left in (1, 4))
    assert 0 == all_kept < kept < 0.02
