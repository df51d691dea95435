"""Blocks of preempted requests: what a simulated engine finds again when it admits them again."""

import numpy as np
import pytest

from lamina.planning.plan import hardware, model_shapes
from lamina.planning.simulate import Arrivals, Deployment, State, System
from lamina.planning.simulate.baseline_instance import BLOCK, FreeBlocks, Running
from lamina.planning.simulate.baselines import BaselineSimulation


@pytest.mark.parametrize("seed", range(20))
def test_blocks_are_used_again_in_the_order_in_which_they_were_freed(seed: int) -> None:
    """Against a list with an entry for each free block: its owner's number, or None."""
    random = np.random.default_rng(seed)
    blocks = FreeBlocks(8)
    free: list[int | None] = [None] * 8
    owners: list[Running] = []
    for _ in range(60):
        choice = random.integers(3)
        if choice == 0:
            used = int(random.integers(len(free) + 1))
            blocks.use(used)
            del free[:used]
        elif choice == 1:
            added = int(random.integers(1, 9))
            kept = int(random.integers(added + 1))
            blocks.add(added)
            blocks.keep(owner := Running(len(owners), 1), kept)
            free += [None] * (added - kept) + [len(owners)] * kept
            owners.append(owner)
        elif owners:
            place = int(random.integers(len(owners)))
            assert blocks.reclaim(owners[place]) == free.count(place)
            free = [one for one in free if one != place]
    blocks.use(len(free))
    with pytest.raises(IndexError):
        blocks.use(1)


def crowded(prefix_cache: bool) -> tuple[BaselineSimulation, int]:
    """An engine with room for about half of the tokens that its requests grow to."""
    shape, count = model_shapes.find("Llama-3-8B"), 40
    device = hardware.load()["rtx4090"]
    deployment = Deployment(model=shape, compute=device, compute_workers=1, prefix_cache=prefix_cache)
    arrivals = Arrivals(np.zeros(count), np.full(count, 1000), np.full(count, 2000))
    return BaselineSimulation(System.CHUNKED_PREFILL, deployment, arrivals, ()), count


def admitted(prefix_cache: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[list[tuple[int, int]], float]:
    """The cached tokens and the tokens to cache of each request when it is admitted, and the seconds of the run."""
    simulation, count = crowded(prefix_cache)
    (instance,) = simulation._first
    admit, found = instance._admit, []

    def noted() -> Running:
        sequence = admit()
        found.append((sequence.cached, sequence.target))
        return sequence

    monkeypatch.setattr(instance, "_admit", noted)
    result = simulation.simulate()
    assert result.log.count(State.FINISHED) == count and result.preempted > 10 and len(found) > count
    assert instance.free == instance.blocks
    return found, result.seconds


def test_a_preempted_request_computes_only_what_was_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    (found, seconds), (none, longer) = (admitted(caches, monkeypatch) for caches in (True, False))
    assert all(cached % BLOCK == 0 and cached < target for cached, target in found)
    assert any(cached for cached, _ in found) and not any(cached for cached, _ in none)
    assert sum(target - cached for cached, target in found) < sum(target for _, target in none)
    assert seconds < longer


def test_a_request_may_use_the_last_block() -> None:
    """vLLM admits a request as long as its blocks are free, and keeps none for others to grow."""
    simulation, _ = crowded(True)
    (instance,) = simulation._first
    assert instance.could_hold(instance.blocks * BLOCK) and instance.has_room(instance.blocks * BLOCK)
    assert not instance.has_room(instance.blocks * BLOCK + 1)
