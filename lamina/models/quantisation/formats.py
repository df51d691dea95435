"""Finds the quantised weights of a checkpoint, from its config and the headers of its files.

Formats: GPTQ, AWQ, AutoRound, compressed-tensors, and fp8 as DeepSeek and Qwen store it. In all of them, a weight is
(code - zero point) * scale, where a group of weights shares zero point and scale. ``codes`` reads the data.
transformers needs a GPU or other versions of torch for these formats (gptqmodel, optimum, compressed-tensors).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from lamina.core.errors import ModelError, UnsupportedModelError
from lamina.models.checkpoint import TensorEntry

SUPPORTED = (
    "GPTQ, AWQ (gemm) and AutoRound in 4 bits, GPTQ and AutoRound in 8, compressed-tensors (pack-quantized, "
    "int-quantized, float-quantized) and fp8 with scales of blocks or tensors"
)
"""The formats that Lamina reads, for messages."""

_WHOLE = -1
"""A block of all outputs, or of all inputs."""

Block = tuple[int, int]
"""Outputs and inputs that share a scale."""


class Layout(Enum):
    """Layout of codes in their tensor. A word of int32 has n codes, the first in the lowest bits, except in AWQ."""

    GPTQ = "gptq"  # int32 [inputs / n, outputs]
    AWQ = "awq"  # int32 [inputs, outputs / 8], with the codes of 8 outputs interleaved
    ROWS = "rows"  # int32 [outputs, inputs / n]
    PLAIN = "plain"  # int8 or fp8 (e4m3) [outputs, inputs]


@dataclass(frozen=True)
class Packed:
    """A weight [outputs, inputs] that is stored as codes.

    Attributes:
        layout: layout of the codes.
        bits: bits of a code.
        codes: name of the tensor of codes.
        scales: name of the tensor of scales.
        zeros: name of the tensor of zero points; None: all are 0, or the middle of codes that have no sign.
        groups: name of the tensor with the group of each input; None: groups are consecutive inputs.
        zero_offset: number to add to stored zero points.
        shape: shape of the weight.
        block: outputs and inputs that share a scale.
        nbytes: bytes of all these tensors.
    """

    layout: Layout
    bits: int
    codes: str
    scales: str
    zeros: str | None
    groups: str | None
    zero_offset: int
    shape: tuple[int, int]
    block: Block
    nbytes: int


@dataclass(frozen=True)
class Scheme:
    """The quantisation that a config describes.

    Attributes:
        method: name of the method in configs.
        bits: bits of a code.
        blocks: possible numbers of outputs and inputs that share a scale; -1: all.
        zero_offset: number to add to stored zero points.
        symmetric: True if all zero points are the middle of the codes, whatever is stored.
        activations: True if the model is meant to run with quantised activations, which Lamina does not do.
        floats: True if codes are 8-bit floats.
    """

    method: str
    bits: int
    blocks: tuple[Block, ...]
    zero_offset: int = 0
    symmetric: bool = False
    activations: bool = False
    floats: bool = False

    def __str__(self) -> str:
        return f"{self.method} in {self.bits} bits"


def scheme(where: object, config: Mapping[str, Any]) -> Scheme | None:
    """Return the scheme in a config.json; None for weights that are not quantised.

    ``where`` names the model in messages. Raises UnsupportedModelError for a scheme that Lamina does not read.
    """
    text = config.get("text_config")
    places = [config, *([text] if isinstance(text, dict) else [])]
    keys = ("quantization_config", "compression_config")
    found = next((place[key] for place in places for key in keys if place.get(key)), None)
    if found is None:
        return None
    method = found.get("quant_method", "unknown") if isinstance(found, dict) else str(found)
    read = _METHODS.get(method)
    why = "" if read is not None else f"the method {method!r} is not known"
    try:
        if read is not None:
            return read(found)
    except _RefusedError as error:
        why = str(error)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        why = f"its quantization_config is not valid ({error!r})"
    raise UnsupportedModelError(
        f"{where} holds weights quantised with {method}, and {why}. Lamina reads {SUPPORTED}; give such a checkpoint "
        "of the model, or the original one"
    )


class _RefusedError(ValueError):
    """A scheme that Lamina does not read; says why."""


def _require(holds: bool, why: str) -> None:
    if not holds:
        raise _RefusedError(why)


def _group(config: Mapping[str, Any]) -> int:
    size = config["group_size"]
    _require(isinstance(size, int) and (size > 0 or size == _WHOLE), f"its group_size is {size}")
    return int(size)


def _gptq(config: Mapping[str, Any]) -> Scheme:
    bits, form = config["bits"], config.get("checkpoint_format") or config.get("format") or "gptq"
    words = config.get("pack_dtype") or "int32"
    _require(bits in (4, 8), f"it has {bits} bits")
    _require(form in ("gptq", "gptq_v2"), f"its checkpoint_format is {form}")
    _require(words == "int32", f"its codes are packed into {words}, not int32 (pack_dtype)")
    others = [name for name in config.get("dynamic") or {} if not name.startswith("-:")]
    _require(not others, f"some modules have settings of their own (dynamic: {', '.join(others)})")
    # Some writers store other zero points in symmetric checkpoints than their version of the format has.
    symmetric = config.get("sym") is True
    return Scheme("gptq", bits, ((1, _group(config)),), zero_offset=int(form == "gptq"), symmetric=symmetric)


def _awq(config: Mapping[str, Any]) -> Scheme:
    bits, form = config["bits"], str(config.get("version") or config.get("format") or "gemm").lower()
    _require(bits == 4, f"it has {bits} bits")
    _require(form == "gemm", f"its version is {form}")
    _require(config.get("zero_point", True) is True, "it has no zero points")
    return Scheme("awq", bits, ((1, _group(config)),))


def _auto_round(config: Mapping[str, Any]) -> Scheme:
    """Return the scheme of AutoRound, which rounds weights in its own way and stores them like GPTQ or AWQ."""
    packing, kind = config.get("packing_format") or "auto_round:auto_gptq", config.get("data_type") or "int"
    read = {"auto_round:auto_gptq": _gptq, "auto_round:auto_awq": _awq}.get(packing)
    _require(kind == "int", f"its data_type is {kind}")
    whole = {"sym": True, **config}
    others = [
        name
        for name, own in (config.get("extra_config") or {}).items()
        if own.get("bits", 0) < 16 and any(own.get(key, whole[key]) != whole[key] for key in _OF_MODULES)
    ]
    _require(not others, f"some modules have settings of their own (extra_config: {', '.join(others[:4])})")
    if read is None:
        raise _RefusedError(f"its packing_format is {packing}")
    return read(whole)


_OF_MODULES = ("bits", "group_size", "sym")


def _fp8(config: Mapping[str, Any]) -> Scheme:
    activations, form = config.get("activation_scheme") or "dynamic", config.get("fmt") or "e4m3"
    _require(activations == "dynamic", f"its activations have fixed scales (activation_scheme {activations})")
    _require(form in ("e4m3", "float8_e4m3fn"), f"its fmt is {form}")
    block = config.get("weight_block_size")
    blocks: tuple[Block, ...] = ((_WHOLE, _WHOLE), (1, _WHOLE)) if block is None else ((block[0], block[1]),)
    return Scheme("fp8", 8, blocks, activations=True, floats=True)


def _compressed(config: Mapping[str, Any]) -> Scheme:
    sparsity = config.get("sparsity_config") or {}
    _require(sparsity.get("format", "dense") == "dense", f"it is sparse ({sparsity.get('format')})")
    _require(not config.get("transform_config"), "it transforms activations (transform_config)")
    groups = list((config.get("config_groups") or {}).values())
    _require(bool(groups), "it quantises no weights (config_groups is empty)")
    for group in groups:
        _require(
            isinstance(group, dict), f"one of its config_groups is {group!r}, without what is done to these modules"
        )
        targets = ", ".join(map(str, group.get("targets") or ["some modules"]))
        _require(bool(group.get("weights")), f"it quantises {targets} without their weights")
    for form in {config.get("format"), *(group.get("format") for group in groups)} - {None, "mixed-precision"}:
        _require(form in _COMPRESSED_FORMATS, f"its format is {form}")
    blocks = tuple(_compressed_block(group) for group in groups)
    sizes = {group["weights"]["num_bits"] for group in groups}
    _require(len(sizes) == 1, f"its parts have {' and '.join(map(str, sorted(sizes)))} bits")
    quantised = any(group.get("input_activations") for group in groups)
    floats = any(group["weights"].get("type") == "float" for group in groups)
    return Scheme("compressed-tensors", sizes.pop(), blocks, activations=quantised, floats=floats)


_COMPRESSED_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")


def _compressed_block(group: Mapping[str, Any]) -> Block:
    weights = group["weights"]
    bits, kind, strategy = weights["num_bits"], weights.get("type", "int"), weights.get("strategy")
    _require((kind, bits) in (("int", 4), ("int", 8), ("float", 8)), f"its weights are {kind} of {bits} bits")
    _require(not weights.get("dynamic"), "the scales of its weights are not stored (dynamic)")
    activations = group.get("input_activations") or {"dynamic": True}
    _require(bool(activations.get("dynamic")), "its activations have fixed scales")
    _require(not group.get("output_activations"), "it quantises the results of layers (output_activations)")
    size, structure = weights.get("group_size"), weights.get("block_structure")
    if isinstance(structure, str):
        structure = [int(part) for part in structure.split("x")]
    if strategy is None:
        strategy = "group" if size and size > 0 else "channel" if size == _WHOLE else "tensor"
    if strategy == "block" and isinstance(structure, list):
        return structure[0], structure[1]
    known = {
        "tensor": (_WHOLE, _WHOLE),
        "channel": (1, _WHOLE),
        "group": (1, _group(weights) if strategy == "group" else 0),
    }
    _require(strategy in known, f"its strategy is {strategy}")
    return known[strategy]


_METHODS = {"gptq": _gptq, "awq": _awq, "auto-round": _auto_round, "fp8": _fp8, "compressed-tensors": _compressed}


def find_packed(tensors: Mapping[str, TensorEntry], known: Scheme) -> dict[str, Packed]:
    """Return the quantised weights, by the names of the unquantised weights.

    Raises ModelError: tensors that belong to a weight are missing, or their shapes do not fit.
    """
    find = {"gptq": _find_gptq, "awq": _find_awq}.get(known.method, _find_plain)
    return {
        f"{base}.weight": _packed(tensors, known, base, layout, names, shape, groups)
        for base, layout, names, shape, groups in find(tensors, known)
    }


def part_names(packed: Mapping[str, Packed]) -> set[str]:
    return {
        name for one in packed.values() for name in (one.codes, one.scales, one.zeros, one.groups) if name is not None
    }


_Found = tuple[str, Layout, Sequence[str], tuple[int, int], str | None]
"""Prefix of the names; layout; names of codes, scales and, if any, zero points; shape; name of the groups' tensor."""


