"""Starts an engine together with its workers: composes ``cluster`` and ``engine``."""

import dataclasses
import os
import socket
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import msgspec

from lamina.cluster import pool, sizing
from lamina.cluster.bringup import ClusterPlan, bring_up, greet
from lamina.cluster.devices import find_devices
from lamina.cluster.gather import START_TIMEOUT_S, Launcher, OnProgress
from lamina.cluster.launchers.local import MODULES, LocalWorkers
from lamina.cluster.launchers.remote import RemoteWorkers
from lamina.cluster.launchers.several import LocalAndRemote
from lamina.cluster.pool import REMOTE, Assigned
from lamina.config import EngineConfig, check_writable
from lamina.engine.ending import OnTrace
from lamina.engine.engine import Engine
from lamina.errors import ConfigError
from lamina.models import directory
from lamina.models.directory import ModelDirectory
from lamina.models.tokenizer import Tokenizer
from lamina.observe.trace import write_trace
from lamina.protocol.control import ANY, ControlServer
from lamina.protocol.messages import LoadProgress
from lamina.protocol.secret import configured
from lamina.topology import Role
from lamina.transport.listener import LOOPBACK

REMOTE_TIMEOUT_S = 1800.0  # for people to start the workers of other machines

Pools = Mapping[Role, Mapping[str, Assigned]]
"""The workers of each pool, by name."""


@dataclasses.dataclass(frozen=True)
class Where:
    """Addresses of this machine.

    Attributes:
        bind: to listen on. address: at which other machines reach it; empty: ``bind``.
        port: for workers of other machines to come to; None: there are none.
    """

    bind: str = LOOPBACK
    address: str = ""
    port: int | None = None


def launch(
    config: EngineConfig,
    on_progress: OnProgress | None = None,
    on_trace: OnTrace | None = None,
    *,
    workers: LocalWorkers | None = None,
    host: str = LOOPBACK,
) -> Engine:
    """Start the workers of ``config``, wait for those of other machines, and return a running engine.

    ``on_trace`` receives the recorded spans of every worker when the engine closes; without it and ``config.trace``
    nothing is recorded. ``workers`` starts the processes; ``host`` is the address of this machine they connect to.

    Raises:
        ConfigError, ModelError: invalid settings or model; raised before anything is started where possible.
        WorkerError, DeadlineError: a worker did not start; nothing is left running.
    """
    if config.trace is not None:
        check_writable("trace", Path(config.trace))
    model = directory.find(config.model, weights=config.load_format != "dummy")
    pools = _assigned(config)
    where = _where(config) if config.listen is not None else Where(host)
    secret = configured(config.secret_file)
    if where.port is not None and secret is None:
        raise ConfigError(
            "listen lets workers of other machines in that have the cluster's secret: give secret_file, and copy that "
            "file to the other machines, or set LAMINA_SECRET"
        )
    tokenizer = Tokenizer(model)
    receivers = [] if on_trace is None else [on_trace]
    if config.trace is not None:
        receivers.append(partial(write_trace, Path(config.trace)))
    sizing.check(config, model, len(pools["compute"]))
    control = ControlServer(
        [*pools["compute"], *pools["memory"]], secret=secret, host=where.bind, advertised=where.address
    )
    launcher: Launcher | None = None
    try:
        local = workers or LocalWorkers()
        launcher = local if where.port is None else _listening(local, where, control)
        _start(config, pools, control, local, launcher)
        on_progress = on_progress or (lambda worker, progress: None)
        plan = _plan(config, model, tokenizer, pools, control, launcher, on_progress, trace=bool(receivers))
        cluster = bring_up(control, launcher, plan, on_progress)
    except BaseException as error:
        if launcher is not None:
            launcher.kill(f"the cluster does not start: {error}")
        control.close()
        raise
    limits = plan.limits
    if config.max_model_len is None:  # a request longer than all slabs together could never be admitted
        limits = dataclasses.replace(limits, max_model_len=min(limits.max_model_len, sum(cluster.capacities.values())))
    return Engine(config, model, tokenizer, limits, control, launcher, cluster, receivers)


