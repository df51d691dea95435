"""Names the tokens of logprobs: the text and the bytes that they have where they stand."""

import codecs
from typing import NamedTuple

from lamina.models.tokenizer import Tokenizer
from lamina.protocol.logprobs import drawn_token, unpack
from lamina.types import Logprob


class Position(NamedTuple):
    """Logprobs at one position of a completion, and what the texts of its tokens depend on.

    Attributes:
        packed: the drawn token and the most likely ones, see ``lamina.protocol.logprobs``.
        text: what the drawn token added to the completion, before a stop string was cut off.
        pending: bytes of an incomplete character before this position.
    """

    packed: bytes
    text: str
    pending: bytes = b""


def named(position: Position, tokenizer: Tokenizer) -> list[Logprob]:
    """The drawn token, then the most likely ones, with their texts and bytes.

    The drawn tokens' texts join to the text of the completion, and their bytes to its UTF-8. Only special tokens are
    written out although the completion leaves them out. Of a character that several tokens make up, the last one has
    the text, and each has its bytes.
    """
    drawn = drawn_token(position.packed)

    def name(token: int) -> tuple[str, bytes]:
        encoded = tokenizer.token_bytes(token)
        if (special := tokenizer.special_texts.get(token)) is not None:
            return special, encoded
        text, rest = _decode(position.pending + encoded)
        if token != drawn:
            return text, encoded
        # A decoder strips the space at the beginning of a text.
        return position.text, encoded if position.pending or rest else position.text.encode()

    return unpack(position.packed, name)


def _decode(encoded: bytes) -> tuple[str, bytes]:
    """The text of ``encoded``, and the bytes of an incomplete character at its end."""
    try:
        return encoded.decode(), b""
    except UnicodeDecodeError:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return decoder.decode(encoded), decoder.getstate()[0]
