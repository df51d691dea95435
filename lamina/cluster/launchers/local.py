"""Launches workers as processes on this machine."""

import contextlib
import logging
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec

from lamina.cluster.conversations import Wish
from lamina.cluster.pool import CPU, CUDA, RUNNABLE, PoolEntry, assign, find_devices, require_kind
from lamina.control.sockets import Bootstrap
from lamina.core.errors import TransportError
from lamina.core.topology import Role

logger = logging.getLogger(__name__)

PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
"""The part of a GPU's multiprocessors that a process may use at most. MPS rounds down and reserves nothing."""

MEMORY_PERCENTAGE = 60
"""Percent of the multiprocessors that a memory worker beside a compute worker may use: an estimate. By its data sheet,
an H200 reads at full bandwidth with 36 KB in flight per multiprocessor (``kernels.gpu.tilings.default``); with the 64
KiB of attention, 55% of them would do."""


def mps_runs(variables: Mapping[str, str]) -> bool:
    """Return whether MPS runs, by the environment of the processes that would use it."""
    return Path(variables.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps", "control").exists()


def limits(role: Role, beside: Collection[Role], mps: bool, variables: Mapping[str, str]) -> dict[str, str]:
    """Environment variables of a worker ``beside`` others on its GPU; see ``docs/decisions.md``.

    ``variables``: of the process that starts it. What is set there is left as it is.
    """
    if not mps or role != "memory" or "compute" not in beside or PERCENTAGE in variables:
        return {}
    return {PERCENTAGE: str(MEMORY_PERCENTAGE)}


STOP_TIMEOUT_S = 5.0
KILL_TIMEOUT_S = 10.0  # for the kernel to end a killed process, which may have gigabytes of memory to give back

# Low enough that spinning OpenMP threads do not starve other workers on their cores, high enough not to slow GEMMs;
# above 10000 a pair of workers on shared cores is ten times slower. Read by libgomp when torch is imported.
OPENMP_SPIN_COUNT = "5000"

# glibc keeps blocks up to this size for reuse; mapping every output of a long prompt chunk again costs a tenth.
KEPT_BYTES = str(1 << 30)


def allocation_variables() -> dict[str, str]:
    """Environment variables of glibc's allocator for processes that run slices."""
    return {"MALLOC_MMAP_THRESHOLD_": KEPT_BYTES, "MALLOC_TRIM_THRESHOLD_": KEPT_BYTES}


COMPUTE, MEMORY = "lamina.compute", "lamina.memory.worker"
MODULES: Mapping[Role, str] = {"compute": COMPUTE, "memory": MEMORY}


def worker_command(module: str) -> list[str]:
    """Return the command of a worker's process. -P: no modules from the working directory."""
    return [sys.executable, "-P", "-m", module]


def start_process(
    command: list[str], bootstrap: Bootstrap, shared_cores: bool, variables: Mapping[str, str] = MappingProxyType({})
) -> subprocess.Popen[bytes]:
    """Start a worker. Its keys go through a pipe, not the command line.

    ``shared_cores``: others compute on its cores. ``variables``: of its environment, besides those of every worker.
    The process may have ended when this returns.
    """
    environment = os.environ | allocation_variables() | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    environment |= variables
    environment.pop("LAMINA_SECRET", None)  # workers have keys of their own
    if shared_cores:
        environment["GOMP_SPINCOUNT"] = OPENMP_SPIN_COUNT
    reading, writing = os.pipe()
    with contextlib.suppress(BrokenPipeError), open(writing, "wb") as ours:
        with open(reading, "rb") as stdin:
            process = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=subprocess.DEVNULL,
                env=environment,
                process_group=0,  # so that Ctrl-C in a terminal reaches the parent alone
            )
        ours.write(msgspec.msgpack.encode(bootstrap))
    return process


