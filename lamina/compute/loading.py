"""Loads a compute worker's part of the model: splits the model, divides it among stages, and loads the weights."""

import contextlib
import logging
from collections.abc import Collection, Iterator, Mapping

import torch

from lamina.compute.device.base import Device, Runner, Sums
from lamina.compute.late_imports import import_meta_kernels
from lamina.compute.model_files import Tell, locate
from lamina.compute.split_cache import Prepared, prepare
from lamina.compute.step import context_nbytes_per_token
from lamina.control.messages import ComputeSetup, LoadProgress, ModelLoaded
from lamina.control.sockets import ControlClient
from lamina.core.errors import ConfigError, is_out_of_memory
from lamina.core.heads import HeadShards
from lamina.core.stages import divide
from lamina.core.types import ActivationDType, Quantization
from lamina.lowering import Target
from lamina.lowering.weight_forms import takes_byte_rows
from lamina.models import directory, tensors
from lamina.models.directory import ModelDirectory, checkpoint_digest
from lamina.models.quantisation.codes import Weight
from lamina.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


def load_tokenizer(control: ControlClient, setup: ComputeSetup) -> Tokenizer:
    """Return the model's tokenizer. Raises ModelError."""
    return Tokenizer(_find_model(control, setup, lambda stage, done, total: None))


def _find_model(control: ControlClient, setup: ComputeSetup, tell: Tell) -> ModelDirectory:
    weights = setup.load_format != "dummy"
    return directory.find(locate(setup.model, setup.source, weights, control.fetch, tell), weights=weights)


def load(control: ControlClient, setup: ComputeSetup, device: Device, ranks: Sums) -> tuple[Runner, HeadShards]:
    """Load this worker's part of the model, reporting progress and the result to the engine.

    Returns:
        The runner of this worker's stage and rank, with weights loaded and memory for a full step reserved, and how
        heads are sharded over memory workers.

    Raises ConfigError, and what ``prepare`` and ``tensors.load`` raise.
    """

    def tell(stage: str, done: int, total: int) -> None:
        control.send(LoadProgress(stage, done, total))

    place = _find_model(control, setup, tell)
    prepared = prepare(place, setup.dtype, lambda: tell("splitting", 0, 1), device.target, ranks.rank)
    tell("splitting", 1, 1)
    shards = HeadShards.for_model(prepared.lowered.whole, setup.head_workers, *setup.degrees)
    starts = divide(_slice_weights(prepared), setup.stages)
    stops = *starts[1:], len(prepared.lowered.parts)
    part = prepared.lowered.stage(range(starts[setup.stage], stops[setup.stage]))
    form = device.form(part, setup.quantization)
    if setup.quantization != "none":
        _check_quantization(place, prepared, setup.quantization, form.names, control.device)
    device.limit(setup.gpu_share)
    if setup.load_format == "dummy":
        import_meta_kernels()
    with _explained_shortage(control.device, setup):
        loaded = tensors.load(
            place,
            part.weights,
            prepared.weights,
            setup.load_format,
            setup.seed,
            lambda done, of: tell("weights", done, of),
            device.place,
            part.shards,
            form,
        )
        weights_held = _describe_weights(place, loaded, setup.quantization, prepared)
        activations = _activation_dtype(setup, device, loaded)
        if activations == "int8":
            weights_held += ", activations in int8"
        runner = device.runner(part, loaded, ranks.reduce if setup.ranks > 1 else None, activations)
        draws, own = min(setup.rows, setup.sequences), shards.of_rank(setup.ranks).count
        runner.reserve(setup.rows, draws, own)
    control.send(
        ModelLoaded(
            list(prepared.lowered.whole),
            runner.dtype,
            sum(prepared.weights.expected[name].numel() for name in prepared.lowered.weights),
            prepared.lowered.vocabulary,
            runner.padded(setup.rows) * context_nbytes_per_token(runner.attentions, runner.contexts, setup.local),
            checkpoint_digest(place),
            starts,
            weights_held,
        )
    )
    return runner, shards


@contextlib.contextmanager
def _explained_shortage(device: str, setup: ComputeSetup) -> Iterator[None]:
    """Raise ConfigError in place of an error that means that memory is short."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(
            f"{device} has too little memory for the weights and a step of {setup.rows} rows, "
            f"{setup.sequences} of which draw tokens: {error}. Lower max_num_batched_tokens or max_num_seqs, raise "
            "gpu_memory_utilization, or use a GPU with more memory"
        ) from error


def _activation_dtype(setup: ComputeSetup, device: Device, loaded: Mapping[str, Weight]) -> ActivationDType:
    """Return what activations are rounded to: of ``auto``, int8 if weights are rounded to int4 and this CPU can."""
    if setup.activation_dtype != "auto":
        return setup.activation_dtype
    rounds = setup.quantization == "int4" and device.target is Target.CPU and takes_byte_rows(loaded)
    return "int8" if rounds else "dtype"


def _check_quantization(
    place: ModelDirectory, prepared: Prepared, to: Quantization, names: Collection[str], device: str
) -> None:
    """Raise ConfigError if the model is quantised already, or its experts cannot be quantised.

    ``names``: Weights that are quantised to ``to``.
    """
    if place.scheme is not None:
        raise ConfigError(
            f"{place.path} holds weights that are quantised already ({place.scheme}); rounding them again to {to} "
            "would lose more: leave out --quantization, or give the original checkpoint"
        )
    expected = prepared.weights.expected
    dense = [name for name in prepared.lowered.weights if name not in names]
    experts = next((name for name in dense if expected[name].dim() == 3), None)
    if experts is not None:
        raise ConfigError(
            f"--quantization {to} covers linear layers, but most weights of this {prepared.weights.family} model "
            f"are of experts ({experts}), which are not quantised to {to} on {device}: leave it out"
        )


def _describe_weights(place: ModelDirectory, loaded: Mapping[str, Weight], to: Quantization, prepared: Prepared) -> str:
    """Return a description of the weights' form; "" if the checkpoint's tensors are not quantised.

    Logs a warning that gives the bytes of quantised weights that had to be dequantised.
    """
    if to != "none":
        expected = prepared.weights.expected
        experts = any(
            expected[name].dim() == 3 for name, weight in loaded.items() if not isinstance(weight, torch.Tensor)
        )
        return f"linear layers{' and experts' if experts else ''} in {to}"
    if place.scheme is None:
        return ""
    recipes, dtype = prepared.weights.recipes, prepared.lowered.dtype.value
    kept = [name for name, weight in loaded.items() if not isinstance(weight, torch.Tensor)]
    count = sum(len(recipes[name].inputs) for name in kept)
    held = f"{count} matrices as stored, " if count else ""
    text = f"{place.scheme}: {held}{'the others' if count else 'all'} in {dtype}"
    stored = sum(one.nbytes for one in place.packed.values())
    dense = sum(weight.nbytes for weight in loaded.values() if isinstance(weight, torch.Tensor))
    logger.warning(
        "the checkpoint stores %d matrices in %s, %.1f MB; %d of them stay as they are here, and all others take "
        "%.1f MB in %s%s",
        len(place.packed),
        place.scheme,
        stored / 1e6,
        count,
        dense / 1e6,
        dtype,
        "; activations are not quantised" if place.scheme.activations else "",
    )
    return text


def _slice_weights(prepared: Prepared) -> list[dict[str, int]]:
    expected, ties = prepared.weights.expected, prepared.weights.ties
    needed = map(prepared.lowered.needs, prepared.lowered.slices)
    return [{ties.get(name, name): expected[name].nbytes for name in names} for names in needed]
