"""Starts an engine together with its workers."""

import dataclasses
import logging
import os
import socket
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from lamina.cluster import locality, model_checks, pool, sizing
from lamina.cluster.conversations import START_TIMEOUT_S, Launcher, OnProgress, Workers
from lamina.cluster.degrees import parse_computes
from lamina.cluster.idle_settings import idle_settings
from lamina.cluster.local_workers import LocalWorkers, SupervisedWorkers
from lamina.cluster.pool import CUDA, LOCAL, REMOTE, Assigned, find_devices
from lamina.cluster.refusals import require_allowed
from lamina.cluster.remote_workers import LocalAndRemote, RemoteWorkers
from lamina.cluster.sizing import ClusterPlan
from lamina.config.engine_config import EngineConfig, check_writable
from lamina.control.agent_messages import Start
from lamina.control.messages import LoadProgress
from lamina.control.secret import Secret, configured
from lamina.control.sockets import ANY, ControlServer
from lamina.core.errors import ConfigError
from lamina.core.topology import Pool, Role, Topology
from lamina.core.types import ChatSettings
from lamina.models import directory
from lamina.models.directory import ModelDirectory, checkpoint_digest, sampling_defaults
from lamina.observe.timing import write_trace
from lamina.schedule.limits import Limits
from lamina.schedule.policy import find_policy
from lamina.text.tokenizer import Tokenizer
from lamina.transport.listener import LOOPBACK

if TYPE_CHECKING:  # imported while the workers start, which takes longer
    from lamina.cluster.bringup import Cluster
    from lamina.engine.engine import Engine
    from lamina.engine.timelines import OnTrace

log = logging.getLogger(__name__)

REMOTE_TIMEOUT_S = 1800.0  # time in which people start the workers of other machines

Pools = Mapping[Role, Mapping[str, Assigned]]
"""The workers of each pool, by name."""


@dataclasses.dataclass(frozen=True)
class Where:
    """Addresses of this machine.

    Attributes:
        bind: The address to listen on.
        address: The address at which other machines reach this machine; empty: ``bind``.
        port: The port that workers of other machines connect to; None: there are no such workers.
    """

    bind: str = LOOPBACK
    address: str = ""
    port: int | None = None


@dataclasses.dataclass(frozen=True)
class Home:
    """State that outlives an engine and belongs to its supervisor (``serve.supervisor``).

    Attributes:
        supervisor_pid: The supervisor's process, with which workers end.
        secret: The secret of the cluster.
        listener: The descriptor of a socket for the control plane.
        workers: The supervisor's workers.
        saved: State saved by an earlier engine, whose workers are taken over; None: workers are started.
        save: Called with the state for the next engine whenever it changes.
    """

    supervisor_pid: int
    secret: bytes
    listener: int
    workers: SupervisedWorkers
    saved: bytes | None
    save: Callable[[bytes], None]


def launch(
    config: EngineConfig,
    on_progress: OnProgress | None = None,
    on_trace: "OnTrace | None" = None,
    *,
    workers: LocalWorkers | None = None,
    host: str = LOOPBACK,
    home: Home | None = None,
) -> "Engine":
    """Start the workers of ``config``, wait for those of other machines, and return a running engine.

    Args:
        config: The settings.
        on_progress: Receives the progress of loading.
        on_trace: Receives every worker's recorded spans when the engine closes. Without it and ``config.trace``,
            nothing is recorded.
        workers: Starts the processes.
        host: Address of this machine that workers connect to.
        home: State of a supervisor, which owns the workers; they may run already.

    Raises:
        ConfigError, ModelError: Invalid settings or model, raised before anything is started where possible.
        WorkerError, DeadlineError: A worker did not start; nothing is left running.
    """
    if config.trace is not None:
        check_writable("trace", Path(config.trace))
    model = directory.find(config.model, weights=config.load_format != "dummy")
    memory = _memory_pool(config)
    pools = _assigned(config, memory)
    where = _where(config, host)
    secret = configured(config.secret_file)
    if config.listen is not None and secret is None:
        raise ConfigError(
            "listen admits workers of other machines that have the cluster's secret: give secret_file and copy that "
            "file to the other machines, or set LAMINA_SECRET"
        )
    tokenizer = Tokenizer(model, _chat_settings(config))
    sampling_defaults(model, config.generation_config)  # raises before anything is started
    receivers = [] if on_trace is None else [on_trace]
    if config.trace is not None:
        receivers.append(partial(write_trace, Path(config.trace)))
    find_policy(config.policy, config.slo_ttft_ms, config.slo_tbt_ms)  # raises before anything is started
    sizing.require_limits(config, model, len(pools["compute"]))
    local = any(entry.kind == LOCAL for entry in memory)
    model_checks.require_division(config, model, len(pools["memory"]), local)
    model_checks.require_room(config, model, pools["compute"], find_devices())
    trace = bool(receivers)
    if home is not None and home.saved is not None:
        launcher: Workers = home.workers
        control, plan, cluster = _take_over(config, model, tokenizer, home, home.saved, trace)
    else:
        own = home.workers if home is not None else workers or LocalWorkers()
        control = _control(pools, where, secret, home)
        launcher, plan, cluster = _start(
            config, model, tokenizer, pools, local, where, control, own, on_progress or (lambda *_: None), trace
        )
    from lamina.engine.engine import Engine

    save = partial(_save, home, cluster, plan.limits)
    return Engine(config, model, tokenizer, plan.limits, control, launcher, cluster, receivers, save)


