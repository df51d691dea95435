"""Lists a checkpoint's tensors from the headers of its safetensors files, and checks the files for damage."""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lamina.core.errors import ModelError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_LFS_POINTER = b"version https://git-lfs"
_HEADER_LIMIT = 100_000_000  # bytes, the format's own limit
_BITS = {"F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16, "U16": 16}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor on disk.

    Attributes:
        dtype: the safetensors name of the element type (BF16, F32, ...).
        nbytes: bytes of the tensor's data.
        start: byte of the file at which the data begin.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    start: int = 0


def read_checkpoint(path: Path) -> dict[str, TensorEntry]:
    """Return the entries of all tensors in the model directory ``path``, by name.

    Raises:
        ModelError: no safetensors files, a missing or truncated shard, an invalid header, or an index that lists a
            tensor its shard does not contain.
    """
    if (path / WEIGHTS).is_file():
        return _read_header(path / WEIGHTS)
    if not (path / INDEX).is_file():
        raise ModelError(_no_weights(path))
    weight_map = read_index(path / INDEX)
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not (path / shard).is_file()]
    if missing:
        raise ModelError(
            f"{path}: {len(missing)} of the {len(shards)} shards named in {INDEX} are missing: {some(missing)}. "
            "Copy them here; the download was probably interrupted"
        )
    entries: dict[str, TensorEntry] = {}
    for shard in shards:
        for name, entry in _read_header(path / shard).items():
            if name not in entries or weight_map.get(name) == shard:  # several shards may hold it
                entries[name] = entry
    lost = sorted(weight_map.keys() - entries.keys())
    if lost:
        raise ModelError(
            f"{path}: {INDEX} names {len(lost)} tensors that its shards do not hold, {some(lost)}. "
            "Index and shards are from different checkpoints: copy the directory again"
        )
    return entries


def read_index(file: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(file.read_bytes())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{file} is not a safetensors index ({error!r}): copy the file again") from error
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise ModelError(f"{file}: weight_map must map tensor names to shard file names: copy the file again")
    return weight_map


def _read_header(file: Path) -> dict[str, TensorEntry]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = int.from_bytes(prefix, "little")
        if _LFS_POINTER.startswith(prefix) and prefix:
            raise ModelError(f"{file} is a Git LFS pointer of {size} bytes, not the weights: run `git lfs pull` there")
        if len(prefix) < 8 or length > _HEADER_LIMIT:
            raise ModelError(f"{file} ({size} bytes) is not a safetensors file: copy it again")
        raw = stream.read(length)
    if len(raw) < length:
        raise ModelError(
            f"{file} is truncated: its header needs {8 + length} bytes, the file has {size}. Copy it again"
        )
    try:
        header: dict[str, dict[str, Any]] = json.loads(raw)
        tensors = {name: item for name, item in header.items() if name != "__metadata__"}
        entries = {
            name: TensorEntry(
                file,
                item["dtype"],
                tuple(item["shape"]),
                item["data_offsets"][1] - item["data_offsets"][0],
                8 + length + item["data_offsets"][0],
            )
            for name, item in tensors.items()
        }
        needed = 8 + length + max((item["data_offsets"][1] for item in tensors.values()), default=0)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ModelError(f"{file} has a broken safetensors header ({error!r}): copy it again") from error
    if size != needed:
        state = "truncated" if size < needed else "longer than its header says"
        raise ModelError(f"{file} is {state}: {needed} bytes expected, {size} found. Copy it again")
    _check_sizes(file, entries)
    return entries


def _check_sizes(file: Path, entries: dict[str, TensorEntry]) -> None:
    for name, entry in entries.items():
        bits = _BITS.get(entry.dtype)
        if bits is not None and entry.nbytes * 8 != math.prod(entry.shape) * bits:
            raise ModelError(
                f"{file}: tensor {name} is {entry.dtype} {list(entry.shape)} but its data has {entry.nbytes} bytes: "
                "copy the file again"
            )


def _no_weights(path: Path) -> str:
    remedy = (
        "Make one with transformers: AutoModelForCausalLM.from_pretrained(OLD).save_pretrained(NEW), or start with "
        "--load-format dummy for random weights"
    )
    if lost := [file for file in path.iterdir() if file.name in (WEIGHTS, INDEX) and file.is_symlink()]:
        return f"{lost[0]} is a link to {lost[0].readlink()}, which does not exist: download or copy the model again"
    others = sorted(file.name for file in path.iterdir() if file.suffix in {".safetensors", ".bin", ".gguf", ".pth"})
    found = f"found {some(others)} instead" if others else "it holds no weights at all"
    return f"{path} holds neither {WEIGHTS} nor {INDEX}; {found}. {remedy}"


def some(names: Iterable[str], limit: int = 3) -> str:
    """Return the first of ``names`` and the number of others, for a message."""
    names = sorted(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
