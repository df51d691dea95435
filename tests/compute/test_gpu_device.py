"""The code for GPUs, emulated: families against Hugging Face, recordings, chunks, and what stays on the card."""

from collections.abc import Callable
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PretrainedConfig

from lamina.compute import worker
from lamina.compute.device import make
from lamina.compute.device.base import ExchangedRows, Rows
from lamina.compute.device.chunk_attention import attend_chunks
from lamina.compute.device.cuda import Cuda
from lamina.compute.device.emulated import Emulated
from lamina.compute.device.gpu import Gpu
from lamina.compute.device.kit import ROWS, padded_rows
from lamina.core.errors import ConfigError
from lamina.core.types import AttentionSpec, DType
from lamina.kernels.segments import SegmentTable
from lamina.lowering import Target, lower
from lamina.lowering.cpu_slices import PositionTable
from lamina.lowering.gpu_slices import place_slices
from lamina.memory.device import gpu_memory
from lamina.models.quantisation.codes import Weight
from lamina.splitter import split
from lamina.splitter.assemble import assemble, capture_clean
from lamina.splitter.markers import Reduce
from lamina.splitter.parts import Rank
from lamina.splitter.split_model import cut
from tests.support import reference_attention
from tests.support.gpu_runner import OnGpu
from tests.support.random_models import NAMES, VOCABULARY, random_model, variant
from tests.support.split_oracle import Runner, assert_same_logits
from tests.support.split_ranks import Ranks, assert_ranks_same_logits
from tests.support.sweep import sweep

ORDINARY = ("gemma2", "deepseek_v3")


@pytest.mark.parametrize("name", sweep(NAMES, ORDINARY))
def test_slices_on_an_emulated_gpu_compute_what_hugging_face_computes(name: str) -> None:
    assert_same_logits(variant(name), OnGpu)


_reduces: list[Reduce] = []


@torch.library.custom_op("lamina_tests::sum_over_ranks", mutates_args=("x",))
def _sum_over_ranks(x: Tensor, number: int) -> None:
    """An operator, so that recordings have it, as they have those of torch.distributed."""
    x.copy_(_reduces[number](x))


def ranks_on_gpus(config: PretrainedConfig, state: dict[str, Tensor], ranks: Ranks, count: int) -> list[Runner]:
    """Return a reference runtime on an emulated card for every rank."""
    found, captured = list[Runner](), capture_clean(config, DType.FLOAT32)
    for number in range(count):
        model = assemble(config, DType.FLOAT32, captured, Rank(number, count))
        weights = {name: cut(state[name], model.shards.get(name, {})) for name in model.weights}
        _reduces.append(ranks.reduce(number))

        def reduce(x: Tensor, place: int = len(_reduces) - 1) -> Tensor:
            x = x.contiguous()
            _sum_over_ranks(x, place)
            return x

        found.append(OnGpu(model, weights, reduce=reduce))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_on_emulated_gpus_compute_what_hugging_face_computes(name: str) -> None:
    assert_ranks_same_logits(variant(name), 2, ranks_on_gpus)


@pytest.mark.parametrize("name", sweep(NAMES, ["llama4_text"]))
def test_nothing_is_made_on_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices on tensors of a GPU without memory: an operator that mixed them with the host's would fail."""
    monkeypatch.setattr(PositionTable, "lookup", PositionTable._compute)
    monkeypatch.setattr(Tensor, "contiguous", lambda tensor: tensor)  # a PyTorch without CUDA has none for its tensors
    model = split(variant(name))
    lowered = lower(model, Target.GPU)
    with FakeTensorMode(allow_non_fake_inputs=True):
        card = torch.device("cuda", 0)
        weights = {
            key: torch.empty(weight.shape, dtype=weight.dtype, device=card) for key, weight in model.weights.items()
        }
        positions, ids = torch.arange(4), torch.zeros(4, dtype=torch.int64, device=card)
        arrived: list[Tensor] = []
        for index, piece in enumerate(place_slices(lowered, weights, card)):
            results = piece(piece.prepare(positions), ids, ids, arrived)
            assert {tensor.device for tensor in results} == {card}
            if index < len(lowered.attentions):
                spec = lowered.attentions[index]
                arrived = [results[0].new_empty(4, spec.query_heads, spec.v_dim), *results[3:]]
        assert results[0].shape == (4, VOCABULARY)


def test_a_recording_replays_what_the_device_did_on_the_same_memory() -> None:
    memory, seen = torch.zeros(3), torch.zeros(3)
    python: list[int] = []

    def work() -> None:
        python.append(len(python))
        seen.copy_(memory * 2 + python[-1])  # a number that the host chose stays as it was

    replay = Emulated().capture(work)
    memory.fill_(5.0)
    replay()
    assert seen.tolist() == [10.0 + python[-1]] * 3
    with pytest.raises(RuntimeError, match="waits for the device"):
        Emulated().capture(lambda: memory.sum().item())


SPECS = [
    AttentionSpec(0, 4, 2, 8, 8, 0.35),
    AttentionSpec(0, 4, 4, 12, 6, 0.3, window=5, softcap=4.0),
    AttentionSpec(0, 4, 1, 4, 8, 0.5, alibi_slopes=(0.5, 0.25, 0.1, 0.0)),
    AttentionSpec(0, 2, 2, 8, 8, 0.5, chunk=6),
    AttentionSpec(0, 4, 2, 16, 16, 0.2, window=40),
]


