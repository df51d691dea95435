"""Workers on three machines: they join, leave, are lost and are refused; every output is that of one machine."""

import dataclasses
import os
import platform
import re
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import lamina
from lamina.config.environment import environment
from lamina.control import secret
from lamina.control.timeline import Span
from lamina.core.errors import ConfigError
from lamina.core.outputs import CompletionOutput
from lamina.dataplane.transport_choice import Transport
from lamina.engine.engine import Engine
from lamina.launch import launch
from tests.support.hosts import FAR, HERE, NEAR, Hosts, Started, addresses_to_itself, free_port, opened
from tests.support.running import REQUESTS, Streams, assert_same, config, wait_for_recoveries, worker_processes
from tests.support.waiting import wait_until

CLOCK_S = 5000


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


def worker_without_the_model(hosts: Hosts, where: str, key: Path, checkpoint: Path, tmp_path: Path) -> Started:
    """A compute worker of a machine where the model's folder is empty; how the model is split is known there."""
    empty, cache = tmp_path / "empty", tmp_path / "cache"
    empty.mkdir()
    cache.mkdir()
    known = environment().cache_dir
    assert known is not None
    (cache / "models").symlink_to(known / "models")
    code = f"import os; os.environ['LAMINA_CACHE_DIR'] = {str(cache)!r}"
    return hosts.worker(NEAR, where, "compute", key, mounts=((empty, checkpoint),), code=code)


def assert_between(spans: dict[str, list[Span]], begun: int, ended: int) -> None:
    """All workers did something, by this machine's clock from ``begun`` to ``ended``."""
    for worker, each in spans.items():
        assert begun < min(span.begin_ns for span in each) <= max(span.end_ns for span in each) < ended, worker


def assert_refused(mistakes: Mapping[str, Started]) -> None:
    """Each command says this, in one line, and exits with status 2."""
    for said, started in mistakes.items():
        status, output = started.end()
        assert status == 2 and said in output and len(output.splitlines()) == 1, output


def serving(engine: Engine) -> set[str]:
    return {name for name, state in engine.stats().workers.items() if state == "serving"}


def test_workers_of_other_machines_join_leave_and_are_lost(
    hosts: Hosts,
    key: Path,
    checkpoint: Path,
    undisturbed: list[list[CompletionOutput]],
    tmp_path: Path,
) -> None:
    port = free_port()
    where = f"{HERE}:{port}"
    settings = dataclasses.replace(
        config(checkpoint, 1, 1, tls=True, secret_file=str(key), listen=where), memory="cpu:1,remote:2"
    )
    first = [hosts.worker(address, where, "memory", key) for address in (NEAR, FAR)]  # before the engine listens
    spans: dict[str, list[Span]] = {}
    begun = time.monotonic_ns()
    engine = launch(settings, on_trace=spans.update)
    workers = worker_processes()
    try:
        used = {pair: each.transport for pair, each in engine.cluster.links.items()}
        assert used["compute0", "memory0"] is Transport.SHM and used["compute0", "memory1"] is Transport.TCP
        assert used["memory1", "memory2"] is Transport.TCP
        assert len({member.host for member in engine.topology.members}) == 3

        streams = Streams(engine, REQUESTS)
        compute = worker_without_the_model(hosts, where, key, checkpoint, tmp_path)
        memory = hosts.worker(FAR, where, "memory", key, clock_s=CLOCK_S)
        wait_until(lambda: {"compute1", "memory3"} <= serving(engine), "nobody joins")
        streams.wait_for_tokens(streams.tokens + 60)
        first[0].signal(signal.SIGTERM)  # leaves
        assert first[0].end()[0] == 0
        first[1].signal(signal.SIGKILL, worker=True)
        wait_for_recoveries(engine, 1)
        status, said = first[1].end()
        assert (status, "failed: its process was ended by signal 9" in said) == (1, True), said
        assert_same(streams.results(), undisturbed)
        assert serving(engine) == {"compute0", "compute1", "memory0", "memory3"}

        other = Path(shutil.copytree(checkpoint, tmp_path / "other"))
        with (other / "model.safetensors").open("r+b") as weights:
            weights.seek(-64, os.SEEK_END)
            weights.write(bytes(64))
        refused = hosts.worker(FAR, where, "compute", key, mounts=((other, checkpoint),))
        status, said = refused.end()
        digests = set(re.findall(r"\b[0-9a-f]{16}\b", said))
        assert (status, "Copy the same files to all machines" in said, len(digests)) == (1, True, 2), said
        assert f"compute2 on {FAR} has digest " in said and f", {platform.node()} has " in said, said

        (copy,) = (tmp_path / "cache" / "checkpoints").glob("*/model.safetensors")
        assert copy.read_bytes() == (checkpoint / "model.safetensors").read_bytes()
        streams = Streams(engine, REQUESTS)
        streams.wait_for_tokens(60)
        compute.signal(signal.SIGKILL)  # the supervisor; its worker ends with it
        wait_for_recoveries(engine, 2)
        assert_same(streams.results(), undisturbed)
        wait_until(lambda: not any(each.used for each in engine.stats().memory.values()), "slots stayed in use")
    finally:
        engine.close()
    assert memory.end()[0] == 0
    assert spans.keys() == {"engine", "compute0", "memory0", "memory3"}
    assert_between(spans, begun, time.monotonic_ns())
    assert len(workers) >= 2 and not [name for name, one in workers.items() if one.is_running()]


@pytest.mark.slow  # it starts seven workers
def test_each_mistake_is_one_clear_error(
    hosts: Hosts,
    key: Path,
    checkpoint: Path,
    undisturbed: list[list[CompletionOutput]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the start goes on until the right worker comes; then those that are served do not notice."""
    monkeypatch.setattr("lamina.launch.REMOTE_TIMEOUT_S", 120.0)
    port, stranger = free_port(), tmp_path / "stranger"
    secret.from_file(stranger)
    where = f"{HERE}:{port}"
    settings = dataclasses.replace(config(checkpoint, 1, 1, secret_file=str(key), listen=where), memory="remote:1")
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(launch, settings)
        assert_refused(
            {
                "no engine can be reached at 10.79.9.9:1": hosts.worker(NEAR, "10.79.9.9:1", "memory", key),
                "asks for 1 GPU; this machine has": hosts.worker(NEAR, where, "memory", key, "--kind", "a100"),
            }
        )
        right = hosts.worker(FAR, where, "memory", key)
        engine = starting.result(60)
    try:
        streams = Streams(engine, REQUESTS)
        version = "import lamina.core; lamina.core.__version__ = '9.9.9'"
        unreachable = hosts.worker(NEAR, where, "memory", key, "--address", "10.79.9.9", "--bind", NEAR)
        assert_refused(
            {
                "has another cluster secret": hosts.worker(NEAR, where, "memory", stranger),
                f"it runs lamina 9.9.9, the engine {lamina.__version__}": hosts.worker(
                    NEAR, where, "memory", key, code=version
                ),
            }
        )
        status, said = unreachable.end()  # the worker had started: that is seen once others connect to it
        assert status == 1 and "cannot be linked" in said and "10.79.9.9" in said, said
        assert_same(streams.results(), undisturbed)
        with pytest.raises(ConfigError, match=f"port {port} of {HERE}, for workers of other machines, is in use"):
            launch(settings)
        assert serving(engine) == {"compute0", "memory0"} and engine.stats().recoveries == 0
        assert len(Streams(engine, REQUESTS[:4]).results()) == 4
    finally:
        engine.close()
    assert right.end()[0] == 0
