"""Starts and ends worker processes on this machine, as children of this process or of the supervisor."""

import contextlib
import logging
import os
import queue
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from lamina.cluster.conversations import Wish
from lamina.cluster.pool import CPU, CUDA, RUNNABLE, PoolEntry, assign, find_devices, require_kind
from lamina.control.agent_messages import Done, End, EngineToSupervisor, Exited, Start, send
from lamina.control.sockets import Bootstrap
from lamina.core.errors import TransportError
from lamina.core.topology import Pool, Role

logger = logging.getLogger(__name__)

PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
"""The part of a GPU's multiprocessors that a process may use at most. MPS rounds down and reserves nothing."""

MEMORY_PERCENTAGE = 60
"""Percent of the multiprocessors that a memory worker beside a compute worker may use: an estimate. By its data sheet,
an H200 reads at full bandwidth with 36 KB in flight per multiprocessor (``kernels.gpu.tilings.default``); with the 64
KiB of attention, 55% of them would do."""

STOP_TIMEOUT_S = 5.0
ANSWER_S = 60.0  # longest wait for the supervisor to start or end workers
KILL_TIMEOUT_S = 10.0  # longest wait for a killed process to end: the kernel may have gigabytes to free

# Low enough that spinning OpenMP threads do not starve other workers on their cores, high enough not to slow GEMMs;
# above 10000 a pair of workers on shared cores is ten times slower. Read by libgomp when torch is imported.
OPENMP_SPIN_COUNT = "5000"

# glibc keeps blocks up to this size for reuse; mapping every output of a long prompt chunk again costs a tenth.
KEPT_BYTES = str(1 << 30)

MODULES: Mapping[Role, str] = {"compute": "lamina.compute", "memory": "lamina.memory.worker"}