@settings(max_examples=30)
@given(
    chunks=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 50), st.integers(0, 3)), min_size=1, max_size=4),
    spec=st.sampled_from(SPECS),
    most_scores=st.sampled_from([64, 1 << 20]),
    seed=st.integers(0, 9),
)
def test_chunks_attend_to_themselves(
    chunks: list[tuple[int, int, int]], spec: AttentionSpec, most_scores: int, seed: int
) -> None:
    """Chunks of any rows, at any positions, with other rows between them; whole or in blocks."""
    rng, firsts, row = np.random.default_rng(seed), [], 0
    for count, _, gap in chunks:
        firsts.append(row + gap)
        row += gap + count
    shapes = (spec.query_heads, spec.qk_dim), (spec.kv_heads, spec.qk_dim), (spec.kv_heads, spec.v_dim)
    q, k, v = (rng.standard_normal((row, *shape)).astype(np.float32) for shape in shapes)
    rows = np.concatenate(
        [np.arange(first, first + count) for first, (count, _, _) in zip(firsts, chunks, strict=True)]
    )
    bounds = np.cumsum([0, *(count for count, _, _ in chunks)]).astype(np.int32)
    starts = np.array([start for _, start, _ in chunks], np.int32)
    table = SegmentTable(bounds, starts, bounds, starts, rows.astype(np.int32))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lamina.compute.device.chunk_attention.MOST_SCORES", most_scores)
        there = torch.from_numpy(q), torch.from_numpy(k), torch.from_numpy(v)
        out, lse = attend_chunks(*there, firsts, table, spec, Emulated().fused)
    wanted_out, wanted_lse = reference_attention.partial(q[rows], k, v, table, spec, 1)
    np.testing.assert_allclose(out, wanted_out, atol=2e-5)
    np.testing.assert_allclose(lse, wanted_lse, atol=2e-5)


def test_flash_attention_has_the_results_that_chunks_need() -> None:
    """Shapes and types of torch's operator for CUDA, without a card."""
    with FakeTensorMode():
        q = torch.empty(1, 4, 9, 64, dtype=torch.bfloat16, device="cuda")
        found = Cuda.fused(None, q, q, q, 0.125)  # type: ignore[arg-type]
        assert found is not None
        out, lse = found
        assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, (1, 4, 9), torch.float32)
        assert Cuda.fused(None, q.float(), q, q, 0.125) is None  # type: ignore[arg-type]


def test_rows_are_padded_to_recorded_numbers() -> None:
    sizes = {padded_rows(rows) for rows in range(1, 2100)}
    assert all(rows <= padded_rows(rows) <= max(2 * rows, 64 + rows) for rows in range(1, 2100))
    assert set(ROWS) <= sizes and len(sizes) < 50


def test_an_unusable_device_is_one_clear_error() -> None:
    with pytest.raises(ConfigError, match=r"cuda:7 cannot run slices: PyTorch .*, or use --compute cpu:1"):
        make("cuda:7")
    with pytest.raises(ConfigError, match="unknown device 'tpu'"):
        make("tpu")


class Counting(Emulated):
    """Counts recordings."""

    recorded = 0

    def capture(self, work: Callable[[], object]) -> Callable[[], None]:
        self.recorded += 1
        return super().capture(work)


def test_no_step_records_what_was_reserved() -> None:
    """Steps of any number of rows, whatever number of them draw a token."""
    kit, model = Counting(), random_model(variant("llama"))
    runner = OnGpu(split(variant("llama")), model.state_dict(), kit)._runner
    runner.reserve(12, draws=5, shards=2)
    reserved = kit.recorded
    for count in range(1, 13):
        total, every = padded_rows(count), np.arange(2 * count)
        exchanged = ExchangedRows(count, total, 2, [every], [every], [np.zeros_like(every)], [], [])
        transfers = runner.transfers(exchanged)
        rows = Rows(torch.full((total,), 7), torch.arange(total))
        attention, context = None, tuple[Tensor, ...]()
        for index, spec in enumerate(runner.attentions):
            output = runner.run(index, rows, attention, context)
            transfers.fill_messages(output.q, output.k, output.v)
            reply = memoryview(bytearray(4 * count * spec.query_heads * (spec.v_dim + 1)))
            attention, context = transfers.merged(spec, [], [(0, reply)], None), output.context
        assert attention is not None
        runner.logits(rows, attention, context, torch.arange(min(count, 5)))
    assert kit.recorded == reserved


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32])
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe"])
def test_experts_are_recorded(name: str, dtype: DType) -> None:
    """What is replayed computes what the operators compute, for other tokens than those it was recorded with."""
    model = split(variant(name), dtype)
    lowered = lower(model, Target.GPU)
    exact = random_model(variant(name)).state_dict()
    weights: dict[str, Weight] = {key: exact[key].to(getattr(torch, dtype.value)) for key in lowered.weights}
    eager = place_slices(lowered, weights, torch.device("cpu"), grouped=False)
    assert all(piece.capturable for piece in eager)
    kit = Counting()
    runner = Gpu(kit).runner(lowered, weights)
    positions = torch.arange(4)
    for seed in range(3):
        torch.manual_seed(seed)
        ids = torch.randint(VOCABULARY, (4,))
        arrived: tuple[Tensor, ...] = ()
        attention = None
        for index, piece in enumerate(eager[:-1]):
            wanted = piece(piece.prepare(positions), ids, positions, arrived)
            got = runner.run(index, Rows(ids, positions), attention, arrived[1:])
            for ours, right in zip(got.results, wanted, strict=True):
                torch.testing.assert_close(ours, right)
            spec = lowered.attentions[index]
            attention = torch.randn(4, spec.query_heads, spec.v_dim).to(getattr(torch, dtype.value))
            arrived = attention, *wanted[3:]
    assert kit.recorded == len(eager) - 1


def test_a_compute_worker_tells_of_the_memory_of_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """KV may have to fit in it."""
    run = Mock()
    monkeypatch.setattr(worker, "run_worker", run)
    worker.main(Mock())
    assert gpu_memory in run.call_args.args
