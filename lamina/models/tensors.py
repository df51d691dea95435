"""Loads selected weights of a model from a checkpoint, through memory maps, or draws random ones for benchmarks.

A ``WeightPlan`` describes how weights are made from checkpoint tensors, so this module does not need transformers.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from lamina.core.errors import ModelError
from lamina.core.types import LoadFormat
from lamina.models.checkpoint import some
from lamina.models.directory import ModelDirectory
from lamina.models.quantisation.codes import DENSE, ExpertCodes, Form, Weight, arranged, plain, read_codes
from lamina.splitter.split_model import Shard, cut

Progress = Callable[[int, int], None]
Read = Callable[[str], torch.Tensor]
HOST = torch.device("cpu")
NOTHING: Mapping[str, Shard] = {}
_DUMMY_STD = 0.02  # standard deviation of dummy matrices: the initialisation of most families
_READABLE = {"F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL"}


@dataclass
class Recipe:
    """How one or more weights of the model are made from checkpoint tensors.

    Attributes:
        outputs: State-dict names of the weights.
        convert: Makes the weights; None: the single output is the single input.
        inputs: (source pattern, checkpoint name) of each input, in the order that ``convert`` needs.
    """

    outputs: list[str]
    convert: Callable[["Recipe", Read], dict[str, torch.Tensor]] | None = None
    inputs: list[tuple[str, str]] = field(default_factory=list)

    def make(self, read: Read) -> dict[str, torch.Tensor]:
        """Return the outputs by name, which may be views of tensors that ``read`` returned."""
        if self.convert is None:
            return {self.outputs[0]: read(self.inputs[0][1])}
        return self.convert(self, read)


@dataclass(frozen=True)
class WeightPlan:
    """How all weights of a model are made from checkpoint tensors.

    Attributes:
        family: Type of the model, for messages.
        expected: Shape and element type of every weight by name, as tensors on the meta device.
        ties: By name of each weight tied to another: the name of the other.
        recipes: By output name; empty for a model without a checkpoint.
    """

    family: str
    expected: Mapping[str, torch.Tensor]
    ties: Mapping[str, str]
    recipes: Mapping[str, Recipe]


def load(
    directory: ModelDirectory,
    names: Sequence[str],
    plan: WeightPlan,
    load_format: LoadFormat = "auto",
    seed: int = 0,
    on_progress: Progress | None = None,
    device: torch.device = HOST,
    shards: Mapping[str, Shard] = NOTHING,
    form: Form = DENSE,
) -> dict[str, Weight]:
    """Load the weights ``names`` of a model to ``device``, as copies. Tied names share one tensor.

    Args:
        directory: Directory of the checkpoint.
        names: Names in ``plan.expected``. No other weights are read.
        plan: How weights are made from the checkpoint.
        load_format: "auto" reads the checkpoint; "dummy" draws weights that depend on ``seed`` and name alone.
        seed: Seed of dummy weights.
        on_progress: Called with (bytes done, total bytes) after every weight.
        device: Device of the result.
        shards: By name, the part of a weight that this rank needs; weights without a shard are loaded whole. Only the
            parts come to ``device``. Tied names have equal shards.
        form: Which weights are held as quantised codes; tied weights never are.

    Raises:
        ConfigError: ``form`` cannot hold a weight.
        ModelError: The model has no weight of a name, or the checkpoint lacks a tensor, or has it in another shape or
            in an element type that cannot be converted.
    """
    unknown = sorted(set(names) - plan.expected.keys())
    if unknown:
        raise ModelError(f"a {plan.family} model has no tensor {unknown[0]} ({len(unknown)} unknown names)")
    done = _ProgressBytes({name: cut(plan.expected[name], shards.get(name, {})).nbytes for name in names}, on_progress)
    if load_format == "dummy":
        return _dummy(names, plan, seed, done, device, shards, form)
    with _Files(directory, device, HOST if shards else device) as files:
        return _Checkpoint(directory, plan, files, form).load_all(names, done, shards)


class _ProgressBytes:
    """Reports progress in bytes. ``nbytes`` has the bytes of each weight before quantisation."""

    def __init__(self, nbytes: Mapping[str, int], report: Progress | None) -> None:
        self._nbytes, self._total, self._report, self._bytes = nbytes, sum(nbytes.values()), report, 0

    def mark_loaded(self, name: str) -> None:
        self._bytes += self._nbytes[name]
        if self._report is not None:
            self._report(self._bytes, self._total)


class _Files(ExitStack):
    """A checkpoint's open files. Tensors are read to the device ``reading``, and kept on ``device``."""

    def __init__(self, directory: ModelDirectory, device: torch.device, reading: torch.device) -> None:
        super().__init__()
        self._directory, self._device, self._reading = directory, device, reading
        self._open: dict[Path, Any] = {}
        self._mapped: set[int] = set()  # addresses of memory maps

    def read_stored(self, key: str) -> torch.Tensor:
        """Return a tensor in its stored element type; on the host, it is a view of a memory map."""
        file = self._directory.tensors[key].file
        if file not in self._open:
            try:
                self._open[file] = self.enter_context(safe_open(file, framework="pt", device=str(self._reading)))
            except SafetensorError as error:
                raise ModelError(f"{file} has a broken safetensors header ({error}): copy it again") from error
        tensor: torch.Tensor = self._open[file].get_tensor(key)
        if tensor.device == HOST:  # elsewhere it was copied, not mapped
            self._mapped.add(tensor.untyped_storage().data_ptr())
        return tensor

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor`` in its own memory on the target device: not a view of a file or of a larger tensor."""
        return _own(tensor, self._mapped, self._device)


class _Checkpoint:
    def __init__(self, directory: ModelDirectory, plan: WeightPlan, files: _Files, form: Form) -> None:
        self._directory = directory
        self._files = files
        self._expected = plan.expected
        self._recipes = plan.recipes
        self._ties = plan.ties
        self._form = form

    def load_all(self, names: Sequence[str], done: _ProgressBytes, shards: Mapping[str, Shard]) -> dict[str, Weight]:
        """Read all of ``names``, running each recipe once."""
        sources = {name: self._stored(name) for name in names}
        wanted = {source: shards.get(name, {}) for name, source in sources.items()}
        needed = set(sources.values())
        for name in sorted(needed):
            self._check_inputs(name)
        made: dict[str, Weight] = {}
        result: dict[str, Weight] = {}
        for name, source in sources.items():
            if source not in made:
                outputs = self._make(self._recipes[source], wanted)
                made.update((output, outputs[output]) for output in outputs.keys() & needed)
                for other in self._copies(source):
                    copy = self._make(self._recipes[other], {other: wanted[source]})[other]
                    self._check_tie(source, made[source], other, copy)
            result[name] = made[source]
            done.mark_loaded(name)
        return result

    def _stored(self, name: str) -> str:
        """Return the name under which the checkpoint holds ``name``: ``name``, or a name tied to it."""
        for candidate in self._tied(name):
            if candidate in self._recipes:
                return candidate
        files = {entry.file.name for entry in self._directory.tensors.values()}
        if self._directory.scheme is None and (codes := sorted(filter(_are_codes, self._directory.tensors))):
            raise ModelError(
                f"{self._directory.path}: the checkpoint holds quantised weights ({some(codes)}), but config.json has "
                "no quantization_config: copy config.json again, or write the settings of quantize_config.json into it"
            )
        raise ModelError(
            f"{self._directory.path}: no tensor for {name} among the {len(self._directory.tensors)} in {some(files)}. "
            "The weights do not belong to this config.json, or are incomplete: copy the directory again"
        )

    def _tied(self, name: str) -> list[str]:
        """Return all names tied to the same tensor as ``name``, the source of the ties first."""
        source = self._ties.get(name, name)
        return [source, *(tied for tied, to in self._ties.items() if to == source)]

    def _copies(self, source: str) -> list[str]:
        return [name for name in self._tied(source) if name in self._recipes and name != source]

    def _check_tie(self, source: str, tensor: Weight, other: str, copy: Weight) -> None:
        # transformers would load both tensors despite the tie; slices expect a single one.
        if not torch.equal(plain(tensor), plain(copy)):
            raise ModelError(
                f"{self._directory.path}: config.json ties {other} to {source}, but the checkpoint holds both and they "
                'differ. If both are meant, write "tie_word_embeddings": false into config.json'
            )

    def _check_inputs(self, name: str) -> None:
        recipe = self._recipes[name]
        for _, key in recipe.inputs:
            packed = self._directory.packed.get(key)
            entry = self._directory.tensors[key if packed is None else packed.codes]
            if packed is None and entry.dtype not in _READABLE:
                raise ModelError(
                    f"{entry.file}: {key} is {entry.dtype}, which Lamina cannot convert; save the weights as float32, "
                    "bfloat16 or float16"
                )
            if recipe.convert is None:
                self._check_shape(name, entry.shape if packed is None else packed.shape, recipe)

    def _check_shape(self, name: str, found: Sequence[int], recipe: Recipe) -> None:
        wanted = self._expected[name].shape
        if tuple(wanted) != tuple(found):
            first = recipe.inputs[0][1]
            made_of = f"{first} and {len(recipe.inputs) - 1} more" if len(recipe.inputs) > 1 else first
            packed = self._directory.packed.get(first)
            file = self._directory.tensors[first if packed is None else packed.codes].file
            raise ModelError(
                f"{file}: {name} (from {made_of}) has shape {list(found)}, but "
                f"config.json requires {list(wanted)}. Weights and config.json are from different models"
            )

    def _make(self, recipe: Recipe, shards: Mapping[str, Shard]) -> dict[str, Weight]:
        first, files = recipe.outputs[0], self._files
        wanted = self._expected[first].dtype
        quantised = {name for name in recipe.outputs if self._is_quantised(name)}
        early = shards.get(first, {}) if recipe.convert is None and not quantised else {}

        def read(key: str) -> torch.Tensor:
            packed = self._directory.packed.get(key)
            if packed is not None:
                return read_codes(packed, files.read_stored).shard(early).dense(wanted)
            return cut(files.read_stored(key), early).to(wanted)  # other parts of a mapped file are not read

        packed = self._directory.packed.get(recipe.inputs[0][1])
        if packed is not None and recipe.convert is None and self._tied(first) == [first]:
            codes = read_codes(packed, files.read_stored).shard(early).replace_tensors(files.own)
            held = self._form.keep_codes(first, codes, wanted)
            return {first: codes.dense(wanted) if held is None else held}
        if (experts := self._keep_expert_codes(recipe, shards.get(first, {}))) is not None:
            return {first: experts}
        try:
            outputs = recipe.make(read)
        except (RuntimeError, ValueError) as error:
            raise ModelError(
                f"{self._directory.path}: {recipe.outputs[0]} cannot be made from {recipe.inputs[0][1]} and "
                f"{len(recipe.inputs) - 1} more tensors: {error}. The checkpoint is incomplete: copy it again"
            ) from error
        if recipe.convert is not None:
            for name, tensor in outputs.items():
                self._check_shape(name, tensor.shape, recipe)
            outputs = {
                name: tensor if name in quantised else cut(tensor, shards.get(name, {}))
                for name, tensor in outputs.items()
            }
        owned = {name: files.own(tensor) for name, tensor in outputs.items()}
        return {
            name: self._form.quantise(name, tensor, shards.get(name, {})) if name in quantised else tensor
            for name, tensor in owned.items()
        }

    def _keep_expert_codes(self, recipe: Recipe, shard: Shard) -> Weight | None:
        """Return the weights of a layer's experts as their stored codes; None if ``form`` cannot hold them so."""
        name, *others = recipe.outputs
        packed = {key: self._directory.packed.get(key) for _, key in recipe.inputs}
        if recipe.convert is None or others or name not in self._form.experts or None in packed.values():
            return None
        like = self._expected[name]
        parts = {key: each for key, each in packed.items() if each is not None}
        one = read_codes(next(iter(parts.values())), self._files.read_stored)
        if self._form.hold_experts(ExpertCodes((one,)), like.dtype) is None:
            return None
        codes = {key: read_codes(each, self._files.read_stored) for key, each in parts.items()}
        try:
            whole = arranged(codes, lambda read: recipe.make(read)[name], like.shape)
        except (RuntimeError, ValueError):  # the dense path fails too, with an error that names what is missing
            whole = None
        if whole is None:
            return None
        codes.clear()
        return self._form.hold_experts(whole.shard(shard).replace_tensors(self._files.own), like.dtype)

    def _is_quantised(self, name: str) -> bool:
        return name in self._form.names and self._tied(name) == [name]


