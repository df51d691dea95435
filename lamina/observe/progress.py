"""Shows progress of long work on standard error: bars on a terminal or in a notebook, else a line every ``REPORT_S``
seconds."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from lamina.core.threads import join_thread

if TYPE_CHECKING:
    from lamina.cluster.conversations import OnProgress
    from lamina.control.messages import LoadProgress

REPORT_S = 10.0


def _can_draw(console: Console) -> bool:
    return console.is_terminal or (console.is_jupyter and find_spec("ipywidgets") is not None)


@contextmanager
def loading_progress(console: Console | None = None) -> "Iterator[OnProgress]":
    """Show each worker's progress of loading weights; yield the callback for ``launch``."""
    newest: dict[str, LoadProgress] = {}
    tasks: dict[str, TaskID] = {}

    def report(seconds: float) -> str:
        each = [
            f"{name} {at.stage}" + f" {at.done} of {at.total}" * (at.total > 1)
            for name, at in sorted(newest.items())
            if at.done < at.total
        ]
        waited = f"after {seconds:.0f} s, workers are still starting"
        return ": ".join([waited, *([", ".join(each)] if each else [])])

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[stage]}"))
    with _bars_or_reports(console, columns, report) as progress:
        if progress is None:
            yield newest.__setitem__
            return
        starting = progress.add_task("workers", total=None, stage="starting")

        def show(worker: str, report: "LoadProgress") -> None:
            progress.update(starting, visible=False)
            if worker not in tasks:
                tasks[worker] = progress.add_task(worker, stage=report.stage)
            progress.update(tasks[worker], completed=report.done, total=report.total, stage=report.stage)

        yield show


@contextmanager
def counting_progress(description: str, total: int, console: Console | None = None) -> Iterator[Callable[[int], None]]:
    """Show how many of ``total`` items are done; yield a function that sets the number."""
    at = 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())

    def report(seconds: float) -> str:
        return f"{description}: {at} of {total} after {seconds:.0f} s"

    with _bars_or_reports(console, columns, report) as progress:
        task = progress.add_task(description, total=total) if progress else None

        def count(done: int) -> None:
            nonlocal at
            at = done
            if progress is not None and task is not None:
                progress.update(task, completed=done)

        yield count


@contextmanager
def waiting(description: str, console: Console | None = None) -> Iterator[None]:
    """Show that work of unknown length is running, with little CPU use, since the work may be a measurement."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())

    def report(seconds: float) -> str:
        return f"{description}: {seconds:.0f} s so far"

    with _bars_or_reports(console, columns, report, per_second=1) as progress:
        if progress is not None:
            progress.add_task(description, total=None)
        yield


@contextmanager
def _bars_or_reports(
    console: Console | None, columns: Sequence[ProgressColumn], report: Callable[[float], str], per_second: float = 10
) -> Iterator[Progress | None]:
    """Yield bars if ``console`` can draw them; else yield None, and print ``report(seconds)`` every ``REPORT_S``."""
    console = console or Console(stderr=True)
    if _can_draw(console):
        with Progress(*columns, console=console, transient=True, refresh_per_second=per_second) as progress:
            yield progress
        return
    begin, over = time.monotonic(), threading.Event()

    def repeat() -> None:
        while not over.wait(REPORT_S):
            console.print(report(time.monotonic() - begin), soft_wrap=True)

    reporter = threading.Thread(target=repeat, name="lamina-progress", daemon=True)
    reporter.start()
    try:
        yield None
    finally:
        over.set()
        join_thread(reporter)


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
