"""Launches workers on a Ray cluster: Ray chooses nodes and starts an agent on each; no message passes through Ray."""

import contextlib
import logging
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util import get_node_ip_address
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from lamina.cluster.agent import AgentActor
from lamina.cluster.conversations import Wish
from lamina.cluster.pool import (
    PLACE_S,
    Bundle,
    RayNode,
    place_bundles,
    ray_bundle,
    ray_device,
    ray_kinds,
    require_kind,
)
from lamina.cluster.remote_workers import RemoteWorkers
from lamina.control.agent_messages import Start
from lamina.core.errors import ConfigError
from lamina.core.topology import Pool, Role

log = logging.getLogger(__name__)

WARN_S = 15.0  # wait for a placement before a warning says what is missing
DRAIN_S = 2.0  # time between two checks for drained nodes
ACTOR_S = 60.0  # longest start of an actor's process
POLL_S = 0.5
REACH_S = 10.0
_LOST = (RayError, RuntimeError, ValueError, ConnectionError)  # what calls raise once the cluster is lost
_engines: list[str] = []  # a cluster's address, once per engine of this process, if one of them has joined it


def connect(address: str) -> str:
    """Join the Ray cluster at ``address`` ("auto": the one of this machine); returns this machine's address there.

    Raises ConfigError if no cluster is found.
    """
    remedy = (
        "Start one with `ray start --head` on this machine, or join this machine with `ray start --address HOST:PORT` "
        "and give auto"
    )
    if ray.is_initialized():  # by another engine of this process, or since it is a part of a Ray program
        joined = ray.get_runtime_context().gcs_address
        if address not in ("auto", joined):
            raise ConfigError(f"this process is part of the Ray cluster at {joined}: give ray auto, not {address}")
        _engines.extend(_engines[:1])
        return str(get_node_ip_address())
    host, _, port = address.rpartition(":")
    if address != "auto":
        try:
            socket.create_connection((host, int(port)), REACH_S).close()  # Ray itself tries for minutes
        except (OSError, ValueError) as error:
            raise ConfigError(f"no Ray cluster can be joined at {address!r}: {error}. {remedy}") from error
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        ray.init(address=address, namespace="lamina", logging_level=logging.ERROR, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"no Ray cluster can be joined at {address!r}: {first} {remedy}") from error
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)  # Ray sets its own
    _engines.append(address)
    return str(get_node_ip_address())


def leave() -> None:
    """Leave the Ray cluster, if nothing else in this process needs it."""
    if len(_engines) == 1:
        ray.shutdown()
    del _engines[-1:]


def nodes() -> list[RayNode]:
    """Return the nodes of the cluster that this process has joined."""
    free = ray._private.state.available_resources_per_node()
    return [
        RayNode(f"{one['NodeManagerAddress']} ({one['NodeID'][:6]})", one["Resources"], free.get(one["NodeID"], {}))
        for one in ray.nodes()
        if one["Alive"]
    ]


@dataclass(frozen=True)
class _Placed:
    kind: str
    node: str