def _are_codes(name: str) -> bool:
    return name.endswith((".qweight", ".weight_packed", ".absmax", ".weight_scale", ".weight_scale_inv"))


def _own(tensor: torch.Tensor, mapped: set[int], device: torch.device) -> torch.Tensor:
    """Return a contiguous tensor with its own memory on ``device``.

    A view of a memory map would depend on the file and be unaligned; a view of a tensor would keep the whole tensor.
    """
    if tensor.device != device:
        return tensor.to(device, memory_format=torch.contiguous_format)
    storage = tensor.untyped_storage()
    if tensor.is_contiguous() and storage.data_ptr() not in mapped and storage.nbytes() == tensor.nbytes:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _dummy(
    names: Sequence[str],
    plan: WeightPlan,
    seed: int,
    done: _ProgressBytes,
    device: torch.device,
    shards: Mapping[str, Shard],
    form: Form,
) -> dict[str, Weight]:
    made: dict[str, Weight] = {}
    result: dict[str, Weight] = {}
    drawn = _draw_in_parallel(dict.fromkeys(plan.ties.get(name, name) for name in names), plan, seed)
    for name in names:
        source, shard = plan.ties.get(name, name), shards.get(name, {})
        if source not in made:
            tensor = next(drawn)
            if name in form.names and name not in (*plan.ties, *plan.ties.values()):
                made[source] = form.quantise(name, tensor.to(device), shard)
            else:
                made[source] = _own(cut(tensor, shard), set(), device)
        result[name] = made[source]
        done.mark_loaded(name)
    return result


def _draw_in_parallel(sources: Iterable[str], plan: WeightPlan, seed: int) -> Iterator[torch.Tensor]:
    """Yield a dummy tensor for each of ``sources``, drawn by a thread per core: 8 billion weights take 45 s on one."""
    threads, left = len(os.sched_getaffinity(0)), iter(sources)
    with ThreadPoolExecutor(threads) as pool:
        while group := list(islice(left, threads)):
            yield from pool.map(lambda name: _dummy_tensor(name, plan.expected[name], seed), group)


def _dummy_tensor(name: str, like: torch.Tensor, seed: int) -> torch.Tensor:
    """Return a dummy weight: matrices are random, biases and integers 0, other vectors (mostly norms) 1."""
    if not like.is_floating_point() or name.endswith("bias"):
        return torch.zeros(like.shape, dtype=like.dtype)
    if like.ndim < 2:
        return torch.ones(like.shape, dtype=like.dtype)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    return torch.empty(like.shape, dtype=like.dtype).normal_(0.0, _DUMMY_STD, generator=generator)
