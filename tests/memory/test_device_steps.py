"""Steps that the device serves itself: the memory worker with an emulated device, whose streams are threads."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from lamina.config.engine_config import EngineConfig
from lamina.control.messages import EndEpoch, EpochEnded
from lamina.core.errors import ConfigError, DeadlineError, PeerLostError, TransportError
from lamina.core.pipeline import Pipeline
from lamina.core.topology import Epoch, Member, Topology
from lamina.core.types import AttentionSpec, Polling
from lamina.kernels import tuning_cache
from lamina.kernels.segments import SegmentTable
from lamina.launch import launch
from lamina.memory import device_steps, worker
from lamina.memory.device import gpu, gpu_polls, polling
from lamina.memory.device.workspaces import Workspaces
from lamina.memory.slab_setup import polling_of
from lamina.transport.device.emulated_slots import ThreadSlots, ThreadStream
from lamina.transport.device.inboxes import Inboxes, SharedMaker
from lamina.transport.device.slots import Outcome
from tests.support import reference_attention
from tests.support.late_backend import LateBackend
from tests.support.memory_worker import TIMEOUT_S, Pair
from tests.support.reference_attention import read_reply

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

from lamina.kernels.gpu.interpreter import Interpreter

WINDOW = 2
LAYERS = WINDOW + 2
SPECS = [AttentionSpec(layer, 2, 2, 8, 8, 0.5, window=4 if layer % 2 else 0) for layer in range(LAYERS)]
PROMPT = 6


def make(
    monkeypatch: pytest.MonkeyPatch, lanes: int, inboxes: Inboxes | None = None, who: Polling = "device"
) -> Iterator[Pair]:
    monkeypatch.setattr(worker, "IDLE_SLICE_S", 0.0)
    monkeypatch.setattr(device_steps, "WINDOW", WINDOW)
    pair = Pair("emulated", who, SPECS, lanes, inboxes)
    yield pair
    pair.resources.close()
    pair.links.close()


@pytest.fixture(params=["slots", "inboxes"])
def pair(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Pair]:
    yield from make(monkeypatch, 2, Inboxes(SharedMaker()) if request.param == "inboxes" else None)


@pytest.fixture(params=["at once", "late"])
def served_by_the_host(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Pair]:
    """By a GPU that works at once, or as late as it may."""
    if request.param == "late":
        backend = LateBackend()
        monkeypatch.setattr(gpu, "backend", lambda name: backend)
        monkeypatch.setattr(gpu, "workspaces", lambda name: Workspaces(backend))
    yield from make(monkeypatch, 2, Inboxes(SharedMaker()), "host")


class Lanes:
    """Sequence n decodes in lane n; K and V of all layers are kept here too, for the oracle."""

    def __init__(self, pair: Pair, count: int = 2) -> None:
        self.pair, self.random = pair, np.random.default_rng(0)
        self.k: list[list[np.ndarray]] = [[np.empty((0, 2, 8), np.float32)] * LAYERS for _ in range(count)]
        self.v = [list(layers) for layers in self.k]

    def token(self, rows: int = 1) -> np.ndarray:
        return self.random.standard_normal((rows, 2, 8)).astype(np.float32)

    def held(self, lane: int) -> int:
        return len(self.k[lane][-1])

    def keep(self, lane: int, layer: int, k: np.ndarray, v: np.ndarray) -> None:
        self.k[lane][layer] = np.concatenate((self.k[lane][layer], k))
        self.v[lane][layer] = np.concatenate((self.v[lane][layer], v))

    def prompt(self, lane: int) -> None:
        """A step that the host serves: K and V are fetched."""
        first = self.held(lane) == 0
        start = self.held(lane)
        self.pair.plan(lane, admitted=PROMPT if first else 0, chunk=(start, start + PROMPT))
        for layer in range(LAYERS):
            k, v, q = self.token(PROMPT), self.token(PROMPT), self.token(PROMPT)
            self.pair.send(lane, *([] if first else [q]), bulk=[k, v])
            self.pair.serve_until_answered(lane)
            self.keep(lane, layer, k, v)

    def plan(self, lane: int) -> None:
        self.pair.plan(lane, decode_at=self.held(lane))

    def ask(self, lane: int, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Send a token; what the answer must be."""
        q, k, v = self.token(), self.token(), self.token()
        self.keep(lane, layer, k, v)
        self.pair.send(lane, k, v, q)
        keys, values = self.k[lane][layer], self.v[lane][layer]
        count = len(keys)
        table = SegmentTable(
            np.array([0, 1], np.int32),
            np.array([count - 1], np.int32),
            np.array([0, count], np.int64),
            np.zeros(1, np.int32),
            np.arange(count, dtype=np.int32),
        )
        return reference_attention.partial(q, keys, values, table, SPECS[layer], threads=1)

    def check(self, lane: int, layer: int, wanted: tuple[np.ndarray, np.ndarray]) -> None:
        got = read_reply(memoryview(self.pair.reply), SPECS[layer], 1)
        for ours, right in zip(got, wanted, strict=True):
            np.testing.assert_allclose(ours, right, rtol=2e-6, atol=4e-6)

    def decode(self, lane: int, layers: range = range(LAYERS)) -> None:
        for layer in layers:
            wanted = self.ask(lane, layer)
            self.pair.serve_until_answered(lane)
            self.check(lane, layer, wanted)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(1e-3)


