"""Starts an engine together with its workers: composes ``cluster`` and ``engine``."""

import dataclasses
import os
from functools import partial
from pathlib import Path

import msgspec

from lamina.cluster import pool, sizing
from lamina.cluster.bringup import bring_up
from lamina.cluster.devices import find_devices, free_memory
from lamina.cluster.gather import OnProgress
from lamina.cluster.launchers.local import COMPUTE, MEMORY, LocalWorkers
from lamina.config import EngineConfig, check_writable
from lamina.engine.ending import OnTrace
from lamina.engine.engine import Engine
from lamina.models import directory
from lamina.models.tokenizer import Tokenizer
from lamina.observe.trace import write_trace
from lamina.protocol.control import ControlServer
from lamina.protocol.secret import from_file
from lamina.topology import Role
from lamina.transport.listener import LOOPBACK


def launch(
    config: EngineConfig,
    on_progress: OnProgress | None = None,
    on_trace: OnTrace | None = None,
    *,
    workers: LocalWorkers | None = None,
    host: str = LOOPBACK,
) -> Engine:
    """Start the workers of ``config`` on this machine and return a running engine.

    ``on_trace`` receives the recorded spans of every worker when the engine closes; without it and ``config.trace``
    nothing is recorded. ``workers`` starts the processes; ``host`` is the address of this machine they connect to.

    Raises:
        ConfigError, ModelError: invalid settings or model; raised before anything is started where possible.
        WorkerError, DeadlineError: a worker did not start; nothing is left running.
    """
    if config.trace is not None:
        check_writable("trace", Path(config.trace))
    model = directory.find(config.model, weights=config.load_format != "dummy")
    computes = tuple(_assigned("compute", pool.parse(config.compute)))
    memory = pool.memory_pool(config.memory, len(computes), config.memory_cores is not None)
    memories, local = _assigned("memory", memory), pool.LOCAL in (entry.kind for entry in memory)
    config = dataclasses.replace(config, memory=",".join(map(str, memory)))
    tokenizer = Tokenizer(model)
    available = frozenset(os.sched_getaffinity(0))
    receivers = [] if on_trace is None else [on_trace]
    if config.trace is not None:
        receivers.append(partial(write_trace, Path(config.trace)))
    plan = sizing.cluster_plan(
        config,
        model,
        [*tokenizer.eos_token_ids],
        computes,
        memories,
        available,
        free_memory,
        trace=bool(receivers),
        local=local,
    )
    secret = None if config.secret_file is None else from_file(config.secret_file)
    control = ControlServer([*computes, *memories], secret=secret, host=host)
    workers = workers or LocalWorkers()
    try:
        for names, module in ((computes, COMPUTE), (memories, MEMORY)):
            for name in names:
                bootstrap = control.bootstraps[name]
                if name in memories:
                    bootstrap = msgspec.structs.replace(bootstrap, device=memories[name].device)
                workers.spawn(name, module, bootstrap, plan.cores[name], plan.shared_cores)
        cluster = bring_up(control, workers, plan, on_progress or (lambda worker, progress: None))
    except BaseException:
        control.close()
        workers.kill()
        raise
    limits = plan.limits
    if config.max_model_len is None:  # a request longer than all slabs together could never be admitted
        limits = dataclasses.replace(limits, max_model_len=min(limits.max_model_len, sum(cluster.capacities.values())))
    return Engine(config, model, tokenizer, limits, control, workers, cluster, receivers)


def _assigned(role: Role, entries: tuple[pool.PoolEntry, ...]) -> dict[str, pool.Assigned]:
    """The workers of a pool, by name, with their devices."""
    workers = pool.assign(role, entries, find_devices())
    return {f"{role}{index}": assigned for index, assigned in enumerate(workers)}
