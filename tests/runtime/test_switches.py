"""No optimisation changes the tokens: whatever is on, they equal Hugging Face's, or depend on the seed alone."""

import itertools
import os
import random
from pathlib import Path
from typing import Any

import pytest

from lamina.config.engine_config import EngineConfig
from lamina.core.pipeline import Arrangement
from lamina.core.sampling import SamplingParams
from lamina.core.types import DType
from lamina.launch import launch
from lamina.schedule.lane_choice import LaneChooser
from tests.support.prepared_checkpoints import write_prepared
from tests.support.random_models import SERVED_VOCABULARY, greedy, served
from tests.support.running import TOKENS, run_all
from tests.support.sweep import sweep

CORES = [str(core) for core in sorted(os.sched_getaffinity(0))]
SWITCHES: dict[str, dict[str, Any]] = {
    "nothing ahead": {"plan_ahead": False},
    "two lanes": {"lanes": 2},
    "lanes that stay": {"compute": "cpu:2", "lanes": 5, "pipelining": "fixed"},
    "lanes that rotate": {"compute": "cpu:2", "lanes": 3},
    "lanes that change while running": {"compute_cores": CORES[0], "memory_cores": CORES[-1]},
    "everything": {"compute": "cpu:2", "lanes": 3},
    "TCP": {"transport": "tcp"},
    "lanes that stay, over TCP": {"compute": "cpu:2", "lanes": 5, "pipelining": "fixed", "transport": "tcp"},
    "everything over TCP": {"compute": "cpu:2", "lanes": 3, "transport": "tcp"},
}


GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
DRAWN = SamplingParams(n=2, seed=5, repetition_penalty=1.3, presence_penalty=0.5, max_tokens=TOKENS, min_tokens=4)


class Switched:
    """A model with windows, sinks and experts, and its answers with the default settings."""

    def __init__(self, place: Path) -> None:
        self.model = str(place)
        reference = write_prepared(served("gpt_oss"), place)
        draw = random.Random(3)
        self.prompts = [[draw.randrange(3, SERVED_VOCABULARY) for _ in range(n)] for n in (1, 3, 8, 21, 55, 7)]
        self.greedy = [[greedy(reference, prompt, TOKENS)] for prompt in self.prompts]
        outputs = self.run({})
        assert outputs[: len(self.prompts)] == self.greedy
        self.drawn = outputs[len(self.prompts) :]

    def run(self, switches: dict[str, Any]) -> list[list[list[int]]]:
        """Token ids of every completion: greedy requests first, then drawn ones."""
        settings: dict[str, Any] = {
            "memory": "cpu:2",
            "dtype": DType.FLOAT32,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 24,
        }
        engine = launch(EngineConfig(model=self.model, **(settings | switches)))
        try:
            each = [GREEDY] * len(self.prompts) + [DRAWN] * len(self.prompts)
            outputs = run_all(engine, self.prompts * 2, each)
        finally:
            engine.close()
        return [[part.token_ids for part in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def switched(tmp_path_factory: pytest.TempPathFactory) -> Switched:
    return Switched(tmp_path_factory.mktemp("switched"))


@pytest.mark.parametrize("switches", sweep(SWITCHES, ["everything over TCP"]))
def test_every_optimisation_leaves_the_tokens_alone(switched: Switched, switches: dict[str, Any]) -> None:
    """Greedy tokens equal Hugging Face's. Sampled tokens, with penalties, depend on the seed alone, on any replica."""
    outputs = switched.run(switches)
    assert outputs[: len(switched.prompts)] == switched.greedy
    assert outputs[len(switched.prompts) :] == switched.drawn


@pytest.mark.slow  # tests/schedule/ checks what replicas are told
def test_lanes_that_change_replicas_and_order_leave_the_tokens_alone(
    switched: Switched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arrangement of lanes changes every few steps: sequences go to replicas that have not run them, and back."""
    steps = itertools.count(1)
    seen = set()

    def choose(chooser: LaneChooser, sequences: int, now: float) -> Arrangement:
        choices = [Arrangement(4), Arrangement(3, rotates=True), Arrangement(2), Arrangement(6)]
        seen.add(chosen := choices[next(steps) // 6 % len(choices)])
        return chosen

    monkeypatch.setattr(LaneChooser, "choose", choose)
    outputs = switched.run({"compute": "cpu:2", "compute_cores": CORES[0], "memory_cores": CORES[-1]})
    assert len(seen) == 4
    assert outputs[: len(switched.prompts)] == switched.greedy
    assert outputs[len(switched.prompts) :] == switched.drawn
