"""Replicas of several stages, on real workers, against Hugging Face and against one worker with all slices."""

import random
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import PretrainedConfig

from lamina.cluster.pool import CPU
from lamina.config.engine_config import EngineConfig
from lamina.control.messages import LoadProgress
from lamina.core.errors import ConfigError
from lamina.core.outputs import CompletionOutput
from lamina.core.sampling import SamplingParams
from lamina.core.types import DType
from lamina.launch import launch
from lamina.lowering import Target
from tests.support.prepared_checkpoints import write_prepared
from tests.support.random_models import NAMES, SERVED, greedy, served, variant
from tests.support.running import (
    HALF,
    REQUESTS,
    Killable,
    Streams,
    assert_same,
    check_last_loss,
    config,
    run_all,
    survive,
)
from tests.support.waiting import END_S, wait_until

TOKENS = 12
LENGTHS = (1, 6, 7, 8, 21, 34, 45, 14)


def check(
    folder: Path, model: PretrainedConfig, stages: int, lengths: tuple[int, ...] = LENGTHS, **settings: Any
) -> dict[str, int]:
    """Greedy tokens of one and of two completions equal Hugging Face's. Returns the bytes loaded, by compute worker."""
    given: dict[str, Any] = {"compute": f"cpu:{stages}", "memory": "cpu:2"} | settings
    target = Target.CPU if given["compute"].startswith(CPU) else Target.GPU
    reference = write_prepared(model, folder, target=target)
    draw = random.Random(model.model_type)
    prompts = [[draw.randrange(3, model.vocab_size) for _ in range(length)] for length in lengths]
    prompts.append(prompts[-2][:30] + prompts[-1])  # begins like another one
    wanted = EngineConfig(
        model=str(folder),
        pipeline_parallel=stages,
        max_model_len=64,
        max_num_seqs=6,
        max_num_batched_tokens=24,
        kv_cache_memory_bytes=4 << 20,
        dtype=DType.FLOAT32,
        **given,
    )
    loaded: dict[str, int] = {}

    def on_progress(worker: str, progress: LoadProgress) -> None:
        if progress.stage == "weights":
            assert progress.done <= progress.total
            loaded[worker] = progress.done

    engine = launch(wanted, on_progress)
    try:
        params = [SamplingParams(n=n, temperature=0.0, max_tokens=TOKENS, ignore_eos=True) for n in (1, 2)]
        outputs = run_all(engine, prompts * 2, [each for each in params for _ in prompts])
    finally:
        engine.close()
    expected = [greedy(reference, prompt, TOKENS) for prompt in prompts]
    got = [[part.token_ids for part in output.outputs] for output in outputs]
    assert got == [[tokens] for tokens in expected] + [[tokens] * 2 for tokens in expected]
    return loaded


@pytest.mark.slow  # test_preemption.py runs two stages too, and tests/compute/test_preparation.py loads them
def test_each_stage_loads_its_own_weights_and_an_embedding_tied_to_the_head_at_both_ends(tmp_path: Path) -> None:
    model = served("llama", layers=2, tie_word_embeddings=True)
    loaded = check(tmp_path, model, 2, lengths=(1, 21, 14), memory="cpu:1")
    embedding = model.vocab_size * model.hidden_size * 4
    (file,) = tmp_path.glob("*.safetensors")
    whole = file.stat().st_size  # with a header
    assert loaded.keys() == {"compute0", "compute1"}
    assert 0 <= whole + embedding - sum(loaded.values()) < 8192
    assert max(loaded.values()) < 0.7 * whole


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"transport": "tcp"},
        {"plan_ahead": False},
        {"lanes": 5},
        {"partition": "head", "memory": "cpu:2"},
        {"balance": "bandwidth", "kv_tokens_per_worker": 40},
        {"compute": "cpu:4"},
        {"compute": "cpu:3", "pipeline_parallel": 3},
        {"memory": "local"},
        {"compute": "cpu:4", "memory": "local", "lanes": 8},
        {"memory": "local,cpu:1", "kv_tokens_per_worker": 40, "prompt_attention": "compute"},
        {"memory": "local", "kv_cache_memory_bytes": 150_000},  # requests give way
    ],
    ids=str,
)
def test_stages_give_the_tokens_of_one_worker(
    settings: dict[str, Any],
    checkpoint: Path,
    undisturbed: list[list[CompletionOutput]],
) -> None:
    """Whatever is requested: seeds, penalties, log probabilities, stops."""
    wanted: dict[str, Any] = {"pipeline_parallel": 2, "compute": "cpu:2"} | settings
    engine = launch(replace(config(checkpoint, 2, 2), **wanted))
    try:
        assert_same(Streams(engine, REQUESTS).results(), undisturbed)
        assert_same(Streams(engine, REQUESTS).results(), undisturbed)  # from cached prefixes
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("family", SERVED)
def test_four_stages_equal_hugging_face(family: str, tmp_path: Path) -> None:
    loaded = check(tmp_path, served(family, layers=4), 4)
    assert len(loaded) == 4