def mps_runs(variables: Mapping[str, str]) -> bool:
    """Return whether NVIDIA's MPS daemon runs, given the environment of the processes that would use it."""
    return Path(variables.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps", "control").exists()


def limits(role: Role, beside: Collection[Role], mps: bool, variables: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables that limit a worker ``beside`` other roles on its GPU; see ``docs/decisions.md``.

    ``variables``: environment of the starting process, whose settings are not overridden.
    """
    if not mps or role != "memory" or "compute" not in beside or PERCENTAGE in variables:
        return {}
    return {PERCENTAGE: str(MEMORY_PERCENTAGE)}


def allocation_variables() -> dict[str, str]:
    """Return environment variables of glibc's allocator for processes that run slices."""
    return {"MALLOC_MMAP_THRESHOLD_": KEPT_BYTES, "MALLOC_TRIM_THRESHOLD_": KEPT_BYTES}


def worker_environment(shared_cores: bool, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a worker's process.

    Args:
        shared_cores: Whether other workers compute on the worker's cores.
        variables: Environment variables besides those of this process.
    """
    environment = os.environ | allocation_variables() | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    environment |= variables
    environment.pop("LAMINA_SECRET", None)  # workers have keys of their own
    if shared_cores:
        environment["GOMP_SPINCOUNT"] = OPENMP_SPIN_COUNT
    return environment


def start_process(
    command: list[str], bootstrap: Bootstrap, shared_cores: bool, variables: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a worker, whose process may have ended when this returns.

    Args:
        command: Command line of the process.
        bootstrap: What the worker needs to join, keys among it; passed through a pipe, not the command line.
        shared_cores: Whether other workers compute on the worker's cores.
        variables: Further environment variables.
    """
    reading, writing = os.pipe()
    with contextlib.suppress(BrokenPipeError), open(writing, "wb") as ours:
        with open(reading, "rb") as stdin:
            process = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=subprocess.DEVNULL,
                env=worker_environment(shared_cores, variables),
                process_group=0,  # so that Ctrl-C in a terminal reaches only the parent
            )
        ours.write(msgspec.msgpack.encode(bootstrap))
    return process


class _OnThisMachine:
    """Common part of ``LocalWorkers`` and ``SupervisedWorkers``."""

    def validate_pool(self, role: Role, kind: str, count: int) -> None:
        require_kind(kind, RUNNABLE)
        assign(role, (PoolEntry(kind, count),), find_devices())

    def default_kind(self, pool: Pool) -> str:
        return CPU

    def offers(self) -> Sequence[Pool]:
        return ()

    def refuse_offers(self, pool: Pool, reason: str) -> None:
        pass

    def wishes(self) -> list[Wish]:
        return []

    def kill_worker(self, name: str, *, cut: bool = False, reason: str = "") -> None:
        self.kill_workers([name])

    def kill_workers(self, names: Collection[str]) -> None:
        """Kill workers and wait until they have exited, so that they cannot write into other workers' arenas.

        Raises TransportError if a process does not end.
        """
        raise NotImplementedError


class LocalWorkers(_OnThisMachine):
    """Worker processes on this machine. They end with ``close`` or with this process, whichever comes first.

    Attributes:
        processes: By worker, all processes but those that ``kill_worker`` has ended.
        devices: Device of each worker so far.
    """

    def __init__(self) -> None:
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.devices: dict[str, str] = {}
        self._exits = selectors.EpollSelector()  # has a descriptor of each process whose exit has not been seen
        self._ended: dict[str, str] = {}
        self._closing = False
        self._cores = defaultdict[Role, frozenset[int]](frozenset)  # by role: cores of all workers so far
        self._shared_cores = False
        self._roles = defaultdict[str, list[Role]](list)  # by device: roles of all workers so far
        self._hinted = set[str]()  # devices that both roles share

    @property
    def exits(self) -> int:
        """A file descriptor that is readable when a process has exited."""
        return self._exits.fileno()

    def start(self, worker: Start) -> None:
        """Start one worker; compute workers must be started first. Raises ConfigError for a device that is missing."""
        name, role, bootstrap, cores = worker.name, worker.role, worker.bootstrap, worker.cores
        if cores:
            self._cores[role] |= cores
            self._shared_cores = worker.shared_cores
        else:
            taken = [self.devices[one] for one in self.processes]
            (assigned,) = assign(role, (PoolEntry(worker.kind, 1),), find_devices(), taken)
            bootstrap = msgspec.structs.replace(bootstrap, device=assigned.device)
            cores = self._cores[role] or frozenset(os.sched_getaffinity(0))
        bootstrap, variables = self._note_shared_gpu(role, bootstrap)
        own = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cores)  # of this thread only; the new process inherits it
        try:
            process = start_process(self.command(name, MODULES[role]), bootstrap, self._shared_cores, variables)
        finally:
            os.sched_setaffinity(0, own)
        self.processes[name] = process
        self.devices[name] = bootstrap.device
        self._exits.register(os.pidfd_open(process.pid), selectors.EVENT_READ, name)

    def _note_shared_gpu(self, role: Role, bootstrap: Bootstrap) -> tuple[Bootstrap, dict[str, str]]:
        """Return ``bootstrap``, which says whether both pools share the worker's GPU, and variables that limit its use.

        Warns once for each GPU that workers of both pools share without MPS.
        """
        device = bootstrap.device
        if not device.startswith(CUDA):
            return bootstrap, {}
        beside, mps = self._roles[device], mps_runs(os.environ)
        beside.append(role)
        if role == "memory" and "compute" in beside:
            bootstrap = msgspec.structs.replace(bootstrap, shares_gpu=True)
            if device not in self._hinted and not mps:
                logger.warning(
                    "compute and memory workers share %s and take turns on it: run `nvidia-cuda-mps-control -d` before "
                    "the start, so that both run at once, or give --memory local, which needs no messages",
                    device,
                )
            self._hinted.add(device)
        return bootstrap, limits(role, beside, mps, os.environ)

    def command(self, name: str, module: str) -> list[str]:
        """Return the command of a worker. It must not fork. -P: import no modules from the working directory."""
        return [sys.executable, "-P", "-m", module]

    def ended(self) -> Mapping[str, str]:
        """Return workers that have exited, with their exit status, by a single system call."""
        if self._closing:
            return {}
        for exited, _ in self._exits.select(0):
            process = self.processes[exited.data]
            process.wait()
            self._ended[exited.data] = describe_exit(process)
            self._exits.unregister(exited.fileobj)
            os.close(exited.fd)
        return self._ended

    def kill_workers(self, names: Collection[str]) -> None:
        killed = {name: self.processes.pop(name) for name in names}
        for process in killed.values():
            process.kill()
        for descriptor in [one for one in self._exits.get_map().values() if one.data in killed]:
            self._exits.unregister(descriptor.fileobj)
            os.close(descriptor.fd)
        for name, process in killed.items():
            self._ended.pop(name, None)
            wait_for_killed(f"worker {name}", process)

    def kill(self, reason: str = "") -> None:
        for process in self.processes.values():
            process.kill()
        self.close()

    def close(self) -> None:
        """Give workers ``STOP_TIMEOUT_S`` to exit by themselves, then kill them. Idempotent."""
        self._closing = True
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for process in self.processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
        for descriptor in list((self._exits.get_map() or {}).values()):
            os.close(descriptor.fd)
        self._exits.close()
        for name, process in self.processes.items():
            wait_for_killed(f"worker {name}", process)


class SupervisedWorkers(_OnThisMachine):
    """Workers whose processes belong to a server's supervisor, so that they outlive the engine.

    One thread at a time may use it. The reader of the supervisor's messages passes those about workers to
    ``on_supervisor_message``, from any thread.

    Attributes:
        processes: Names of the workers that run, or have exited by themselves.
    """

    def __init__(self, line: Connection, running: Collection[str], exited: Mapping[str, str]) -> None:
        """Begin with the workers of an earlier engine.

        Args:
            line: Connection to the supervisor.
            running: Workers that the supervisor owns.
            exited: Workers of ``running`` that have exited, with the reasons.
        """
        self.processes = set(running)
        self._line = line
        self._ended = dict(exited)
        self._answers: queue.SimpleQueue[Done] = queue.SimpleQueue()
        self._unanswered = 0
        self._sending = threading.Lock()

    def on_supervisor_message(self, message: Exited | Done) -> None:
        if isinstance(message, Exited):
            self._ended = {**self._ended, message.worker: message.how}  # other threads may be reading the old one
        else:
            self._answers.put(message)

    def start(self, worker: Start) -> None:
        try:
            self._ask(worker)
        except TransportError as error:
            raise OSError(str(error)) from error
        self.processes.add(worker.name)

    def ended(self) -> Mapping[str, str]:
        return self._ended

    def kill_workers(self, names: Collection[str]) -> None:
        self._ask(End(sorted(names)))
        self.processes.difference_update(names)
        self._ended = {worker: how for worker, how in self._ended.items() if worker not in names}

    def kill(self, reason: str = "") -> None:
        self.kill_workers(set(self.processes))

    def close(self) -> None:
        self._ask(End(sorted(self.processes), STOP_TIMEOUT_S))
        self.processes.clear()

    def tell_supervisor(self, message: EngineToSupervisor) -> None:
        """Send a message without a reply, from any thread. Raises OSError if the supervisor has exited."""
        with self._sending:
            send(self._line, message)

    def _ask(self, message: EngineToSupervisor) -> None:
        self.tell_supervisor(message)
        self._unanswered += 1
        deadline = time.monotonic() + ANSWER_S
        while self._unanswered:  # answers come in order: those to messages that were given up come first
            try:
                answer = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise TransportError(f"the supervisor has not answered within {ANSWER_S:.0f} s") from None
            self._unanswered -= 1
        if answer.error:
            raise TransportError(answer.error)


def wait_for_killed(name: str, process: subprocess.Popen[bytes]) -> None:
    """Wait for the exit of a killed process. Raises TransportError, with its ``name``, if it does not end in time."""
    try:
        process.wait(KILL_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise TransportError(
            f"{name} (process {process.pid}) was killed, but has not ended within {KILL_TIMEOUT_S:.0f} s; "
            f"it may wait for a device or a network file system"
        ) from error


def describe_exit(process: subprocess.Popen[bytes]) -> str:
    """Describe how an exited process has ended, and the usual cause of SIGKILL."""
    code = process.returncode
    if code >= 0:
        return f"its process exited with status {code} (process {process.pid})"
    cause = "; the kernel does so when memory runs out: see dmesg" if -code == signal.SIGKILL else ""
    return f"its process was ended by signal {-code} (process {process.pid}{cause})"
