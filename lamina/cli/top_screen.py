"""The screen of `lamina top`. Needs textual."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

from rich.console import RenderableType
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.widgets import Footer, Header, Static

from lamina.core.errors import LaminaError

Json = dict[str, Any]

MARGIN = 6
"""Columns of the screen beside the view."""


class TopScreen(App[None]):
    """Polls a server's state in a thread, and shows it."""

    BINDINGS: ClassVar[list[BindingType]] = [("q", "quit", "Quit"), ("space", "halt", "Halt")]
    CSS = "#view { padding: 1 2; }"

    def __init__(
        self,
        look: Callable[[], tuple[Json, Json]],
        draw: Callable[[list[Json], Json, int], RenderableType],
        states: "deque[Json]",
        every_s: float,
    ) -> None:
        """Show what ``look`` returns: a server's state, and a window of its lanes.

        Args:
            draw: Makes the view of the states, for lanes and a number of columns.
            states: Holds the states of the last minutes.
            every_s: Seconds between two looks.
        """
        super().__init__(ansi_color=True)
        self._look, self._draw, self._states, self._every_s = look, draw, states, every_s
        self._halted = False
        self._ended = threading.Event()
        self.title = "Lamina"

    def compose(self) -> ComposeResult:
        """Lay out the screen."""
        yield Header(show_clock=True)
        with VerticalScroll():
            yield Static("Connecting …", id="view")
        yield Footer()

    def on_mount(self) -> None:
        """Start the polling thread."""
        self.run_worker(self._watch, thread=True)

    def on_unmount(self) -> None:
        """End the polling thread."""
        self._ended.set()

    def action_halt(self) -> None:
        """Pause or resume the view."""
        self._halted = not self._halted
        self.sub_title = "halted" if self._halted else ""

    def _watch(self) -> None:
        while not self._ended.is_set():
            try:
                found = self._look()
            except LaminaError as error:
                self.call_from_thread(self._show_error, str(error))
            else:
                self.call_from_thread(self._show, *found)
            self._ended.wait(self._every_s)

    def _show(self, state: Json, lanes: Json) -> None:
        self._states.append(state)
        if not self._halted:
            self.sub_title = str(state["model"])
            self.query_one("#view", Static).update(self._draw(list(self._states), lanes, self.size.width - MARGIN))

    def _show_error(self, error: str) -> None:
        self.sub_title = f"{error.partition(';')[0]}; trying again"
