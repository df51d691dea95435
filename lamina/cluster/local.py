"""Local launcher: workers are processes of this machine."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

import msgspec
import psutil

from lamina.cluster import pool
from lamina.cluster.devices import find_devices
from lamina.config import EngineConfig
from lamina.engine.bringup import ClusterPlan, bring_up
from lamina.engine.engine import Engine
from lamina.engine.scheduler import Limits
from lamina.errors import ConfigError
from lamina.models import directory
from lamina.models.tokenizer import Tokenizer
from lamina.transport.control import Bootstrap, ControlServer
from lamina.transport.messages import ComputeSetup, LoadProgress

STOP_TIMEOUT_S = 5.0
KV_SHARE = 0.4  # of the memory that is free, for all memory workers together

# Between these, OpenMP threads neither starve the other workers on their cores nor lose GEMM speed; above 10000 a
# pair of workers on shared cores is ten times slower. Read by libgomp when torch is imported.
OPENMP_SPIN_COUNT = "5000"

MODULES = {"compute": "lamina.compute.worker", "memory": "lamina.memory.worker"}


class LocalWorkers:
    """Worker processes of this machine, ended by ``close`` or with this process, whichever comes first."""

    def __init__(self) -> None:
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._closing = False

    def spawn(self, name: str, module: str, bootstrap: Bootstrap) -> None:
        """Start one worker; its keys go through a pipe, not the command line."""
        environment = os.environ | {
            "GOMP_SPINCOUNT": OPENMP_SPIN_COUNT,
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_VERBOSITY": "error",
        }
        process = subprocess.Popen(
            [sys.executable, "-m", module], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment
        )
        assert process.stdin is not None
        with process.stdin as stdin:
            stdin.write(msgspec.msgpack.encode(bootstrap))
        self._processes[name] = process

    @property
    def pids(self) -> Mapping[str, int]:
        """Process ids by worker."""
        return {name: process.pid for name, process in self._processes.items()}

    def ended(self) -> Mapping[str, str]:
        """Workers that are gone, with their exit status."""
        if self._closing:
            return {}
        codes = {name: process.poll() for name, process in self._processes.items()}
        return {name: _describe(code) for name, code in codes.items() if code is not None}

    def kill(self) -> None:
        """End all workers at once."""
        for process in self._processes.values():
            process.kill()
        self.close()

    def close(self) -> None:
        """Give workers ``STOP_TIMEOUT_S`` to end by themselves, then kill them. Idempotent."""
        self._closing = True
        for process in self._processes.values():
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(STOP_TIMEOUT_S)


def _describe(code: int) -> str:
    return f"its process was ended by signal {-code}" if code < 0 else f"its process ended with exit status {code}"


def launch(config: EngineConfig, on_progress: Callable[[LoadProgress], None] | None = None) -> Engine:
    """Start the workers of ``config`` on this machine and return an engine that serves.

    Raises:
        ConfigError, ModelError: what the user can mend, before anything is started where possible.
        WorkerError, DeadlineError: a worker could not start; nothing is left running.
    """
    model = directory.find(config.model, weights=config.load_format != "dummy")
    computes, memories = _names(config.compute, "compute"), _names(config.memory, "memory")
    limits = _limits(config, model)
    tokenizer = Tokenizer(model)
    plan = _plan(config, str(model.path), computes, memories, limits, sorted(tokenizer.eos_token_ids))
    control = ControlServer([*computes, *memories])
    workers = LocalWorkers()
    try:
        for name in (*computes, *memories):
            workers.spawn(name, MODULES[name.rstrip("0123456789")], control.bootstraps[name])
        cluster = bring_up(control, workers, plan, on_progress or (lambda progress: None))
    except BaseException:
        control.close()
        workers.kill()
        raise
    return Engine(config, model.name, tokenizer, limits, control, workers, cluster)


def _names(text: str, role: pool.Role) -> tuple[str, ...]:
    entries = pool.parse(text)
    pool.check_available(role, entries, find_devices())
    return tuple(f"{role}{index}" for index in range(sum(entry.count for entry in entries)))


def _limits(config: EngineConfig, model: directory.ModelDirectory) -> Limits:
    longest = model.max_model_len
    wanted = config.max_model_len or longest
    if wanted is None:
        raise ConfigError(f"the config of {model.name} does not tell its context length; give max_model_len")
    if longest is not None and wanted > longest:
        raise ConfigError(f"max_model_len is {wanted}; {model.name} was made for at most {longest} tokens")
    if wanted < 2:
        raise ConfigError(f"max_model_len is {wanted}; give at least 2, one prompt token and one drawn")
    if config.max_num_seqs < 1 or config.max_num_batched_tokens < config.max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens is {config.max_num_batched_tokens} and max_num_seqs {config.max_num_seqs}; "
            f"every sequence needs one token row of a step, so give 1 <= max_num_seqs <= max_num_batched_tokens"
        )
    return Limits(config.max_num_seqs, config.max_num_batched_tokens, wanted)


def _plan(
    config: EngineConfig,
    model: str,
    computes: Sequence[str],
    memories: Sequence[str],
    limits: Limits,
    eos_token_ids: list[int],
) -> ClusterPlan:
    cores = len(os.sched_getaffinity(0))
    free = psutil.virtual_memory().available
    kv_bytes = config.kv_cache_memory_bytes
    if kv_bytes is None:
        kv_bytes = int(free * KV_SHARE) // len(memories)
    elif not 0 < kv_bytes * len(memories) < free:
        raise ConfigError(
            f"kv_cache_memory_bytes is {kv_bytes} for each of {len(memories)} memory workers; "
            f"this machine has {free} bytes free. Give less, or leave it out"
        )
    dtype = None if config.dtype == "auto" else config.dtype
    # Slices and attention of one batch take turns, so each pool may use all cores.
    compute_threads, memory_threads = (config.threads or max(1, cores // len(names)) for names in (computes, memories))
    return ClusterPlan(
        computes=tuple(computes),
        memories=tuple(memories),
        compute_setup=ComputeSetup(model, dtype, config.load_format, config.seed, compute_threads, eos_token_ids),
        memory_threads=memory_threads,
        kv_bytes_per_worker=kv_bytes,
        most_useful_tokens=limits.max_num_seqs * limits.max_model_len * len(computes),
        rows=limits.max_num_batched_tokens,
    )
