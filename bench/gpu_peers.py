"""Other libraries at the same decode step, for gpu_card.py; what they compute is compared before they are timed."""

import importlib.util
from collections.abc import Callable
from typing import Any

import cupy
import numpy as np

TOLERANCE = 0.02  # outputs of values near 1 in bfloat16
WORKSPACE_BYTES = 256 << 20


def seconds(name: str, step: Any, measure: Callable[..., float]) -> float | None:
    """Seconds of one call of this peer; None if it is not installed or cannot do the step."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    call = {"torch_sdpa": torch_sdpa, "flashinfer": flashinfer}[name](step)
    if call is None:
        return None
    step.attend()
    with torch.cuda.stream(torch.cuda.ExternalStream(cupy.cuda.get_current_stream().ptr)):
        theirs = call().float().reshape(step.out.shape)
        torch.cuda.current_stream().synchronize()
        worst = float(np.abs(cupy.asnumpy(step.out) - theirs.cpu().numpy()).max())
        if worst > TOLERANCE:
            raise RuntimeError(f"{name} differs from us by {worst:.3f}; one of the two computes something else")
        return measure(call)


def torch_sdpa(step: Any) -> Callable[[], Any] | None:
    """torch's scaled_dot_product_attention over dense K and V, for sequences of one length."""
    import torch

    if len(set(step.lengths)) > 1:
        return None
    order = as_torch(step.slots).long()
    count, length = len(step.lengths), step.lengths[0]

    def dense(slab: Any) -> Any:
        return (
            as_torch(slab).view(torch.bfloat16)[order].view(count, length, *slab.shape[1:]).transpose(1, 2).contiguous()
        )

    q, k, v = as_torch(step.q).view(torch.bfloat16).unsqueeze(2), dense(step.slab.k), dense(step.slab.v)
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def flashinfer(step: Any) -> Callable[[], Any] | None:
    """FlashInfer's batch decode over pages of one token."""
    if importlib.util.find_spec("flashinfer") is None:
        return None
    import torch
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
    offsets = torch.tensor(np.cumsum([0, *step.lengths]), dtype=torch.int32, device="cuda")
    last = torch.ones(len(step.lengths), dtype=torch.int32, device="cuda")
    heads = step.spec.query_heads, step.spec.kv_heads, step.spec.qk_dim
    types = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    wrapper.plan(offsets, as_torch(step.slots), last, *heads, 1, **types)
    q = as_torch(step.q).view(torch.bfloat16)
    k, v = (as_torch(slab).view(torch.bfloat16).unsqueeze(1) for slab in (step.slab.k, step.slab.v))
    return lambda: wrapper.run(q, (k, v))


def as_torch(array: Any) -> Any:
    """The same memory; torch's kernels know no uint16, so bits become int16."""
    import torch

    return torch.from_dlpack(array.view(np.int16) if array.dtype == np.uint16 else array)