def _control(pools: Pools, where: Where, secret: Secret | None, home: Home | None) -> ControlServer:
    return ControlServer(
        [*pools["compute"], *pools["memory"]],
        None if home is None else home.supervisor_pid,
        secret=secret if home is None else Secret(home.secret),
        host=where.bind,
        advertised=where.address,
        listener=None if home is None or where.port is not None else home.listener,
    )


def _start(
    config: EngineConfig,
    model: ModelDirectory,
    tokenizer: Tokenizer,
    pools: Pools,
    local: bool,
    where: Where,
    control: ControlServer,
    own: LocalWorkers | SupervisedWorkers,
    on_progress: OnProgress,
    trace: bool,
) -> "tuple[Launcher, ClusterPlan, Cluster]":
    """Start all workers and bring them up; if that fails, end them all."""
    launcher: Launcher = own
    try:
        launcher = _launcher(config, pools, own, where, control)
        for worker in _workers(config, pools, control):
            launcher.start(worker)
        import lamina.engine.engine  # noqa: F401 (now: the workers are importing too)
        from lamina.cluster.bringup import bring_up

        plan = _plan(config, model, tokenizer, pools, local, control, launcher, on_progress, trace)
        cluster = bring_up(control, launcher, plan, on_progress)
    except BaseException as error:
        launcher.kill(f"the cluster does not start: {error}")
        control.close()
        raise
    if config.max_model_len is None:  # a request longer than all slabs together could never be admitted
        most = min(plan.limits.max_model_len, cluster.topology.most_tokens)
        plan = dataclasses.replace(plan, limits=dataclasses.replace(plan.limits, max_model_len=most))
    return launcher, plan, cluster


def _save(
    home: Home | None, cluster: "Cluster", limits: Limits, topology: Topology, wanted: Mapping[Pool, int]
) -> None:
    from lamina.cluster.bringup import Saved

    if home is not None and cluster.fabric is not None:
        home.save(msgspec.msgpack.encode(Saved.from_topology(cluster.fabric, topology, wanted, limits)))


