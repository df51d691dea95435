"""Times other attention libraries at the same decode steps (for attention.py), after comparing their outputs."""

import importlib.util
from collections.abc import Callable
from typing import Any

import cupy
import numpy as np

TOLERANCE = 0.02  # outputs of values near 1 in bfloat16
WORKSPACE_BYTES = 256 << 20
REPEATS = 20  # launched from Python one after another: the GPU must not wait for that


def seconds(name: str, step: Any, measure: Callable[..., float]) -> float | None:
    """Seconds of one call of this peer, installed, for a step in bfloat16; None if it cannot do the step."""
    import torch

    stream = torch.cuda.ExternalStream(cupy.cuda.get_current_stream().ptr)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        call = PEERS[name](step)
        if call is None:
            return None
        step.attend()
        theirs = call().float().reshape(step.out.shape)
        torch.cuda.current_stream().synchronize()
        worst = float(np.abs(cupy.asnumpy(step.out) - theirs.cpu().numpy()).max())
        if not worst <= TOLERANCE:
            raise RuntimeError(f"{name} differs from us by {worst:.3f}; one of the two computes something else")
        return measure(call, repeats=REPEATS)


def dense(step: Any, array: Any) -> Any:
    """K or V as [sequences, tokens, Hkv, D] in the order of tokens, for sequences of one length."""
    order, count = as_torch(step.slots).long(), len(step.lengths)
    return bfloat16(array)[order].view(count, step.lengths[0], *array.shape[1:])


def torch_sdpa(step: Any) -> Callable[[], Any] | None:
    """torch's scaled_dot_product_attention over dense K and V, for sequences of one length."""
    if len(set(step.lengths)) > 1:
        return None
    import torch

    q, slab = bfloat16(step.q).unsqueeze(2), step.slabs[0]
    k, v = (dense(step, array).transpose(1, 2).contiguous() for array in (slab.k, slab.v))
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def flash_attention(step: Any) -> Callable[[], Any] | None:
    """FlashAttention's decode over dense K and V, for sequences of one length."""
    if len(set(step.lengths)) > 1:
        return None
    import torch

    decode = importlib.import_module(installed("flash_attention")).flash_attn_with_kvcache
    k, v = (dense(step, array).contiguous() for array in (step.slabs[0].k, step.slabs[0].v))
    lengths = torch.tensor(step.lengths, dtype=torch.int32, device="cuda")
    q = bfloat16(step.q).unsqueeze(1)
    return lambda: decode(q, k, v, cache_seqlens=lengths)


def flashinfer(step: Any) -> Callable[[], Any] | None:
    """FlashInfer's batch decode over pages of one token; by its tensor cores where heads share K and V."""
    import torch
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    heads = step.spec.query_heads, step.spec.kv_heads, step.spec.qk_dim
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=heads[0] > heads[1])
    offsets = torch.tensor(np.cumsum([0, *step.lengths]), dtype=torch.int32, device="cuda")
    last = torch.ones(len(step.lengths), dtype=torch.int32, device="cuda")
    types = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    wrapper.plan(offsets, as_torch(step.slots), last, *heads, 1, **types)
    q = bfloat16(step.q)
    k, v = (bfloat16(array).unsqueeze(1) for array in (step.slabs[0].k, step.slabs[0].v))
    return lambda: wrapper.run(q, (k, v))


PEERS = {"torch_sdpa": torch_sdpa, "flash_attention": flash_attention, "flashinfer": flashinfer}
MODULES = {
    "torch_sdpa": ("torch",),
    "flash_attention": ("flash_attn_interface", "flash_attn"),  # version 3, 2
    "flashinfer": ("flashinfer",),
}


def installed(name: str) -> str:
    """The peer's module; empty if this Python has none."""
    return next((module for module in MODULES[name] if importlib.util.find_spec(module)), "")


def as_torch(array: Any) -> Any:
    """The same memory; torch's kernels know no uint16, so bits become int16."""
    from torch.utils.dlpack import from_dlpack

    return from_dlpack(array.view(np.int16) if array.dtype == np.uint16 else array)


def bfloat16(array: Any) -> Any:
    """The same memory, bits of bfloat16, for torch."""
    import torch

    return as_torch(array).view(torch.bfloat16)