@pytest.mark.slow
@pytest.mark.parametrize("family", NAMES)
def test_two_stages_equal_hugging_face(family: str, tmp_path: Path) -> None:
    check(tmp_path, served(family) if family in SERVED else variant(family), 2)


@pytest.mark.slow
@pytest.mark.parametrize("family", SERVED)
def test_stages_with_local_memory_equal_hugging_face(family: str, tmp_path: Path) -> None:
    """Each stage has K and V of its own layers, of windows and of both kinds too."""
    check(tmp_path, served(family), 2, memory="local")


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 3])
def test_stages_with_local_memory_of_gpus_equal_hugging_face(stages: int, tmp_path: Path) -> None:
    """Divide a model of two layers: the last of three stages has no attention."""
    pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
    model = served("llama", layers=2)
    check(tmp_path, model, stages, lengths=(1, 3, 30), compute=f"emulated:{stages}", memory="local")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_stages_on_emulated_gpus_equal_hugging_face(family: str, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
    check(tmp_path, served(family), 2, lengths=(1, 3, 30), compute="emulated:2", memory="cpu:1")


@pytest.mark.slow
def test_more_stages_than_slices_are_refused_before_weights_are_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pipeline_parallel is 4, and the model has 3 slices"):
        check(tmp_path, served("llama", layers=2), 4)


def test_statistics_show_the_slots_of_every_stage(checkpoint: Path) -> None:
    engine = launch(replace(config(checkpoint, 4, 1, pipeline_parallel=2), memory="local"))
    try:
        before = engine.stats()
        assert before.memory.keys() == before.places.keys() == {f"compute{number}" for number in range(4)}
        assert {name: (place["replica"], place["stage"]) for name, place in before.places.items()} == {
            f"compute{number}": divided
            for number, divided in enumerate([("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")])
        }
        slots = {name: memory.capacity for name, memory in before.memory.items()}
        assert slots["compute0"] == slots["compute1"] and slots["compute2"] == slots["compute3"]
        assert before.slots == (0, slots["compute0"] + slots["compute2"])
        reported = set[str]()

        def ended() -> bool:
            reported.update(name for name, one in engine.stats().memory.items() if one.used)
            return len(streams.outputs) == len(REQUESTS)

        for _ in range(60):  # workers report now and then, and these requests are short
            streams = Streams(engine, REQUESTS)
            wait_until(ended, "the requests did not end")
            if reported == before.memory.keys():
                break
        assert reported == before.memory.keys(), "a stage did not report its slots"
        wait_until(lambda: not any(one.used for one in engine.stats().memory.values()), "slots stayed in use")
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [0, 1])
def test_a_lost_memory_worker_is_a_pause(
    restarts: int,
    checkpoint: Path,
    undisturbed: list[list[CompletionOutput]],
) -> None:
    wanted = config(checkpoint, 2, 2, pipeline_parallel=2, max_restarts=restarts)
    assert_same(survive(wanted, [("memory0", signal.SIGKILL)], 150), undisturbed[:HALF])


@pytest.mark.slow
def test_memory_workers_join_and_leave_and_stages_stay(
    checkpoint: Path,
    undisturbed: list[list[CompletionOutput]],
) -> None:
    engine = launch(config(checkpoint, 2, 1, pipeline_parallel=2))
    try:
        streams = Streams(engine, REQUESTS)
        streams.wait_for_tokens(100)
        (joined,) = engine.scale(memory=1).result(END_S)
        streams.wait_for_tokens(300)
        engine.scale(memory=-1).result(END_S)
        assert_same(streams.results(), undisturbed)
        for count in (-1, 1):
            with pytest.raises(ConfigError, match="a replica has 2 compute workers, and 1 is no multiple of that"):
                engine.scale(compute=count).result(END_S)
        assert engine.stats().recoveries == 0 and joined == "memory1"
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["compute0", "compute3"])
def test_a_lost_stage_costs_its_replica(
    victim: str,
    checkpoint: Path,
    undisturbed: list[list[CompletionOutput]],
) -> None:
    wanted = config(checkpoint, 4, 2, pipeline_parallel=2)
    assert_same(survive(wanted, [(victim, signal.SIGKILL)], 150), undisturbed[:HALF])


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["compute0", "compute1"])
def test_the_last_replica_takes_the_engine_with_it(victim: str, checkpoint: Path) -> None:
    workers = Killable()
    engine = launch(config(checkpoint, 2, 2, pipeline_parallel=2), workers=workers)
    pids = workers.pids
    try:
        streams = Streams(engine, REQUESTS)
        streams.wait_for_tokens(150)
        check_last_loss(streams, workers, victim)
    finally:
        engine.close()
    assert not [name for name, pid in pids.items() if psutil.pid_exists(pid)]
