"""Random requests of several clients, beside aborts and under memory pressure, on every layout of a cluster.

    python -m tests.fuzz [--seed N] [--seconds 60] [--layout NAME] [--family gemma2]

Every output must equal that of the request alone on one worker with local memory, and greedy ones Hugging Face's;
every request must end once, and no slot may stay in use. ``--seconds`` are shared by the layouts, all but for the time
that each takes to start. A seed gives the same requests again, of which the same are aborted, but not the same timing.
"""

import argparse
import contextlib
import dataclasses
import itertools
import random
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from lamina.config.engine_config import EngineConfig
from lamina.core.errors import ConfigError
from lamina.core.outputs import CompletionOutput, FinishReason, RequestOutput
from lamina.core.sampling import SamplingParams
from lamina.core.types import Client, DType
from lamina.engine.engine import Engine
from lamina.launch import launch
from tests.support.commands import start
from tests.support.prepared_checkpoints import write_prepared
from tests.support.random_models import SERVED, SERVED_VOCABULARY, greedy, served
from tests.support.waiting import END_S
from tests.support.whole_outputs import whole

SLOTS = 300  # of a memory worker: three or four of the longest requests
TOKEN_NBYTES = 3 * 2 * 2 * 16 * 4  # K and V of the layers and heads of the model
ENDS_S = 60.0
CLIENTS = 4
DISTINCT = 60  # requests of a seed
LOGPROB = 1e-3  # the rounding of sums in another order

BASE: dict[str, Any] = {
    "compute": "cpu:2",
    "memory": "cpu:2",
    "dtype": DType.FLOAT32,
    "max_num_seqs": 24,
    "max_num_batched_tokens": 64,
    "kv_cache_memory_bytes": SLOTS * TOKEN_NBYTES,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "local": {"compute": "cpu:1", "memory": "local"},
    "pools": {"lanes": 2},
    "lanes that rotate": {"lanes": 3, "pipelining": "rotational"},
    "everything ahead": {"lanes": 3},
    "heads": {"partition": "head"},
    "tokens": {"partition": "token", "kv_tokens_per_worker": 32, "memory": "cpu:3"},
    "tensor parallel": {"tensor_parallel": 2},
    "pipeline parallel": {"pipeline_parallel": 2},
    "spilling": {"kv_overcommit": 4.0},
    "bandwidth": {"balance": "bandwidth", "memory": "cpu:3"},
    "throughput": {"balance": "throughput", "memory": "cpu:3"},
    "ledger": {"balance": "ledger", "memory": "cpu:3"},
    "int8": {"kv_cache_dtype": "int8"},
    "prompts on compute": {"prompt_attention": "compute", "pipelining": "fixed"},
    "prefill apart": {"prefill": "cpu:1", "memory": "local"},
    "frontends": {},
    "scaling": {},
    "TLS": {"transport": "tcp", "tls": True},
}
ROUNDED = {"int8"}
"""Layouts whose tokens depend on how prompts are cut: see "Reproducible output" in docs/concepts.md."""
SAME_AT_LEAST = 0.5  # of all outputs

Prompt = tuple[list[int], SamplingParams]


def random_requests(seed: int) -> list[Prompt]:
    """Requests of every kind; some prompts begin alike."""
    draw, starts = random.Random(seed), [[3 + number] * 24 for number in range(3)]
    return [(_prompt(draw, starts), _params(draw)) for _ in range(DISTINCT)]


def _prompt(draw: random.Random, starts: Sequence[list[int]]) -> list[int]:
    begin = draw.choice([[], [], *starts])
    return begin + [draw.randrange(3, SERVED_VOCABULARY) for _ in range(draw.choice([1, 2, 7, 20, 50]))]


