"""Names the tokens of logprobs: the text and the bytes that they have where they stand."""

from typing import NamedTuple

from lamina.control.logprobs import drawn_token, unpack
from lamina.core.types import Logprob
from lamina.text.tokenizer import Tokenizer, complete_text


class Position(NamedTuple):
    """Logprobs at one position of a completion, and what the texts of its tokens depend on.

    Attributes:
        packed: the drawn token and the most likely ones, see ``lamina.control.logprobs``.
        text: what the drawn token added to the completion, before a stop string was cut off.
        pending: bytes of an incomplete character before this position.
    """

    packed: bytes
    text: str
    pending: bytes = b""


def named(position: Position, tokenizer: Tokenizer) -> list[Logprob]:
    """Return the drawn token, then the most likely ones, with their texts and bytes.

    The drawn tokens' texts join to the text of the completion, and their bytes to its UTF-8. Only special tokens are
    written out although the completion leaves them out. Of a character that several tokens make up, the last one has
    the text, and each has its bytes.
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
