"""Advice from evaluated plans: the Pareto front, a recommendation, the gain from more workers, why no plan fits."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lamina.core.errors import ConfigError
from lamina.planning.plan.cost import MEMORY_SHARE_USABLE
from lamina.planning.plan.planner import Plan, Planner, evaluate_group
from lamina.planning.plan.ways import NO_LIMITS, TENSOR_PARALLEL, Partition, Way

SAME_COST = 0.02
"""Plans whose cost differs by less than this share count as equally cheap; the smaller one is recommended."""


def pareto(plans: Sequence[Plan]) -> list[Plan]:
    """Return the Pareto front of cost per output token, tokens per second and TBT, cheapest plan first."""
    table = np.array([(plan.usd_per_million_out, -plan.tokens_s, plan.tbt_s) for plan in plans]).reshape(-1, 3)
    kept = np.empty_like(table)
    front: list[Plan] = []
    # Every dominated plan is dominated by a plan of the front, which precedes it in this order.
    for index in np.lexsort(table.T[::-1]).tolist():
        if not (kept[: len(front)] <= table[index]).all(axis=1).any():
            kept[len(front)] = table[index]
            front.append(plans[index])
    return front


def recommend(plans: Sequence[Plan]) -> Plan:
    """Return the plan with the least hourly cost, among plans within SAME_COST of the least cost per output token."""
    cheapest = min(plan.usd_per_million_out for plan in plans)
    near = [plan for plan in plans if plan.usd_per_million_out <= cheapest * (1 + SAME_COST)]
    return min(near, key=lambda plan: (plan.usd_per_hour, -plan.tokens_s))


def beyond(planner: Planner, plan: Plan) -> list[str]:
    """Describe the gain by one more worker in each pool, a line for each."""
    pools = plan.pools
    memory, compute, replicas = 2 * pools.memory_workers, 2 * pools.compute_workers, 2 * pools.replicas
    # A pool that no longer divides the heads is partitioned by requests.
    divides = pools.partition is Partition.REQUEST or planner.shape.kv_heads % memory == 0
    more_memory = replace(pools, memory_workers=memory, partition=pools.partition if divides else Partition.REQUEST)
    variants = {
        f"{memory} {pools.second.kind} instead of {pools.memory_workers}": more_memory,
        f"{compute} {pools.compute.kind} instead of {pools.compute_workers}": replace(
            pools, compute_workers=compute, lanes=replicas + 1
        ),
        "twice both pools": replace(more_memory, compute_workers=compute, lanes=replicas + 1),
    }
    free = Planner(
        planner.shape, planner.workload, planner.models, planner.prices, replace(planner.goals, usd_per_hour=math.inf)
    )
    lines = []
    for what, larger in variants.items():
        found = free.evaluate(larger)
        if found is not None:
            faster = found.tokens_s / plan.tokens_s - 1
            costlier = found.usd_per_hour / plan.usd_per_hour / (1 + faster) - 1 if plan.usd_per_hour else None
            cost = "" if costlier is None else f", {costlier:+.0%} cost per token"
            lines.append(f"{what}: {faster:+.0%} tokens/s{cost}; bottleneck: {found.bottleneck.value}")
    return lines


@dataclass(frozen=True)
class Alone:
    """Conventional decoding on one pool of ``count`` devices in groups of ``tensor_parallel``."""

    kind: str
    count: int
    tensor_parallel: int
    tokens_s: float
    usd_per_hour: float

    @property
    def usd_per_million_out(self) -> float:
        """US dollars per million output tokens."""
        return self.usd_per_hour / 3600 / self.tokens_s * 1e6

    def against(self, plan: Plan) -> str:
        """Describe what this pool serves, and a plan's gain over it."""
        return (
            f"{self.count} {self.kind} alone (${self.usd_per_hour:.2f}/h, tensor parallelism {self.tensor_parallel}): "
            f"{self.tokens_s:.0f} tokens/s, ${self.usd_per_million_out:.2f} per million output tokens; this plan: "
            f"{self.usd_per_million_out / plan.usd_per_million_out - 1:+.0%} tokens per dollar"
        )


def alone(planner: Planner, plan: Plan) -> Alone | None:
    """Return the cheapest conventional pool on either kind of the plan, for about the plan's hourly cost.

    None if the model fits neither kind or misses the SLO on both.
    """
    found = []
    for kind in (plan.pools.compute, plan.pools.second):
        hourly, model = planner.prices.usd_per_hour(kind), planner.models[kind.kind]
        for degree in TENSOR_PARALLEL:
            if planner.shape.kv_heads % degree or not hourly:
                continue
            if group := evaluate_group(model, degree, planner.workload, planner.goals.tbt_s):
                groups = max(1, round(plan.usd_per_hour / hourly / degree))
                count = groups * degree
                found.append(Alone(kind.kind, count, degree, groups * group.tokens_s, count * hourly))
    return min(found, key=lambda one: (one.usd_per_million_out, one.count), default=None)


