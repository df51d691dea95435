"""Finds the shape of a model for the cost model, from a config.json or by the name of a known model."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from lamina.core.errors import ConfigError, ModelError, UnsupportedModelError
from lamina.core.types import DType, KvCacheDType, KvElement
from lamina.models import hub
from lamina.models.directory import CONFIG, max_model_len, model_name, read_json, stated_tie
from lamina.models.quantisation.formats import scheme
from lamina.planning.plan import reference
from lamina.planning.plan.kernel_times import Floats

COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names of the number of experts in configs."""

_ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_k")
_WIDTH = ("moe_intermediate_size", "expert_intermediate_size", "intermediate_size")
_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")
_SHARED_WIDTH = ("shared_expert_intermediate_size", "shared_intermediate_size", "share_expert_dim")
_DENSE = ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers")


SKEW = 0.5
"""How unevenly tokens choose experts. AIConfigurator measures power laws: 128 choices of 128 experts touch 63 of
them, and 192 touch 96; this exponent gives 74 and 91."""


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts.

    Attributes:
        count: Experts of a layer.
        active: Experts that each token uses.
        intermediate: Width of one expert.
        layers: Number of layers with experts; other layers are dense.
        shared: Width of the experts that every token uses.
    """

    count: int
    active: int
    intermediate: int
    layers: int
    shared: int = 0

    @classmethod
    def from_config(cls, name: str, config: Mapping[str, Any], layers: int) -> "Experts | None":
        """Read a parsed config.json; return None for a dense model.

        Raises:
            ModelError: A size is missing.
            UnsupportedModelError: Layers have different numbers of experts.
        """
        unequal = next((key for key in COUNTS if isinstance(config.get(key), list)), None)
        if unequal:
            raise UnsupportedModelError(
                f"{name} has a mixture of experts whose layers differ ({unequal} {config[unequal]}); the cost model "
                "covers equal ones"
            )
        count = _first(config, COUNTS)
        if count is None or count == 1:
            return None
        active, width = _first(config, _ACTIVE), _first(config, _WIDTH)
        if active is None or width is None or active > count:
            raise ModelError(
                f"the config of {name} has {count} experts, of which each token uses {active}, {width} wide; give "
                f"one of {', '.join(_ACTIVE)}, at most {count}, and one of {', '.join(_WIDTH)}"
            )
        shared = _first(config, _SHARED_WIDTH) or width * (_first(config, _SHARED) or 0)
        if config.get("model_type") == "llama4_text":
            shared = width
        return cls(
            count=count,
            active=active,
            intermediate=width,
            shared=shared,
            layers=_layers_with_experts(config, layers),
        )

    @property
    def width(self) -> int:
        """Width of all experts of a layer together."""
        return self.count * self.intermediate + self.shared

    def touched(self, rows: ArrayLike) -> Floats:
        """Return the mean number of experts that ``rows`` tokens use, if they choose independently and expert i is
        chosen in proportion to ``i ** -SKEW``."""
        weights = np.arange(1, self.count + 1, dtype=np.float64) ** -SKEW
        chosen = np.minimum(1.0, self.active * weights / weights.sum())
        missed = (1 - chosen) ** np.asarray(rows, dtype=np.float64)[..., None]
        return np.asarray((1 - missed).sum(axis=-1))


def _layers_with_experts(config: Mapping[str, Any], layers: int) -> int:
    listed = config.get("moe_layer_freq")
    if isinstance(listed, list):
        return sum(map(bool, listed))
    listed = config.get("mlp_only_layers")
    dense = len(listed) if isinstance(listed, list) else 0
    return max(1, (layers - (_first(config, _DENSE) or 0)) // _step(config) - dense)


def _step(config: Mapping[str, Any]) -> int:
    """Return the period of layers with experts: 1 if all have them."""
    return _first(config, ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval")) or 1


def _first(config: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    found = (config.get(key) for key in keys)
    return next((one for one in found if isinstance(one, int) and not isinstance(one, bool) and one > 0), None)


WeightDType = Literal["auto", "fp8", "int8", "int4"]
"""Element type of the layers' matrices; auto is the model's own. Embeddings keep that in any case."""

_WEIGHT_BYTES: dict[WeightDType, float] = {"fp8": 1.0, "int8": 1.0, "int4": 0.5 + 8 / 128}
"""Bytes of a weight; in int4, with a scale and a zero point of 4 bytes each for every 128 weights."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder-only transformer, dense or with a mixture of experts.

    Attributes:
        name: Name of the model.
        layers: Number of layers, L.
        hidden: Hidden size, d.
        intermediate: Width of the feed-forward network.
        query_heads: Query heads; G = query_heads / kv_heads of them share one KV head.
        kv_heads: KV heads.
        head_size: Size of q, k and v of a head.
        vocabulary: Rows of the embedding.
        gated: Whether the feed-forward network has a third matrix.
        tied_embeddings: Whether the output head is the embedding.
        dtype: Element type of activations and messages.
        max_tokens: Longest sequence; None if the config does not say.
        kv_cache_dtype: Element type of cached K and V.
        weight_dtype: Element type of the layers' weights.
        experts: Experts of the layers that have them; None for a dense model.
        only_experts: Whether only experts are stored as ``weight_dtype``, and attention as ``dtype``.
        unread: What ``lamina launch`` lacks to start the model, else empty.
        window: Attention window of ``windowed`` layers, in tokens; 0 if no layer has one.
        windowed: Number of layers with a window.
    """

    name: str
    layers: int
    hidden: int
    intermediate: int
    query_heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    gated: bool = True
    tied_embeddings: bool = False
    dtype: DType = DType.BFLOAT16
    max_tokens: int | None = None
    kv_cache_dtype: KvCacheDType = "auto"
    weight_dtype: WeightDType = "auto"
    experts: Experts | None = None
    only_experts: bool = False
    unread: str = ""
    window: int = 0
    windowed: int = 0

    def stored_as(self, kv_cache_dtype: KvCacheDType, weight_dtype: WeightDType) -> "ModelShape":
        """Return the model with other element types of cached K and V and of weights; "auto" keeps a type.

        Raises ConfigError for another type of weights that are stored as codes already.
        """
        if self.weight_dtype != "auto" and weight_dtype not in ("auto", self.weight_dtype):
            raise ConfigError(
                f"the weights of {self.name} are stored as {self.weight_dtype} already, and are not quantised again; "
                "leave out --weight-dtype, or give the config.json of the unquantised model"
            )
        kept = weight_dtype if self.weight_dtype == "auto" else self.weight_dtype
        return replace(self, kv_cache_dtype=kv_cache_dtype, weight_dtype=kept)

    @property
    def group(self) -> int:
        """G: query heads that share one key/value head."""
        return self.query_heads // self.kv_heads

    @property
    def fp8(self) -> bool:
        """Whether the layers' weights are 8-bit floats, which some hardware multiplies as they are."""
        return self.weight_dtype == "fp8"

    @property
    def weight_itemsize(self) -> float:
        """Bytes of one of the layers' weights."""
        return _WEIGHT_BYTES.get(self.weight_dtype, float(self.dtype.itemsize))

    @property
    def dense_itemsize(self) -> float:
        """Bytes of one of the weights outside of experts."""
        return float(self.dtype.itemsize) if self.only_experts else self.weight_itemsize

    @property
    def _attention_parameters(self) -> int:
        return self.hidden * self.head_size * 2 * (self.query_heads + self.kv_heads)

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer's matrices; the mean, if not all layers have experts."""
        matrices, width = 3 if self.gated else 2, float(self.intermediate)
        if self.experts is not None:
            sparse = self.experts.layers / self.layers
            width = (1 - sparse) * width + sparse * self.experts.width
        return self._attention_parameters + round(self.hidden * width * matrices)

    @property
    def parameters(self) -> int:
        """All weights except norms, biases and routers, which are below 0.1%."""
        return self.layers * self.layer_parameters + self._embeddings

    @property
    def _embeddings(self) -> int:
        return self.vocabulary * self.hidden * (1 if self.tied_embeddings else 2)

    @property
    def weight_bytes(self) -> int:
        """Bytes of one replica."""
        attention = self._attention_parameters
        others = self.layer_parameters - attention
        layers = round(self.layers * (attention * self.dense_itemsize + others * self.weight_itemsize))
        return layers + self._embeddings * self.dtype.itemsize

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of cached keys and values of one token in all layers, with quantisation scales."""
        return 2 * self.kv_heads * self.kv_element.row_nbytes(self.head_size) * self.layers

    @property
    def kv_element(self) -> KvElement:
        """How K and V are cached."""
        return KvElement.from_setting(self.kv_cache_dtype, self.dtype)


def _llama(name: str, layers: int, hidden: int, intermediate: int, heads: int, **others: Any) -> ModelShape:
    values = {"kv_heads": heads, "vocabulary": 32000, "max_tokens": 2048, "head_size": hidden // heads, **others}
    return ModelShape(name=name, layers=layers, hidden=hidden, intermediate=intermediate, query_heads=heads, **values)


def _experts(count: int, active: int, intermediate: int, layers: int) -> Experts:
    return Experts(count=count, active=active, intermediate=intermediate, layers=layers)


_MXFP4 = "mxfp4"
_QWEN3: dict[str, Any] = {"head_size": 128, "vocabulary": 151936, "max_tokens": 40960}

KNOWN = {
    shape.name.lower(): shape
    for shape in (
        _llama("LLaMA-7B", 32, 4096, 11008, 32),
        _llama("LLaMA-13B", 40, 5120, 13824, 40),
        _llama("LLaMA-33B", 60, 6656, 17920, 52),
        _llama("LLaMA-65B", 80, 8192, 22016, 64),
        _llama("Llama-2-7B", 32, 4096, 11008, 32, max_tokens=4096),
        _llama("Llama-2-13B", 40, 5120, 13824, 40, max_tokens=4096),
        _llama("Llama-2-70B", 80, 8192, 28672, 64, kv_heads=8, max_tokens=4096),
        _llama("Llama-3-8B", 32, 4096, 14336, 32, kv_heads=8, vocabulary=128256, max_tokens=8192),
        _llama("Llama-3-70B", 80, 8192, 28672, 64, kv_heads=8, vocabulary=128256, max_tokens=8192),
        _llama("Mixtral-8x7B", 32, 4096, 14336, 32, kv_heads=8, max_tokens=32768, experts=_experts(8, 2, 14336, 32)),
        _llama("Qwen3-30B-A3B", 48, 2048, 6144, 32, kv_heads=4, experts=_experts(128, 8, 768, 48), **_QWEN3),
        _llama("Qwen3-32B", 64, 5120, 25600, 64, kv_heads=8, **_QWEN3),
        _llama(
            "gpt-oss-120b",
            36,
            2880,
            2880,
            64,
            kv_heads=8,
            head_size=64,
            vocabulary=201088,
            max_tokens=131072,
            experts=_experts(128, 4, 2880, 36),
            weight_dtype="int4",
            only_experts=True,
            unread=f"a reader of weights stored as {_MXFP4}",
            window=128,
            windowed=18,
        ),
        _llama("InternLM-20B", 60, 5120, 13824, 40, vocabulary=103168, max_tokens=4096),
    )
}
"""The papers' models and two mixtures of experts, from their published configs; lower-case name -> shape."""

