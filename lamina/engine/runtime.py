"""What callers need of an engine, in this process or in another."""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol

from lamina.engine.stats import EngineStats
from lamina.engine.updates import OnUpdate
from lamina.frontend.defaults import Defaults
from lamina.models.tokenizer import Tokenizer
from lamina.types import Client, SamplingParams


class Submission(NamedTuple):
    """A request to queue: ``on_update`` is called with every update of it."""

    request_id: str
    prompt: str | list[int]
    params: SamplingParams
    on_update: OnUpdate


class Runtime(Protocol):
    """An engine: ``engine.Engine`` in its own process, ``remote.RemoteEngine`` in a frontend.

    Attributes:
        model_name: The model's name for clients.
        model_aliases: Further names that clients may use.
        vocab_size: Token ids of prompts must be below it.
    """

    model_name: str
    model_aliases: tuple[str, ...]
    vocab_size: int
    tokenizer: Tokenizer
    max_model_len: int
    sampling_defaults: Defaults

    @property
    def dead(self) -> str | None:
        """Why it has stopped, if it has."""
        ...

    def submit_all(self, submissions: Sequence[Submission], client: Client) -> None:
        """Queue all or none. Raises RequestError, OverloadedError, EngineDeadError. May wait: not for event loops."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request with the tokens it has. Does nothing if it is unknown or has ended."""
        ...

    def stats(self) -> EngineStats:
        """Counters as of now. May wait: not for event loops."""
        ...

    def scale(self, *, compute: int | str = 0, memory: int | str = 0) -> Future[list[str]]:
        """Let workers join the pools, or leave where a number is negative; see ``engine.Engine.scale``."""
        ...

    def close(self) -> None:
        """End all requests with an error."""
        ...