class LocalWorkers:
    """Worker processes on this machine. They end with ``close`` or with this process, whichever comes first.

    Attributes:
        devices: of each worker so far.
    """

    def __init__(self) -> None:
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._exits = selectors.EpollSelector()  # of a descriptor of each process that has not been seen to exit
        self._ended: dict[str, str] = {}
        self._closing = False
        self._cores: dict[str, frozenset[int]] = {}  # of all workers so far, by module
        self.devices: dict[str, str] = {}
        self._roles = defaultdict[str, list[Role]](list)  # of all workers so far, by device
        self._hinted = set[str]()  # devices that both roles share
        self._shared_cores = False

    @property
    def processes(self) -> Mapping[str, subprocess.Popen[bytes]]:
        """By worker, without those that ``kill_worker`` has ended: to watch them, or to send them signals."""
        return self._processes

    @property
    def exits(self) -> int:
        """A descriptor that is readable when ``ended`` has something new."""
        return self._exits.fileno()

    def spawn(self, name: str, module: str, bootstrap: Bootstrap, cores: frozenset[int], shared_cores: bool) -> None:
        """Start one worker on ``cores``. ``shared_cores``: the other pool uses them too. Compute workers come first."""
        bootstrap, variables = self._share(module, bootstrap)
        self._cores[module] = self._cores.get(module, frozenset()) | cores
        self._shared_cores = shared_cores
        own = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cores)  # of this thread only; the new process inherits it
        try:
            process = start_process(self.command(name, module), bootstrap, shared_cores, variables)
        finally:
            os.sched_setaffinity(0, own)
        self._processes[name] = process
        self.devices[name] = bootstrap.device
        self._exits.register(os.pidfd_open(process.pid), selectors.EVENT_READ, name)

    def _share(self, module: str, bootstrap: Bootstrap) -> tuple[Bootstrap, dict[str, str]]:
        """Return what a worker has to know of those on its GPU, and its environment variables."""
        if not bootstrap.device.startswith(CUDA):
            return bootstrap, {}
        roles = self._roles[bootstrap.device]
        roles.append("compute" if module == COMPUTE else "memory")
        if module != COMPUTE and "compute" in roles:
            bootstrap = msgspec.structs.replace(bootstrap, shares_gpu=True)
            self._hint(bootstrap.device)
        return bootstrap, limits(roles[-1], roles, mps_runs(os.environ), os.environ)

    def _hint(self, device: str) -> None:
        """Say how processes that share a GPU run at once, if they do not."""
        if device not in self._hinted and not mps_runs(os.environ):
            logger.warning(
                "compute and memory workers share %s and take turns on it: start nvidia-cuda-mps-control -d before, so "
                "that they run at once, or give --memory local, which needs no messages",
                device,
            )
        self._hinted.add(device)

    def start(self, name: str, role: Role, kind: str, bootstrap: Bootstrap) -> None:
        """Start another worker, on all cores of those of its role that were started before, and on a device of
        ``kind``, such as that of one that was ended.

        Raises ConfigError if this machine has no such device.
        """
        taken = [self.devices[worker] for worker in self._processes]
        (assigned,) = assign(role, (PoolEntry(kind, 1),), find_devices(), taken)
        bootstrap = msgspec.structs.replace(bootstrap, device=assigned.device)
        module = MODULES[role]
        cores = self._cores.get(module) or frozenset(os.sched_getaffinity(0))
        self.spawn(name, module, bootstrap, cores, self._shared_cores)

    def validate_pool(self, role: Role, kind: str, count: int) -> None:
        """Raises ConfigError unless this machine has room for a pool of ``count`` such workers."""
        require_kind(kind, RUNNABLE)
        assign(role, (PoolEntry(kind, count),), find_devices())

    def default_kind(self, role: Role) -> str:
        return CPU

    def wishes(self) -> list[Wish]:
        """None: this process alone decides."""
        return []

    def command(self, name: str, module: str) -> list[str]:
        """Return the command of a worker, which must run it in the started process itself."""
        return worker_command(module)

    def ended(self) -> Mapping[str, str]:
        """Workers that have exited, with their exit status. One system call, however many run."""
        if self._closing:
            return {}
        for exited, _ in self._exits.select(0):
            process = self._processes[exited.data]
            process.wait()
            self._ended[exited.data] = describe_exit(process)
            self._exits.unregister(exited.fileobj)
            os.close(exited.fd)
        return self._ended

    def kill_worker(self, name: str, *, cut: bool = False, reason: str = "") -> None:
        """Kill one worker and wait until it has exited: from then on it cannot write into the arenas of others.

        Raises TransportError if the kernel does not end it.
        """
        process = self._processes.pop(name)
        process.kill()
        wait_for_killed(name, process)
        self._ended.pop(name, None)
        for descriptor in [one for one in self._exits.get_map().values() if one.data == name]:
            self._exits.unregister(descriptor.fileobj)
            os.close(descriptor.fd)

    def kill(self, reason: str = "") -> None:
        """Kill all workers at once."""
        for process in self._processes.values():
            process.kill()
        self.close()

    def close(self) -> None:
        """Give workers ``STOP_TIMEOUT_S`` to exit by themselves, then kill them. Idempotent."""
        self._closing = True
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
        for descriptor in list((self._exits.get_map() or {}).values()):
            os.close(descriptor.fd)
        self._exits.close()
        for name, process in self._processes.items():
            wait_for_killed(name, process)


def wait_for_killed(name: str, process: subprocess.Popen[bytes]) -> None:
    """Wait for the exit of a worker's process that has been killed. Raises TransportError if it does not come."""
    try:
        process.wait(KILL_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise TransportError(
            f"worker {name} (process {process.pid}) was killed, but has not ended within {KILL_TIMEOUT_S:.0f} s; "
            f"it may wait for a device or a network file system"
        ) from error


def describe_exit(process: subprocess.Popen[bytes]) -> str:
    """Say how a process that has been waited for has ended, and what the cause of SIGKILL usually is."""
    code = process.returncode
    if code >= 0:
        return f"its process exited with status {code} (process {process.pid})"
    cause = "; the kernel does so when memory runs out: see dmesg" if -code == signal.SIGKILL else ""
    return f"its process was ended by signal {-code} (process {process.pid}{cause})"
