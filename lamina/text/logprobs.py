"""Adds to each token of logprobs the text and the bytes that it has at its position."""

from typing import NamedTuple

from lamina.control.packed_logprobs import drawn_token, unpack
from lamina.core.outputs import Logprob
from lamina.text.tokenizer import Tokenizer, complete_text


class Position(NamedTuple):
    """Logprobs at one position of a completion, with what the texts of the tokens depend on.

    Attributes:
        packed: the drawn token and the most likely ones, packed by ``lamina.control.packed_logprobs``.
        text: text that the drawn token added to the completion, before a stop string was cut off.
        pending: bytes of an incomplete character before this position.
    """

    packed: bytes
    text: str
    pending: bytes = b""


def named(position: Position, tokenizer: Tokenizer) -> list[Logprob]:
    """Return the drawn token, then the most likely ones, with their texts and bytes.

    The texts of the drawn tokens concatenate to the text of the completion, and their bytes to its UTF-8, except that
    special tokens have a text even if the completion leaves them out. If several tokens make up a character, the last
    token has its text.
    """
    drawn, pending = drawn_token(position.packed), position.pending

    def name(token: int) -> tuple[str, tuple[int, ...]]:
        if token in tokenizer.special_texts or (token != drawn and not pending):
            return tokenizer.token_text(token)
        encoded = tokenizer.token_bytes(token)
        text, rest = complete_text(pending + encoded)
        if token != drawn:
            return text, tuple(encoded)
        # A decoder strips the space at the beginning of a text.
        return position.text, tuple(encoded if pending or rest else position.text.encode())

    return unpack(position.packed, name)
