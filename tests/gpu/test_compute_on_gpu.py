"""Compute workers on a GPU: slices, messages and the whole runtime against Hugging Face."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lamina.compute.device.chunk_attention import attend_chunks
from lamina.core.errors import ConfigError
from lamina.core.types import AttentionSpec, Quantization
from lamina.kernels.segments import SegmentTable
from lamina.lowering.expert_operators import experts_stacked, multiply
from lamina.models.quantisation.codes import StackedCodes, quantise_experts
from tests.support import reference_attention
from tests.support.gpu_runner import OnGpu
from tests.support.lane_transfers import check_lanes
from tests.support.polling_runs import BY_HOST, SETTINGS, check_polling
from tests.support.random_models import served, variant
from tests.support.rank_runs import check_ranks
from tests.support.running import check_greedy
from tests.support.split_oracle import assert_same_logits

pytestmark = pytest.mark.gpu

QUANTISED: tuple[Quantization, ...] = ("int8", "int4", "fp8")
TOLERANCE = 1e-4  # of logits in float32, whose products add up in another order than on the CPU


@pytest.mark.parametrize("name", ["llama", "gemma2", "deepseek_v3", "gpt_oss", "qwen2_moe"])
def test_slices_compute_what_hugging_face_computes(name: str) -> None:
    from lamina.compute.device.cuda import Cuda

    assert_same_logits(variant(name), lambda model, weights: OnGpu(model, weights, Cuda(0)), TOLERANCE)


@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_lanes_that_take_turns_move_their_own_rows(is_recorded: bool, has_sinks: bool) -> None:
    from lamina.compute.device.cuda import Cuda

    for seed, (shards, workers) in enumerate([(1, 1), (1, 3), (2, 2)]):
        check_lanes(Cuda(0), 9, 3, shards, workers, is_recorded, has_sinks, seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # in blocks; by FlashAttention
def test_chunks_attend_to_themselves(dtype: torch.dtype) -> None:
    from lamina.compute.device.cuda import Cuda

    spec, count = AttentionSpec(0, 8, 2, 64, 64, 0.125), 300
    rng = np.random.default_rng(0)
    shapes = (spec.query_heads, spec.qk_dim), (spec.kv_heads, spec.qk_dim), (spec.kv_heads, spec.v_dim)
    q, k, v = (torch.from_numpy(rng.standard_normal((count, *shape)).astype(np.float32)).to(dtype) for shape in shapes)
    bounds, start, rows = np.array([0, count], np.int32), np.array([5], np.int32), np.arange(count, dtype=np.int32)
    table = SegmentTable(bounds, start, bounds, start, rows)
    card = Cuda(0)
    there = q.to(card.place), k.to(card.place), v.to(card.place)
    out, lse = attend_chunks(*there, [0], table, spec, card.fused)
    here = q.float().numpy(), k.float().numpy(), v.float().numpy()
    wanted_out, wanted_lse = reference_attention.partial(*here, table, spec, 1)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    np.testing.assert_allclose(out.cpu().numpy(), wanted_out, atol=tolerance)
    np.testing.assert_allclose(lse.cpu().numpy(), wanted_lse, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("counts", [[3, 0, 1], [1, 70, 0, 300, 2]])
def test_experts_multiply_as_on_the_cpu(counts: list[int], dtype: torch.dtype) -> None:
    ends = torch.tensor(counts).cumsum(0).int()
    x, here = torch.randn(sum(counts), 160).to(dtype), torch.randn(len(counts), 96, 160).to(dtype)
    there = here.cuda()
    ways: list[tuple[Any, Any, Any]] = [
        (multiply, here.mT, there.mT),
        (multiply, here.mT.contiguous(), there.mT.contiguous()),
    ]
    for to in QUANTISED:
        each = list(quantise_experts("", here, to, {}))  # once: a GPU divides with other roundings
        placed = (one.replace_tensors(torch.Tensor.cuda) for one in each)
        codes = [StackedCodes.stack(experts, len(counts)) for experts in (each, placed)]
        ways.append((experts_stacked, codes[0], codes[1]))
    for product, on_cpu, on_gpu in ways:
        wanted, found = product(x, on_cpu, ends), product(x.cuda(), on_gpu, ends.cuda()).cpu()
        tolerance = 1e-4 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance * float(wanted.abs().max()))


def test_no_more_than_a_share_of_the_memory_is_taken() -> None:
    from lamina.compute.device.cuda import Cuda

    card = Cuda(0)
    free, total = torch.cuda.mem_get_info(card.place)
    try:
        card.limit(1 - (free - (1 << 30)) / total)  # leaves 1 GiB
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2 << 30, dtype=torch.uint8, device=card.place)
        torch.empty(1 << 29, dtype=torch.uint8, device=card.place)
        with pytest.raises(ConfigError, match="gpu_memory_utilization"):
            card.limit(1 - free / total - 0.01)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, card.place)


@pytest.mark.parametrize(("compute", "memory"), [("cuda:1", "cpu:2"), ("cuda:1", "cuda:1,cpu:1")])
def test_greedy_tokens_equal_hugging_face(compute: str, memory: str, tmp_path: Path) -> None:
    """A compute worker with memory workers on CPUs; and one GPU in both roles."""
    check_greedy("llama", tmp_path, compute=compute, memory=memory)


def test_local_memory_equals_hugging_face(tmp_path: Path) -> None:
    check_greedy("gemma2", tmp_path, compute="cuda:1", memory="local", holders={"compute0"})


@pytest.mark.parametrize("which", ["one lane", "two lanes", "three lanes"])
def test_requests_that_the_gpu_answers_itself_equal_hugging_face(which: str, tmp_path: Path) -> None:
    served_by_device = check_polling(tmp_path, "gpt_oss", memory="cuda:1", **SETTINGS[which])
    assert (served_by_device == 0) == (which in BY_HOST)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_ranks_equal_hugging_face(tmp_path: Path) -> None:
    """Ranks that add up by NCCL in recordings; a prompt too long to be recorded; one KV head."""
    model = served("llama", num_key_value_heads=1, max_position_embeddings=1024)
    sizes = {"max_model_len": 1024, "max_num_batched_tokens": 640}
    check_ranks(tmp_path, model, 2, (1, 6, 600), 5, compute="cuda:2", **sizes)
