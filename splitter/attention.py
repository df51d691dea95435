"""Registers an attention implementation with transformers that inserts markers into captured graphs, and reads an
``AttentionSpec`` from each marker.

Models call the function that is registered under their ``attn_implementation``. No mask function is registered under
the same name, so models build no mask; window and chunk are arguments instead.
"""

import sys
from typing import Any

import torch
from torch import Tensor, fx
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lamina.core.errors import UnsupportedModelError
from lamina.core.types import AttentionSpec
from lamina.splitter.markers import ATTENTION

IMPLEMENTATION = "lamina"


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    sinks: Tensor | None = None,
    slopes: list[float] | None = None,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """Insert the marker of one causal attention over one sequence.

    Args:
        query: [1, Hq, T, D].
        key: [1, Hkv, T, D].
        value: [1, Hkv, T, Dv]; Hkv divides Hq.
        sinks: [Hq] logits or None. Other arguments are fields of AttentionSpec.

    Returns: [1, T, Hq, Dv], without values.
    """
    rows = [tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value)]
    out: Tensor = ATTENTION(*rows, sinks, slopes or [], scale, window, chunk, softcap)
    return out.unsqueeze(0)


# Arguments that models pass to their attention function but that do not change causal attention over one unpadded
# sequence.
_IRRELEVANT = {
    "cache_position",
    "dropout",
    "is_causal",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "use_cache",
}


def _registered(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Insert the marker for a call by transformers, whose signature this is. Returns ([1, T, Hq, Dv], None)."""
    name = type(module).__name__
    unknown = {key for key, value in kwargs.items() if value is not None} - _IRRELEVANT
    if unknown:
        raise UnsupportedModelError(f"{name} passes {sorted(unknown)} to its attention; Lamina's kernels lack support")
    if attention_mask is not None:
        raise UnsupportedModelError(f"{name} adds a mask or bias of its own to causal attention")
    if not kwargs.get("is_causal", getattr(module, "is_causal", True)):
        raise UnsupportedModelError(f"{name} is not causal: only decoder attention can be served from a KV cache")
    window, chunk = _visibility(module, sliding_window)
    out = attention(
        query,
        key,
        value,
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        sinks=s_aux,
        window=window,
        chunk=chunk,
        softcap=softcap or 0.0,
    )
    return out, None


def _visibility(module: torch.nn.Module, sliding_window: int | None) -> tuple[int, int]:
    """Return window and chunk of one attention, from the settings by which transformers builds the layer's mask."""
    config: Any = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        # Some families pass no window to their attention, but build a sliding mask if the configuration has a window.
        masks_slide = hasattr(sys.modules[type(module).__module__], "create_sliding_window_causal_mask")
        return sliding_window or (masks_slide and getattr(config, "sliding_window", None)) or 0, 0
    kind = kinds[module.layer_idx]
    if kind == "full_attention":
        return 0, 0
    if kind == "sliding_attention":
        return sliding_window or config.sliding_window, 0
    if kind == "chunked_attention":
        return 0, config.attention_chunk_size
    raise UnsupportedModelError(
        f"layer {module.layer_idx} is of type {kind!r}; the splitter knows full, sliding and chunked attention"
    )


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _registered)


def sinks(node: fx.Node) -> fx.Node | None:
    """Return the placeholder of an operator node's sink logits, looking through casts, or None."""
    source = node.args[3]
    while isinstance(source, fx.Node) and source.op != "placeholder":
        (source,) = source.all_input_nodes
    assert source is None or isinstance(source, fx.Node)
    return source


def spec(node: fx.Node, layer: int) -> AttentionSpec:
    """Return the AttentionSpec of an operator node in a captured graph."""
    arguments: Any = node.args
    query, key, value, sink, slopes, scale, window, chunk, softcap = arguments
    return AttentionSpec(
        layer=layer,
        query_heads=query.meta["val"].shape[1],
        kv_heads=key.meta["val"].shape[1],
        qk_dim=query.meta["val"].shape[2],
        v_dim=value.meta["val"].shape[2],
        scale=scale,
        window=window,
        chunk=chunk,
        softcap=softcap,
        sinks=sink is not None,
        alibi_slopes=tuple(slopes) if slopes else None,
    )