def _chat_settings(config: EngineConfig) -> ChatSettings:
    """Raises ConfigError if the template cannot be read."""
    template = None
    if config.chat_template is not None:
        try:
            template = Path(config.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not text"
            raise ConfigError(
                f"cannot read chat_template '{config.chat_template}': {why}; give a file with a Jinja template"
            ) from None
    return ChatSettings(template, config.tool_call_parser, config.reasoning_parser)


def _take_over(
    config: EngineConfig, model: ModelDirectory, tokenizer: Tokenizer, home: Home, state: bytes, trace: bool
) -> "tuple[ControlServer, ClusterPlan, Cluster]":
    """Take over the workers of an earlier engine.

    Raises TransportError, or ConfigError if they are of another release because files were upgraded meanwhile.
    """
    from lamina.cluster import bringup
    from lamina.cluster.joining import check_version

    saved = msgspec.msgpack.decode(state, type=bringup.Saved)
    for name, hello in saved.greetings.items():
        check_version(name, hello)
    kinds = saved.kinds()
    eos = [*tokenizer.eos_token_ids]
    config = sizing.fit_lanes(config, len(kinds["compute"]))
    local = saved.compute_setup.local
    plan = sizing.cluster_plan(config, model, eos, kinds, saved.greetings, is_open=False, trace=trace, local=local)
    plan = saved.restore(plan)
    names = [member.name for member in saved.topology.members]
    control = ControlServer(names, home.supervisor_pid, secret=Secret(home.secret), listener=home.listener)
    try:
        return control, plan, bringup.take_over(control, home.workers, plan, saved)
    except BaseException:
        control.close()
        raise


def _memory_pool(config: EngineConfig) -> tuple[pool.PoolEntry, ...]:
    """Return the configured memory pool, or the default for the other settings. Raises ConfigError."""
    if config.ray is not None:
        known = _known_to_ray(config)
        compute, memory = parse_computes(config, known), pool.parse(config.memory or pool.CPU, [*known, LOCAL])
    else:
        compute = parse_computes(config)
        bounds = {} if config.autoscale is None else pool.parse_bounds(config.autoscale)
        apart = (
            config.memory_cores is not None
            or config.kv_overcommit > 1
            or config.polling == "device"
            or config.partition == "head"
            or (config.prompt_attention == "compute" and config.prefill is None)
            or bounds.get("memory", (0, 0))[0] > 0
        )
        memory = pool.memory_pool(config.memory, compute, apart)
    kinds = pool.kinds(compute), pool.kinds(memory)
    require_allowed(config, *kinds)
    for idle in idle_settings(config, *kinds):
        log.warning("%s", idle)
    return memory


def _assigned(config: EngineConfig, memory: tuple[pool.PoolEntry, ...]) -> Pools:
    """Return the workers of both pools, by name, with their devices, in the order of the settings."""
    if config.ray is not None:
        return {
            role: {f"{role}{index}": Assigned(kind, pool.ray_device(kind)) for index, kind in enumerate(kinds)}
            for role, kinds in _ray_kinds(config).items()
        }
    entries: dict[Role, tuple[pool.PoolEntry, ...]] = {
        "compute": parse_computes(config),
        "memory": memory,
    }
    if config.listen is None and any(entry.kind == REMOTE for each in entries.values() for entry in each):
        raise ConfigError("remote workers join from other machines: give listen, the address that they connect to")
    here = {role: tuple(entry for entry in each if entry.kind != REMOTE) for role, each in entries.items()}
    prompts = 0 if config.prefill is None else config.prefill.count(",") + 1
    prefills = sum(entry.kind != REMOTE for entry in entries["compute"][:prompts])
    assigned = pool.assign_pools(here, find_devices(), prefills)
    pools: dict[Role, dict[str, Assigned]] = {}
    for role, each in entries.items():
        own = iter(assigned[role])
        workers = [Assigned(REMOTE, "") if kind == REMOTE else next(own) for kind in pool.kinds(each) if kind != LOCAL]
        pools[role] = {f"{role}{index}": worker for index, worker in enumerate(workers)}
    return pools


def _ray_kinds(config: EngineConfig) -> dict[Role, list[str]]:
    known = _known_to_ray(config)
    memory = pool.parse(config.memory or pool.CPU, [*known, LOCAL])
    return {
        "compute": pool.kinds(parse_computes(config, known)),
        "memory": [kind for kind in pool.kinds(memory) if kind != LOCAL],
    }


def _known_to_ray(config: EngineConfig) -> list[str]:
    return pool.ray_kinds(pool.own_kinds(config.kind))


def ray_bundles(config: EngineConfig) -> dict[str, pool.Bundle]:
    """Return each worker's Ray resources. Raises ConfigError for kinds that do not exist."""
    own = pool.own_kinds(config.kind)
    return {
        f"{role}{index}": pool.ray_bundle(kind, own, config.threads)
        for role, kinds in _ray_kinds(config).items()
        for index, kind in enumerate(kinds)
    }


def join_ray(config: EngineConfig) -> tuple[str, dict[str, str]]:
    """Join the Ray cluster. Returns this machine's address there, and a node for each worker.

    Raises ConfigError if there is no cluster, or a resource is missing, which the error names.
    """
    try:
        from lamina.cluster import ray_workers
    except ImportError as error:
        raise ConfigError(f"ray cannot be used: {error}. Run pip install 'ray[serve]'") from error
    bundles = ray_bundles(config)
    own = ray_workers.connect(config.ray or "auto")
    try:
        return own, ray_workers.dry_run(bundles)
    except ConfigError:
        ray_workers.leave()
        raise


def _where(config: EngineConfig, host: str) -> Where:
    if config.ray is not None:
        own, _ = join_ray(config)
        return Where(own, config.advertise or own, 0)
    if config.listen is None:
        return Where(host)
    name, _, port = config.listen.rpartition(":")
    if not name or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"listen is {config.listen!r}; give HOST:PORT, such as 10.0.0.1:7070")
    try:
        bind, address = socket.gethostbyname(name), socket.gethostbyname(config.advertise or name)
    except OSError as error:
        raise ConfigError(f"{name} or {config.advertise} is not the address of a machine: {error}") from error
    if address == ANY:
        raise ConfigError(f"listen is {config.listen}: give advertise the address at which others reach this machine")
    return Where(bind, address, int(port))