_KEYS = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "query_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "vocabulary": ("vocab_size",),
}
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_WIDTHS = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
_NOT_GATED = {
    *("gpt2", "gpt_neo", "gpt_neox", "gptj", "gpt_bigcode", "opt", "bloom"),
    *("mpt", "falcon", "phi", "starcoder2", "nemotron", "arcee", "apertus", "persimmon", "codegen"),
}
_REFUSED = {
    "kv_lora_rank": "latent attention (MLA)",
    "mamba_d_state": "layers with a state of their own",
    "state_size": "layers with a state of their own",
    "hybrid_override_pattern": "layers of several kinds, some with a state of their own",
    "layers_block_type": "layers of several kinds, some with a state of their own",
    "linear_attn_config": "linear attention",
    "linear_num_value_heads": "linear attention",
    "attn_type_list": "linear attention",
    "block_configs": "layers of different sizes",
    "hidden_size_per_layer_input": "embeddings for each layer",
    "lru_width": "layers with a state of their own",
    "residual_moe": "a dense network beside its experts",
    "parallel_attn_mlp_res": "a dense network beside its experts",
    "compress_ratios": "attention to compressed K and V",
    "o_lora_rank": "output projections of low rank",
    "index_topk": "sparse attention",
    "sparse_attention_config": "sparse attention",
    "hybrid_layer_pattern": "layers whose attention has different sizes",
    "swa_num_key_value_heads": "layers whose attention has different sizes",
    "global_head_dim": "layers whose attention has different sizes",
    "attention_other_setting": "layers whose attention has different sizes",
}
_TIED = {
    *("gemma", "gemma2", "gemma3", "gemma3_text", "cohere", "cohere2", "starcoder2", "smollm3", "ernie4_5"),
    *("ernie4_5_moe", "gpt2", "gpt_neo", "gpt_bigcode", "opt", "bloom", "mpt", "falcon", "biogpt", "xglm", "lfm2"),
}
"""Model types whose output head is the embedding unless the config says otherwise, as in transformers."""
_DENSE_WIDTH = {"llama4_text": ("intermediate_size_mlp",)}
"""Where the width of dense layers is, by model type, if it is not that of the experts."""
_SIZES = (*_KEYS["query_heads"], *_KV_HEADS, *_WIDTHS, *_WIDTH, *_ACTIVE, *_SHARED)
"""Sizes that some configs list by layer."""
_ATTENTION = "attention"
"""Suffix in ``layer_types`` of layers that keep K and V: full, sliding or chunked attention."""


