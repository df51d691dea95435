"""The whole runtime over networks: two network stacks, packets lost and late, a partition that heals. Same tokens.

Namespaces need root. ``tests/rdma/run.sh`` boots a kernel that has netem and RDMA devices; where they are not, the
tests that need them are skipped.
"""

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from lamina.cluster.local_workers import LocalWorkers
from lamina.config.engine_config import EngineConfig
from lamina.core.outputs import RequestOutput
from lamina.core.sampling import SamplingParams
from lamina.dataplane.transport_choice import Transport
from lamina.engine.engine import Engine
from lamina.launch import launch
from lamina.schedule import growth
from tests.support import network_model
from tests.support.hosts import addresses_to_itself
from tests.support.network_model import DTYPE, KV_TOKENS, PROMPTS, TOKENS, Model
from tests.support.whole_outputs import whole

NEAR, FAR = "10.78.0.1", "10.78.0.2"
LOSSY = ("loss", "2%", "delay", "1ms")
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
PARTITION_S = 1.0
PATIENCE_S = 600.0
KV_BYTES = KV_TOKENS * 3 * 2 * (16 + 16) * 4  # layers, heads, K and V, float32


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "CHEAP", 0)  # few tokens move, too, instead of being computed again


@dataclass(frozen=True)
class Stacks:
    """This network stack and another one, ``namespace``, joined by a virtual cable from ``near`` to ``far``."""

    namespace: str
    near: str
    far: str

    def inside(self, *words: str) -> None:
        run("ip", "netns", "exec", self.namespace, *words)

    def impair(self, *netem: str) -> None:
        """Let the cable lose and delay packets, both ways."""
        try:
            run("tc", "qdisc", "replace", "dev", self.near, "root", "netem", *netem)
        except FileNotFoundError:
            pytest.skip("no tc command to impair a network with (Debian: apt-get install iproute2; it is in /usr/sbin)")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this kernel has no netem: {error.stderr.strip()}")
        self.inside("tc", "qdisc", "replace", "dev", self.far, "root", "netem", *netem)

    def partition(self) -> None:
        """Pull the cable out for a while."""
        self.inside("ip", "link", "set", self.far, "down")
        time.sleep(PARTITION_S)
        self.inside("ip", "link", "set", self.far, "up")


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    with addresses_to_itself():
        yield


@pytest.fixture(scope="module")
def stacks(alone: None) -> Iterator[Stacks]:
    opened = Stacks(f"lamina{os.getpid()}", f"lam{os.getpid()}a", f"lam{os.getpid()}b")
    try:
        run("ip", "netns", "add", opened.namespace)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespace can be made here: {getattr(error, 'stderr', None) or error}")
    try:
        peer = ("peer", "name", opened.far, "netns", opened.namespace)
        run("ip", "link", "add", opened.near, "type", "veth", *peer)
        run("ip", "address", "add", f"{NEAR}/24", "dev", opened.near)
        run("ip", "link", "set", opened.near, "up")
        opened.inside("ip", "address", "add", f"{FAR}/24", "dev", opened.far)
        opened.inside("ip", "link", "set", opened.far, "up")
        opened.inside("ip", "link", "set", "lo", "up")
        yield opened
    finally:
        run("ip", "netns", "delete", opened.namespace)  # and with it the cable


class StackedWorkers(LocalWorkers):
    """Memory workers run in the other network stack."""

    def __init__(self, stacks: Stacks) -> None:
        super().__init__()
        self._stacks = stacks

    def command(self, name: str, module: str) -> list[str]:
        within = ["ip", "netns", "exec", self._stacks.namespace] if name.startswith("memory") else []
        return [*within, *super().command(name, module)]