def _launcher(
    config: EngineConfig,
    pools: Pools,
    local: LocalWorkers | SupervisedWorkers,
    where: Where,
    control: ControlServer,
) -> Launcher:
    if where.port is None:
        return local
    remote = RemoteWorkers(where.bind, where.port, control.secret, control.keys)
    if config.ray is None:
        return LocalAndRemote(local, remote)
    from lamina.cluster.ray_workers import RayWorkers

    computes, memories = ([one.kind for one in pools[role].values()] for role in ("compute", "memory"))
    prefills = pool.size(config.prefill)
    kinds: dict[Pool, list[str]] = {
        "prefill": computes[:prefills] or computes,
        "compute": computes[prefills:] or computes,
        "memory": memories or [pool.CPU],
    }
    engine = where.address or where.bind, remote.port
    return RayWorkers(remote, engine, control.keys[0], kinds, pool.own_kinds(config.kind), config.threads)


def _workers(config: EngineConfig, pools: Pools, control: ControlServer) -> list[Start]:
    cores = {role: _cores(config, role, each) for role, each in pools.items()}
    used = [frozenset[int]().union(*each.values()) for each in cores.values()]
    shared = bool(frozenset.intersection(*used))
    prompts_only = set(list(pools["compute"])[: pool.size(config.prefill)])
    workers = [
        Start(
            "prefill" if name in prompts_only else role,
            one.kind,
            msgspec.structs.replace(control.bootstraps[name], device=one.device),
            cores[role].get(name, frozenset()),
            shared,
        )
        for role, each in pools.items()
        for name, one in each.items()
    ]
    return sorted(workers, key=lambda worker: worker.kind == REMOTE)


def _cores(config: EngineConfig, role: Role, workers: Mapping[str, Assigned]) -> dict[str, frozenset[int]]:
    """Return the cores of each of a pool's workers on this machine: the configured cores, or cores near its GPU."""
    here = {name: one.device for name, one in workers.items() if one.kind != REMOTE and config.ray is None}
    text = config.compute_cores if role == "compute" else config.memory_cores
    available = frozenset(os.sched_getaffinity(0))
    if text is None and any(device.startswith(CUDA) for device in here.values()):
        machine = locality.here()
        return {name: locality.near_cores(machine, device, available) for name, device in here.items()}
    return dict(zip(here, sizing.worker_cores(text, len(here), available) if here else (), strict=True))


def _plan(
    config: EngineConfig,
    model: ModelDirectory,
    tokenizer: Tokenizer,
    pools: Pools,
    local: bool,
    control: ControlServer,
    launcher: Launcher,
    on_progress: OnProgress,
    trace: bool,
) -> ClusterPlan:
    """Wait for all workers and decide how to bring them up."""
    from lamina.cluster.bringup import greet

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
    kinds["compute"] = sizing.by_machine(kinds["compute"], pool.size(config.prefill), greetings)
    reported = sizing.reported_kinds(kinds, greetings)
    require_allowed(config, [*reported["compute"].values()], [*[LOCAL] * local, *reported["memory"].values()])
    is_open = config.listen is not None or config.ray is not None
    eos = [*tokenizer.eos_token_ids]
    plan = sizing.cluster_plan(config, model, eos, kinds, greetings, is_open=is_open, trace=trace, local=local)
    if not is_open:
        return plan
    source = control.offer_files(checkpoint_digest(model), model.files)
    return dataclasses.replace(plan, compute_setup=msgspec.structs.replace(plan.compute_setup, source=source))
