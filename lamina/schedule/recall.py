"""KV that memory workers have kept from the requests of an earlier engine, until these requests come again. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from lamina.control.messages import Computed
from lamina.core.requests import Drawn, ids_of
from lamina.core.segments import by_worker
from lamina.core.types import Request, Segment
from lamina.kv.placement import Placement
from lamina.kv.prefix_cache import PrefixCache


@dataclass(frozen=True)
class _Kept:
    """The first ``tokens`` tokens of a completion.

    Attributes:
        segments: Where they are, by place.
        reserved: Slots reserved for them, by place.
    """

    index: int
    sequence: int
    tokens: int
    segments: list[Segment]
    reserved: dict[str, int]


class Recall:
    """Reserves slots for kept sequences. A request that comes again finds its tokens in the prefix cache.

    Of several completions of a request, only the prompt is found again: they are forked once it has run.
    """

    def __init__(self, placement: Placement, prefixes: PrefixCache, windowed: bool) -> None:
        """``windowed``: Whether a layer forgets tokens. Then nothing is kept: a worker may have forgotten tokens that
        the last one kept still attends to."""
        self._placement, self._prefixes, self._windowed = placement, prefixes, windowed
        self._kept: dict[str, list[_Kept]] = {}  # by request id
        self._claims: list[tuple[_Kept, Request, Drawn | None]] = []  # claims that the next plan settles

    def __bool__(self) -> bool:
        return bool(self._kept or self._claims)

    def keep(self, found: Iterable[Computed]) -> None:
        """Reserve slots for sequences; those on places that are no more, or without enough free slots, are released."""
        for one in found:
            segments = self._placement.collect(one.segments) or []
            kept = _Kept(one.index, one.sequence, one.tokens, segments, {})
            for place, tokens in by_worker(segments, 0, one.tokens).items():
                if tokens <= self._placement.left(place):  # places may share workers: one after the other
                    self._placement.reserve_on(place, tokens)
                    kept.reserved[place] = tokens
            if not self._windowed and sum(kept.reserved.values()) == one.tokens:
                self._kept.setdefault(one.request, []).append(kept)
            else:
                self._free(kept)

    def claim(self, request: Request, drawn: Drawn | None) -> None:
        """Note that a request has come again, which goes on from what it has ``drawn``."""
        self._claims += [(one, request, drawn) for one in self._kept.pop(request.request_id, ())]

    def settle(self) -> None:
        """Add what has been claimed to the prefix cache. The plan that is being made must have the cache's changes."""
        for one, request, drawn in self._claims:
            self._free(one)
            tokens = [*request.prompt_token_ids, *(drawn or {}).get(one.index, ())]
            ids = ids_of(tokens[: one.tokens])
            self._prefixes.keep_sequence(request.params.cache_salt, ids, one.sequence, one.segments)
        self._claims.clear()

    def drop(self) -> None:
        """Release what has not been added to the prefix cache."""
        for one in (*(one for each in self._kept.values() for one in each), *(one for one, _, _ in self._claims)):
            self._free(one)
        self._kept.clear()
        self._claims.clear()

    def _free(self, one: _Kept) -> None:
        for place, tokens in one.reserved.items():
            self._placement.will_release(place, tokens)
            self._placement.free_slots(place, tokens)
        self._prefixes.free_unused(one.sequence)