def find(model: str) -> ModelShape:
    """Return the shape of a model directory, a config.json, a name in ``KNOWN`` in any case, or a model on the hub.

    Raises:
        ModelError: The file or name does not exist, or the config lacks a size.
        UnsupportedModelError: The cost model does not cover this architecture.
    """
    known = next((name for name, on_hub in HUB.items() if on_hub == model), model).lower()
    if known in KNOWN:
        return KNOWN[known]
    path = Path(model).expanduser()
    if not path.exists() and hub.is_name(model):
        path = _downloaded(model)
    file = path / CONFIG if path.is_dir() else path
    if not file.is_file():
        near = difflib.get_close_matches(model.lower(), KNOWN, n=2)
        hint = f"; did you mean {' or '.join(KNOWN[name].name for name in near)}?" if near else "."
        names = ", ".join(shape.name for shape in KNOWN.values())
        raise ModelError(
            f"{model!r} is not a model directory, a config.json or a known name{hint} Known: {names}; OWNER/NAME "
            "downloads the config.json of a model"
        )
    name = model_name(file.parent).rpartition("/")[2] if file.name == CONFIG else file.stem
    beside = file.parent / MODELOPT
    if beside.is_file():
        raise UnsupportedModelError(
            f"{name} holds weights quantised as {beside.name} says, which Lamina does not read; plan its unquantised "
            "model with --weight-dtype"
        )
    shape = from_config(name, reference.completed(file, read_json(file)))
    reference.require_equal(file, name, shape.parameters)
    return replace(shape, unread=shape.unread or reference.refusal(file))


