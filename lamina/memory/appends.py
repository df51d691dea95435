"""Finds new tokens that the attention kernel can append itself, which saves one launch per layer. Pure."""

from collections.abc import Callable

from lamina.protocol.wire import MessageRows, Piece, SegmentKey, SegmentRows


def appended_rows(rows: MessageRows, pieces: tuple[Piece, ...], key: Callable[[SegmentRows], SegmentKey]) -> list[int]:
    """For each of ``rows.attends``, the row of the message's k and v that belongs to its only query; -1 if none does.

    Empty unless the message is sent whole and every row of its k and v belongs to such a query: as in decode steps.
    """
    if len(pieces) > 1 or not rows.kept or any(tokens != 1 for _, tokens in rows.kept):
        return []
    places = {segment: place for place, (segment, _) in enumerate(rows.kept)}
    own = [each.rows == 1 and each.kv_stop == each.start + 1 for each in rows.attends]
    found = [places.pop(key(each), -1) if last else -1 for each, last in zip(rows.attends, own, strict=True)]
    return [] if places else found
