"""Outputs that grow with every update."""

from collections.abc import Callable

from lamina.core.outputs import RequestOutput
from lamina.engine.updates import OnUpdate, RequestUpdate, UpdateSum
from lamina.text.tokenizer import Tokenizer


def whole(tokenizer: Tokenizer, on_output: Callable[[RequestOutput], None]) -> OnUpdate:
    """Return a receiver of one request's updates that passes everything so far to ``on_output``."""
    gathered = UpdateSum(tokenizer)

    def on_update(update: RequestUpdate) -> None:
        gathered.append_update(update)
        on_output(gathered.output())

    return on_update
