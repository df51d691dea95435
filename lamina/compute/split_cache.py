"""Splits and lowers a model and plans the load of its weights, with a cache in the user's folder.

Importing transformers, capturing and cutting take seconds. All inputs of the result (``ingredients``) are hashed into
the name of the cache file. A file that cannot be read is logged and made again; without a writable folder, nothing is
cached.
"""

import contextlib
import hashlib
import importlib.metadata
import logging
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError

from lamina import _native
from lamina.compute.late_imports import import_transformers
from lamina.config.environment import environment
from lamina.core.types import DType
from lamina.lowering import LoweredModel, Target
from lamina.lowering.native_operators import packing
from lamina.lowering.records import NotStorableError, decode, encode
from lamina.models.directory import CONFIG, ModelDirectory
from lamina.models.tensors import Recipe, WeightPlan
from lamina.splitter.parts import ONLY, Rank

logger = logging.getLogger(__name__)

KEPT_FILES = 64
"""Files of this number that were written last are kept: every new version of torch, transformers or Lamina leaves
the files of the one before behind."""

_CODE = Path(__file__).parents[1]  # the whole package: a list of the modules that matter would soon be out of date
_NATIVE = Path(_native.__file__)
_PACKAGES = ("lamina", "torch", "transformers", "networkx", "sympy", "safetensors")
_DIGEST_BYTES = 32


@dataclass(frozen=True)
class Prepared:
    """A split and lowered model, and how to load its weights."""

    lowered: LoweredModel
    weights: WeightPlan


class _Tensor(msgspec.Struct, array_like=True):
    shape: tuple[int, ...]
    dtype: torch.dtype


class _Weights(msgspec.Struct):
    """A storable ``WeightPlan`` without conversions; ``sources``: names of tensors in the checkpoint."""

    family: str
    expected: dict[str, _Tensor]
    ties: dict[str, str]
    sources: dict[str, str]


class _Record(msgspec.Struct):
    """A cache file's content, after its SHA-256. ``weights`` is None if transformers converts them."""

    model: LoweredModel
    weights: _Weights | None


def prepare(
    place: ModelDirectory,
    dtype: DType | None,
    on_split: Callable[[], None],
    target: Target = Target.CPU,
    rank: Rank = ONLY,
) -> Prepared:
    """Split and lower the model in ``place`` with element type ``dtype`` (None: the config's own), or read it back.

    ``on_split`` is called before the split, which takes seconds. ``rank``: whose part of the model to make. Raises what
    ``load_config`` and ``split`` raise.
    """
    key = cache_key(ingredients(place, dtype, target, rank))
    folder = environment().cache_dir
    if folder is not None and (known := _recall(folder / "models" / key, place)) is not None:
        return known
    on_split()
    prepared = _split(place, dtype, target, rank)
    if folder is not None:
        _keep(folder / "models" / key, prepared)
    return prepared


def ingredients(
    place: ModelDirectory, dtype: DType | None, target: Target = Target.CPU, rank: Rank = ONLY
) -> dict[str, bytes]:
    """Return all inputs that the result depends on."""
    packings = [packing(each) for each in ([dtype] if dtype else DType)]
    paths = [path.name for path in _native.attention_paths()]
    return {
        "config": (place.path / CONFIG).read_bytes(),
        "dtype": str(dtype and dtype.value).encode(),
        "target": target.value.encode(),
        "rank": f"{rank.number} of {rank.count}".encode(),
        "tensors": "\n".join(sorted(place.tensors)).encode(),
        "packing": str([each and (each.linear.__name__, each.inputs_multiple) for each in packings]).encode(),
        "python": sys.version.encode(),
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {paths}".encode(),
        "native": _NATIVE.read_bytes(),
        "torch build": torch.__version__.encode(),
        **{name: importlib.metadata.version(name).encode() for name in _PACKAGES},
        **{str(file.relative_to(_CODE)): file.read_bytes() for file in _sources(_CODE)},
    }


def _sources(folder: Path) -> Iterator[Path]:
    """Yield all Python files of a package; in a checkout, some of its directories are links."""
    for path, _, names in os.walk(folder, followlinks=True):
        yield from (Path(path, name) for name in names if name.endswith(".py"))