def served_by_the_device(pair: Pair) -> float:
    pair.worker._serve_once()
    return pair.worker._device_steps.busy_s


def test_a_decode_step_is_answered_while_the_host_does_nothing(pair: Pair) -> None:
    lanes = Lanes(pair)
    lanes.prompt(0)
    assert served_by_the_device(pair) == 0.0, "K and V that are fetched are the host's"
    lanes.plan(0)
    pair.worker._serve_once()  # reads the plan
    pair.worker._serve_once()  # launches
    for layer in range(WINDOW):
        wanted = lanes.ask(0, layer)
        until(lambda: pair.answered(0))
        lanes.check(0, layer, wanted)
    wanted = lanes.ask(0, WINDOW)
    time.sleep(0.05)
    assert not pair.answered(0), "the host has launched no more"
    pair.serve_until_answered(0)
    lanes.check(0, WINDOW, wanted)
    lanes.decode(0, range(WINDOW + 1, LAYERS))
    assert served_by_the_device(pair) > 0.0
    lanes.plan(0)
    lanes.decode(0)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_lanes_of_both_kinds_share_the_slots_of_a_link(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Three lanes are the host's: a link has two slots."""
    for pair in make(monkeypatch, count):
        lanes = Lanes(pair, count)
        for lane in range(count):
            lanes.prompt(lane)
        for step in range(4):
            prompting = step % count  # its next chunk attends to the one before, and its K and V are fetched
            for lane in range(count):
                if lane != prompting:
                    lanes.plan(lane)
            start = lanes.held(prompting)
            pair.plan(prompting, chunk=(start, start + PROMPT))
            for layer in range(LAYERS):
                k, v = lanes.token(PROMPT), lanes.token(PROMPT)
                pair.send(prompting, lanes.token(PROMPT), bulk=[k, v])
                lanes.keep(prompting, layer, k, v)
                wanted = {lane: lanes.ask(lane, layer) for lane in range(count) if lane != prompting}
                left, deadline = set(range(count)), time.monotonic() + TIMEOUT_S
                while left:
                    assert time.monotonic() < deadline, left
                    pair.worker._serve_once()
                    for lane in sorted(left):
                        if pair.answered(lane):
                            left.remove(lane)
                            if lane != prompting:
                                lanes.check(lane, layer, wanted[lane])
        assert (served_by_the_device(pair) > 0.0) == (count == 2)
        assert not pair.links.hub.keeping and not pair.worker._hub.keeping


def end_epoch(pair: Pair, number: int) -> None:
    """Both sides drop everything and go on in the next epoch, keeping no KV."""
    members = (Member("compute0", "compute", "cpu", "host"), Member("memory0", "memory", "emulated", "host", 3000))
    topology = Topology(Epoch(0, number), members, Pipeline(2, 1))
    pair.control.sent.clear()
    pair.control.tell(EndEpoch(topology))
    pair.mail.reset(topology)
    while not any(isinstance(message, EpochEnded) for message in pair.control.sent):  # usage may be reported first
        pair.worker._serve_once()
    pair.links.ring("memory0", number)
    while not pair.worker._fence.open:
        pair.worker._serve_once()
    assert [message.missing for message in pair.control.sent if isinstance(message, EpochEnded)][-1] == []
    pair.turns, pair.epoch = [0] * len(pair.turns), topology.epoch


def test_the_end_of_an_epoch_ends_waits_and_no_earlier_message_is_taken_for_a_new_one(pair: Pair) -> None:
    """Turns begin again in the next epoch, so that a message of the last one has the same lane and turn."""
    lanes = Lanes(pair)
    for epoch in (2, 3, 4):
        lanes.k[0], lanes.v[0] = lanes.k[1][:], lanes.v[1][:]
        lanes.prompt(0)
        lanes.plan(0)
        pair.worker._serve_once()
        pair.worker._serve_once()
        time.sleep(0.02)
        with pytest.raises(DeadlineError):  # no message of this epoch is there that could have been answered
            pair.mail.receive(pair.wait, ["memory0"], 0.0)
        if epoch == 2:
            lanes.decode(0, range(2))  # ends after some attentions
        wanted = lanes.ask(0, 2 if epoch == 2 else 0)
        if epoch == 4:
            pair.serve_until_answered(0)
            lanes.check(0, 0, wanted)
            lanes.decode(0, range(1, LAYERS))
        else:
            end_epoch(pair, epoch)


def test_a_wait_ends_by_itself_if_the_host_hangs(pair: Pair) -> None:
    lanes = Lanes(pair)
    lanes.prompt(0)
    stream = pair.worker._device_steps._lanes[0].stream
    assert isinstance(stream, ThreadStream)
    stream._silence_s = 0.5
    lanes.plan(0)
    pair.worker._serve_once()
    pair.worker._serve_once()
    for _ in range(40):  # a host that is alive may wait as long as it likes
        time.sleep(0.02)
        pair.worker._serve_once()
    until(lambda: stream._outcome is Outcome.EXPIRED)
    stream.drain()
    lanes.ask(0, 0)
    with pytest.raises(DeadlineError, match=r"had done nothing for 0\.5 s"):
        pair.worker._serve_once()
    assert not pair.answered(0)


def test_the_host_reads_and_writes_inboxes(served_by_the_host: Pair) -> None:
    """And slots, for what is not written by a device; both in any order."""
    pair = served_by_the_host
    lanes, channel = Lanes(pair), pair.mail.channels["memory0"]
    assert channel.writes_inbox and channel.inbox
    lanes.prompt(0)
    lanes.prompt(1)
    answers = []
    pair.mail.pop_message = lambda *key, take=pair.mail.pop_message: answers.append(take(*key)) or answers[-1]  # type: ignore[method-assign, func-returns-value]
    for _ in range(2):
        lanes.plan(0)
        lanes.plan(1)
        lanes.decode(0)
        lanes.decode(1)
        lanes.prompt(0)
    assert {isinstance(answer.body, memoryview) for answer in answers} == {True, False}


def waiting(pair: Pair) -> Lanes:
    """The device waits for the first request of a step that decodes."""
    lanes = Lanes(pair)
    lanes.prompt(0)
    lanes.plan(0)
    pair.worker._serve_once()  # reads the plan
    pair.worker._serve_once()  # launches
    return lanes


def test_a_device_that_answers_a_lost_peer_writes_where_it_still_may(pair: Pair) -> None:
    """Its waits go on until the epoch ends, and the message that it waits for may have come before the loss."""
    lanes = waiting(pair)
    pair.worker._fence.on_peer_lost(PeerLostError("compute0", "it has exited"))
    lanes.ask(0, 0)  # if the inbox were not mapped any more, the answer would end this process
    stream = pair.worker._device_steps._lanes[0].stream
    until(lambda: int(stream.records["done_ns"][0]) > 0)
    inboxes = pair.worker._store.device.inboxes
    assert inboxes is not None and inboxes.theirs("compute0") is None
    pair.worker._device_steps.drop()
    inboxes.retire()


def test_closing_ends_the_waits(pair: Pair) -> None:
    waiting(pair)
    before = threading.active_count()
    pair.worker.close()
    assert threading.active_count() < before


def test_a_cpu_has_nothing_that_polls() -> None:
    assert not any(gpu_polls("cpu", asked) for asked in ("auto", "host", "device"))
    with pytest.raises(ConfigError, match="only GPUs can poll for messages themselves"):
        launch(EngineConfig(memory="cpu:2", polling="device"))


def test_a_gpu_that_also_computes_does_not_poll(pair: Pair) -> None:
    pair.control.shares_gpu = True
    assert polling_of(pair.control, "auto") == polling_of(pair.control, "host") == "host"  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="emulated also runs slices"):
        polling_of(pair.control, "device")  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [DeadlineError("no answer"), TransportError("cannot register")])
