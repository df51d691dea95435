"""Doorbells polled by a GPU: order, deadlines, aborts and peers that die; the GPU works after each."""

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from lamina.core.errors import DeadlineError, PeerLostError
from lamina.transport.device.peer_memory import DeviceArena
from lamina.transport.device.polling import Polling

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
BELL = 1 << 20  # a doorbell's offset in an arena, behind the payload
PEER = """
import sys
import cupy
from lamina.transport.device.peer_memory import PeerArena
from lamina.transport.device.polling import Polling
arena = PeerArena(bytes.fromhex(sys.argv[1]))
print("mapped", flush=True)
polling = Polling("parent")
bell = polling.doorbell(arena.address + (1 << 20))
payload = cupy.cuda.UnownedMemory(arena.address, 1 << 20, None)
payload = cupy.ndarray((1 << 20,), "uint8", cupy.cuda.MemoryPointer(payload, 0))
for line in sys.stdin:
    payload[...] = int(line)
    polling.ring(bell)
    cupy.cuda.get_current_stream().synchronize()
arena.close()
"""


@pytest.fixture
def stream():
    import cupy

    with cupy.cuda.Stream(non_blocking=True) as own:
        yield own
        own.synchronize()


@pytest.fixture
def peer(stream):
    """(arena, process that writes and rings for every number on its standard input)"""
    arena = DeviceArena(BELL + 128)
    stream.synchronize()
    command = [sys.executable, "-c", PEER, arena.handle().hex()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout and process.stdout.readline() == "mapped\n"
        yield arena, process
        process.kill()


def alive(process):
    return lambda: process.poll() is None


def say(process, number):
    process.stdin.write(f"{number}\n")
    process.stdin.flush()


def test_messages_of_another_process_arrive_whole_and_in_order(stream, peer):
    import cupy

    arena, process = peer
    polling = Polling("peer")
    bell = polling.doorbell(arena.address + BELL)
    for number in (3, 1, 200):
        seen = cupy.empty(BELL, np.uint8)
        polling.wait(bell, timeout_s=60.0)
        cupy.copyto(seen, arena.bytes[:BELL])
        say(process, number)
        polling.synchronize(alive(process))
        assert (seen.get() == number).all()


def test_rings_reach_the_host(stream):
    import cupy

    pinned = cupy.cuda.alloc_pinned_memory(8)
    word = np.frombuffer(pinned, np.uint64, 1)
    word[0] = 0
    polling = Polling("host")
    bell = polling.doorbell(pinned.ptr)
    for wanted in (1, 2, 3):
        polling.ring(bell)
        stream.synchronize()
        assert word[0] == wanted


def card_works():
    import cupy

    assert int(cupy.arange(1000).sum()) == 499_500


def test_a_deadline_ends_the_wait_and_silences_what_follows(stream):
    import cupy

    bells = cupy.zeros(32, np.uint64)
    polling = Polling("silent peer")
    incoming, outgoing = polling.doorbell(bells.data.ptr), polling.doorbell(bells.data.ptr + 128)
    polling.wait(incoming, timeout_s=0.05)
    polling.ring(outgoing)
    with pytest.raises(DeadlineError, match=r"no message from silent peer within 0\.05 s"):
        polling.synchronize(lambda: True)
    assert bells.get().tolist() == [0] * 32
    polling.reset()
    polling.ring(outgoing)
    polling.synchronize(lambda: True)
    assert bells.get()[16] == 1
    card_works()


def test_an_abort_ends_the_wait(stream):
    import cupy

    polling = Polling("peer")
    word = cupy.zeros(1, np.uint64)
    polling.wait(polling.doorbell(word.data.ptr), timeout_s=100.0)
    polling.abort()
    with pytest.raises(PeerLostError, match="lost peer peer"):
        polling.synchronize(lambda: True)
    card_works()


def test_a_killed_peer_ends_the_wait(stream, peer):
    arena, process = peer
    polling = Polling("peer")
    polling.wait(polling.doorbell(arena.address + BELL), timeout_s=200.0)
    process.kill()
    with pytest.raises(PeerLostError):
        polling.synchronize(alive(process))
    polling.reset()
    card_works()
    assert arena.bytes.get().sum() == 0  # the arena outlives the process that had mapped it


def test_a_killed_peer_leaves_no_memory_mapped(stream):
    """What a process had mapped by a handle is returned to the GPU when its owner frees it, and not before it died."""
    import cupy

    def free_bytes():
        return cupy.cuda.runtime.memGetInfo()[0]

    DeviceArena(BELL)  # whatever the first one costs
    before = free_bytes()
    arena = DeviceArena(256 << 20)
    command = [sys.executable, "-c", PEER, arena.handle().hex()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout and process.stdout.readline() == "mapped\n"
        process.kill()
    stream.synchronize()
    del arena
    deadline = time.monotonic() + 10.0  # the driver may take down the process's context after its end
    while free_bytes() <= before - (64 << 20):
        assert time.monotonic() < deadline, "256 MiB are mapped still"
        time.sleep(0.01)
