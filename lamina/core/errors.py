"""Every exception Lamina raises on purpose.

A ``UserError`` can be fixed by the caller (HTTP 400), and an ``OverloadedError`` by waiting (HTTP 429). Messages name
the fact, the numbers and the remedy.
"""

from collections.abc import Mapping


class LaminaError(Exception):
    """Base of all errors raised by Lamina on purpose."""


class UserError(LaminaError, ValueError):
    """The caller can fix it."""


class ConfigError(UserError):
    """A flag, a pool or a combination of settings is invalid."""


class ModelError(UserError):
    """The model directory or one of its files cannot be used."""


class UnsupportedModelError(ModelError):
    """The splitter does not support this architecture; the message says what was found and what was expected."""


class RequestError(UserError):
    """A prompt or sampling parameter that cannot be served."""


class TransportError(LaminaError):
    """A peer, an arena or a doorbell failed."""


class PeerLostError(TransportError):
    """A peer has exited, closed its endpoint or stopped answering. ``peer`` names it."""

    def __init__(self, peer: str, detail: str) -> None:
        super().__init__(f"lost peer {peer}: {detail}")
        self.peer = peer


class UnreachableError(TransportError):
    """Workers that the control plane cannot reach: ``workers`` gives the reason for each."""

    def __init__(self, workers: Mapping[str, str]) -> None:
        named = "; ".join(f"worker {worker}: {reason}" for worker, reason in workers.items())
        super().__init__(f"cannot reach workers on the control plane: {named}")
        self.workers = workers


class RefusedError(TransportError):
    """An endpoint rejected a connection. ``verdict`` is the kind of reason."""

    def __init__(self, verdict: str, reason: str) -> None:
        super().__init__(reason)
        self.verdict = verdict


class DeadlineError(TransportError, TimeoutError):
    """A wait passed its deadline."""


class CapacityError(LaminaError):
    """A slab has too few free token slots. ``needed``, ``free`` and ``capacity`` are counted in tokens."""

    def __init__(self, *, needed: int, free: int, capacity: int) -> None:
        super().__init__(
            f"{needed} token slots are needed and {free} of {capacity} are free; "
            "wait for sequences to finish or give the memory workers more memory"
        )
        self.needed = needed
        self.free = free
        self.capacity = capacity


class PlacementError(LaminaError):
    """The segments of a sequence cannot be served: a bug in the engine, found before it corrupts results."""

    def __init__(self, placed: str, why: str) -> None:
        super().__init__(f"{placed}: {why}. This is a bug in Lamina; please report it with this message")


NO_TOKEN_LEFT = "the request leaves no token to draw"
"""How the error of a request begins that rules out every token."""


class LogitsError(LaminaError):
    """No token can be drawn in ``rows``: the logits are not finite, or the request rules out every token."""

    def __init__(self, rows: list[int], ruled_out: bool = False) -> None:
        """``ruled_out``: True if the model's logits of these rows are finite: only the requests are at fault."""
        super().__init__(
            f"{NO_TOKEN_LEFT} in rows {rows}: its allowed_token_ids, min_tokens, stop_token_ids, bad_words or grammar "
            "rule out every token; relax one of them"
            if ruled_out
            else f"logits are NaN or infinite in rows {rows}: the checkpoint is broken, float16 overflows (run it in "
            "bfloat16 or float32), or min_tokens, stop_token_ids or the grammar rule out every token"
        )
        self.rows = rows


class WorkerError(LaminaError):
    """A worker failed. ``worker`` names it."""

    def __init__(self, worker: str, detail: str) -> None:
        super().__init__(f"worker {worker} failed: {detail}")
        self.worker = worker


class EngineDeadError(LaminaError):
    """The engine has stopped and accepts no more requests."""


class OverloadedError(LaminaError):
    """Too many requests are in the engine; the same request may succeed later."""


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error of Python, PyTorch or CuPy means that a device has too little memory.

    CUDA's libraries say so only in the text of an error."""
    text = str(error).lower()
    told = ("out of memory", "memoryallocation", "alloc_failed", "out_of_memory")
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(each in text for each in told))


def user_error(kind: str, message: str) -> UserError | None:
    """Return the UserError of another process, from its class name and message; None for another kind of error."""
    found = globals().get(kind)
    return found(message) if isinstance(found, type) and issubclass(found, UserError) else None
