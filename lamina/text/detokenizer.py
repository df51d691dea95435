"""Makes the text of generated tokens as they arrive, and the texts and bytes of the tokens of logprobs."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from lamina.control.packed_logprobs import drawn_token, unpack
from lamina.core.outputs import Logprob
from lamina.text.tokenizer import REPLACEMENT, Tokenizer, complete_text

_CHARACTER_BYTES = 4  # the maximum in UTF-8


class IncrementalDetokenizer:
    """Decodes a growing sequence incrementally, at a constant cost per token; the concatenated increments are its text.

    A token may be part of a character, and its text may depend on the token before it (a leading space, for one). So
    each step decodes a short window of the last tokens and returns the new part, holding back an incomplete character.
    Special tokens have no text unless ``skip_special_tokens`` is False.

    Byte-fallback decoders write one replacement character for every byte of a run of byte tokens that is not valid
    UTF-8 as a whole, even for valid characters before the error. Here, complete characters are returned and final; from
    the first invalid byte on, every byte of the run becomes a replacement character.

    Args:
        prompt_token_ids: the tokens before the first generated one; only the last ones are decoded.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._run = _ByteRun()
        self._window = tokenizer.context(prompt_token_ids)
        self._context = 0  # leading tokens of the window whose text had been returned when the window last moved
        text = self._window_text()
        self._held = text.endswith(REPLACEMENT)  # an incomplete character at the end of the window
        self._sent = len(text.removesuffix(REPLACEMENT))  # characters of the window's text that have been returned
        bytes_ = itertools.takewhile(lambda token: tokenizer.byte_of(token) is not None, reversed(self._window))
        for token in reversed(list(bytes_)):
            self._next(token)

    def append(self, token_ids: Sequence[int]) -> str:
        """Return the text that ``token_ids`` add; empty while a character is incomplete."""
        return "".join([self._next(token) for token in token_ids])

    @property
    def pending(self) -> bytes:
        """The bytes of an incomplete character, which later tokens may complete."""
        if not self._held:
            return self._run.pending
        return complete_text(b"".join(map(self._tokenizer.token_bytes, self._window)))[1]

    def flush(self) -> str:
        """Return the rest of the text: replacement characters for the bytes of an incomplete character."""
        text = self._window_text()
        new = text[self._sent :]
        self._sent = len(text)
        return new + self._run.flush()

    def _has_text(self, token: int) -> bool:
        return self._tokenizer.has_text(token) or (not self._skip and token in self._tokenizer.special_texts)

    def _window_text(self) -> str:
        return self._tokenizer.decode(self._window, self._skip)

    def _next(self, token: int) -> str:
        if not self._held and (fixed := self._tokenizer.fixed_text(token)) is not None:
            self._window, self._context, self._sent = [token], 1, len(fixed)
            return fixed
        if not self._has_text(token):
            return ""
        byte = self._tokenizer.byte_of(token)
        if byte is None:
            return self._run.flush() + self._decode(token)
        self._window, self._context = [token], 1  # an ordinary token that follows is not at the beginning of the text
        self._sent, self._held = len(self._window_text()), False
        return self._run.append(byte)

    def _decode(self, token: int) -> str:
        self._window.append(token)
        text = self._window_text()
        self._held = text.endswith(REPLACEMENT)  # one for an incomplete character; the text before it is final
        complete = text[:-1] if self._held else text
        new = complete[self._sent :]
        if self._held:
            self._sent = max(self._sent, len(complete))
            if len(self._window) - self._context > 2 * _CHARACTER_BYTES:
                self._cut_window()
        elif new:
            del self._window[: self._context]
            self._context = len(self._window)
            self._sent = len(self._window_text())
        elif len(self._window) - self._context > 2 * _CHARACTER_BYTES:
            self._window.pop()  # tokens without text must not grow the window without bound
        return new

    def _cut_window(self) -> None:
        """Keep as many tokens as a character can have bytes. Their text may begin with an incomplete character, but its
        end is the same: the first byte of a character is never mistaken for a continuation of the one before."""
        del self._window[:-_CHARACTER_BYTES]
        self._context = 0
        self._sent = len(self._window_text()) - 1


class _ByteRun:
    """Decodes a run of byte-fallback tokens. ``pending``: bytes of an incomplete character."""

    def __init__(self) -> None:
        self.pending = b""
        self._broken = False

    def append(self, byte: int) -> str:
        """Return the character that the next byte completes, replacement characters once the run is invalid, or
        nothing."""
        if self._broken:
            return REPLACEMENT
        self.pending += bytes([byte])
        try:
            text = self.pending.decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data":
                return ""
            self._broken = True
            text = REPLACEMENT * len(self.pending)
        self.pending = b""
        return text

    def flush(self) -> str:
        """End the run; returns one replacement character for each byte of an incomplete character."""
        text = REPLACEMENT * len(self.pending)
        self.pending, self._broken = b"", False
        return text


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
