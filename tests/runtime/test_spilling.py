"""Prefixes on the disks of memory workers: chats that come back from there go on with the same tokens."""

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from lamina.config.engine_config import EngineConfig
from lamina.core.errors import ConfigError
from lamina.core.outputs import RequestOutput
from lamina.engine.engine import Engine
from lamina.kv.disk import FULL
from tests.support.prefix_runs import GREEDY, drawn, run, start, tokens
from tests.support.running import Killable, wait_for_recoveries
from tests.support.waiting import wait_until

CHATS = 24
OVERCOMMIT = 12.0


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Not the folder of temporary files, which may be memory."""
    place = Path(
        tempfile.mkdtemp(prefix=".spilled-", dir=Path(__file__).parent)
    )  # other processes test beside this one
    yield place
    place.rmdir()  # which fails if it is not empty


def prompts() -> list[list[int]]:
    return [tokens(150 + number, 50 + number) for number in range(CHATS)]


def wait_until_copied(engine: Engine) -> None:
    disks, placement = engine._scheduler.disks, engine._scheduler.placement

    def is_copied(place: str) -> bool:
        return placement.filled(place) < FULL or not disks._uncopied[place]

    wait_until(lambda: not disks._copying and all(map(is_copied, disks._uncopied)), "blocks are not copied")


def settle(engine: Engine) -> None:
    """Wait until no request has KV any more, and what the workers report is what the engine has reserved."""
    stats, placement = engine.stats, engine._scheduler.placement
    wait_until(lambda: not any(placement.reserved.values()), "tokens stay reserved")
    wait_until(
        lambda: (
            {name: memory.cached + memory.used for name, memory in stats().memory.items() if memory.cached}
            == {name: tokens for name, tokens in placement.on_workers(placement.idle).items() if tokens}
        ),
        "slots stay in use",
    )


def resumed(engine: Engine, first: list[RequestOutput]) -> list[RequestOutput]:
    """The next turn of each chat, one after another."""
    outputs = []
    for number, before in enumerate(first):
        said = before.prompt_token_ids + before.outputs[0].token_ids
        outputs += run(engine, [(said + tokens(5, number), GREEDY)])
    return outputs


def file_of(pid: int, folder: Path) -> Path:
    """The open file of a worker in the folder, which has no name any more."""
    files = [Path(f"/proc/{pid}/fd/{number}") for number in os.listdir(f"/proc/{pid}/fd")]
    (found,) = [file for file in files if os.readlink(file).startswith(str(folder))]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kv_cache_dtype", "division"),
    [
        ("auto", {}),
        ("int8", {}),
        ("auto", {"partition": "head"}),
        ("auto", {"compute": "cpu:2", "tensor_parallel": 2, "partition": "request"}),
    ],
)
def test_chats_come_back_from_the_disk_with_the_same_tokens(
    model: Path, folder: Path, kv_cache_dtype: str, division: dict[str, Any]
) -> None:
    """Several times as many as memory holds; then a disk fails, and then a memory worker is lost."""
    workers = Killable()
    pools: dict[str, Any] = {"memory": "cpu:2", "compute": "cpu:1", "kv_cache_dtype": kv_cache_dtype} | division
    nbytes = {"auto": 300_000, "int8": 100_000}[kv_cache_dtype]  # about as many tokens
    disk: dict[str, Any] = {"kv_overcommit": OVERCOMMIT, "kv_spill_dir": str(folder)}
    engine = start(model, workers, **pools, kv_cache_memory_bytes=nbytes, **disk)
    try:
        total = sum(engine.cluster.capacities.values())
        first = []
        for prompt in prompts():
            first += run(engine, [(prompt, GREEDY)])
            wait_until_copied(engine)
        assert sum(len(prompt) for prompt in prompts()) > 3 * total
        assert not list(folder.iterdir())  # the files have no names
        second = resumed(engine, first)
        stats = engine.stats()
        assert stats.fetched > 0.5 * sum(len(prompt) for prompt in prompts())
        assert all(output.cached_tokens >= 128 for output in second)
        settle(engine)
        together = run(engine, [(output.prompt_token_ids, GREEDY) for output in second])
        settle(engine)

        os.truncate(file_of(workers.pids["memory0"], folder), 4096)  # reads past the end fail
        failing = resumed(engine, first)
        workers.signal("memory1", signal.SIGKILL)
        wait_for_recoveries(engine, 1)
        survived = resumed(engine, first)
        settle(engine)
        assert not engine._scheduler.disks.held
    finally:
        engine.close()
    assert not list(folder.iterdir())
    # A prompt that attends to a rounded prefix differs a little from one computed whole: with int8, what comes from the
    # disk is compared with what never left memory, and what may have been computed again is not compared.
    rounded = kv_cache_dtype == "int8"
    plain = start(model, **pools, kv_cache_memory_bytes=nbytes * (100 if rounded else 1), prefix_cache=rounded)
    try:
        expected = resumed(plain, [run(plain, [(prompt, GREEDY)])[0] for prompt in prompts()])
    finally:
        plain.close()
    for outputs in (second,) if rounded else (second, together, failing, survived):
        assert drawn(outputs) == drawn(expected)
    assert [len(output.outputs[0].token_ids) for output in (*together, *failing, *survived)] == 3 * [
        len(output.outputs[0].token_ids) for output in expected
    ]


@pytest.mark.slow  # it starts three clusters
def test_a_folder_that_cannot_be_used_is_refused_at_the_start(model: Path, folder: Path, tmp_path: Path) -> None:
    def refused(text: str, **settings: Any) -> None:
        with pytest.raises(ConfigError, match=text):
            start(model, memory="cpu:1", compute="cpu:1", **settings).close()

    refused("kv_spill_dir is '/nowhere', a folder that does not exist", kv_overcommit=2.0, kv_spill_dir="/nowhere")
    refused("kv_overcommit needs [0-9]{14,} bytes in .*; [0-9]+ are free", kv_overcommit=1e9, kv_spill_dir=str(folder))
    for settings in ({"kv_overcommit": 2.0}, {"kv_spill_dir": str(tmp_path)}):
        with pytest.raises(ConfigError, match="give both a number above 1 and a folder"):
            EngineConfig(**settings)
    if psutil.disk_usage("/dev/shm").total:
        refused("kv_spill_dir is '/dev/shm', which is memory", kv_overcommit=2.0, kv_spill_dir="/dev/shm")
