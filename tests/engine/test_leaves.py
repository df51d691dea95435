"""Which workers may leave, and how often lost ones are replaced."""

from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.cluster.conversations import Workers
from lamina.control.liveness import MOST_WAIT_S, WINDOW_S, Restarts
from lamina.control.sockets import ControlServer
from lamina.core.errors import ConfigError
from lamina.core.pipeline import Pipeline
from lamina.core.topology import FIRST, Member, Topology
from lamina.engine.leaves import Leaves
from tests.support.schedules import plan_of, request, scheduler

TOPOLOGY = Topology(
    FIRST,
    (
        Member("compute0", "compute", "cpu", ""),
        Member("memory0", "memory", "cpu", "", 60),
        Member("memory1", "memory", "cpu", "", 30),
    ),
    Pipeline(1, 1),
)


def leaving(*prompts: int) -> Leaves:
    """Of a scheduler whose requests, with these prompts and one more token each, are all on ``memory0``."""
    under_test = scheduler({"memory0": 60, "memory1": 30})
    for number, prompt in enumerate(prompts):
        assert under_test.submit(request(str(number), prompt, max_tokens=2)).lane < 0
        assert plan_of(under_test).admitted[0].segments[0].worker == "memory0"
    return Leaves(cast(ControlServer, None), cast(Workers, None), under_test)


def test_a_memory_worker_stays_while_the_others_lack_room_for_what_it_holds_or_may_come_to() -> None:
    leaving(20).validate_leave(["memory0"], TOPOLOGY)
    leaving(20, 20).validate_leave(["memory1"], TOPOLOGY)
    with pytest.raises(ConfigError, match="memory0 holds 40 tokens, and the memory workers that stay have room for 30"):
        leaving(20, 20).validate_leave(["memory0"], TOPOLOGY)
    with pytest.raises(ConfigError, match="may need 31 KV tokens, and the memory workers that stay hold 30"):
        leaving(30).validate_leave(["memory0"], TOPOLOGY)


@given(st.integers(0, 5), st.lists(st.floats(0.0, 2 * WINDOW_S), max_size=20))
def test_replacements_are_bounded_and_wait_longer_and_longer(most: int, losses: list[float]) -> None:
    restarts, allowed = Restarts(most), list[float]()
    for now in sorted(losses):
        recent = [at for at in allowed if now - at < WINDOW_S]
        at = restarts.next(now)
        assert (at is None) == (len(recent) >= most)
        if at is not None:
            assert at == now + (min(2.0 ** (len(recent) - 1), MOST_WAIT_S) if recent else 0.0)
            allowed.append(now)
