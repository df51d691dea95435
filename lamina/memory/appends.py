"""Which new tokens attention may append itself, as it reads them: one launch less in every layer. Pure."""

from collections.abc import Callable

from lamina.protocol.wire import MessageRows, Piece, SegmentKey, SegmentRows


def appended_rows(rows: MessageRows, pieces: tuple[Piece, ...], key: Callable[[SegmentRows], SegmentKey]) -> list[int]:
    """For each of ``rows.attends``, which row of a message's k and v is the last token that it sees and its only
    query's own; -1: none.

    Empty unless the message comes whole and this holds for every row of its k and v: as when sequences decode.
    """
    if len(pieces) > 1 or not rows.kept or any(tokens != 1 for _, tokens in rows.kept):
        return []
    places = {segment: place for place, (segment, _) in enumerate(rows.kept)}
    own = [each.rows == 1 and each.kv_stop == each.start + 1 for each in rows.attends]
    found = [places.pop(key(each), -1) if last else -1 for each, last in zip(rows.attends, own, strict=True)]
    return [] if places else found