class RayWorkers:
    """Starts each worker under a Ray actor, with a placement group that reserves its kind's resources.

    The actors' agents connect to ``remote`` at address ``engine`` with public key ``engine_key``.
    """

    def __init__(
        self,
        remote: RemoteWorkers,
        engine: tuple[str, int],
        engine_key: bytes,
        kinds: Mapping[Pool, Sequence[str]],
        own: Mapping[str, str],
        threads: int | None,
    ) -> None:
        """``kinds``: kinds of the pools at the start. ``own``, ``threads``: see ``pool.ray_bundle``."""
        self._remote, self._engine, self._engine_key = remote, engine, engine_key
        self._kinds, self._own, self._threads = kinds, own, threads
        self._closing = threading.Event()
        self._tending: dict[str, threading.Thread] = {}
        self._killed = set[str]()  # workers that ``kill_worker`` was called for
        self._lock = threading.Lock()  # guards ``_placed`` and ``_wishes``
        self._placed: dict[str, _Placed] = {}
        self._wishes: list[Wish] = []
        self._actor = ray.remote(AgentActor)
        self._watching = threading.Thread(target=self._watch, name="ray-drains", daemon=True)
        self._watching.start()

    def _bundle(self, kind: str) -> Bundle:
        return ray_bundle(kind, self._own, self._threads)

    def default_kind(self, pool: Pool) -> str:
        """Return the first kind of the pool at the start."""
        return self._kinds[pool][0]

    def offers(self) -> Sequence[Pool]:
        """Return no offers: an agent starts only for a worker that the engine has started."""
        return ()

    def refuse_offers(self, pool: Pool, reason: str) -> None:
        """Do nothing: no agent offers a worker."""

    def validate_pool(self, role: Role, kind: str, count: int) -> None:
        """Raise ConfigError for an unknown kind. Ray finds a node later, which its autoscaler may add."""
        require_kind(kind, ray_kinds(self._own))

    def start(self, worker: Start) -> None:
        """Place a worker by Ray and start it there, in a thread. Failures are reported by ``ended``."""
        self._remote.start(worker)
        thread = threading.Thread(target=self._tend, args=[worker], name=f"ray-{worker.name}", daemon=True)
        self._tending[worker.name] = thread
        thread.start()

    def _tend(self, worker: Start) -> None:
        name, role, kind = worker.name, worker.role, worker.kind
        wanted, group, actor = self._bundle(kind), None, None
        try:
            group = placement_group([dict(wanted)], name=f"lamina-{name}-{time.time_ns()}")
            if not self._place(name, group, wanted):
                return
            node = placement_group_table(group)["bundles_to_node_id"][0]
            with self._lock:
                self._placed[name] = _Placed(kind, node)
            options = self._actor.options(
                num_cpus=wanted.get("CPU", 0.0),
                num_gpus=wanted.get("GPU", 0.0),
                resources={key: amount for key, amount in wanted.items() if key not in ("CPU", "GPU")},
                scheduling_strategy=PlacementGroupSchedulingStrategy(group),
                max_restarts=0,
            )
            actor = options.remote()
            self._remote.trust(ray.get(actor.key.remote(), timeout=ACTOR_S), name)
            ended = actor.host_worker.remote(self._engine, self._engine_key, name, role, kind, ray_device(kind))
            while not self._is_over(name) and not self._is_ready(name, ended, POLL_S):
                pass
            if not self._is_over(name) and (why := ray.get(ended, timeout=POLL_S)):
                self._remote.give_up(name, why)
        except RayActorError as error:
            self._remote.give_up(name, f"its Ray actor is lost: {_first_sentence(error)}")
        except (RayError, GetTimeoutError, RuntimeError) as error:
            self._remote.give_up(name, f"Ray cannot start it: {_first_sentence(error)}")
        finally:
            with self._lock:
                self._placed.pop(name, None)
            with contextlib.suppress(*_LOST):
                if actor is not None:
                    ray.kill(actor)
                if group is not None:
                    remove_placement_group(group)

    def _place(self, name: str, group: PlacementGroup, wanted: Bundle) -> bool:
        """Wait for Ray, or its autoscaler, to place a worker; return False after ``PLACE_S`` or if it was killed."""
        ready = group.ready()
        if self._is_ready(name, ready, WARN_S):
            return True
        if not self._is_over(name):
            log.warning(
                "%s waits for a place on the Ray cluster, for up to %.0f s: %s", name, PLACE_S, _why(name, wanted)
            )
        if self._is_ready(name, ready, PLACE_S - WARN_S):
            return True
        if not self._is_over(name):
            self._remote.give_up(name, f"Ray has found no place for it within {PLACE_S:.0f} s: {_why(name, wanted)}")
        return False

    def _is_over(self, name: str) -> bool:
        return self._closing.is_set() or name in self._killed

    def _is_ready(self, name: str, reference: Any, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not self._is_over(name):
            done, _ = ray.wait([reference], timeout=min(POLL_S, max(0.0, deadline - time.monotonic())))
            if done or time.monotonic() >= deadline:
                return bool(done)
        return False

    def _watch(self) -> None:
        """Record a wish to move for workers on nodes that Ray drains, which are idle, preempted or retired."""
        while not self._closing.wait(DRAIN_S):
            with contextlib.suppress(*_LOST):
                draining = ray._private.state.state.get_draining_nodes()
                with self._lock:
                    moving = [name for name, one in self._placed.items() if one.node in draining]
                    self._wishes = [Wish(name, moves=True) for name in moving]

    def wishes(self) -> Sequence[Wish]:
        """Return the wishes of workers whose nodes are drained and of workers that leave."""
        with self._lock:
            moves, self._wishes = self._wishes, []
        return [*moves, *self._remote.wishes()]

    def ended(self) -> Mapping[str, str]:
        return self._remote.ended()

    def kill_worker(self, worker: str, *, cut: bool = False, reason: str = "") -> None:
        try:
            self._remote.kill_worker(worker, cut=cut, reason=reason)
        finally:
            self._killed.add(worker)

    def kill(self, reason: str = "") -> None:
        """End all workers at once."""
        self._remote.kill(reason)
        self._leave_cluster()

    def close(self) -> None:
        """End all workers and leave the Ray cluster."""
        self._remote.close()
        self._leave_cluster()

    def _leave_cluster(self) -> None:
        self._closing.set()
        for thread in self._tending.values():
            thread.join(ACTOR_S)
        self._tending.clear()
        self._watching.join(ACTOR_S)
        leave()


def dry_run(bundles: Mapping[str, Bundle]) -> dict[str, str]:
    """Return the node that each worker would run on. Raises ConfigError that names the missing resource."""
    return place_bundles(bundles, nodes())


def _why(name: str, wanted: Bundle) -> str:
    try:
        place_bundles({name: wanted}, nodes())
    except ConfigError as error:
        return str(error)
    return "it has room now"


def _first_sentence(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].split(". ")[0].rstrip(".") if lines else type(error).__name__