@lru_cache(maxsize=8)
def _downloaded(model: str) -> Path:
    """Return the directory of a model on the hub, without its weights. Raises ModelError."""
    return hub.download(model, weights=False)


MODELOPT = "hf_quant_config.json"
"""File of a model directory that says how NVIDIA's ModelOpt quantised the weights; its config.json may not."""


HUB = {
    "Llama-2-7B": "meta-llama/Llama-2-7b-hf",
    "Llama-2-13B": "meta-llama/Llama-2-13b-hf",
    "Llama-2-70B": "meta-llama/Llama-2-70b-hf",
    "Llama-3-8B": "meta-llama/Meta-Llama-3-8B",
    "Llama-3-70B": "meta-llama/Meta-Llama-3-70B",
    "Mixtral-8x7B": "mistralai/Mixtral-8x7B-v0.1",
    "Qwen3-30B-A3B": "Qwen/Qwen3-30B-A3B",
    "Qwen3-32B": "Qwen/Qwen3-32B",
}
"""Names on the Hugging Face Hub of models in ``KNOWN`` that ``lamina launch`` reads."""


def model_to_launch(model: str) -> str:
    """Return the ``lamina launch --model`` argument of a planned model: its directory, or its name on the hub; a
    placeholder if neither is known."""
    path = Path(model).expanduser()
    if path.is_dir() or (hub.is_name(model) and not path.exists()):
        return model
    if path.is_file() and path.name == CONFIG:
        return str(path.parent)
    name = find(model).name
    return HUB.get(name, f"PATH_TO_{name}")