def cache_key(ingredients: Mapping[str, bytes]) -> str:
    """Return a name that differs if any ingredient does."""
    digest = hashlib.sha256()
    for name, value in sorted(ingredients.items()):
        digest.update(f"{name} {len(value)}\n".encode() + value)
    return digest.hexdigest()


def _split(place: ModelDirectory, dtype: DType | None, target: Target, rank: Rank = ONLY) -> Prepared:
    import_transformers()
    from lamina.lowering import lower
    from lamina.models.pretrained import load_config, resolve_dtype
    from lamina.splitter import split

    config = load_config(place)
    lowered = lower(split(config, resolve_dtype(config, dtype or "auto"), rank), target)
    return Prepared(lowered, _plan(place, lowered.dtype))


def _recall(file: Path, place: ModelDirectory) -> Prepared | None:
    try:
        content = file.read_bytes()
        digest, payload = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if digest != _digest(file, payload):
            raise NotStorableError("its checksum is wrong")
        record = msgspec.msgpack.decode(payload, type=_Record, dec_hook=decode)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, NotStorableError, msgspec.MsgspecError, SafetensorError) as error:
        logger.warning("%s cannot be used (%s): splitting the model again", file, error)
        return None
    plan = _plan(place, record.model.dtype) if record.weights is None else _restore_plan(record.weights)
    return Prepared(record.model, plan)


def _keep(file: Path, prepared: Prepared) -> None:
    try:
        record = _Record(prepared.lowered, _store_plan(prepared.weights))
        payload = msgspec.msgpack.encode(record, enc_hook=encode)
    except NotStorableError as error:
        logger.info("this model is split at every start: %s", error)
        return
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write(file, _digest(file, payload) + payload)
    except OSError as error:
        logger.warning("%s cannot be written (%s): the next start will split the model again", file, error)
        return
    try:
        _prune(file.parent)
    except OSError as error:
        logger.warning("old files in %s cannot be removed (%s): remove them by hand", file.parent, error)


def _write(file: Path, content: bytes) -> None:
    """Write a file completely or not at all, also if another process writes it. Raises OSError."""
    number, name = tempfile.mkstemp(dir=file.parent)
    try:
        with os.fdopen(number, "wb") as stream:
            stream.write(content)
        os.replace(name, file)
    except BaseException:
        os.unlink(name)
        raise


def _prune(folder: Path) -> None:
    with contextlib.suppress(FileNotFoundError):  # another process is pruning, too
        files = [path for path in folder.iterdir() if path.is_file()]
        newest_first = sorted(files, key=lambda path: path.stat().st_mtime, reverse=True)
        for old in newest_first[KEPT_FILES:]:
            old.unlink()


def _digest(file: Path, payload: bytes) -> bytes:
    """Return a digest of a file's content and name, which detects damaged files and files of other models."""
    return hashlib.sha256(file.name.encode() + payload).digest()


def _plan(place: ModelDirectory, dtype: DType) -> WeightPlan:
    import_transformers()
    from lamina.models import pretrained
    from lamina.models.pretrained import load_config

    return pretrained.plan(place, load_config(place), dtype)


def _store_plan(plan: WeightPlan) -> _Weights | None:
    """Return the plan in storable form; None if transformers' code converts some tensors."""
    if any(recipe.convert is not None for recipe in plan.recipes.values()):
        return None
    expected = {name: _Tensor(tuple(like.shape), like.dtype) for name, like in plan.expected.items()}
    sources = {name: recipe.inputs[0][1] for name, recipe in plan.recipes.items()}
    return _Weights(plan.family, expected, dict(plan.ties), sources)


def _restore_plan(stored: _Weights) -> WeightPlan:
    return WeightPlan(
        stored.family,
        {name: torch.empty(like.shape, dtype=like.dtype, device="meta") for name, like in stored.expected.items()},
        stored.ties,
        {name: Recipe([name], inputs=[(source, source)]) for name, source in stored.sources.items()},
    )
