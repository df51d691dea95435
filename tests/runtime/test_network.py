"""The whole runtime over networks: two network stacks, packets lost and late, a partition that heals. Same tokens.

Namespaces need root. ``tests/rdma/run.sh`` boots a kernel that has netem and RDMA devices; where they are not, the
tests that need them are skipped.
"""

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import pytest

from lamina.cluster.local import LocalWorkers, launch
from lamina.config import EngineConfig
from lamina.engine import bringup
from lamina.transport.choice import Transport
from lamina.types import DType, RequestOutput, SamplingParams
from tests.runtime.checkpoints import CONFIGS, greedy, make_checkpoint

NEAR, FAR = "10.78.0.1", "10.78.0.2"
PROMPTS = [[5, 6, 7], list(range(3, 40)), [9]]
TOKENS = 60
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
PARTITION_S = 1.0
PATIENCE_S = 600.0


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


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
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this kernel has no netem: {error.stderr.strip()}")
        self.inside("tc", "qdisc", "replace", "dev", self.far, "root", "netem", *netem)

    def partition(self) -> None:
        """Pull the cable out for a while."""
        self.inside("ip", "link", "set", self.far, "down")
        time.sleep(PARTITION_S)
        self.inside("ip", "link", "set", self.far, "up")


@pytest.fixture
def stacks() -> Iterator[Stacks]:
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
    """Compute and memory workers use different RDMA devices, joined by the cable of ``tests/rdma/job.sh``."""

    def command(self, name: str, module: str) -> list[str]:
        device = "rxe2" if name.startswith("memory") else "rxe1"
        return ["env", f"LAMINA_RDMA_DEVICE={device}", *super().command(name, module)]


@dataclass(frozen=True)
class Model:
    """A checkpoint, and the tokens that Hugging Face draws greedily after each of the prompts."""

    path: str
    expected: list[list[int]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    place = tmp_path_factory.mktemp("llama")
    reference = make_checkpoint(CONFIGS["llama"], place)
    return Model(str(place), [greedy(reference, prompt, TOKENS) for prompt in PROMPTS])


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """An emulated machine takes its time to start workers."""
    monkeypatch.setattr(bringup, "START_TIMEOUT_S", PATIENCE_S)


def generate(
    config: EngineConfig,
    transports: set[Transport],
    workers: LocalWorkers | None = None,
    host: str = "127.0.0.1",
    meanwhile: Callable[[], None] = lambda: None,
) -> list[list[int]]:
    """Tokens of every prompt; ``meanwhile`` runs once the first is there."""
    engine = launch(config, workers=workers, host=host)
    finals: dict[str, RequestOutput] = {}
    started, ended = threading.Event(), threading.Event()

    def on_output(output: RequestOutput) -> None:
        started.set()
        if output.finished:
            finals[output.request_id] = output
            if len(finals) == len(PROMPTS):
                ended.set()

    try:
        assert {choice.transport for choice in engine.cluster.links.values()} == transports
        for index, prompt in enumerate(PROMPTS):
            engine.submit(str(index), prompt, GREEDY, on_output)
        assert started.wait(PATIENCE_S)
        meanwhile()
        assert ended.wait(PATIENCE_S), engine.stats()
    finally:
        engine.close()
    assert [output.error for output in finals.values() if output.error] == []
    return [finals[str(index)].outputs[0].token_ids for index in range(len(PROMPTS))]


def config(model: Model, transport: Literal["rdma", "tcp"]) -> EngineConfig:
    return EngineConfig(
        model=model.path, memory="cpu:2", dtype=DType.FLOAT32, transport=transport, kv_cache_memory_bytes=1 << 24
    )


def test_between_two_network_stacks_through_a_partition(model: Model, stacks: Stacks) -> None:
    workers = StackedWorkers(stacks)
    assert generate(config(model, "tcp"), {Transport.TCP}, workers, NEAR, stacks.partition) == model.expected


def test_with_packets_lost_and_late(model: Model, stacks: Stacks) -> None:
    stacks.impair("loss", "2%", "delay", "1ms")
    assert generate(config(model, "tcp"), {Transport.TCP}, StackedWorkers(stacks), NEAR) == model.expected


@pytest.mark.skipif("LAMINA_TEST_RDMA" not in os.environ, reason="no RDMA devices: see tests/rdma")
@pytest.mark.parametrize("netem", [(), ("loss", "2%", "delay", "1ms")], ids=["clean", "lossy"])
def test_over_rdma_between_two_devices(model: Model, netem: tuple[str, ...]) -> None:
    for device in ("lamina1", "lamina2") if netem else ():
        run("tc", "qdisc", "replace", "dev", device, "root", "netem", *netem)
    assert generate(config(model, "rdma"), {Transport.RDMA}, CardWorkers()) == model.expected
