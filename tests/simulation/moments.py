"""Moments of an engine at which faults strike: states that last so briefly that faults at random times miss them."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from lamina.engine.changes import JoinStage


def _joins(engine: Any, stage: JoinStage) -> bool:
    return any(joiner.stage is stage for joiner in engine._members.pools._joins._joiners)


def _is_between_pools(engine: Any) -> bool:
    return not engine.topology.serves


def _is_moving(engine: Any) -> bool:
    return bool(engine._scheduler.moves.in_progress)


def _has_prompt_of_several(engine: Any) -> bool:
    """True while the prompt of a request with several completions is computed."""
    running = (group for lane in engine._scheduler._lanes for group in lane.running)
    return any(not group.forked and len(group.alive) > 1 and group.completions[0].cached for group in running)


def _has_ended_parent(engine: Any) -> bool:
    """True while a completion has ended from which others will still be forked."""
    return any(lane.has_ended for lane in engine._scheduler._lanes)


def _left_by_prompts(engine: Any) -> Collection[str]:
    """Return workers that KV of a prompt has left, while completions that will be forked from it still belong there."""
    known, left = engine._members.recipients._known, set[str]()
    for group in (group for lane in engine._scheduler._lanes for group in lane.running):
        if not group.forked and len(group.alive) > 1 and group.completions[0].sequence in known:
            homes = {*known[group.completions[0].sequence].homes}
            others = [known[one.sequence] for one in group.completions[1:] if one.sequence in known]
            left.update(home for one in others for home in one.homes if home not in homes)
    return left


def _recomputed_in_part(engine: Any) -> Collection[str]:
    """Return requests whose first completion draws while the tokens of another one are computed again."""
    running = (group for lane in engine._scheduler._lanes for group in lane.running if group.forked)
    return {
        group.request.request_id
        for group in running
        if not group.completions[0].finished and not group.completions[0].left and any(one.left for one in group.alive)
    }


def _unaware(engine: Any) -> Collection[str]:
    """Return members that have yet to apply a change of members."""
    record = engine._members._record
    return () if record._pending is None else record._waiting


MOMENTS: Mapping[str, Callable[[Any], bool | Collection[str]]] = {
    "linking": lambda engine: _joins(engine, JoinStage.LINKING),
    "linked": lambda engine: _joins(engine, JoinStage.LINKED),
    "changing": _unaware,
    "draining": lambda engine: bool(engine._members.pools._leaves.names),
    "parting": lambda engine: bool(engine._members.pools._leaves.parted),
    "turning": lambda engine: bool(engine._members.pools._turning),
    "ending": lambda engine: not engine._members.is_steady,
    "bare": _is_between_pools,
    "paused": lambda engine: engine._turn.is_paused,
    "searching": lambda engine: engine._turn._suspects.searching,
    "moving": _is_moving,
    "unforked": _has_prompt_of_several,
    "parent": _has_ended_parent,
    "moved": _left_by_prompts,
    "recomputed": _recomputed_in_part,
}
"""By name: whether the state of an engine is that of the moment, after a turn, or the workers or requests that make it
so."""
