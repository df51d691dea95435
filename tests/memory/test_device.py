"""Each device keeps, attends and moves KV as the others do: against attention in float64."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.control.messages import MemorySetup
from lamina.core.errors import ConfigError
from lamina.core.sampling import SamplingParams
from lamina.core.steps import Admission, DecodeRows, SequenceStep, StepPlan
from lamina.core.types import AttentionSpec, DType, KvElement, Overlap, Segment
from lamina.dataplane.wire import body_nbytes
from lamina.memory import device as select
from lamina.memory.device.base import Device, Pairs, Table
from lamina.memory.device.gpu import Gpu
from lamina.memory.device.workspaces import Workspaces
from lamina.memory.slab import Slab
from lamina.memory.store import KvStore, StepTables
from lamina.transport.device.inboxes import SharedMaker
from tests.support import reference_attention
from tests.support.kernel_cases import Pair, decode, make_case
from tests.support.late_backend import LateBackend

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

from lamina.kernels.gpu.backend import Program
from lamina.kernels.gpu.interpreter import Interpreter
from lamina.kernels.gpu.specialize import sees_all
from tests.support.shared_prefixes import SPECS, check_shared_prefixes

DEVICES = ("cpu", "emulated", "late")


def make(name: str, attentions: Sequence[AttentionSpec], element: KvElement, capacity: int, threads: int = 1) -> Device:
    """As ``select.make``; "late": a GPU that works late."""
    if name == "late":
        return Gpu(LateBackend(), attentions, element, capacity)
    return select.make(name, attentions, element, capacity, threads)


@pytest.mark.parametrize("name", DEVICES)
@settings(max_examples=5, deadline=None)
@given(
    pairs=st.lists(
        st.one_of(
            st.integers(1, 70).map(decode),
            st.tuples(st.integers(2, 20), st.integers(0, 40)).map(lambda pair: Pair(pair[0], pair[1], pair[1])),
        ),
        min_size=1,
        max_size=4,
    ),
    layer=st.integers(0, len(SPECS) - 1),
    seed=st.integers(0, 99),
)
def test_what_is_kept_is_attended_to(name: str, pairs: list[Pair], layer: int, seed: int) -> None:
    case = make_case(pairs, SPECS[layer], "float32", seed)
    device = make(name, SPECS, KvElement.FLOAT32, len(case.k), threads=1)
    order = np.random.default_rng(seed).permutation(len(case.k)).astype(np.int32)
    for part in np.array_split(order, 3):
        device.keep(layer, *map(device.sent, (case.k[part], case.v[part], part)))
    slots = np.split(case.segments.slots, case.segments.kv_offsets[1:-1])
    seen = Pairs(
        rows=[pair.rows for pair in pairs],
        query_start=[pair.query_start for pair in pairs],
        kv_start=[pair.kv_start for pair in pairs],
        keys=range(len(pairs)),
        first=[0] * len(pairs),
        stop=[pair.tokens for pair in pairs],
    )
    out, lse = attended(device.table(seen, slots.__getitem__), layer, device.sent(case.q), device)
    wanted_out, wanted_lse = reference_attention.partial(case.q, case.k, case.v, case.segments, case.spec, threads=1)
    np.testing.assert_allclose(out, wanted_out, rtol=0, atol=1e-5)
    np.testing.assert_allclose(lse, wanted_lse, rtol=1e-6, atol=1e-5)


def test_an_inbox_has_been_read_once_it_is_settled() -> None:
    """Also where nothing is attended to, which waits by itself."""
    device, random = make("late", SPECS, KvElement.FLOAT32, 8), np.random.default_rng(0)
    held = SharedMaker().make(4 * (2 * 2 * 16 * 2))
    k, v = (random.standard_normal((2, 2, 16)).astype(np.float32) for _ in range(2))
    held.inbox.array[:] = np.frombuffer(k.tobytes() + v.tobytes(), np.uint8)
    there = device.sent(held.inbox.array).view(np.float32).reshape(2, 2, 2, 16)
    slots = np.array([5, 3], np.int32)
    device.keep(0, there[0], there[1], device.sent(slots))
    device.settle()
    held.inbox.array[:] = 0  # the next message
    content = memoryview(bytearray(held.memory.nbytes))
    device.read(0, slots, content)
    assert bytes(content) == k.tobytes() + v.tobytes()


def attended(table: Table, layer: int, q: np.ndarray, device: Device) -> tuple[np.ndarray, np.ndarray]:
    out, lse = device.results(len(q), SPECS[layer])
    out[:], lse[:] = np.nan, np.nan
    for _ in table.attend(layer, q, out, lse):
        pass
    return out, lse


class Tables:
    """Two devices that hold the same K and V, and one slab. Tables of both are made at once, and used later."""

    CAPACITY = 300

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.slab = Slab[int](self.CAPACITY)
        gpu = Gpu(Interpreter(), SPECS[:1], KvElement.FLOAT32, self.CAPACITY, least_saved=0)
        self.devices: list[Device] = [make("cpu", SPECS[:1], KvElement.FLOAT32, self.CAPACITY, threads=1), gpu]
        k, v = (self.rng.standard_normal((self.CAPACITY, 2, 16)).astype(np.float32) for _ in "kv")
        slots = np.arange(self.CAPACITY, dtype=np.int32)
        for device in self.devices:
            device.keep(0, *map(device.sent, (k, v, slots)))
        self.made: list[tuple[np.ndarray, list[Table]]] = []
        self.next = 0

    def change(self, what: str, amount: int) -> None:
        """Change a segment at random, or make one."""
        known = self.slab.segments
        segment = int(self.rng.choice(known)) if known else -1
        held = len(self.slab.slots(segment)) if known else 0
        self.next += 1
        if what == "open" or not known:
            self.slab.open(self.next)
            self.slab.append(self.next, min(amount, self.slab.free_slots))
        elif what == "append":
            self.slab.append(segment, min(amount, self.slab.free_slots))
        elif what == "fork":
            self.slab.fork(segment, self.next, min(amount, held))
        elif what == "truncate":
            self.slab.truncate(segment, min(amount, held))
        elif what == "rearrange":  # the segment keeps its name and loses its beginning
            self.slab.rearrange([segment], {segment: [(segment, min(amount, held), held)]})
        elif what == "free":
            self.slab.free(segment)

    def make(self) -> None:
        """Tables of half of the segments, as a step does."""
        chosen = [each for each in self.slab.segments if len(self.slab.slots(each)) and self.rng.random() < 0.5]
        shortened = self.slab.take_shortened()
        for device in self.devices:
            device.forget(shortened)
        if not chosen:
            return
        stops = [len(self.slab.slots(each)) for each in chosen]
        firsts = [int(self.rng.integers(0, stop)) * (self.rng.random() < 0.3) for stop in stops]
        seen = Pairs([1] * len(chosen), [stop - 1 for stop in stops], firsts, chosen, firsts, stops)
        q = self.rng.standard_normal((len(chosen), 4, 16)).astype(np.float32)
        self.made.append((q, [device.table(seen, self.slab.slots) for device in self.devices]))

    def use(self, drop: bool) -> None:
        """Attend to one of the tables, and forget it then if ``drop``."""
        if not self.made:
            return
        which = int(self.rng.integers(len(self.made)))
        q, tables = self.made[which]
        results = [attended(table, 0, q, device) for table, device in zip(tables, self.devices, strict=True)]
        for one, other in zip(*results, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)
        if drop:
            del self.made[which]


CHANGES = ["open", "append", "append", "append", "fork", "fork", "truncate", "rearrange", "free"]


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(
    steps=st.lists(st.tuples(st.sampled_from(CHANGES), st.integers(1, 90), st.integers(0, 3)), max_size=30),
    seed=st.integers(0, 99),
)
def test_a_table_stays_valid_whatever_becomes_of_its_segments(steps: list[tuple[str, int, int]], seed: int) -> None:
    """Several steps are in flight: their tables are made while earlier ones are in use, and released in any order."""
    tables = Tables(seed)
    for what, amount, then in steps:
        tables.change(what, amount)
        if then == 1:
            tables.make()
        elif then > 1:
            tables.use(drop=then == 3)
    while tables.made:
        tables.use(drop=True)


class Counting(Interpreter):
    """A backend that counts what crosses the bus."""

    def __init__(self) -> None:
        self.uploaded: list[int] = []
        self.launched: list[str] = []
        self.waits = 0
        self.joined = 0

    def launch(self, program: Program, grid: tuple[int, ...], arguments: Sequence[Any]) -> None:
        self.launched.append(program.kernel)
        self.joined += dict(program.constants).get("joins") is True
        super().launch(program, grid, arguments)

    def upload(self, source: np.ndarray, target: np.ndarray) -> None:
        self.uploaded.append(source.nbytes)
        super().upload(source, target)

    def download(self, *copies: tuple[np.ndarray, np.ndarray]) -> None:
        self.waits += 1
        super().download(*copies)


def test_a_layer_costs_one_copy_each_way_and_a_step_what_has_changed() -> None:
    sequences, tokens, specs = 2, 90, SPECS[:2]
    store = KvStore("memory0", MemorySetup(specs, DType.FLOAT32, 2000, 1, Overlap(), False))
    backend = Counting()
    store.device = Gpu(backend, specs, KvElement.FLOAT32, 2000)
    whole = [[Segment(each, "memory0", (0, 2), (0, None))] for each in range(sequences)]
    admitted = [Admission(each, 1, tokens, whole[each], SamplingParams(), 0) for each in range(sequences)]
    store.apply(StepPlan(0, 0, 0, [], [], admitted, [SequenceStep(0, 0, [0] * tokens, [])], DecodeRows([], [], [])))
    for each in range(1, sequences):
        chunk = SequenceStep(each, 0, [0] * tokens, [])
        store.apply(StepPlan(each, 0, 0, [], [], [], [chunk], DecodeRows([], [], [])))

    def decode(at: int) -> StepTables:
        rows = list(range(sequences))
        (tables,) = store.apply(StepPlan(at, 0, at, [], [], [], [], DecodeRows(rows, [at] * sequences, [])))
        return tables

    decode(tokens)  # sends the whole tables
    backend.uploaded.clear()
    step = decode(tokens + 1)
    assert sum(backend.uploaded) < 4 * tokens, "a word per sequence, not its table"
    for layer, spec in enumerate(specs):
        backend.uploaded.clear()
        backend.launched.clear()
        backend.waits = 0
        nbytes = body_nbytes(spec, DType.FLOAT32, step.rows)
        out, lse = store.device.results(sequences, spec)
        for _ in store.serve(layer, step, 0, memoryview(bytearray(nbytes)), out, lse):
            pass
        assert (backend.uploaded, backend.waits) == ([nbytes], 1)
        assert backend.launched == ["attend", "combine"], "which append as well; the step was planned with its table"


@pytest.mark.parametrize("samples", [2, 9], ids=["a few", "more than a decode tile"])
def test_shared_prefixes_are_read_once_for_all(samples: int) -> None:
    joined = check_shared_prefixes(Counting(), samples)
    assert [count > 0 for count in joined] == [sees_all(spec) for spec in SPECS], "kernels that add shared prefixes"


class Small(Interpreter):
    """A GPU with room for the slabs of some layers."""

    def __init__(self, layers: int) -> None:
        free = 8 * sum(spec.slab_bytes_per_token(KvElement.FLOAT32) for spec in SPECS[:layers])
        self.free, self.outside = (free, 2 * free), 0

    def memory(self) -> tuple[int, int]:
        return self.free

    def on_host(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        self.outside += 1
        return super().on_host(shape, dtype)


@pytest.mark.parametrize(("layers", "share", "here"), [(3, 0.9, 3), (2, 1.0, 2), (2, 0.9, 1)])
def test_layers_without_room_on_the_gpu_are_on_the_host(
    layers: int, share: float, here: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Then a share of the GPU's memory stays free, too."""
    backend = Small(layers)
    workspaces = Workspaces(backend)
    workspaces.gpu_share = share
    device = Gpu(backend, SPECS, KvElement.FLOAT32, 8, workspaces)
    assert backend.outside == 2 * (3 - here), "K and V of each such layer"
    assert (f"memory for the KV of {here} of 3 layers" in caplog.text) == (here < 3)
    content, back = (bytearray(3 * SPECS[2].slab_bytes_per_token(KvElement.FLOAT32)) for _ in range(2))
    content[:] = np.random.default_rng(0).bytes(len(content))
    device.restore(2, np.array([5, 1, 7], np.int32), memoryview(content))
    device.read(2, np.array([5, 1, 7], np.int32), memoryview(back))
    assert back == content


