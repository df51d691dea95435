"""The end of a thread is awaited for a bounded time."""

import threading

import pytest

from lamina.core.threads import join_thread


def test_a_thread_that_does_not_end_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    over = threading.Event()
    thread = threading.Thread(target=over.wait, name="stubborn")
    thread.start()
    assert not join_thread(thread, 0.01)
    assert "stubborn" in caplog.text
    caplog.clear()
    over.set()
    assert join_thread(thread) and not caplog.text
