"""Detects failed requests of a benchmark, whose figures would be wrong."""

from lamina.engine.updates import RequestUpdate


class Failures:
    """The errors of requests. The engine's thread adds them; the benchmark's thread checks."""

    def __init__(self) -> None:
        self._errors: list[str] = []

    def note(self, update: RequestUpdate) -> None:
        """Keep the error of an update, if it has one."""
        if update.error is not None:
            self._errors.append(f"request {update.request.request_id}: {update.error}")

    def check(self) -> None:
        """Raise SystemExit if any request has failed so far."""
        if self._errors:
            raise SystemExit(f"error: {len(self._errors)} requests failed; the first is {self._errors[0]}")