def refusal(planner: Planner, candidates: Sequence[Way]) -> ConfigError:
    """Return the error for candidates of which none works, with the reason. ``candidates`` is not empty."""
    shape, workload, goals, models = planner.shape, planner.workload, planner.goals, planner.models
    fitting = [pools for pools in candidates if models[pools.compute.kind].weights_fit(pools.shape.ranks)]
    if not fitting:
        return _too_heavy(planner, candidates)
    free = Planner(shape, workload, models, planner.prices, NO_LIMITS)
    plans = [plan for pools in fitting if (plan := free.evaluate(pools)) is not None]
    if not plans:
        return _too_long(planner, fitting)
    cheapest = min(plans, key=lambda plan: plan.usd_per_hour)
    if not goals.affords(cheapest.usd_per_hour):
        return _unreachable(
            "--budget", f"${goals.usd_per_hour:.2f}/h", f"${_up(cheapest.usd_per_hour, 2)}/h", cheapest.pools
        )
    first = min(plans, key=lambda plan: plan.ttft_s)
    if first.ttft_s > goals.ttft_s:
        return _unreachable("--slo-ttft", f"{goals.ttft_s * 1e3:g}ms", f"{_up(first.ttft_s * 1e3)}ms", first.pools)
    affordable = [p for p in plans if goals.affords(p.usd_per_hour)]
    prompt = [p for p in affordable if p.ttft_s <= goals.ttft_s]
    if not prompt:
        first = min(affordable, key=lambda plan: plan.ttft_s)
        flag, nearest = "--slo-ttft within --budget", f"{_up(first.ttft_s * 1e3)}ms"
        return _unreachable(flag, f"{goals.ttft_s * 1e3:g}ms", nearest, first.pools)
    fastest = min((p.pools for p in prompt), key=free.least_tbt)
    nearest = f"{_up(free.least_tbt(fastest) * 1e3, 1)}ms"
    return _unreachable("--slo-tbt", f"{goals.tbt_s * 1e3:g}ms", nearest, fastest)


def _too_heavy(planner: Planner, candidates: Sequence[Way]) -> ConfigError:
    shape, models = planner.shape, planner.models
    most = max(candidates, key=lambda pools: models[pools.compute.kind].usable_bytes * pools.shape.ranks)
    usable, kind = models[most.compute.kind].usable_bytes, most.compute.kind
    groups = [degree for degree in TENSOR_PARALLEL if shape.kv_heads % degree == 0]
    holding = [degree for degree in groups if models[kind].weights_fit(degree)]
    remedy = (
        f"give --compute {kind}:{holding[0]}, or hardware with more memory"
        if holding
        else f"give hardware with {_up(shape.weight_bytes / max(groups) / MEMORY_SHARE_USABLE / 1e9)} GB or more each"
    )
    return ConfigError(
        f"{shape.name} has {shape.weight_bytes / 1e9:.0f} GB of weights; tensor parallelism over "
        f"{most.shape.ranks} x {kind} holds {most.shape.ranks * usable / 1e9:.0f} GB; {remedy}"
    )


def _too_long(planner: Planner, fitting: Sequence[Way]) -> ConfigError:
    shape, workload = planner.shape, planner.workload
    room = {pools.second.kind: planner.models[pools.second.kind].kv_tokens for pools in fitting}
    enough = {kind: _workers(planner, fitting, kind) for kind in room}
    kind, workers = min(enough.items(), key=lambda pair: pair[1])
    most = max(pools.memory_workers for pools in fitting if pools.second.kind == kind)
    remedy = (
        f"--memory {kind}:{workers:.0f}, or hardware with more memory"
        if workers < math.inf
        else "hardware with more memory"
    )
    return ConfigError(
        f"{workload.name} needs {workload.live:.0f} tokens of KV per sequence; a {kind} holds {room[kind]}, and "
        f"the pool has at most {most}. A sequence is kept on one worker, or its {shape.kv_heads} KV heads are divided "
        f"evenly over several; to hold one sequence per lane give {remedy}"
    )


def _workers(planner: Planner, fitting: Sequence[Way], kind: str) -> float:
    """Return the fewest memory workers of a kind that hold one sequence per lane; infinite if no number does."""
    each, live = planner.models[kind].kv_tokens, planner.workload.live
    lanes, heads = min(pools.lanes for pools in fitting), planner.shape.kv_heads
    whole = math.ceil(lanes / (each // live)) if each >= live else math.inf
    by_heads = (n for n in range(2, heads + 1) if heads % n == 0 and n * each >= lanes * live)
    return min(whole, *by_heads, math.inf)


def _up(number: float, digits: int = 0) -> str:
    """Format ``number`` rounded up, so that a limit of this value succeeds."""
    return f"{math.ceil(round(number * 10**digits, 6)) / 10**digits:.{digits}f}"


def _unreachable(flag: str, target: str, nearest: str, pools: Way) -> ConfigError:
    return ConfigError(
        f"no plan meets {flag} {target}; the nearest is {nearest}, with --compute {pools.compute.kind}:"
        f"{pools.compute_workers} --memory {pools.second.kind}:{pools.memory_workers}. Give that value, or "
        "allow other hardware or more workers"
    )
