"""Errors of `lamina plan` for whole requests if no way fits, is cheap enough or keeps the targets."""

import math
import re
from typing import TYPE_CHECKING

from lamina.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lamina.planning.plan.nearest import Reach
    from lamina.planning.plan.serving import Server
    from lamina.planning.plan.ways import Capacity, Slo, Way
    from lamina.planning.simulate.trial import Course

REMEDY = "Or plan for other hardware, for more devices, or for other lengths of requests"


def unfound(server: "Server", candidates: "Sequence[Way]") -> ConfigError:
    """Return the error of a plan in whose candidates the closed form finds no way that serves."""
    reasons = [server.unfit(way) for way in candidates]
    if reasons and all(reasons):
        return ConfigError(f"no way to serve fits: {'; '.join(_nearest(filter(None, reasons)))}. {_remedy(server)}")
    slo = server.slo
    usd = {
        place: sum(way.usd_per_hour(server.prices))
        for place, (way, why) in enumerate(zip(candidates, reasons, strict=True))
        if not why
    }
    cheapest = min(usd.values())
    if not slo.affords(cheapest):
        return ConfigError(
            f"no way to serve costs ${slo.usd_per_hour:.2f}/h or less; the cheapest that holds the model and a request "
            f"costs ${cheapest:.2f}/h. Raise --budget, or give other hardware"
        )
    affordable = [candidates[place] for place, hourly in usd.items() if slo.affords(hourly)]
    reached = [one for way in affordable for one in server.reach(way)]
    return _missed(slo, reached) if reached else _crowded(server)


def unkept(slo: "Slo", course: "Course", chosen: "Sequence[Capacity]") -> ConfigError:
    """Return the error of a plan whose chosen ways keep the targets by the closed form, but not in the simulator."""
    from lamina.planning.simulate.trial import WORSE

    reached = [course.reach(one) for one in chosen]
    if kept := next((one for one in reached if one.keeps(slo)), None):
        return ConfigError(
            f"{_targets(slo)} in the simulator at a useful load: {kept.way.describe()} keeps both at low load alone, "
            f"where a request costs over {WORSE:g} times what the closed form says for the cheapest way. Raise "
            "--slo-ttft or --slo-tbt, or give other hardware"
        )
    return _missed(slo, reached)


def _crowded(server: "Server") -> ConfigError:
    from lamina.kv.placement import WATERMARK

    return ConfigError(
        f"no way to serve has room for a batch: a request has {server.workload.live:.0f} tokens of KV on average, and "
        f"admission leaves {WATERMARK:.0%} of a worker's KV free for sequences to grow. {_remedy(server)}"
    )


def _missed(slo: "Slo", reached: "Sequence[Reach]") -> ConfigError:
    from lamina.planning.plan.nearest import nearest

    return ConfigError(" ".join([f"{_targets(slo)} at any load.", *nearest(reached, slo), REMEDY]))


def _targets(slo: "Slo") -> str:
    budget = f" for ${slo.usd_per_hour:.2f}/h" if slo.usd_per_hour < math.inf else ""
    first = f"{slo.ttft_s:g} s" if slo.ttft_s >= 1 else f"{slo.ttft_s * 1e3:g} ms"
    return f"no way to serve{budget} keeps p99 TTFT {first} and p99 TBT {slo.tbt_s * 1e3:g} ms"


def _nearest(reasons: "Iterable[str]") -> list[str]:
    """Return the reason with the largest numbers of each kind of reason: that of the way that nearly fits."""
    best: dict[str, str] = {}
    for reason in reasons:
        kind = re.sub(r"(?<![a-z])\d+", "", reason)
        best[kind] = max(best.get(kind, ""), reason, key=lambda text: [float(n) for n in re.findall(r"[\d.]+", text)])
    return list(best.values())


def _remedy(server: "Server") -> str:
    """Return what to do if nothing fits: more devices help as long as ranks and stages can use them."""
    from lamina.planning.plan.stages import STAGES
    from lamina.planning.plan.ways import TENSOR_PARALLEL

    heads = server.shape.kv_heads
    most = max(degree for degree in TENSOR_PARALLEL if heads % degree == 0)
    return (
        f"Give hardware with more memory, or more of it: plans divide a copy of the weights into {max(STAGES)} stages "
        f"of {most} devices at most ({heads} KV heads)"
    )
