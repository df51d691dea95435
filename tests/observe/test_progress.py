"""Progress: bars on a terminal, and lines elsewhere when work takes long."""

import contextlib
import importlib.machinery
import io
import sys
import time
import types
from contextlib import AbstractContextManager
from typing import Any

import pytest
from rich.console import Console

from lamina.control.messages import LoadProgress
from lamina.observe import progress
from lamina.observe.progress import BatchProgress, counting_progress, loading_progress, waiting


def console(terminal: bool) -> tuple[Console, io.StringIO]:
    written = io.StringIO()
    return Console(file=written, force_terminal=terminal, width=120), written


def test_a_batch_shows_requests_and_rate() -> None:
    terminal, written = console(True)
    with BatchProgress(3, enabled=True, console=terminal) as progress:
        progress.update(5, finished=False)
        progress.update(4, finished=True)
        progress.update(4, finished=True)
    assert "2/3" in written.getvalue() and "tokens/s" in written.getvalue()


def test_loading_shows_each_worker_and_its_stage() -> None:
    terminal, written = console(True)
    with loading_progress(terminal) as show:
        show("compute0", LoadProgress("splitting", 0, 1))
        show("compute1", LoadProgress("weights", 3, 7))
    for text in ("compute0", "splitting", "compute1", "weights"):
        assert text in written.getvalue()


def test_nothing_is_drawn_without_a_terminal_or_when_not_wanted() -> None:
    for terminal, enabled in ((False, True), (True, False)):
        shown, written = console(terminal)
        with BatchProgress(1, enabled=enabled, console=shown) as progress:
            progress.update(5, finished=True)
        assert written.getvalue() == ""
    shown, written = console(False)
    with loading_progress(shown) as show:
        show("compute0", LoadProgress("weights", 1, 2))
    assert written.getvalue() == ""


def test_long_work_is_reported_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "REPORT_S", 0.02)
    for said, make in (
        ("Cells: 3 of 7 after 0 s\n", lambda piped: counting_progress("Cells", 7, piped)),
        ("Measuring: 0 s so far\n", lambda piped: waiting("Measuring", piped)),
    ):
        piped, written = console(False)
        shown: AbstractContextManager[object] = make(piped)
        with shown as count:
            if callable(count):
                count(3)
            deadline = time.monotonic() + 20
            while said not in written.getvalue() and time.monotonic() < deadline:
                time.sleep(0.01)
        assert said in written.getvalue()


def test_counting_and_waiting_show_a_bar_on_a_terminal() -> None:
    terminal, written = console(True)
    with counting_progress("Cells", 7, terminal) as count:
        count(3)
    with waiting("Measuring", terminal):
        pass
    assert "Cells" in written.getvalue() and "Measuring" in written.getvalue()


def test_a_notebook_with_widgets_shows_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []

    class Output(contextlib.nullcontext[None]):
        def clear_output(self, wait: bool) -> None:
            pass

        def close(self) -> None:
            pass

    for name, content in (
        ("IPython", {}),
        ("IPython.display", {"display": shown.append}),
        ("ipywidgets", {"Output": Output}),
    ):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    with BatchProgress(2, enabled=True, console=Console(force_jupyter=True)) as progress:
        progress.update(5, finished=True)
    assert any("Generating" in getattr(each, "text", "") for each in shown)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    monkeypatch.setattr("lamina.observe.progress.find_spec", lambda name: None)
    shown.clear()
    with BatchProgress(2, enabled=True, console=Console(force_jupyter=True)) as progress:
        progress.update(5, finished=True)
    assert shown == []
