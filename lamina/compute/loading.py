"""Splits or recalls the model, and loads the weights of a compute worker, as the engine directs."""

import torch

from lamina.compute.device.base import Device, Runner, Sums
from lamina.compute.division import divide
from lamina.compute.model_files import locate
from lamina.compute.preparation import Prepared, prepare
from lamina.compute.step import context_nbytes_per_token
from lamina.errors import ConfigError
from lamina.heads import HeadShards
from lamina.models import directory, tensors
from lamina.models.digest import checkpoint_digest
from lamina.protocol.control import ControlClient
from lamina.protocol.messages import ComputeSetup, LoadProgress, ModelLoaded


def load(control: ControlClient, setup: ComputeSetup, device: Device, ranks: Sums) -> tuple[Runner, HeadShards]:
    """The model with its weights, or this rank's or stage's part of both, and how heads are cut; the engine is told on
    the way.

    Raises ConfigError, and what ``prepare`` and ``tensors.load`` raise.
    """

    def tell(stage: str, done: int, total: int) -> None:
        control.send(LoadProgress(stage, done, total))

    weights = setup.load_format != "dummy"
    place = directory.find(locate(setup.model, setup.source, weights, control.fetch, tell), weights=weights)
    prepared = prepare(place, setup.dtype, lambda: tell("splitting", 0, 1), device.target, ranks.rank)
    tell("splitting", 1, 1)
    shards = HeadShards.over(prepared.lowered.whole, setup.head_workers, setup.ranks)
    starts = divide(_weights(prepared), setup.stages)
    stops = *starts[1:], len(prepared.lowered.parts)
    part = prepared.lowered.stage(range(starts[setup.stage], stops[setup.stage]))
    try:
        loaded = tensors.load(
            place,
            part.weights,
            prepared.weights,
            setup.load_format,
            setup.seed,
            lambda done, of: tell("weights", done, of),
            device.place,
            part.shards,
        )
        runner = device.runner(part, loaded, ranks.reduce if setup.ranks > 1 else None)
        draws, own = min(setup.rows, setup.sequences), shards.of_rank(setup.ranks).count
        runner.reserve(setup.rows, draws, setup.overlap.q_first, own)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"{control.device} has too little memory for the weights and a step of {setup.rows} rows, of which "
            f"{setup.sequences} draw tokens: {error}. Lower max_num_batched_tokens or max_num_seqs, or use a GPU with "
            "more memory"
        ) from error
    control.send(
        ModelLoaded(
            list(prepared.lowered.whole),
            runner.dtype,
            sum(prepared.weights.expected[name].numel() for name in prepared.lowered.weights),
            runner.padded(setup.rows) * context_nbytes_per_token(runner.attentions, runner.contexts),
            checkpoint_digest(place),
            starts,
        )
    )
    return runner, shards


def _weights(prepared: Prepared) -> list[dict[str, int]]:
    """Bytes of the weights of each slice; names that are tied count as one."""
    expected, ties = prepared.weights.expected, prepared.weights.ties
    needed = map(prepared.lowered.needs, prepared.lowered.slices)
    return [{ties.get(name, name): expected[name].nbytes for name in names} for names in needed]
