"""Requests on running engines: submitted, waited for, disturbed, and compared with what they should give."""

import dataclasses
import itertools
import random
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from lamina.cluster.local_workers import LocalWorkers
from lamina.config.engine_config import EngineConfig
from lamina.core.outputs import CompletionOutput, RequestOutput
from lamina.core.sampling import SamplingParams, StructuredOutputs
from lamina.core.types import DType
from lamina.engine.engine import Engine
from lamina.engine.updates import RequestUpdate, UpdateSum
from lamina.launch import launch
from lamina.lowering import Target
from tests.support.prepared_checkpoints import write_prepared
from tests.support.random_models import SERVED_VOCABULARY, greedy, served
from tests.support.waiting import END_S, wait_until
from tests.support.whole_outputs import whole

Prompt = tuple[list[int], SamplingParams]
LONG = SamplingParams(max_tokens=100, ignore_eos=True, temperature=0.0)


def config(checkpoint: Path, compute: int, memory: int, **settings: object) -> EngineConfig:
    """Prompts take several chunks, and a memory worker holds a few requests."""
    base = EngineConfig(
        model=str(checkpoint),
        compute=f"cpu:{compute}",
        memory=f"cpu:{memory}",
        dtype=DType.FLOAT32,
        max_num_seqs=16,
        max_num_batched_tokens=32,
        kv_cache_memory_bytes=1_000_000,
        max_restarts=0,
    )
    return dataclasses.replace(base, **settings)  # type: ignore[arg-type]


PAIRS = StructuredOutputs(regex="( ?[\u4e03-\u4e20] ?[\u4e21-\u4e50])+")  # tokens of the test model begin with a space


def prompts(count: int, seed: int) -> list[Prompt]:
    """Requests of every kind: greedy and seeded, several completions, penalties, logprobs, stops."""
    draw = random.Random(seed)
    kinds = [
        SamplingParams(temperature=0.0, logprobs=2),
        SamplingParams(temperature=0.9, seed=7, n=3),
        SamplingParams(temperature=0.8, seed=8, repetition_penalty=1.3, presence_penalty=0.5),
        SamplingParams(temperature=0.0, frequency_penalty=0.7, n=2),
        SamplingParams(temperature=1.0, seed=9, top_p=0.9, stop_token_ids=[11, 12, 13]),
        SamplingParams(temperature=0.7, seed=10, logprobs=0, max_tokens=20, min_tokens=20),
        SamplingParams(seed=11, n=2, structured_outputs=PAIRS),
    ]
    return [
        (
            [draw.randrange(3, SERVED_VOCABULARY) for _ in range(draw.choice([1, 5, 30, 60]))],
            dataclasses.replace(kinds[number % len(kinds)], max_tokens=draw.choice([20, 40, 60]), ignore_eos=True),
        )
        for number in range(count)
    ]


class Streams:
    """All requests at once; counts what arrives, and keeps the outputs."""

    def __init__(self, engine: Engine, requests: Sequence[Prompt]) -> None:
        self.outputs: dict[str, RequestOutput] = {}
        self.tokens = 0
        self._changed = threading.Condition()
        self._wanted = len(requests)
        for number, (prompt, params) in enumerate(requests):
            engine.submit(str(number), prompt, params, self._reader(engine))

    def _reader(self, engine: Engine) -> Callable[[RequestUpdate], None]:
        whole = UpdateSum(engine.tokenizer)

        def on_update(update: RequestUpdate) -> None:
            tokens = update.tokens
            whole.append_update(update)
            with self._changed:
                self.tokens += tokens
                if update.finished:
                    assert update.request.request_id not in self.outputs
                    self.outputs[update.request.request_id] = whole.output()
                self._changed.notify_all()

        return on_update

    def wait_for_tokens(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.tokens >= count or self._ended(), END_S), self.tokens

    def _ended(self) -> bool:
        return len(self.outputs) == self._wanted

    def wait(self) -> list[RequestOutput]:
        with self._changed:
            assert self._changed.wait_for(self._ended, END_S), f"{len(self.outputs)} of {self._wanted}"
        return [self.outputs[str(number)] for number in range(self._wanted)]

    def results(self) -> list[list[CompletionOutput]]:
        outputs = self.wait()
        assert not [output.error for output in outputs if output.error]
        return [output.outputs for output in outputs]


class Killable(LocalWorkers):
    """Workers that a test can kill or stop."""

    def signal(self, name: str, number: signal.Signals) -> None:
        self.processes[name].send_signal(number)

    @property
    def pids(self) -> dict[str, int]:
        return {name: process.pid for name, process in self.processes.items()}


def check_last_loss(streams: Streams, workers: Killable, victim: str) -> None:
    """Kill a worker whose loss ends the engine, and check that requests fail with an error that names the worker."""
    workers.signal(victim, signal.SIGKILL)
    failed = [output for output in streams.wait() if output.error]
    assert failed and all(f"worker {victim} is gone" in str(output.error) for output in failed)


REQUESTS = prompts(24, 1)
HALF = 12
"""How many of ``REQUESTS`` tests run that only lose workers: 19 sequences of all kinds, of which 16 run at once."""


