"""Draws progress bars on standard error if it is a terminal, and in notebooks."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Self

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

from lamina.cluster.gather import OnProgress
from lamina.protocol.messages import LoadProgress

REPORT_S = 30.0


def _can_draw(console: Console) -> bool:
    return console.is_terminal or (console.is_jupyter and find_spec("ipywidgets") is not None)


@contextmanager
def loading_progress(console: Console | None = None) -> Iterator[OnProgress]:
    """One line per worker while it loads weights; yields the callback for ``launch``.

    If standard error is neither a terminal nor a notebook, prints every worker's progress in one line every
    ``REPORT_S`` seconds.
    """
    console = console or Console(stderr=True)
    if not _can_draw(console):
        with _reports(console) as on_progress:
            yield on_progress
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[stage]}"))
    with Progress(*columns, console=console, transient=True) as progress:
        starting = progress.add_task("workers", total=None, stage="starting")
        tasks: dict[str, TaskID] = {}

        def show(worker: str, report: LoadProgress) -> None:
            progress.update(starting, visible=False)
            if worker not in tasks:
                tasks[worker] = progress.add_task(worker, stage=report.stage)
            progress.update(tasks[worker], completed=report.done, total=report.total, stage=report.stage)

        yield show


@contextmanager
def _reports(console: Console) -> Iterator[OnProgress]:
    newest: dict[str, LoadProgress] = {}
    begin, over = time.monotonic(), threading.Event()

    def report() -> None:
        while not over.wait(REPORT_S):
            each = [f"{name} {at.stage} {at.done} of {at.total}" for name, at in sorted(newest.items())]
            waited = f"after {time.monotonic() - begin:.0f} s, workers are still starting"
            console.print(": ".join([waited, *([", ".join(each)] if each else [])]), soft_wrap=True)

    reporter = threading.Thread(target=report, name="lamina-loading", daemon=True)
    reporter.start()
    try:
        yield newest.__setitem__
    finally:
        over.set()
        reporter.join()


@contextmanager
def counting_progress(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar over ``total`` items; yields a function that sets how many are done."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not _can_draw(console)) as progress:
        task = progress.add_task(description, total=total)
        yield lambda done: progress.update(task, completed=done)


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