class CardWorkers(LocalWorkers):
    """The first memory worker uses another RDMA device than the others; a cable joins them: ``tests/rdma/job.sh``."""

    def command(self, name: str, module: str) -> list[str]:
        device = "rxe2" if name == "memory0" else "rxe1"
        return ["env", f"LAMINA_RDMA_DEVICE={device}", *super().command(name, module)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    made = os.environ.get("LAMINA_TEST_MODEL")
    if made:
        return network_model.load(Path(made))
    place = tmp_path_factory.mktemp("llama")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAMINA_CACHE_DIR", str(place / network_model.CACHE))
        return network_model.make(place)


def start(
    model: Model, transport: Literal["rdma", "tcp"], workers: LocalWorkers, host: str, *, tls: bool = False
) -> Engine:
    """An engine whose workers are all linked by this transport."""
    config = EngineConfig(
        model=model.path,
        memory="cpu:2",
        dtype=DTYPE,
        transport=transport,
        tls=tls,
        kv_cache_memory_bytes=KV_BYTES,
        max_num_seqs=5,
        max_num_batched_tokens=16,  # a prompt comes in chunks, whose K and V are read by the memory workers
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lamina.launch.START_TIMEOUT_S", PATIENCE_S)  # an emulated machine takes its time
        patch.setenv("LAMINA_CACHE_DIR", str(Path(model.path, network_model.CACHE)))
        engine = launch(config, workers=workers, host=host)
    assert {choice.transport for choice in engine.cluster.links.values()} == {Transport(transport)}
    return engine


@pytest.fixture(scope="module")
def tcp_engine(model: Model, stacks: Stacks) -> Iterator[Engine]:
    engine = start(model, "tcp", StackedWorkers(stacks), NEAR, tls=True)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def rdma_engine(model: Model) -> Iterator[Engine]:
    if "LAMINA_TEST_RDMA" not in os.environ:
        pytest.skip("no RDMA devices: see tests/rdma")
    engine = start(model, "rdma", CardWorkers(), "127.0.0.1")
    yield engine
    engine.close()


def generate(
    engine: Engine, meanwhile: Callable[[], object] = lambda: None, which: Sequence[int] = range(len(PROMPTS))
) -> list[list[int]]:
    """Tokens of these of the prompts; ``meanwhile`` runs once the first is there."""
    finals: dict[str, RequestOutput] = {}
    started, ended = threading.Event(), threading.Event()

    def on_output(output: RequestOutput) -> None:
        started.set()
        if output.finished:
            finals[output.request_id] = output
            if len(finals) == len(which):
                ended.set()

    for index in which:
        engine.submit(str(index), PROMPTS[index], GREEDY, whole(engine.tokenizer, on_output))
    assert started.wait(PATIENCE_S)
    meanwhile()
    assert ended.wait(PATIENCE_S), engine.stats()
    assert [output.error for output in finals.values() if output.error] == []
    return [finals[str(index)].outputs[0].token_ids for index in which]


def leave_with_kv(engine: Engine, model: Model) -> None:
    """One of two memory workers leaves while both hold requests: K and V go to the other."""
    before = engine.stats().placement.moves
    which = [0, 2, 3]
    tokens = generate(engine, lambda: engine.scale(memory=-1).result(PATIENCE_S), which)
    assert tokens == [model.expected[index] for index in which]
    until = time.monotonic() + PATIENCE_S
    while engine.stats().placement.moves == before:
        assert time.monotonic() < until, "nothing has moved"
        time.sleep(0.1)


def test_tcp_between_two_network_stacks_through_a_partition(model: Model, stacks: Stacks, tcp_engine: Engine) -> None:
    assert generate(tcp_engine, stacks.partition) == model.expected


def test_tcp_with_packets_lost_and_late(model: Model, stacks: Stacks, tcp_engine: Engine) -> None:
    stacks.impair(*LOSSY)
    assert generate(tcp_engine) == model.expected


def test_tcp_when_a_memory_worker_leaves(model: Model, tcp_engine: Engine) -> None:
    leave_with_kv(tcp_engine, model)


def test_rdma_between_two_devices(model: Model, rdma_engine: Engine) -> None:
    assert generate(rdma_engine) == model.expected


def test_rdma_with_packets_lost_and_late(model: Model, rdma_engine: Engine) -> None:
    for device in ("lamina1", "lamina2"):
        run("tc", "qdisc", "replace", "dev", device, "root", "netem", *LOSSY)
    assert generate(rdma_engine) == model.expected


def test_rdma_when_a_memory_worker_leaves(model: Model, rdma_engine: Engine) -> None:
    leave_with_kv(rdma_engine, model)  # by one-sided reads


def test_rdma_when_workers_of_both_pools_join(model: Model, rdma_engine: Engine) -> None:
    """Pinned arenas have room for their links; the joiners' queue pairs are made while requests run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAMINA_CACHE_DIR", str(Path(model.path, network_model.CACHE)))
        grown = rdma_engine.scale(memory=1, compute=1)
        assert generate(rdma_engine, lambda: grown.result(PATIENCE_S)) == model.expected
    members = rdma_engine.topology.names
    assert len(members) == 4 and generate(rdma_engine) == model.expected
    found = {pair: choice.transport for pair, choice in rdma_engine.cluster.links.items() if members.issuperset(pair)}
    assert set(found.values()) == {Transport.RDMA} and len(found) == 6