def _params(draw: random.Random) -> SamplingParams:
    most = draw.randrange(1, 32)
    if draw.random() < 0.12:
        return SamplingParams(use_beam_search=True, n=draw.choice([2, 3]), temperature=0.0, max_tokens=min(most, 12))
    return SamplingParams(
        n=draw.choice([1, 1, 1, 2, 3]),
        max_tokens=most,
        min_tokens=draw.choice([0, 0, most // 2]),
        temperature=draw.choice([0.0, 0.0, 0.7, 1.3]),
        top_k=draw.choice([0, 0, 5]),
        top_p=draw.choice([1.0, 1.0, 0.8]),
        min_p=draw.choice([0.0, 0.0, 0.05]),
        repetition_penalty=draw.choice([1.0, 1.0, 1.3]),
        presence_penalty=draw.choice([0.0, 0.0, 0.5]),
        frequency_penalty=draw.choice([0.0, 0.0, 0.5]),
        stop=draw.choice([[], [], [chr(0x4E00 + draw.randrange(3, SERVED_VOCABULARY))]]),
        stop_token_ids=draw.choice([[], [], [draw.randrange(3, SERVED_VOCABULARY)]]),
        ignore_eos=draw.choice([True, False]),
        logprobs=draw.choice([None, None, 0, 2]),
        seed=draw.randrange(1000),
    )


class Reference:
    """A checkpoint of a family in ``place`` and the requests of a seed."""

    def __init__(self, place: Path, seed: int, family: str) -> None:
        self.place, self.requests = place, random_requests(seed)
        self._model = write_prepared(served(family), place)
        write_prepared(served(family), place, ranks=2)

    def alone(self, **settings: Any) -> list[list[CompletionOutput]]:
        """What each request gets alone, on one worker with local memory."""
        local: dict[str, Any] = {"compute": "cpu:1", "memory": "local", "dtype": DType.FLOAT32}
        engine = launch(EngineConfig(model=str(self.place), **local | settings))
        try:
            calls = ((f"request {number} alone", *one) for number, one in enumerate(self.requests))
            return [Call(engine, *call, Client()).wait().outputs for call in calls]
        finally:
            engine.close()

    def check_greedy(self, outputs: Sequence[Sequence[CompletionOutput]]) -> None:
        """Compare greedy requests with Hugging Face. Raises AssertionError."""
        for number, ((prompt, params), (output, *_)) in enumerate(zip(self.requests, outputs, strict=True)):
            if params == dataclasses.replace(PLAIN, **{name: getattr(params, name) for name in ENDS}):
                tokens = output.token_ids
                assert tokens == greedy(self._model, prompt, len(tokens)), f"request {number} is not Hugging Face's"


PLAIN = SamplingParams(temperature=0.0)
ENDS = ("max_tokens", "seed", "stop", "stop_token_ids", "ignore_eos", "logprobs", "top_k", "top_p", "min_p")
"""What does not change the tokens of a greedy request that has no penalties and no shortest length."""


class Call:
    """One request to an engine, from its submission to its one end."""

    def __init__(self, engine: Engine, name: str, prompt: list[int], params: SamplingParams, client: Client) -> None:
        self.name, self._engine, self._ended = name, engine, threading.Event()
        self._output: RequestOutput | None = None
        self._late = 0  # calls after the end
        engine.submit(name, prompt, params, whole(engine.tokenizer, self._receive), client)

    def _receive(self, output: RequestOutput) -> None:
        self._output = output
        self._late += self._ended.is_set()
        if output.finished:
            self._ended.set()

    def abort(self) -> None:
        self._engine.abort(self.name)

    def wait(self) -> RequestOutput:
        """The output. Raises AssertionError if none comes, or an error, or more after the end."""
        assert self._ended.wait(ENDS_S), f"{self.name} has not ended within {ENDS_S:.0f} s"
        assert self._output is not None
        assert self._output.error is None, f"{self.name}: {self._output.error}"
        assert not self._late, f"{self.name} was called back after its end"
        return self._output


def difference(got: Sequence[CompletionOutput], expected: Sequence[CompletionOutput]) -> str:
    """What is wrong with an output; nothing if it was aborted and is the beginning of the one expected."""
    if len(got) != len(expected):
        return f"{len(got)} completions, not {len(expected)}"
    for mine, theirs in zip(got, expected, strict=True):
        if mine.finish_reason == FinishReason.ABORT:
            if mine.token_ids != theirs.token_ids[: len(mine.token_ids)]:
                return f"{mine.token_ids} does not begin {theirs.token_ids}"
        elif dataclasses.replace(mine, logprobs=None) != dataclasses.replace(theirs, logprobs=None):
            return f"{mine} instead of {theirs}"
        elif len(mine.logprobs or ()) != len(theirs.logprobs or ()):
            return f"{len(mine.logprobs or ())} log-probabilities instead of {len(theirs.logprobs or ())}"
        for one, other in zip(mine.logprobs or (), theirs.logprobs or (), strict=False):
            if any(abs(a.logprob - b.logprob) > LOGPROB for a, b in zip(one, other, strict=True)):
                return f"log-probabilities {one} instead of {other}"
    return ""


class Load:
    """Clients that send requests for ``seconds``, abort some, and compare the outputs.

    Attributes:
        deadline: When the clients stop; ``start`` sets it.
    """

    def __init__(
        self,
        requests: Sequence[Prompt],
        expected: Sequence[Sequence[CompletionOutput]],
        seed: int,
        seconds: float,
        rounded: bool,
    ) -> None:
        self.same = self.compared = self.aborted = 0
        self._requests, self._expected = requests, expected
        self._seed, self._seconds, self._rounded = seed, seconds, rounded
        self.deadline = 0.0
        self._lock = threading.Lock()

    def start(self) -> None:
        """Begin the time of the clients, once the workers run."""
        self.deadline = time.monotonic() + self._seconds

    def run(self, client: Callable[[int], None]) -> None:
        """Let the clients, by number, run at once. Raises what the first that fails raises."""
        with ThreadPoolExecutor(CLIENTS) as threads:
            for ended in [threads.submit(client, number) for number in range(CLIENTS)]:
                ended.result()

    def waves(self, client: int) -> Iterator[list[tuple[int, float | None]]]:
        """The requests, by number, that a client sends at once, and when it aborts each, in seconds."""
        draw = random.Random(f"{self._seed} {client}")
        while time.monotonic() < self.deadline:
            sizes, share = ([8, 16], 0.1) if client % 2 else ([1, 2, 3], 0.4)  # batches, or streams closed early
            numbers = draw.choices(range(DISTINCT), k=draw.choice(sizes))
            yield [(number, draw.uniform(0, 0.2) if draw.random() < share else None) for number in numbers]

    def engine_client(self, engine: Engine, client: int) -> None:
        """What one client does."""
        names = itertools.count()
        for wave in self.waves(client):
            calls = [
                Call(engine, f"{client}.{next(names)}: request {number}", *self._requests[number],
                     Client(f"account{client // 2}", str(client)))
                for number, _ in wave
            ]  # fmt: skip
            begun = time.monotonic()
            aborts = [(after, call) for (_, after), call in zip(wave, calls, strict=True) if after is not None]
            for after, call in sorted(aborts, key=lambda one: one[0]):
                time.sleep(max(0.0, begun + after - time.monotonic()))
                call.abort()
            for (number, _), call in zip(wave, calls, strict=True):
                self._compare(call.name, call.wait().outputs, self._expected[number])

    def http_client(self, url: str, client: int) -> None:
        """What one client of a server does. It compares texts, which show every token, and closes connections."""
        with httpx.Client(timeout=ENDS_S) as http:
            for wave in self.waves(client):
                with ThreadPoolExecutor(len(wave)) as threads:
                    answers = threads.map(lambda one: self._ask(http, url, *one), wave)
                for (number, _), answer in zip(wave, answers, strict=True):
                    expected = [dataclasses.replace(one, logprobs=None) for one in self._expected[number]]
                    if answer is not None:
                        got = [
                            dataclasses.replace(
                                theirs,
                                text=one["text"],
                                finish_reason=FinishReason(one["finish_reason"]),
                            )
                            for one, theirs in zip(answer, expected, strict=True)
                        ]
                        self._compare(f"{client}: request {number}", got, expected)

    def _ask(self, http: httpx.Client, url: str, number: int, after: float | None) -> list[dict[str, Any]] | None:
        prompt, params = self._requests[number]
        body = {name: value for name, value in dataclasses.asdict(params).items() if value is not None}
        try:
            timeout = httpx.Timeout(ENDS_S, read=ENDS_S if after is None else after + 0.001)
            response = http.post(f"{url}/v1/completions", json=body | {"prompt": prompt}, timeout=timeout)
        except httpx.ReadTimeout:
            assert after is not None, f"request {number} has no answer within {ENDS_S:.0f} s"
            self.aborted += 1
            return None
        assert response.status_code == 200, f"request {number}: {response.text}"
        return sorted(response.json()["choices"], key=lambda one: one["index"])

    def _compare(self, name: str, got: Sequence[CompletionOutput], expected: Sequence[CompletionOutput]) -> None:
        what = difference(got, expected)
        with self._lock:
            self.aborted += any(one.finish_reason == FinishReason.ABORT for one in got)
            self.compared += 1
            self.same += not what
        assert self._rounded or not what, f"{name}: {what}"

    def check(self) -> None:
        """Whether enough outputs were the same. Raises AssertionError."""
        assert self.compared, "no request has ended"
        assert self.same >= SAME_AT_LEAST * self.compared, (
            f"only {self.same} of {self.compared} outputs are as expected"
        )


def scale(engine: Engine, deadline: float) -> None:
    """Let workers join and leave in turn. A memory worker whose KV fits nowhere else stays until it does."""
    for changes in itertools.cycle([{"memory": 1}, {"compute": 1}, {"memory": -1}, {"compute": -1}]):
        while time.monotonic() < deadline:
            time.sleep(0.3)
            with contextlib.suppress(ConfigError):
                engine.scale(**changes).result(ENDS_S)
                break
        else:
            return


def check_empty(slots_in_use: Callable[[], object]) -> None:
    """Wait until nothing is in use. Raises AssertionError with what is."""
    deadline = time.monotonic() + 10
    while used := slots_in_use():
        assert time.monotonic() < deadline, f"in use at rest: {used}"
        time.sleep(0.1)


def fuzz_engine(place: Path, layout: str, load: Load, spill: Path) -> None:
    """Run the load on an engine of this process. Raises AssertionError."""
    settings = BASE | LAYOUTS[layout] | ({"kv_spill_dir": str(spill)} if layout == "spilling" else {})
    engine = launch(EngineConfig(model=str(place), **settings))
    try:
        with ThreadPoolExecutor(1) as threads:
            load.start()
            scaled = threads.submit(scale, engine, load.deadline) if layout == "scaling" else None
            load.run(lambda client: load.engine_client(engine, client))
            if scaled is not None:
                scaled.result()

        def in_use() -> object:
            stats = engine.stats()
            assert stats.dead is None, stats.dead
            busy = {name: one for name, one in stats.memory.items() if one.used or one.sequences}
            return stats.running or stats.waiting or busy

        check_empty(in_use)
        stats = engine.stats()
        print(f"    {stats.steps} steps, {stats.preempted} preempted, {stats.spilled} spilled")
    finally:
        engine.close()


def fuzz_server(place: Path, load: Load) -> None:
    """Run the load on a server with two frontends. Raises AssertionError."""
    given = {name: value for name, value in BASE.items() if name != "dtype"}
    options = itertools.chain(*([f"--{name.replace('_', '-')}", str(value)] for name, value in given.items()))
    server = start("--model", str(place), "--dtype", "float32", "--frontends", "2", *options)
    for stream in (server.process.stdout, server.process.stderr):
        assert stream is not None
        threading.Thread(target=stream.read, daemon=True).start()  # else the server would wait for its reader
    try:
        load.start()
        load.run(lambda client: load.http_client(server.url, client))

        def in_use() -> object:
            lines = httpx.get(f"{server.url}/metrics", timeout=ENDS_S).raise_for_status().text.splitlines()
            named = ("lamina_kv_slots_used{", "lamina_requests_running ", "lamina_requests_waiting ")
            return [line for line in lines if line.startswith(named) and float(line.rpartition(" ")[2])]

        check_empty(in_use)
    finally:
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(END_S)


def fuzz(seed: int, seconds: float, layouts: Sequence[str], family: str = "llama") -> list[str]:
    """Run the layouts one after another, and return what was wrong with each. ``family``: of the model."""
    print(f"seed {seed}", flush=True)
    faults = []
    with tempfile.TemporaryDirectory() as place, tempfile.TemporaryDirectory(dir=Path.cwd()) as spill:
        reference = Reference(Path(place), seed, family)
        exact = reference.alone()
        reference.check_greedy(exact)
        for layout in layouts:
            expected = reference.alone(**LAYOUTS[layout]) if layout in ROUNDED else exact
            load = Load(reference.requests, expected, seed, seconds / len(layouts), layout in ROUNDED)
            try:
                if layout == "frontends":
                    fuzz_server(reference.place, load)
                else:
                    fuzz_engine(reference.place, layout, load, Path(spill))
                load.check()
            except Exception as error:  # an engine that fails in any way is what is looked for
                faults.append(f"{layout}, --seed {seed}: {type(error).__name__}: {error}")
                print(f"FAILED {faults[-1]}")
            print(f"{layout}: {load.compared} outputs, {load.same} as expected, {load.aborted} aborted", flush=True)
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=secrets.randbits(31))
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--layout", choices=LAYOUTS, action="append")
    parser.add_argument("--family", choices=SERVED, default="llama")
    given = parser.parse_args()
    sys.exit(bool(fuzz(given.seed, given.seconds, given.layout or [*LAYOUTS], given.family)))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
