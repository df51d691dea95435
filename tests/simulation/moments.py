"""Moments of an engine at which faults strike: states that last so briefly that faults at random times miss them."""

from collections.abc import Callable, Mapping
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


MOMENTS: Mapping[str, Callable[[Any], bool]] = {
    "linking": lambda engine: _joins(engine, JoinStage.LINKING),
    "linked": lambda engine: _joins(engine, JoinStage.LINKED),
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
}
"""By name: whether the state of an engine is that of the moment, after a turn."""
