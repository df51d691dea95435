"""Adapts model families that do not call transformers' attention interface, or that use row numbers as positions.

Each adapter replaces that arithmetic in one family, and keeps weights, projections and rotary embedding.
"""

import re
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from lamina.core.types import DType
from lamina.splitter.attention import IMPLEMENTATION, attention


def build_implementation(model_type: str) -> str:
    """Return the ``attn_implementation`` with which to construct a model of this type."""
    return "eager" if model_type in _ADAPTERS else IMPLEMENTATION


def adapt(model: PreTrainedModel, model_type: str) -> None:
    """Make the attentions of ``model`` (mutated) call ``attention``, if its family needs an adapter."""
    adapter = _ADAPTERS.get(model_type)
    if adapter is None:
        return
    for module in model.modules():
        adapter(module)
    # MPT requires a mask, which it converts; the mask of eager attention is dead code that capture removes.
    model.config._attn_implementation = "eager" if model_type == "mpt" else IMPLEMENTATION


def knows_positions(model_type: str) -> bool:
    """Return whether a family takes no ``position_ids``, since its only use of positions is ALiBi."""
    return model_type in ("bloom", "mpt")


def keep_in_float32(model: PreTrainedModel, dtype: DType) -> None:
    """Convert parameters of ``model`` (mutated), built in ``dtype``, to float32 where ``from_pretrained`` does.

    ``_keep_in_fp32_modules`` applies to float16 only (bfloat16 has float32's range), the strict list to both.
    """
    kept = set(model._keep_in_fp32_modules_strict or ()) if dtype is not DType.FLOAT32 else set()
    if dtype is DType.FLOAT16:
        kept |= set(model._keep_in_fp32_modules or ())
    patterns = [re.compile(pattern.replace("*", ".*")) for pattern in kept]
    for name, tensor in model.state_dict(keep_vars=True).items():
        if any(pattern.search(name) for pattern in patterns):
            tensor.data = tensor.data.float()


def _code(module: nn.Module) -> Any:
    return sys.modules[type(module).__module__]


def _bind(module: nn.Module, method: str, function: Callable[..., Any]) -> None:
    setattr(module, method, types.MethodType(function, module))


def _bloom(module: nn.Module) -> None:
    def forward(self: Any, hidden_states: Tensor, residual: Tensor, **_: Any) -> tuple[Tensor, None]:
        query, key, value = self._reshape(self.query_key_value(hidden_states))
        out = attention(query, key, value, scale=self.inv_norm_factor, slopes=slopes)
        return self.dense(out.flatten(2)) + residual, None

    if type(module).__name__ == "BloomAttention":
        slopes = _real(lambda: _alibi_slopes(module))
        _bind(module, "forward", forward)


def _mpt(module: nn.Module) -> None:
    def forward(self: Any, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        mixed = self.Wqkv(hidden_states)
        if self.clip_qkv:
            mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        heads = mixed.unflatten(2, (3, self.n_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        out = attention(heads[0], heads[1], heads[2], scale=self.softmax_scale, slopes=slopes)
        return self.out_proj(out.flatten(2)), None

    if type(module).__name__ == "MptAttention":
        slopes = _real(lambda: _mpt_slopes(module))
        _bind(module, "forward", forward)


def _mpt_slopes(module: Any) -> Tensor:
    """Return the slopes, from the alibi tensor for two positions, which holds -slope and 0."""
    alibi: Tensor = _code(module).build_mpt_alibi_tensor(module.n_heads, 2)
    return -alibi[:, 0, 0]


def _falcon(module: Any) -> None:
    def forward(
        self: Any,
        hidden_states: Tensor,
        alibi: Tensor | None,
        attention_mask: Tensor | None,
        position_embeddings: tuple[Tensor, Tensor],
        **_: Any,
    ) -> tuple[Tensor, None]:
        fused = self.query_key_value(hidden_states)
        if self.new_decoder_architecture:  # keep K and V grouped; the original repeats them per query head
            groups = fused.unflatten(2, (self.num_kv_heads, -1, self.head_dim))
            query, key, value = groups[..., :-2, :].flatten(2, 3), groups[..., -2, :], groups[..., -1, :]
        else:
            query, key, value = self._split_heads(fused)
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        if alibi is None:
            query, key = _code(module).apply_rotary_pos_emb(query, key, *position_embeddings)
        out = attention(query, key, value, scale=self.inv_norm_factor, slopes=slopes)
        return self.dense(out.flatten(2)), None

    if type(module).__name__ == "FalconAttention":
        slopes = _real(lambda: _alibi_slopes(module) * module.inv_norm_factor) if module.config.alibi else None
        _bind(module, "forward", forward)


def _alibi_slopes(module: Any) -> Tensor:
    """Return the slopes as the model rounds them: the biases of position 1."""
    alibi = _code(module).build_alibi_tensor(torch.ones(1, 2, dtype=torch.long), module.num_heads, torch.float32)
    slopes: Tensor = alibi[:, 0, 1]
    return slopes


def _gptj_or_neo(module: nn.Module) -> None:
    def _attn(self: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, None]:
        # GPT-J divides by scale_attn; GPT-Neo does not scale at all.
        scale = 1.0 / getattr(self, "scale_attn", 1.0)
        window = self.config.window_size if getattr(self, "attention_type", None) == "local" else 0
        return attention(query, key, value, scale=scale, window=window).transpose(1, 2), None

    if hasattr(module, "_attn"):
        _bind(module, "_attn", _attn)


def _llama4(module: Any) -> None:
    """Scale q by the temperature of each token's position; the original numbers the rows of the step instead."""
    attention: Any = getattr(module, "self_attn", None)
    if not getattr(attention, "attn_temperature_tuning", False) or attention.use_rope:
        return
    attention.attn_temperature_tuning = False
    positions: list[Tensor] = []

    def receive(layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        positions[:] = [kwargs["position_ids"][0]]

    def scale(projection: nn.Module, args: Any, query: Tensor) -> Tensor:
        intervals = torch.floor((positions[0].float() + 1.0) / attention.floor_scale)
        scales = torch.log1p(intervals) * attention.attn_scale + 1.0
        scaled: Tensor = (query * scales[:, None]).to(query.dtype)
        return scaled

    module.register_forward_pre_hook(receive, with_kwargs=True)
    attention.q_proj.register_forward_hook(scale)  # q has no norm in layers without rotary embedding


def _real(compute: Callable[[], Tensor]) -> list[float]:
    """Compute real values inside a fake tensor mode."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        return [float(value) for value in compute()]


_ADAPTERS: dict[str, Callable[[nn.Module], None]] = {
    "bloom": _bloom,
    "falcon": _falcon,
    "gpt_neo": _gptj_or_neo,
    "gptj": _gptj_or_neo,
    "llama4_text": _llama4,
    "mpt": _mpt,
}

FAMILIES = tuple(_ADAPTERS)
"""Types of models that have an adapter."""