def _find_gptq(tensors: Mapping[str, TensorEntry], known: Scheme) -> Iterator[_Found]:
    for base in _with_suffix(tensors, ".qweight"):
        names = _NAMES[:2] if known.symmetric else _NAMES
        words, outputs = _matrix(_entries(tensors, base, names)[0])
        yield base, Layout.GPTQ, names, (outputs, words * 32 // known.bits), _known(tensors, f"{base}.g_idx")


def _find_awq(tensors: Mapping[str, TensorEntry], known: Scheme) -> Iterator[_Found]:
    for base in _with_suffix(tensors, ".qweight"):
        inputs, words = _matrix(tensors[f"{base}.qweight"])
        yield base, Layout.AWQ, _NAMES, (words * 32 // known.bits, inputs), None


_NAMES = ("qweight", "scales", "qzeros")


def _find_plain(tensors: Mapping[str, TensorEntry], known: Scheme) -> Iterator[_Found]:
    for base in _with_suffix(tensors, ".weight_packed"):
        outputs, words = _matrix(tensors[f"{base}.weight_packed"])
        names = ["weight_packed", "weight_scale", *_zero_points(tensors, base)]
        yield base, Layout.ROWS, names, (outputs, words * 32 // known.bits), _known(tensors, f"{base}.weight_g_idx")
    for base in _with_suffix(tensors, ".weight"):
        entry = tensors[f"{base}.weight"]
        if entry.dtype not in ("I8", "F8_E4M3"):
            if f"{base}.weight_scale" in tensors:
                raise ModelError(
                    f"{entry.file}: {base}.weight is {entry.dtype} with scales beside it, to be rounded when used; "
                    "Lamina reads weights stored as codes. Save the model compressed (save_compressed=True)"
                )
            continue
        scale = next((one for one in ("weight_scale_inv", "weight_scale") if f"{base}.{one}" in tensors), None)
        if scale is None:
            raise ModelError(f"{entry.file}: {base}.weight is {entry.dtype} without a scale: copy it again")
        yield base, Layout.PLAIN, ["weight", scale, *_zero_points(tensors, base)], _matrix(entry), None


def _known(tensors: Mapping[str, TensorEntry], name: str) -> str | None:
    return name if name in tensors else None


def _zero_points(tensors: Mapping[str, TensorEntry], base: str) -> list[str]:
    return ["weight_zero_point"] if f"{base}.weight_zero_point" in tensors else []


def _with_suffix(tensors: Mapping[str, TensorEntry], suffix: str) -> list[str]:
    return [name.removesuffix(suffix) for name in tensors if name.endswith(suffix)]


def _entries(tensors: Mapping[str, TensorEntry], base: str, names: Sequence[str]) -> list[TensorEntry]:
    missing = [f"{base}.{name}" for name in names if f"{base}.{name}" not in tensors]
    if missing:
        present = next(entry.file for name, entry in tensors.items() if name.startswith(f"{base}."))
        raise ModelError(f"{present.parent}: there is no {missing[0]}, which {base} needs: copy the checkpoint again")
    return [tensors[f"{base}.{name}"] for name in names]


def _matrix(entry: TensorEntry) -> tuple[int, int]:
    if len(entry.shape) != 2:
        raise ModelError(f"{entry.file}: codes of shape {list(entry.shape)}; Lamina reads those of matrices")
    return entry.shape[0], entry.shape[1]


def _packed(
    tensors: Mapping[str, TensorEntry],
    known: Scheme,
    base: str,
    layout: Layout,
    names: Sequence[str],
    shape: tuple[int, int],
    groups: str | None,
) -> Packed:
    entries = _entries(tensors, base, names)
    codes, scales, zeros, *_ = (*(f"{base}.{name}" for name in names), None)
    assert codes is not None and scales is not None
    held = entries if groups is None else [*entries, tensors[groups]]
    turned = layout in (Layout.GPTQ, Layout.AWQ)
    block = _block(base, shape, entries[1], known, turned)
    nbytes = sum(entry.nbytes for entry in held)
    return Packed(layout, known.bits, codes, scales, zeros, groups, known.zero_offset, shape, block, nbytes)


def _block(base: str, shape: tuple[int, int], scales: TensorEntry, known: Scheme, turned: bool) -> Block:
    """Return the scheme's block that fits the shape of ``scales``, which are [groups, outputs] if ``turned``."""
    for block in dict.fromkeys(known.blocks):
        sizes = [size if part == _WHOLE else part for size, part in zip(shape, block, strict=True)]
        wanted = [math.ceil(size / part) for size, part in zip(shape, sizes, strict=True)]
        found = [size for size in (scales.shape[::-1] if turned else scales.shape) if size != 1]
        if found == [size for size in wanted if size != 1]:
            return sizes[0], sizes[1]
    raise ModelError(
        f"{scales.file}: {base} has {list(scales.shape)} scales for a weight {list(shape)}, which do not fit groups of "
        f"{' or '.join(str(block) for block in dict.fromkeys(known.blocks))} (outputs, inputs; -1: all) as in "
        "config.json. Weights and config.json are from different models"
    )
