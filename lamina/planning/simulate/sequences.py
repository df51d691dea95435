"""What the simulator keeps of a lane's sequences: their numbers, and stand-ins for the tokens that they have drawn."""

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import numpy as np

from lamina.core.requests import Owner
from lamina.planning.simulate.result import RequestLog
from lamina.planning.simulate.scenario import Ints

Sequences = TypeVar("Sequences")


class Numbers(Generic[Sequences]):
    """Caches one number for each of a lane's sequences, until it is called with another object."""

    def __init__(self, look_up: Callable[[Sequences], list[int]]) -> None:
        self._look_up = look_up
        self._sequences: Sequences | None = None
        self._last: Ints = np.zeros(0, np.int64)

    def numbers_of(self, sequences: Sequences) -> Ints:
        """Return the numbers of ``sequences``, an object that must not be mutated."""
        if sequences is not self._sequences:
            self._sequences = sequences
            self._last = np.array(self._look_up(sequences), np.int64)
        return self._last

    def forget_numbers(self) -> None:
        """Drop the cache."""
        self._sequences = None


def requests_of(drawn: Mapping[int, Owner]) -> list[int]:
    """Return the index of the request of each sequence that drew a token."""
    return [int(group.request.request_id) for group, _ in drawn.values()]


class Drawn(list[int]):
    """The generated tokens of a request: as many as the log says, all with the same value."""

    def __init__(self, log: RequestLog, index: int, value: int = 0) -> None:
        super().__init__([value])  # for plans that must name the last one
        self._log, self._index, self._value = log, index, value

    def __len__(self) -> int:
        return int(self._log.drawn[self._index])

    def __getitem__(self, place: Any) -> Any:
        return [self._value] * len(range(*place.indices(len(self)))) if isinstance(place, slice) else self._value