def test_auto_leaves_it_to_the_host_where_the_device_cannot_poll(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAMINA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(polling, "_device_trip", Mock(side_effect=error))
    assert not polling.polls("auto", Timed(), ThreadSlots)
    assert not list(tmp_path.iterdir()), "it may work the next time"


def test_links_that_change_are_taken_up_once_no_step_waits(pair: Pair) -> None:
    """Meanwhile the host serves all steps that begin."""
    lanes, used = Lanes(pair), pair.worker._device_steps
    for lane in range(2):
        lanes.prompt(lane)
    lanes.plan(0)
    lanes.decode(0, range(1))
    direct = dict(used._direct)
    used.change_channels({}, used._pipeline, used._computes)
    assert used._direct == direct, "the device may still write to its slots"
    used.change_channels(pair.worker._channels, used._pipeline, used._computes)
    lanes.plan(1)
    lanes.decode(1, range(1))
    assert 1 not in used._runs
    lanes.decode(0, range(1, LAYERS))
    lanes.decode(1, range(1, LAYERS))
    lanes.plan(0)
    lanes.decode(0, range(1))
    assert list(used._runs) == [0]
    lanes.decode(0, range(1, LAYERS))


class Timed(Interpreter):
    """Says that its times mean something."""

    timed, name = True, "timed"


class Shown(Timed):
    """Has a display, so that its driver ends kernels that wait."""

    ends_long_kernels, name = True, "shown"


def test_a_device_with_a_display_does_not_poll() -> None:
    assert not polling.polls("auto", Shown(), Mock())
    with pytest.raises(ConfigError, match=r"the driver ends kernels of shown .* give polling auto or host"):
        polling.polls("device", Shown(), Mock())


def test_auto_measures_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAMINA_CACHE_DIR", str(tmp_path))
    kept = tuning_cache.file_for("polling", Timed.name)
    made: list[ThreadSlots] = []

    def slots() -> ThreadSlots:
        made.append(ThreadSlots())
        return made[-1]

    first = polling.polls("auto", Timed(), slots)
    trips = tuning_cache.load(kept, polling.Trips)
    assert trips is not None and min(trips.device_s, trips.host_s) > 0.0
    assert first == (trips.device_s < trips.host_s)
    tuning_cache.save(kept, polling.Trips(1e-6, 2e-6))
    assert polling.polls("auto", Timed(), slots) and len(made) == 1
    assert polling.polls("device", Timed(), slots) and not polling.polls("host", Timed(), slots)


def test_auto_needs_a_measurement_that_says_something() -> None:
    assert not gpu_polls("emulated", "auto"), "times of an emulated device say nothing"