@pytest.mark.parametrize("source", DEVICES)
@pytest.mark.parametrize("target", DEVICES)
@pytest.mark.parametrize("element", [KvElement.BFLOAT16, KvElement.INT8])
def test_what_one_device_reads_another_restores(source: str, target: str, element: KvElement) -> None:
    spec, tokens = SPECS[1], 11
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((tokens, spec.kv_heads, size)).astype(np.float32) for size in (spec.qk_dim, spec.v_dim))
    here, there = (make(name, SPECS, element, 32, threads=1) for name in (source, target))
    slots, others = (rng.permutation(32)[:tokens].astype(np.int32) for _ in range(2))
    here.keep(1, *map(here.sent, (k, v, slots)))
    sent, back = (bytearray(tokens * spec.slab_bytes_per_token(element)) for _ in range(2))
    here.read(1, slots, memoryview(sent))
    there.restore(1, others, memoryview(sent))
    there.read(1, others, memoryview(back))
    assert back == sent and any(sent)


def test_an_unusable_device_is_one_clear_error() -> None:
    with pytest.raises(ConfigError, match=r"cuda device 7 cannot be used; found .*use a CPU"):
        make("cuda:7", SPECS, KvElement.FLOAT32, 8, threads=1)
    with pytest.raises(ConfigError, match=r"unknown device 'tpu'"):
        make("tpu", SPECS, KvElement.FLOAT32, 8, threads=1)