def from_config(name: str, config: Mapping[str, Any]) -> ModelShape:
    """Return the shape that a parsed config.json describes. Raises the errors of ``find``."""
    nested = config.get("text_config")
    text = _uniform(name, nested if isinstance(nested, dict) else config)
    weight_dtype = _require_covered(name, config, text)
    sizes = {size: _integer(name, text, keys) for size, keys in _KEYS.items()}
    hidden, heads = sizes["hidden"], sizes["query_heads"]
    tied = stated_tie(config)
    multi_query = bool(text.get("multi_query")) and not text.get("new_decoder_architecture")
    kv_heads = 1 if multi_query else _first(text, _KV_HEADS) or heads
    head_size = _first(text, ("head_dim",)) or hidden // heads
    if heads % kv_heads or not head_size:
        raise ModelError(
            f"the config of {name} has {heads} query heads, {kv_heads} key/value heads and a hidden size of {hidden}; "
            "query heads must be a multiple of key/value heads, and the head size at least 1"
        )
    return ModelShape(
        name=name,
        layers=sizes["layers"],
        hidden=hidden,
        query_heads=heads,
        vocabulary=sizes["vocabulary"],
        intermediate=_width(text) or 4 * hidden,
        kv_heads=kv_heads,
        head_size=head_size,
        gated=text.get("model_type") not in _NOT_GATED,
        tied_embeddings=_is_tied(text) if tied is None else tied,
        dtype=_dtype(text, config),
        max_tokens=max_model_len(config),
        weight_dtype=weight_dtype,
        only_experts=_is_mxfp4(config),
        unread=f"a reader of weights stored as {_MXFP4}" if _is_mxfp4(config) else "",
        experts=Experts.from_config(name, text, sizes["layers"]),
        window=_windows(text)[0],
        windowed=_windows(text)[1],
    )


def _width(text: Mapping[str, Any]) -> int | None:
    """Return the width of dense layers. The first Qwen's configs count both matrices of the gate."""
    kind = str(text.get("model_type"))
    width = _first(text, (*_DENSE_WIDTH.get(kind, ()), *_WIDTHS))
    return width // 2 if width and kind == "qwen" else width


