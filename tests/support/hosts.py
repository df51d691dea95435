"""Other machines for a test: network namespaces joined by cables, each with process ids of its own.

Nothing in them shares memory with this process, and packets between them leave one network stack and enter another.
Namespaces need root; where they cannot be made, tests that need them are skipped with the reason.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from filelock import FileLock

HERE, NEAR, FAR = "10.79.0.1", "10.79.0.2", "10.79.0.3"
END_S = 90.0
TURN_S = 280.0
NAMESPACES = "/run/netns"  # where `ip netns` has them


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True, timeout=END_S)


def addresses_to_itself() -> FileLock:
    """Return a lock for test runs whose network namespaces have the same addresses on one machine."""
    return FileLock(Path(tempfile.gettempdir()) / "lamina-test-addresses.lock", timeout=TURN_S)


@dataclass
class Started:
    """A `lamina worker`, in a process group of its own."""

    process: subprocess.Popen[str]

    def signal(self, number: signal.Signals, *, worker: bool = False) -> None:
        """Send a signal to the command, or to the worker that it supervises."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        command = next(one for one in found if one.cmdline()[:1] == [sys.executable] and "--engine" in one.cmdline())
        (command if not worker else command.children()[0]).send_signal(number)

    def end(self) -> tuple[int, str]:
        """Exit status and what it said, once it has ended."""
        said, _ = self.process.communicate(timeout=END_S)
        return self.process.returncode, said


@dataclass
class Hosts:
    """The other machines, by address."""

    namespaces: dict[str, str]
    started: list[Started] = field(default_factory=list)

    def worker(
        self,
        address: str,
        engine: str,
        role: str,
        secret: Path,
        *options: str,
        mounts: tuple[tuple[Path, Path], ...] = (),
        code: str = "",
        clock_s: int = 0,
    ) -> Started:
        """Start `lamina worker` there. ``mounts``: folders that appear in place of others; ``code`` runs first.
        ``clock_s``: how far the monotonic clock there is ahead."""
        runs = f"import sys; {code}; sys.argv[0] = 'lamina'; from lamina.__main__ import main; main()"
        program = ["-c", runs] if code else ["-m", "lamina"]
        command = [sys.executable, *program, "worker", "--engine", engine, "--role", role, "--secret-file", str(secret)]
        binds = "".join(f"mount --bind '{shown}' '{at}' && " for shown, at in mounts)
        named = f"echo {address} > /proc/sys/kernel/hostname && "
        shell = ["sh", "-c", f'{named}{binds}exec "$@"', "sh", *command, *options]
        clock = ["--time", "--monotonic", str(clock_s)] if clock_s else []
        isolated = ["unshare", "--pid", "--mount", "--uts", *clock, "--fork", "--kill-child", "--mount-proc", *shell]
        inside = ["ip", "netns", "exec", self.namespaces[address], *isolated]
        process = subprocess.Popen(inside, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.started.append(Started(process))
        return self.started[-1]

    def close(self) -> None:
        """End every `lamina worker` that still runs."""
        for one in self.started:
            if one.process.poll() is None:
                one.process.kill()
                one.process.communicate(timeout=END_S)


@contextlib.contextmanager
def opened() -> Iterator[Hosts]:
    """Two machines at NEAR and FAR, joined with each other and with this one, which is at HERE."""
    names = {NEAR: f"lamina{os.getpid()}n", FAR: f"lamina{os.getpid()}f"}
    made: list[str] = []
    cables: list[str] = []
    try:
        try:
            _remove_leftovers()
            for name in names.values():
                run("ip", "netns", "add", name)
                made.append(name)
                run("ip", "netns", "exec", name, "ip", "link", "set", "lo", "up")
            for number, (one, other) in enumerate(((HERE, NEAR), (HERE, FAR), (NEAR, FAR))):
                _join(f"lh{os.getpid()}{number}", names.get(one, ""), one, names[other], other)
                if one == HERE:
                    cables.append(f"lh{os.getpid()}{number}a")
            run("unshare", "--pid", "--mount", "--fork", "--mount-proc", "true")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network and process namespaces can be made here: {getattr(error, 'stderr', '') or error}")
        yield Hosts(names)
    finally:
        for cable in cables:  # deleted with their namespaces too, but some time later
            run("ip", "link", "delete", cable)
        for name in made:
            run("ip", "netns", "delete", name)


def _remove_leftovers() -> None:
    """Namespaces of tests that were killed: they have the same addresses."""
    for name in os.listdir(NAMESPACES) if os.path.isdir(NAMESPACES) else ():
        if (known := re.fullmatch(r"lamina(\d+)[nf]", name)) and not psutil.pid_exists(int(known[1])):
            run("ip", "netns", "delete", name)


def _join(link: str, near: str, near_address: str, far: str, far_address: str) -> None:
    run("ip", "link", "add", f"{link}a", "type", "veth", "peer", "name", f"{link}b", "netns", far)
    if near:
        run("ip", "link", "set", f"{link}a", "netns", near)
    for name, space, own, peer in (
        (f"{link}a", near, near_address, far_address),
        (f"{link}b", far, far_address, near_address),
    ):
        inside = ["ip", "netns", "exec", space] if space else []
        run(*inside, "ip", "address", "add", own, "peer", peer, "dev", name)
        run(*inside, "ip", "link", "set", name, "up")


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.create_server(("0.0.0.0", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port
