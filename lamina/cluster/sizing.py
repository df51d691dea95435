"""What a configuration comes to on a given machine: limits of requests, threads, bytes of KV. Pure functions."""

import os
from collections.abc import Callable, Sequence
from typing import get_args

from lamina.config import EngineConfig, LoadFormat
from lamina.engine.bringup import ClusterPlan
from lamina.engine.scheduler import Limits
from lamina.errors import ConfigError
from lamina.models.directory import ModelDirectory
from lamina.transport.messages import ComputeSetup

KV_SHARE = 0.5  # of the memory that is free once the weights are loaded, for all memory workers together


def check(config: EngineConfig) -> None:
    """Refuse settings that can never be. Raises ConfigError naming the setting and its range."""
    positive = ("max_num_seqs", "max_num_batched_tokens", "threads", "kv_cache_memory_bytes")
    for name in positive:
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; give at least 1, or leave it out")
    if config.max_num_batched_tokens < config.max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens is {config.max_num_batched_tokens} and max_num_seqs {config.max_num_seqs}; every "
            f"sequence needs a row of its own in a step, so give max_num_batched_tokens at least {config.max_num_seqs}"
        )
    if config.load_format not in get_args(LoadFormat):
        raise ConfigError(f"load_format is {config.load_format!r}; give {' or '.join(get_args(LoadFormat))}")


def limits(config: EngineConfig, model: ModelDirectory) -> Limits:
    """Bounds of steps and requests before the size of the slabs is known. Raises ConfigError."""
    longest = model.max_model_len
    wanted = longest if config.max_model_len is None else config.max_model_len
    if wanted is None:
        raise ConfigError(f"the config of {model.name} does not tell its context length; give max_model_len")
    if wanted < 2:
        raise ConfigError(f"max_model_len is {wanted}; give at least 2, one prompt token and one drawn")
    if longest is not None and wanted > longest:
        raise ConfigError(f"max_model_len is {wanted}; {model.name} was made for at most {longest} tokens")
    return Limits(config.max_num_seqs, config.max_num_batched_tokens, wanted)


def kv_bytes_per_worker(config: EngineConfig, workers: int, free_bytes: int) -> int:
    """Bytes of KV for each of ``workers`` memory workers on a machine with so much memory free. Raises ConfigError."""
    wanted = config.kv_cache_memory_bytes
    if wanted is None:
        return int(free_bytes * KV_SHARE) // workers
    if wanted * workers > free_bytes:
        raise ConfigError(
            f"kv_cache_memory_bytes is {wanted} for each of {workers} memory workers; "
            f"{free_bytes} bytes are free beside the weights. Give less, or leave it out"
        )
    return wanted


def cluster_plan(
    config: EngineConfig,
    model: ModelDirectory,
    eos_token_ids: Sequence[int],
    computes: tuple[str, ...],
    memories: tuple[str, ...],
    free_bytes: Callable[[], int],
) -> ClusterPlan:
    """How to bring up these workers; ``free_bytes`` is asked once the weights are loaded."""
    bounds = limits(config, model)
    cores = len(os.sched_getaffinity(0))
    # Slices and attention of one batch take turns, so each pool may use all cores.
    compute_threads, memory_threads = (config.threads or max(1, cores // len(names)) for names in (computes, memories))
    dtype = None if config.dtype == "auto" else config.dtype
    setup = ComputeSetup(
        str(model.path), dtype, config.load_format, config.seed, compute_threads, sorted(eos_token_ids)
    )
    return ClusterPlan(
        computes=computes,
        memories=memories,
        compute_setup=setup,
        memory_threads=memory_threads,
        kv_bytes_per_worker=lambda: kv_bytes_per_worker(config, len(memories), free_bytes()),
        most_useful_tokens=bounds.max_num_seqs * bounds.max_model_len * len(computes),
        rows=bounds.max_num_batched_tokens,
    )
