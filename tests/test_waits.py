"""Every wait has a deadline: calls that block without an argument, read from the source."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCKING = {"accept", "communicate", "get", "join", "poll", "recv", "recv_bytes", "recv_multipart", "result", "wait"}

# Calls that cannot block for long, with the reason.
JUDGED = {
    ("lamina/cli/batch.py", "task.result()"): "the task is done",
    ("lamina/cli/models.py", "capture.get()"): "output that was captured",
    ("lamina/cluster/local_workers.py", "process.wait()"): "its pidfd has reported the exit",
    ("lamina/compute/ranks.py", "self._control.poll()"): "returns at once",
    ("lamina/compute/worker.py", "self._control.poll()"): "returns at once",
    ("lamina/control/agent_messages.py", "line.recv_bytes()"): "a thread of its own, which ends with the other process",
    ("lamina/control/file_transfer.py", "self._socket.recv_multipart()"): "``poll`` has found a message",
    ("lamina/control/file_transfer.py", "socket.recv_multipart()"): "``poll`` has found a message",
    ("lamina/engine/frontends.py", "future.result()"): "called when the future is done",
    ("lamina/engine/frontends.py", "self._requests.recv_multipart()"): "``poll`` has found a message",
    ("lamina/engine/remote_engine.py", "made._welcome.wait()"): "within ``asyncio.timeout``",
    ("lamina/engine/streams.py", "self._arrived.wait()"): "``_watch`` wakes it every ``WATCH_S``",
    ("lamina/memory/disk_tier.py", "one.moving.popleft().result()"): "the future is done",
    ("lamina/memory/disk_tier.py", "one.moving[0].result()"): "the future is done",
    ("lamina/output.py", "self._pieces.get()"): "a daemon thread that has nothing else to do",
    ("lamina/planning/profiling/transports.py", "self._socket.recv()"): "``poll`` has found a message",
    ("lamina/sdk.py", "self.engine.scale(compute=compute, memory=memory, prefill=prefill).result()"): (
        "the steps of a change have deadlines, and it ends with the engine"
    ),
    ("lamina/serve/frontend_processes.py", "process.popen.poll()"): "returns at once",
    ("lamina/serve/frontend_processes.py", "process.popen.wait()"): "its pidfd has reported the exit",
    ("lamina/serve/generation.py", "working.result()"): "the task is done",
    ("lamina/serve/http_errors.py", "request_id.get()"): "a context variable",
    ("lamina/serve/monitoring.py", "closing.wait()"): "within ``asyncio.wait_for``",
    ("lamina/serve/request_log.py", "request_id.get()"): "a context variable",
    ("lamina/serve/supervisor.py", "engine.poll()"): "returns at once",
    ("lamina/serve/supervisor.py", "ours.poll()"): "returns at once",
    ("lamina/text/grammars.py", "result.result()"): "a computation in a thread for the sake of its stack",
    ("lamina/worker/loop.py", "self._control.poll()"): "returns at once",
    ("lamina/worker/loop.py", "self._newcomers.poll()"): "returns at once",
    ("transport/device/cuda.py", "inbox.array[:count].get()"): "a copy from a GPU",
    ("transport/device/emulated_slots.py", "self._work.get()"): "a daemon thread that has nothing else to do",
    ("transport/listener.py", "self._socket.accept()"): "the socket does not block",
    ("transport/rdma/endpoint.py", "select.poll()"): "makes an object",
    ("transport/rdma/events.py", "select.poll()"): "makes an object",
}


def unbounded(source: str) -> Iterator[str]:
    """Yield the calls without a deadline: of methods that may block, without arguments or with None alone."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in BLOCKING:
            values = [*node.args, *(each.value for each in node.keywords)]
            if all(isinstance(one, ast.Constant) and one.value is None for one in values):
                yield ast.unparse(node)


def test_every_wait_has_a_deadline_or_a_reason() -> None:
    files = [path for top in ("lamina", "splitter", "transport") for path in (ROOT / top).rglob("*.py")]
    found = {(str(path.resolve().relative_to(ROOT)), call) for path in files for call in unbounded(path.read_text())}
    assert sorted(found - JUDGED.keys()) == [], "give a timeout, or the reason why it does not wait"
    assert sorted(JUDGED.keys() - found) == [], "no such call any more"


@pytest.mark.parametrize(
    ("source", "waits"),
    [
        ("a.join()", True),
        ("a.get(timeout=None)", True),
        ("a.wait(5)", False),
        ("', '.join(x)", False),
        ("get()", False),
    ],
)
def test_calls_without_a_deadline_are_found(source: str, waits: bool) -> None:
    assert bool([*unbounded(source)]) == waits
