"""A supervisor that is interrupted while it waits for its engine."""

import signal
import threading
from pathlib import Path
from types import TracebackType

import psutil
import pytest

from lamina.config.engine_config import EngineConfig
from lamina.serve import supervisor
from lamina.serve.supervisor import Supervisor


class Interrupted(threading.Condition):
    """Ctrl-C comes when a wait of the main thread has ended, and its lock is still held."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.raise_signal(signal.SIGINT)
        super().__exit__(kind, error, trace)


def test_an_interrupt_while_a_lock_is_held_ends_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "CLOSE_S", 10.0)
    one = Supervisor(EngineConfig(), tmp_path, list)
    monkeypatch.setattr(one._begun, "_cond", Interrupted(threading.Lock()))
    before = set(psutil.Process().children())
    with pytest.raises(KeyboardInterrupt), one:
        pytest.fail("it has not started")
    assert not one._thread.is_alive(), "it waits for the lock"
    assert set(psutil.Process().children()) <= before
