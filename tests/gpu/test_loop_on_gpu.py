"""A memory worker's layers as captured graphs, replayed for messages that another process writes and rings for."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bench.gpu.loop import capture_layer
from lamina.core.errors import PeerLostError
from lamina.core.types import KvElement
from lamina.kernels.gpu.attention import Attention, KvSlab, StepCapacity, pair_table
from lamina.kernels.gpu.tilings import Choices
from lamina.transport.device.peer_memory import DeviceArena
from lamina.transport.device.polling import Polling
from tests.support import reference_attention
from tests.support.kernel_cases import decode, make_spec, table

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
LAYERS, CACHED, SLOTS = 2, 40, 64
SPEC = make_spec(2, 4, 64)
Q, KV = 8 * 64, 2 * 64  # numbers of one token's q, and of its k or v
MESSAGE, ANSWER = Q + 2 * KV, Q + 8  # q, k, v; out and lse
BELL = 8192  # a doorbell's offset in an arena, behind the payload
PEER = f"""
import sys
import cupy
import numpy as np
from lamina.transport.device.peer_memory import PeerArena
from lamina.transport.device.polling import Polling
arenas = [PeerArena(bytes.fromhex(handle)) for handle in sys.argv[1:]]
def mapped(arena, count):
    memory = cupy.cuda.UnownedMemory(arena.address, 4 * count, None)
    return cupy.ndarray((count,), np.float32, cupy.cuda.MemoryPointer(memory, 0))
message, answer = mapped(arenas[0], {MESSAGE}), mapped(arenas[1], {ANSWER})
polling = Polling("memory worker")
asked, answered = (polling.doorbell(arena.address + {BELL}) for arena in arenas)
print("mapped", flush=True)
for line in sys.stdin:
    rng = np.random.default_rng(int(line))
    message.set(rng.standard_normal({MESSAGE}).astype(np.float32))
    polling.ring(asked)
    polling.wait(answered, 60.0)
    seen = answer.get()
    polling.raise_failure()
    print(float(seen.astype(np.float64).sum()), flush=True)
"""


class Worker:
    """The memory worker's side: two layers' slabs with one sequence, captured between doorbells."""

    def __init__(self):
        import cupy

        from lamina.kernels.gpu.cuda import Cuda

        rng = np.random.default_rng(0)
        self.polling = Polling("compute worker")
        self.asked, self.answered = DeviceArena(BELL + 128), DeviceArena(BELL + 128)
        asked, answered = (self.polling.doorbell(arena.address + BELL) for arena in (self.asked, self.answered))
        message = self.asked.bytes[: 4 * MESSAGE].view(np.float32)
        q, k, v = (message[a:b].reshape(1, -1, 64) for a, b in ((0, Q), (Q, Q + KV), (Q + KV, MESSAGE)))
        answer = self.answered.bytes[: 4 * ANSWER].view(np.float32)
        self.out, self.lse = answer[:Q].reshape(1, 8, 64), answer[Q:].reshape(1, 8)
        self.held = [[rng.standard_normal((SLOTS, 2, 64)).astype(np.float32) for _ in "kv"] for _ in range(LAYERS)]
        self.slots = rng.permutation(SLOTS).astype(np.int32)
        tables = cupy.asarray(self.slots)
        self.kept = [tables]  # graphs hold addresses, not arrays
        self.attention = Attention(Cuda(0), StepCapacity(1, 1), Choices(""))
        self.begin(CACHED + 1)
        self.graphs = []
        for held in self.held:
            slab = KvSlab(KvElement.FLOAT32, *map(cupy.asarray, held))
            self.kept.append(slab)

            def work(slab=slab):
                self.attention.partial(q, slab, tables, SPEC, self.out, self.lse, (k, v))

            self.graphs.append(capture_layer(work, self.polling, (asked, answered), timeout_s=200.0))

    def begin(self, tokens):
        """Announce a step whose message brings the sequence's last token."""
        self.segments = table([decode(tokens)], self.slots)
        self.attention.upload_pairs(pair_table(self.segments, new_rows=np.array([0])))

    def expected(self, layer, seed):
        """(out, lse) by the oracle, for what the peer draws from this seed."""
        drawn = np.random.default_rng(seed).standard_normal(MESSAGE).astype(np.float32)
        q, k, v = (drawn[a:b].reshape(1, -1, 64) for a, b in ((0, Q), (Q, Q + KV), (Q + KV, MESSAGE)))
        for kept, new in zip(self.held[layer], (k, v), strict=True):
            kept[self.segments.slots[-1]] = new[0]
        keys, values = self.held[layer]
        return reference_attention.partial(q, keys, values, self.segments, SPEC, threads=1)


@pytest.fixture
def worker():
    import cupy

    with cupy.cuda.Stream(non_blocking=True) as stream:
        yield Worker()
        stream.synchronize()


@pytest.fixture
def peer(worker):
    handles = [arena.handle().hex() for arena in (worker.asked, worker.answered)]
    command = [sys.executable, "-c", PEER, *handles]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout and process.stdout.readline() == "mapped\n"
        yield process
        process.kill()


def test_replayed_layers_answer_what_the_peer_asks(worker, peer):
    for step in range(3):
        worker.begin(CACHED + 1 + step)
        for layer, graph in enumerate(worker.graphs):
            seed = 10 * step + layer
            graph.launch()
            peer.stdin.write(f"{seed}\n")
            peer.stdin.flush()
            worker.polling.synchronize(lambda: peer.poll() is None)
            wanted = worker.expected(layer, seed)
            for got, right in zip((worker.out, worker.lse), wanted, strict=True):
                np.testing.assert_allclose(got.get(), right, atol=3e-5)
            assert float(peer.stdout.readline()) == pytest.approx(sum(float(each.sum()) for each in wanted), abs=0.01)


def test_a_peer_killed_between_layers_ends_the_step_unanswered(worker, peer):
    for graph in worker.graphs:
        graph.launch()
    peer.stdin.write("1\n")
    peer.stdin.flush()
    assert peer.stdout.readline(), "the first layer was not answered"
    peer.kill()
    with pytest.raises(PeerLostError):
        worker.polling.synchronize(lambda: peer.poll() is None)
    assert worker.answered.bytes[BELL : BELL + 8].view(np.uint64).get()[0] == 1
