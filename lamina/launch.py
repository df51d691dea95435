"""Starts an engine together with its workers: composes ``cluster`` and ``engine``."""

import dataclasses
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import msgspec

from lamina.cluster import pool, sizing
from lamina.cluster.bringup import Cluster, ClusterPlan, bring_up
from lamina.cluster.devices import find_devices, free_memory
from lamina.cluster.gather import OnProgress
from lamina.cluster.launchers.local import COMPUTE, MEMORY, LocalWorkers
from lamina.cluster.launchers.supervised import SupervisedWorkers
from lamina.cluster.takeover import Saved, take_over
from lamina.config import EngineConfig, check_writable
from lamina.engine.ending import OnTrace
from lamina.engine.engine import Engine
from lamina.models import directory
from lamina.models.tokenizer import Tokenizer
from lamina.observe.trace import write_trace
from lamina.protocol.control import ControlServer
from lamina.protocol.secret import Secret, from_file
from lamina.topology import Role, Topology
from lamina.transport.listener import LOOPBACK


@dataclasses.dataclass(frozen=True)
class Home:
    """What outlives an engine: see ``serve.supervisor``.

    Attributes:
        supervisor_pid: the process that workers end with. secret: of the cluster. listener: descriptor of a socket for
            the control plane. workers: belong to that process.
        saved: by the engine before this one, whose workers are taken over; None: they are started.
        save: called with what another engine would need, whenever that changes.
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
    on_trace: OnTrace | None = None,
    *,
    workers: LocalWorkers | None = None,
    host: str = LOOPBACK,
    home: Home | None = None,
) -> Engine:
    """Start the workers of ``config`` on this machine and return a running engine.

    ``on_trace`` receives the recorded spans of every worker when the engine closes; without it and ``config.trace``
    nothing is recorded. ``workers`` starts the processes; ``host`` is the address of this machine they connect to.
    ``home``: the workers belong to another process, and may be there already.

    Raises:
        ConfigError, ModelError: invalid settings or model; raised before anything is started where possible.
        WorkerError, DeadlineError: a worker did not start; nothing is left running.
    """
    if config.trace is not None:
        check_writable("trace", Path(config.trace))
    model = directory.find(config.model, weights=config.load_format != "dummy")
    computes, memories = tuple(_assigned(config.compute, "compute")), _assigned(config.memory, "memory")
    tokenizer = Tokenizer(model)
    available = frozenset(os.sched_getaffinity(0))
    receivers = [] if on_trace is None else [on_trace]
    if config.trace is not None:
        receivers.append(partial(write_trace, Path(config.trace)))
    plan = sizing.cluster_plan(
        config, model, [*tokenizer.eos_token_ids], computes, memories, available, free_memory, trace=bool(receivers)
    )
    tell = on_progress or (lambda worker, progress: None)
    if home is not None:
        control, cluster = _at_home(home, plan, tell)
        started: LocalWorkers | SupervisedWorkers = home.workers
    else:
        secret = None if config.secret_file is None else from_file(config.secret_file)
        control = ControlServer([*computes, *memories], secret=secret, host=host)
        started = workers or LocalWorkers()
        cluster = _start(control, started, plan, tell)
    limits = plan.limits
    if config.max_model_len is None:  # a request longer than all slabs together could never be admitted
        limits = dataclasses.replace(limits, max_model_len=min(limits.max_model_len, sum(cluster.capacities.values())))

    def save(topology: Topology, wanted: Mapping[Role, int]) -> None:
        if home is not None and cluster.fabric is not None:
            home.save(msgspec.msgpack.encode(Saved.of(cluster.fabric, topology, wanted)))

    return Engine(config, model, tokenizer, limits, control, started, cluster, receivers, save)


def _start(
    control: ControlServer, workers: LocalWorkers | SupervisedWorkers, plan: ClusterPlan, on_progress: OnProgress
) -> Cluster:
    """Start all workers of a plan. Raises what ``bring_up`` does; nothing is left running."""
    try:
        for names, module in ((plan.computes, COMPUTE), (plan.memories, MEMORY)):
            for name in names:
                bootstrap = control.bootstraps[name]
                if name in plan.memories:
                    bootstrap = msgspec.structs.replace(bootstrap, device=plan.memories[name].device)
                workers.spawn(name, module, bootstrap, plan.cores[name], plan.shared_cores)
        return bring_up(control, workers, plan, on_progress)
    except BaseException:
        control.close()
        workers.kill()
        raise


def _at_home(home: Home, plan: ClusterPlan, on_progress: OnProgress) -> tuple[ControlServer, Cluster]:
    """Take over the workers that there are, or start those of the plan."""
    saved = None if home.saved is None else msgspec.msgpack.decode(home.saved, type=Saved)
    names = [*plan.computes, *plan.memories] if saved is None else sorted(saved.topology.names)
    control = ControlServer(names, home.supervisor_pid, secret=Secret(home.secret), listener=home.listener)
    if saved is None:
        return control, _start(control, home.workers, plan, on_progress)
    try:
        return control, take_over(control, home.workers, plan, saved)
    except BaseException:
        control.close()
        raise


def _assigned(text: str, role: Role) -> dict[str, pool.Assigned]:
    """The workers of a pool, by name, with their devices."""
    workers = pool.assign(role, pool.parse(text), find_devices())
    return {f"{role}{index}": assigned for index, assigned in enumerate(workers)}
