"""Every exception Lamina raises on purpose.

::

    LaminaError
    ├── UserError (ValueError)        the caller can mend it; HTTP 400
    │   ├── ConfigError               a flag, a pool or a combination that cannot be
    │   ├── ModelError                the model directory or its files
    │   │   └── UnsupportedModelError the splitter refuses this architecture, with the reason
    │   └── RequestError              a prompt or a sampling parameter
    ├── TransportError                a peer, an arena or a doorbell
    │   ├── PeerLostError             the peer's process is gone
    │   └── DeadlineError (TimeoutError)  a wait passed its deadline
    ├── WorkerError                   a worker failed; carries the worker's name and its own message
    └── EngineDeadError               the engine has stopped; says why and what to do

Messages name the fact, the numbers and the remedy.
"""


class LaminaError(Exception):
    """Base of all errors raised by Lamina on purpose."""


class UserError(LaminaError, ValueError):
    """The caller can mend it."""


class ConfigError(UserError):
    """A flag, a pool or a combination of settings that cannot be."""


class ModelError(UserError):
    """The model directory or one of its files cannot be used."""


class UnsupportedModelError(ModelError):
    """The splitter refuses this architecture: the message says what was found and what was expected."""


class RequestError(UserError):
    """A prompt or sampling parameter that cannot be served."""


class TransportError(LaminaError):
    """A peer, an arena or a doorbell failed."""


class PeerLostError(TransportError):
    """The process at the other end is gone. ``peer`` names it."""

    def __init__(self, peer: str, detail: str) -> None:
        super().__init__(f"peer {peer} is gone: {detail}")
        self.peer = peer


class DeadlineError(TransportError, TimeoutError):
    """A wait passed its deadline."""


class WorkerError(LaminaError):
    """A worker failed. ``worker`` names it."""

    def __init__(self, worker: str, detail: str) -> None:
        super().__init__(f"worker {worker} failed: {detail}")
        self.worker = worker


class EngineDeadError(LaminaError):
    """The engine has stopped and takes no more requests."""
