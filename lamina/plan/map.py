"""Where a second kind of device pays: the cheapest ways to serve on one kind and on two, over a grid of lengths.

Pure. Every cell is a workload whose requests all have one prompt and one output length. Both sides may use the same
devices and keep the same SLOs, and are compared by dollars for a request, so at equal cost. On one kind: one pool, or
prefill and decoding apart. On two: attention offloaded, or prefill on one kind and decoding on the other. Offloading
to memory workers of the same kind as the compute workers counts as one kind.

A second gain is for prompts that cost nothing, because their KV is already there: the bound for sessions that are
continued and for shared prefixes. How often that is so depends on a prefix cache, which is not modelled.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from lamina.plan.cost import CostModel
from lamina.plan.hardware import Hardware
from lamina.plan.models import ModelShape
from lamina.plan.prices import Prices
from lamina.plan.serving import Capacity, Kind, Server, Slo, Way, ways
from lamina.plan.workload import Workload, of_lengths

PROMPTS = (256, 1024, 4096, 16384, 65536)
OUTPUTS = (128, 512, 2048, 8192, 32768)

_CHUNKS = (512, 2048)
_MOST_LANES = 2  # of a replica
PAYS = 0.05
"""A gain below this is within what the closed form is off, and counts as none."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The cheapest way of either side for one workload; None where no way holds it within the SLOs.

    ``cached``: gain if prompts cost nothing, as ``gain``.
    """

    workload: Workload
    alone: Capacity | None
    together: Capacity | None
    cached: float | None

    @property
    def gain(self) -> float | None:
        """Requests per dollar on two kinds over those on one, less 1; None unless both sides serve it."""
        return _gain(self.alone, self.together)


def cells(
    shape: ModelShape,
    workloads: Iterable[Workload],
    pools: tuple[Sequence[tuple[Hardware, int]], Sequence[tuple[Hardware, int]]],
    models: Mapping[str, CostModel],
    prices: Prices,
    slo: Slo,
) -> Iterable[Cell]:
    """A cell for every workload, in order."""
    candidates = [way for way in ways(shape, *pools) if _coarse(way)]
    for workload in workloads:
        alone, together = _both(Server(shape, workload, models, prices, slo), candidates)
        kept = replace(workload, prompt=1.0, sample=())
        yield Cell(
            workload=workload,
            alone=alone,
            together=together,
            cached=_gain(*_both(Server(shape, kept, models, prices, slo), candidates)),
        )


def grid() -> list[Workload]:
    """Every pair of lengths, outputs first."""
    return [of_lengths(prompt, output) for output in OUTPUTS for prompt in PROMPTS]


def crossover(found: Sequence[Cell]) -> str:
    """In words, where two kinds pay in a grid."""
    compared = [cell for cell in found if cell.gain is not None]
    paying = [cell for cell in compared if (cell.gain or 0) > PAYS]
    only = [cell for cell in found if cell.alone is None and cell.together is not None]
    if not compared:
        return "No cell can be served both on one kind and on two."
    best = max(compared, key=lambda cell: cell.gain or 0)
    text = (
        f"Two kinds cost less per request in {len(paying)} of {len(compared)} cells; the largest gain is "
        f"{best.gain:+.0%}, with {best.workload.name}"
    )
    if paying:
        shares = [cell.workload.prompt / cell.workload.output for cell in paying]
        others = [cell.workload.prompt / cell.workload.output for cell in compared if cell not in paying]
        text += f". Where they pay, a prompt has {_span(shares)} times as many tokens as its output"
        text += f"; elsewhere {_span(others)} times" if others else ""
    if only:
        text += f". On one kind alone, nothing serves {len(only)} more"
    kept = [cell.cached for cell in found if cell.cached is not None]
    if kept:
        text += (
            f". If prompts cost nothing, two kinds cost less in {sum(gain > PAYS for gain in kept)} of {len(kept)}, "
            f"by up to {max(kept):+.0%}"
        )
    return text + "."


def _span(values: Sequence[float]) -> str:
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low} to {high}"


def _both(server: Server, candidates: Iterable[Way]) -> tuple[Capacity | None, Capacity | None]:
    """The cheapest on one kind and on two."""
    best: list[Capacity | None] = [None, None]
    for way in candidates:
        if (found := server.evaluate(way)) is None:
            continue
        side = int(way.memory is not None and way.memory.kind != way.compute.kind)
        known = best[side]
        if known is None or found.usd_per_request < known.usd_per_request:
            best[side] = found
    return best[0], best[1]


def _gain(alone: Capacity | None, together: Capacity | None) -> float | None:
    return alone.usd_per_request / together.usd_per_request - 1 if alone and together else None


def _coarse(way: Way) -> bool:
    """Whether a map has this way: counts that are powers of two, two lengths of chunks, no rotation."""
    counts = (way.compute_workers, way.memory_workers or 1)
    if any(count & (count - 1) for count in counts) or (way.rotates and way.replicas > 1):
        return False
    if way.kind is Kind.APART:
        return True
    return way.chunk in _CHUNKS and way.lanes <= _MOST_LANES * way.replicas