def _uniform(name: str, text: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config with one number for each size that it lists by layer.

    Raises UnsupportedModelError if the layers differ.
    """
    listed = {key: text[key] for key in _SIZES if isinstance(text.get(key), list)}
    if unequal := next((key for key, values in listed.items() if len(set(values)) != 1), None):
        raise UnsupportedModelError(
            f"{name} has layers of different sizes ({unequal}), which the cost model does not cover"
        )
    return {**text, **{key: values[0] for key, values in listed.items()}}


def _require_covered(name: str, config: Mapping[str, Any], text: Mapping[str, Any]) -> WeightDType:
    """Return the element type of the weights. Raises UnsupportedModelError if the cost model does not cover a model."""
    mxfp4 = _is_mxfp4(config)
    stored = None if mxfp4 else scheme(name, config)
    nested = [value for value in text.values() if isinstance(value, dict)]
    for inner in nested:
        if any(inner.get(key) not in (None, 0, 1) for key in COUNTS):
            raise UnsupportedModelError(f"{name} describes a mixture of experts in a part of its config, not on top")
    parts: list[Mapping[str, Any]] = [text, *nested]
    for part in parts:
        for key, what in _REFUSED.items():
            if _says(key, part.get(key)):
                raise UnsupportedModelError(
                    f"{name} has {what} ({key} {part[key]}), which the cost model does not cover"
                )
    if text.get("v_head_dim") not in (None, text.get("head_dim")):
        raise UnsupportedModelError(
            f"{name} has values of {text['v_head_dim']} and keys of {text.get('head_dim')} elements, which the cost "
            "model does not cover"
        )
    kinds = text.get("layer_types")
    for kind in kinds if isinstance(kinds, list) else ():
        if not str(kind).endswith(_ATTENTION) or str(kind).startswith("linear"):
            raise UnsupportedModelError(
                f"{name} has layers of type {kind}; the cost model covers layers with K and V only"
            )
    if stored is None:
        return "int4" if mxfp4 else "auto"
    return "int4" if stored.bits == 4 else "fp8" if stored.floats else "int8"


def _is_mxfp4(config: Mapping[str, Any]) -> bool:
    """Return whether a config is gpt-oss's, whose experts are stored in 4 bits, and nothing else."""
    stored = config.get("quantization_config")
    named = config.get("model_type") == "gpt_oss"
    return named and isinstance(stored, dict) and stored.get("quant_method") == _MXFP4


def _says(key: str, value: object) -> bool:
    """Return whether the value of a key in ``_REFUSED`` means that a model has what the key is about."""
    if key == "attn_type_list" and isinstance(value, list):
        return any(kind != 1 for kind in value)  # 1 is attention with K and V
    return value is True or value not in (None, False, 0, 1)


def _is_tied(text: Mapping[str, Any]) -> bool:
    """Return transformers' default; a config without a model type is taken to tie its embeddings."""
    return "model_type" not in text or text["model_type"] in _TIED


def _windows(text: Mapping[str, Any]) -> tuple[int, int]:
    """Return the window of layers that have one, and their number."""
    kinds, window = text.get("layer_types"), text.get("sliding_window")
    if not isinstance(kinds, list) or not isinstance(window, int) or window < 1:
        return 0, 0
    return window, sum(str(kind).startswith("sliding") for kind in kinds)


def _integer(name: str, config: Mapping[str, Any], keys: tuple[str, ...]) -> int:
    value = _first(config, keys)
    if value is None:
        raise ModelError(
            f"the config of {name} has none of {', '.join(keys)}; the cost model knows no other names of this size. "
            "Give the whole config.json, or another model"
        )
    return value


def _dtype(*configs: Mapping[str, Any]) -> DType:
    stated = next((c[key] for c in configs for key in ("dtype", "torch_dtype") if isinstance(c.get(key), str)), "")
    return DType(stated) if stated in {dtype.value for dtype in DType} else DType.BFLOAT16
