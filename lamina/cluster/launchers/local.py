"""Local launcher: workers are processes of this machine."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping

import msgspec

from lamina.protocol.control import Bootstrap

STOP_TIMEOUT_S = 5.0

# Between these, OpenMP threads neither starve the other workers on their cores nor lose GEMM speed; above 10000 a
# pair of workers on shared cores is ten times slower. Read by libgomp when torch is imported.
OPENMP_SPIN_COUNT = "5000"

# glibc keeps blocks up to this size for reuse; mapping and unmapping every output of a long prompt chunk costs a tenth.
KEPT_BYTES = str(1 << 30)


def allocation_variables() -> dict[str, str]:
    """What glibc reads when a process starts that runs slices."""
    return {"MALLOC_MMAP_THRESHOLD_": KEPT_BYTES, "MALLOC_TRIM_THRESHOLD_": KEPT_BYTES}


COMPUTE, MEMORY = "lamina.compute", "lamina.memory.worker"


class LocalWorkers:
    """Worker processes of this machine, ended by ``close`` or with this process, whichever comes first."""

    def __init__(self) -> None:
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._closing = False

    def spawn(self, name: str, module: str, bootstrap: Bootstrap, cores: frozenset[int], shared_cores: bool) -> None:
        """Start one worker on ``cores``, which the other pool uses too if ``shared_cores``.

        Its keys go through a pipe, not the command line. -P: no modules from the user's folder.
        """
        environment = os.environ | allocation_variables() | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        if shared_cores:
            environment["GOMP_SPINCOUNT"] = OPENMP_SPIN_COUNT
        reading, writing = os.pipe()
        with contextlib.suppress(BrokenPipeError), open(writing, "wb") as ours:  # it has exited: ``ended`` says how
            own = os.sched_getaffinity(0)
            os.sched_setaffinity(0, cores)  # of this thread alone; what it starts inherits it
            try:
                with open(reading, "rb") as stdin:
                    self._processes[name] = subprocess.Popen(
                        self.command(name, module),
                        stdin=stdin,
                        stdout=subprocess.DEVNULL,
                        env=environment,
                        process_group=0,  # Ctrl-C, which ends the terminal's own, is for the engine alone
                    )
            finally:
                os.sched_setaffinity(0, own)
            ours.write(msgspec.msgpack.encode(bootstrap))

    def command(self, name: str, module: str) -> list[str]:
        """What starts a worker, which must be the process started itself."""
        return [sys.executable, "-P", "-m", module]

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
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
        for process in self._processes.values():
            process.wait(STOP_TIMEOUT_S)


def _describe(code: int) -> str:
    return f"its process was ended by signal {-code}" if code < 0 else f"its process ended with exit status {code}"