def _assigned(config: EngineConfig) -> Pools:
    """The workers of both pools, by name, with their devices. Those of other machines come last."""
    entries: dict[Role, tuple[pool.PoolEntry, ...]] = {
        "compute": pool.parse(config.compute),
        "memory": pool.parse(config.memory),
    }
    here = {role: tuple(entry for entry in each if entry.kind != REMOTE) for role, each in entries.items()}
    assigned = pool.assign_pools(here, find_devices())
    pools: dict[Role, dict[str, Assigned]] = {}
    for role, each in entries.items():
        elsewhere = sum(entry.count for entry in each if entry.kind == REMOTE)
        workers = (*assigned[role], *[Assigned(REMOTE, "")] * elsewhere)
        pools[role] = {f"{role}{index}": worker for index, worker in enumerate(workers)}
    return pools


def _where(config: EngineConfig) -> Where:
    """Where workers of other machines come to. Raises ConfigError."""
    name, _, port = (config.listen or "").rpartition(":")
    if not name or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"listen is {config.listen!r}; give HOST:PORT, such as 10.0.0.1:7070")
    try:
        bind, address = socket.gethostbyname(name), socket.gethostbyname(config.advertise or name)
    except OSError as error:
        raise ConfigError(f"{name} or {config.advertise} is not the address of a machine: {error}") from error
    if address == ANY:
        raise ConfigError(f"listen is {config.listen}: give advertise the address at which others reach this machine")
    return Where(bind, address, int(port))


def _listening(local: LocalWorkers, where: Where, control: ControlServer) -> LocalAndRemote:
    """``local``, and workers of other machines."""
    return LocalAndRemote(local, RemoteWorkers(where.bind, where.port or 0, control.secret, control.keys))


def _start(config: EngineConfig, pools: Pools, control: ControlServer, local: LocalWorkers, launcher: Launcher) -> None:
    """Start all workers, those of this machine on the cores that are configured."""
    available = frozenset(os.sched_getaffinity(0))
    here = {role: [name for name, one in each.items() if one.kind != REMOTE] for role, each in pools.items()}
    texts: dict[Role, str | None] = {"compute": config.compute_cores, "memory": config.memory_cores}
    cores = {role: sizing.worker_cores(texts[role], len(names), available) for role, names in here.items() if names}
    used = {role: frozenset.union(*each) for role, each in cores.items()}
    shared = len(used) == 2 and not used["compute"].isdisjoint(used["memory"])
    for role, names in here.items():
        for name, own in zip(names, cores.get(role, ()), strict=True):
            bootstrap = msgspec.structs.replace(control.bootstraps[name], device=pools[role][name].device)
            local.spawn(name, MODULES[role], bootstrap, own, shared)
    for role, each in pools.items():
        for name, one in each.items():
            if one.kind == REMOTE:
                launcher.start(name, role, one.kind, control.bootstraps[name])


def _plan(
    config: EngineConfig,
    model: ModelDirectory,
    tokenizer: Tokenizer,
    pools: Pools,
    control: ControlServer,
    launcher: Launcher,
    on_progress: OnProgress,
    trace: bool,
) -> ClusterPlan:
    """Wait for all workers and decide how to bring them up."""
    elsewhere = [name for each in pools.values() for name, one in each.items() if one.kind == REMOTE]
    for name in elsewhere:
        on_progress(name, LoadProgress("waiting for another machine", 0, 1))
    names = [name for each in pools.values() for name in each]
    greetings = greet(control, launcher, names, REMOTE_TIMEOUT_S if elsewhere else START_TIMEOUT_S)
    for name in elsewhere:
        on_progress(name, LoadProgress("waiting for another machine", 1, 1))
    kinds: dict[Role, dict[str, str]] = {
        role: {name: one.kind for name, one in each.items()} for role, each in pools.items()
    }
    is_open = config.listen is not None
    eos = [*tokenizer.eos_token_ids]
    return sizing.cluster_plan(config, model, eos, kinds, greetings, is_open=is_open, trace=trace)
