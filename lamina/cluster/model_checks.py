"""Checks that a model fits the degrees, the partition and the devices, before any worker starts. Pure."""

import math
from collections.abc import Mapping, Sequence

from lamina.cluster.degrees import shapes
from lamina.cluster.pool import CUDA, Assigned, Devices, size
from lamina.config.engine_config import EngineConfig
from lamina.core.errors import ConfigError
from lamina.core.heads import HeadShards
from lamina.core.pipeline import Shape
from lamina.core.stages import require_slices
from lamina.core.types import DType, Partition
from lamina.kv.stripes import head_workers
from lamina.models.directory import ModelDirectory


def require_division(config: EngineConfig, model: ModelDirectory, memories: int, local: bool) -> None:
    """Raise ConfigError if the workers cannot divide the model's layers or heads, as far as its config states.

    Workers that have loaded the model check the rest.

    Args:
        config: The settings.
        model: The model.
        memories: Number of memory workers.
        local: Whether compute workers hold KV.
    """
    pools, layers = shapes(config), model.text_config.get("num_hidden_layers")
    if isinstance(layers, int):
        require_slices(layers + 1, max(shape.stages for shape in pools))
    if (heads := model.kv_heads) is not None:
        ranks = [shape.ranks for shape in pools]
        shards = HeadShards.for_counts([heads], head_workers(config.partition, memories), *ranks)
        require_holders(shards, config.partition, max(ranks) if local else 1)


def require_holders(shards: HeadShards, partition: Partition, ranks: int) -> None:
    """Raise ConfigError if workers cannot hold KV by heads as the settings ask.

    Args:
        shards: How heads are cut.
        partition: The setting.
        ranks: Ranks of a replica that holds KV; 1 if none does.
    """
    if (sharers := shards.sharers(ranks)) > 1:
        raise ConfigError(
            f"{sharers} ranks of a replica share each of the {shards.heads} KV heads, which local memory would have to "
            f"hold {sharers} times; give --tensor-parallel {shards.heads} at most, or memory workers"
        )
    if partition == "head" and shards.count == 1:
        raise ConfigError(
            f"the attentions of this model have KV heads ({shards.heads} at most) that memory workers cannot share "
            "evenly; give --partition token, request or auto"
        )


def require_room(
    config: EngineConfig, model: ModelDirectory, computes: Mapping[str, Assigned], devices: Devices
) -> None:
    """Raise ConfigError if a compute worker's device on this machine is too small for its part of the weights alone.

    Args:
        config: The settings. With ``ray``, nothing is checked: Ray may start all workers on other machines.
        model: The model; without weights, nothing is checked.
        computes: The compute workers.
        devices: Devices of this machine.
    """
    if config.ray is not None:
        return
    (early, late), prefills = shapes(config), size(config.prefill)
    named, nbytes = list(computes.items()), least_weight_nbytes(config, model)
    in_ram = [0.0]
    for pool, shape in ((named[:prefills], early), (named[prefills:], late)):
        for first in range(0, len(pool), shape.workers):
            _require_room_on_gpus(config, model, pool[first : first + shape.workers], shape, nbytes, devices)
        here = sum(bool(worker.device) and not _is_gpu(worker) for _, worker in pool)
        whole = shape.workers if shape.stages > 1 else 1  # one of the stages may have little
        in_ram.append(min(here // whole * whole, shape.workers) / shape.workers)
    if (held := nbytes * max(in_ram)) > devices.ram_bytes:
        raise ConfigError(
            f"this machine has {devices.ram_bytes / 1e9:.1f} GB of memory, and the weights of {model.name} take at "
            f"least {held / 1e9:.1f} GB: {_rounding(config, model)}divide the model over machines by "
            "pipeline_parallel and --compute remote:N"
        )


def _require_room_on_gpus(
    config: EngineConfig,
    model: ModelDirectory,
    replica: Sequence[tuple[str, Assigned]],
    shape: Shape,
    nbytes: int,
    devices: Devices,
) -> None:
    """Raise ConfigError if GPUs of this machine are too small for a replica. ``nbytes``: Least bytes of its weights.

    Ranks have equal parts, so that each must fit. Stages have parts of whole layers, and a small part may be on a small
    GPU, so that only all parts together must fit.
    """
    memory = {name: devices.gpu_bytes[int(one.device.rpartition(":")[2])] for name, one in replica if _is_gpu(one)}
    if shape.stages == 1:
        parts = [([name], nbytes / shape.ranks) for name in memory]
    else:
        parts = [([*memory], float(nbytes))] if len(memory) == shape.workers else []
    kinds = {name: one.kind for name, one in replica}
    of = f" / {shape.ranks}" if shape.ranks > 1 and shape.stages == 1 else ""
    for names, needed in parts:
        have = sum(memory[name] for name in names)
        if needed > have:
            has = "has" if len(names) == 1 else "together have"
            raise ConfigError(
                f"{', '.join(names)} on {', '.join(dict.fromkeys(kinds[name] for name in names))} {has} "
                f"{have / 1e9:.1f} GB of memory, and the weights of {model.name} take at least {nbytes / 1e9:.1f}{of} "
                f"GB: raise tensor_parallel or pipeline_parallel, {_rounding(config, model) or 'or '}use GPUs with "
                "more memory"
            )


def _is_gpu(worker: Assigned) -> bool:
    return worker.device.startswith(CUDA)


def _rounding(config: EngineConfig, model: ModelDirectory) -> str:
    """Return the advice to round the weights to fewer bits; empty if they cannot be rounded further."""
    if model.packed or config.quantization == "int4":
        return ""
    return f"give quantization {'int8 or int4' if config.quantization == 'none' else 'int4'}, or "


def least_weight_nbytes(config: EngineConfig, model: ModelDirectory) -> int:
    """Return a lower bound of the bytes of a replica's weights, which are those of the language model."""
    tensors = model.language_tensors
    if model.packed:
        return sum(entry.nbytes for entry in tensors)
    bits = {"none": 16, "int8": 8, "fp8": 8, "int4": 4}[config.quantization]
    if config.quantization == "none" and config.dtype != "auto":
        bits = 8 * DType(config.dtype).itemsize
    return sum(math.prod(entry.shape) for entry in tensors) * bits // 8
