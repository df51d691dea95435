"""Shows on standard error how far long work is: bars on a terminal or in a notebook, else a line every ``REPORT_S``
seconds."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

if TYPE_CHECKING:
    from lamina.cluster.conversations import OnProgress
    from lamina.control.messages import LoadProgress

REPORT_S = 10.0


def _can_draw(console: Console) -> bool:
    return console.is_terminal or (console.is_jupyter and find_spec("ipywidgets") is not None)


@contextmanager
def loading_progress(console: Console | None = None) -> "Iterator[OnProgress]":
    """One line per worker while it loads weights; yields the callback for ``launch``.

    If standard error is neither a terminal nor a notebook, prints every worker's progress in one line every
    ``REPORT_S`` seconds.
    """
    console = console or Console(stderr=True)
    if not _can_draw(console):
        with _loading_reports(console) as on_progress:
            yield on_progress
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[stage]}"))
    with Progress(*columns, console=console, transient=True) as progress:
        starting = progress.add_task("workers", total=None, stage="starting")
        tasks: dict[str, TaskID] = {}

        def show(worker: str, report: "LoadProgress") -> None:
            progress.update(starting, visible=False)
            if worker not in tasks:
                tasks[worker] = progress.add_task(worker, stage=report.stage)
            progress.update(tasks[worker], completed=report.done, total=report.total, stage=report.stage)

        yield show


@contextmanager
def _loading_reports(console: Console) -> "Iterator[OnProgress]":
    newest: dict[str, LoadProgress] = {}

    def report(seconds: float) -> str:
        each = [f"{name} {at.stage} {at.done} of {at.total}" for name, at in sorted(newest.items())]
        waited = f"after {seconds:.0f} s, workers are still starting"
        return ": ".join([waited, *([", ".join(each)] if each else [])])

    with _reports(console, report):
        yield newest.__setitem__


@contextmanager
def _reports(console: Console, report: Callable[[float], str]) -> Iterator[None]:
    """Print ``report`` of the seconds so far every ``REPORT_S`` seconds."""
    begin, over = time.monotonic(), threading.Event()

    def repeat() -> None:
        while not over.wait(REPORT_S):
            console.print(report(time.monotonic() - begin), soft_wrap=True)

    reporter = threading.Thread(target=repeat, name="lamina-progress", daemon=True)
    reporter.start()
    try:
        yield
    finally:
        over.set()
        reporter.join()


@contextmanager
def counting_progress(description: str, total: int, console: Console | None = None) -> Iterator[Callable[[int], None]]:
    """Show how many of ``total`` items are done; yields a function that sets the number."""
    console = console or Console(stderr=True)
    if not _can_draw(console):
        at = 0

        def count(done: int) -> None:
            nonlocal at
            at = done

        with _reports(console, lambda seconds: f"{description}: {at} of {total} after {seconds:.0f} s"):
            yield count
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(description, total=total)
        yield lambda done: progress.update(task, completed=done)


@contextmanager
def waiting(description: str, console: Console | None = None) -> Iterator[None]:
    """Show that work of unknown length goes on, with little effect on what it may measure."""
    console = console or Console(stderr=True)
    if not _can_draw(console):
        with _reports(console, lambda seconds: f"{description}: {seconds:.0f} s so far"):
            yield
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, refresh_per_second=1) as progress:
        progress.add_task(description, total=None)
        yield


class BatchProgress:
    """A bar with the finished requests and tokens per second of one offline batch."""

    def __init__(self, requests: int, *, enabled: bool, console: Console | None = None) -> None:
        console = console or Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[rate]}"),
            console=console,
            transient=True,
            disable=not (enabled and _can_draw(console)),
        )
        self._task = self._progress.add_task("Generating", total=requests, rate="")
        self._total = 0

    def update(self, tokens: int, finished: bool) -> None:
        """Count ``tokens`` more tokens of a request, and the request if it has ``finished``."""
        if self._progress.disable:
            return
        self._total += tokens
        elapsed = self._progress.tasks[0].elapsed
        rate = f"{self._total / elapsed:.0f} tokens/s" if elapsed else ""
        self._progress.update(self._task, advance=1 if finished else 0, rate=rate)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