def assert_same(got: list[list[CompletionOutput]], expected: list[list[CompletionOutput]]) -> None:
    """Equal, but for the rounding of log probabilities: other rows in a step add up in another order."""
    for mine, theirs in zip(itertools.chain(*got), itertools.chain(*expected), strict=True):
        assert dataclasses.replace(mine, logprobs=None) == dataclasses.replace(theirs, logprobs=None)
        for one, other in zip(mine.logprobs or (), theirs.logprobs or (), strict=True):
            assert [entry.token_id for entry in one] == [entry.token_id for entry in other]
            assert [entry.logprob for entry in one] == pytest.approx([entry.logprob for entry in other], abs=1e-3)


def wait_for_recoveries(engine: Engine, count: int) -> None:
    wait_until(lambda: engine.stats().recoveries >= count, f"recovery {count}")


def survive(
    settings: EngineConfig, losses: Sequence[tuple[str, signal.Signals]], every: int
) -> list[list[CompletionOutput]]:
    """Return the outputs of half of ``REQUESTS`` in a run that loses these workers one after another.

    ``every``: Tokens between two losses.
    """
    workers = Killable()
    engine = launch(settings, workers=workers)
    pids = workers.pids
    try:
        streams = Streams(engine, REQUESTS[:HALF])
        for number, (victim, how) in enumerate(losses):
            streams.wait_for_tokens((number + 1) * every)
            workers.signal(victim, how)
            wait_for_recoveries(engine, number + 1)
        results = streams.results()
        wait_until(lambda: not any(memory.used for memory in engine.stats().memory.values()), "slots stayed in use")
        stats = engine.stats()
        assert stats.recoveries == len(losses) and stats.dead is None
    finally:
        engine.close()
    assert not [name for name, pid in pids.items() if psutil.pid_exists(pid)]
    return results


TOKENS = 10


def run_all(
    engine: Engine, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]
) -> list[RequestOutput]:
    """Submit all prompts at once and wait for their final outputs."""
    each = params if isinstance(params, list) else [params] * len(prompts)
    finals: dict[str, RequestOutput] = {}
    all_done = threading.Event()

    def on_output(output: RequestOutput) -> None:
        if output.finished:
            finals[output.request_id] = output
            if len(finals) == len(prompts):
                all_done.set()

    for index, prompt in enumerate(prompts):
        engine.submit(str(index), prompt, each[index], whole(engine.tokenizer, on_output))
    assert all_done.wait(120), f"{len(finals)} of {len(prompts)} requests ended; engine: {engine.stats()}"
    return [finals[str(index)] for index in range(len(prompts))]


LENGTHS = (1, 2, 3, 5, 8, 13, 21, 34, 55, 7)  # of prompts


def check_greedy(
    family: str,
    tmp_path: Path,
    memory: str,
    lengths: tuple[int, ...] = LENGTHS,
    tokens: int = TOKENS,
    compute: str = "cpu:1",
    holders: frozenset[str] | set[str] = frozenset(("memory0", "memory1")),
    kv_tokens_per_worker: int | None = None,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
) -> None:
    """``holders``: the workers that hold KV of the requests in the end."""
    target = Target.CPU if compute.startswith("cpu") else Target.GPU
    reference = write_prepared(served(family), tmp_path, target=target, ranks=tensor_parallel)
    draw = random.Random(family)
    prompts = [[draw.randrange(3, SERVED_VOCABULARY) for _ in range(length)] for length in lengths]
    config = EngineConfig(
        model=str(tmp_path),
        compute=compute,
        memory=memory,
        dtype=DType.FLOAT32,
        max_num_seqs=4,
        max_num_batched_tokens=24,
        kv_cache_memory_bytes=4 << 20,
        kv_tokens_per_worker=kv_tokens_per_worker,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
    )
    engine = launch(config)
    try:
        outputs = run_all(engine, prompts, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True))
        stats = engine.stats()
    finally:
        engine.close()
    got = [output.outputs[0].token_ids for output in outputs]
    assert got == [greedy(reference, prompt, tokens) for prompt in prompts]
    assert {segment.worker for output in outputs for segment in output.placement} == holders
    if kv_tokens_per_worker is None:  # else cached parts of sequences are counted too
        assert all(memory.sequences <= 4 for memory in stats.memory.values()), stats.memory


def named_memory(process: psutil.Process) -> set[str]:
    """Files in ``/dev/shm`` that a process maps and that would remain if it were killed."""
    lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if "/dev/shm/" in line and not line.endswith(" (deleted)")}


def worker_processes(parent: psutil.Process | None = None) -> dict[str, psutil.Process]:
    """Worker processes by the module they run, below ``parent`` (this process)."""
    found = {}
    for child in (parent or psutil.Process()).children(recursive=True):
        if child.status() == psutil.STATUS_ZOMBIE:
            continue  # it has ended
        words = child.cmdline()
        if "-m" in words and words[-1].startswith("lamina."):
            found[f"{words[-1]}#{child.pid}"] = child
    return found
