"""Local memory of compute workers on other machines: every output is that of Hugging Face, and no slot stays used."""

import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lamina.config.engine_config import EngineConfig
from lamina.control import secret
from lamina.core.sampling import SamplingParams
from lamina.core.types import DType
from lamina.dataplane.transport_choice import Transport
from lamina.engine.engine import Engine
from lamina.launch import launch
from tests.support.hosts import FAR, HERE, NEAR, Hosts, addresses_to_itself, free_port, opened
from tests.support.prepared_checkpoints import write_prepared
from tests.support.random_models import SERVED_VOCABULARY, greedy, served
from tests.support.running import Streams, wait_for_recoveries
from tests.support.waiting import wait_until

TOKENS = 48
LENGTHS = (1, 9, 57, 30, 70, 3, 21, 44)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with addresses_to_itself(), opened() as made:
        yield made
        made.close()


@pytest.fixture
def key(tmp_path: Path) -> Path:
    file = tmp_path / "secret"
    secret.from_file(file)
    return file


class Served:
    """Prompts of a random model, and what Hugging Face continues them with."""

    def __init__(self, folder: Path, ranks: int = 1) -> None:
        reference = write_prepared(served("llama"), folder, ranks=ranks)
        draw = random.Random(3)
        self.prompts = [[draw.randrange(3, SERVED_VOCABULARY) for _ in range(count)] for count in LENGTHS]
        self.expected = [[greedy(reference, prompt, TOKENS)] for prompt in self.prompts]

    def begin(self, engine: Engine) -> Streams:
        params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
        return Streams(engine, [(prompt, params) for prompt in self.prompts])

    def check(self, streams: Streams) -> None:
        assert [[one.token_ids for one in each] for each in streams.results()] == self.expected


def check_empty(engine: Engine) -> None:
    wait_until(lambda: not any(one.used for one in engine.stats().memory.values()), "slots stayed in use")
    assert not any(engine._scheduler.placement.reserved.values())


def settings(folder: Path, where: str, key: Path, **given: Any) -> EngineConfig:
    base: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "kv_cache_memory_bytes": 1_000_000}
    return EngineConfig(
        model=str(folder),
        dtype=DType.FLOAT32,
        memory="local",
        listen=where,
        secret_file=str(key),
        **{**base, **given},
    )


def test_prompts_run_on_one_machine_and_are_decoded_in_local_memory_of_another(
    hosts: Hosts, key: Path, tmp_path: Path
) -> None:
    """A lost machine costs its replicas alone; others take its place and join."""
    folder = tmp_path / "model"
    model, where = Served(folder), f"{HERE}:{free_port()}"
    workers = [hosts.worker(NEAR, where, "prefill", key), hosts.worker(FAR, where, "compute", key)]
    engine = launch(settings(folder, where, key, prefill="remote:1", compute="remote:1"))
    try:
        topology = engine.topology
        assert (topology.prefills, topology.local) == (("compute0",), topology.names)
        assert [one.transport for one in engine.cluster.links.values()] == [Transport.TCP]
        streams = model.begin(engine)
        model.check(streams)
        assert {each.worker for output in streams.wait() for each in output.placement} == {"compute1"}
        check_empty(engine)

        streams = model.begin(engine)
        streams.wait_for_tokens(60)
        workers[0].signal(signal.SIGKILL)
        wait_for_recoveries(engine, 1)
        model.check(streams)
        assert engine.topology.computes == ("compute1",)
        streams = model.begin(engine)
        hosts.worker(NEAR, where, "prefill", key)
        wait_until(lambda: len(engine.topology.computes) == 2, "nobody takes the place of the lost worker")
        hosts.worker(NEAR, where, "compute", key)  # later, since it might take that place too
        wait_until(lambda: len(engine.topology.computes) == 3, "nobody joins")
        assert engine.topology.prefills == ("compute2",)
        model.check(streams)

        streams = model.begin(engine)
        streams.wait_for_tokens(60)
        workers[1].signal(signal.SIGKILL)
        wait_for_recoveries(engine, 2)
        model.check(streams)
        check_empty(engine)
    finally:
        engine.close()


WAYS: dict[str, tuple[dict[str, Any], list[tuple[str, str]]]] = {
    "instances lend": ({"compute": "cpu:1,remote:1", "kv_tokens_per_worker": 16}, [(NEAR, "compute")]),
    "ranks of two machines lend": (
        {"compute": "remote:4", "kv_tokens_per_worker": 16, "tensor_parallel": 2},
        [(NEAR, "compute"), (FAR, "compute")] * 2,
    ),
    "stages on two machines": (
        {"compute": "remote:4", "pipeline_parallel": 2},
        [(NEAR, "compute"), (FAR, "compute")] * 2,
    ),
    "ranks for prompts": (
        {"prefill": "remote:2", "compute": "cpu:2", "tensor_parallel": 2},
        [(NEAR, "prefill")] * 2,
    ),
}


@pytest.mark.parametrize(
    "way", [way if way == "instances lend" else pytest.param(way, marks=pytest.mark.slow) for way in WAYS]
)
def test_every_way_with_local_memory_runs_on_several_machines(
    way: str, hosts: Hosts, key: Path, tmp_path: Path
) -> None:
    """The machine with the first agent is lost while requests run, and the other replica goes on."""
    given, agents = WAYS[way]
    folder, where = tmp_path / "model", f"{HERE}:{free_port()}"
    model = Served(folder, given.get("tensor_parallel", 1))
    for address, role in agents:
        hosts.worker(address, where, role, key)
    engine = launch(settings(folder, where, key, **given))
    try:
        topology = engine.topology
        streams = model.begin(engine)
        model.check(streams)
        used = {segment.worker for output in streams.wait() for segment in output.placement}
        lends = "kv_tokens_per_worker" in given
        assert used == topology.local if lends else used <= topology.local - set(topology.prefills), used
        check_empty(engine)
        streams = model.begin(engine)
        streams.wait_for_tokens(60)
        hosts.started[0].signal(signal.SIGKILL)
        wait_for_recoveries(engine, 1)
        model.check(streams)
        assert len(engine.topology.replicas) == 1
        check_empty(engine)
    finally:
        engine.close()
