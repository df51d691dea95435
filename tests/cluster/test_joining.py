"""The room that the arenas of workers that join have for links, and which machines may run ranks."""

from unittest.mock import Mock

import pytest

from lamina.cluster.joining import Fabric, require_ranks_together
from lamina.control.messages import Hello
from lamina.core.errors import ConfigError, TransportError
from lamina.core.pipeline import Pipeline, Shape
from lamina.core.topology import FIRST, Member, Topology
from lamina.core.types import AttentionSpec, DType
from lamina.dataplane.leases import PINNED_SPARE_LINKS, SPARE_LINKS, Leases, messages


def test_a_memory_worker_that_joins_before_lost_workers_are_replaced_has_room_for_them() -> None:
    """Also where RDMA pins arenas, which get room for few workers more than the pools are to have."""
    sizes = messages([AttentionSpec(0, 4, 2, 64, 64, 1.0)], DType.FLOAT32, 16, 0)
    plan = Mock(greetings={}, config=Mock(transport="tcp"))
    fabric = Fabric(Mock(), plan, Mock(), Mock(), sizes, pinned={"memory2"})
    names = ["compute0", "memory1", "memory2"]
    members = tuple(Member(name, "compute" if "compute" in name else "memory", "cpu", "") for name in names)
    register = fabric.register_message(members[-1], Topology(FIRST, members, Pipeline(1, 1)), missing=3)
    leases = Leases(register.arena)
    later = 3 + PINNED_SPARE_LINKS  # lost compute workers, and others that make the pools grow
    for slot_nbytes in (
        0,
        *[sizes.request] * (1 + later),
    ):  # memory1, compute0, and all compute workers that come later
        leases.lease(slot_nbytes)
    with pytest.raises(TransportError, match="for another link"):
        leases.lease(sizes.request)
    assert list(fabric.arenas) == ["memory2"] and later < SPARE_LINKS


def test_ranks_on_gpus_of_two_machines_are_one_clear_error() -> None:
    """Those on CPUs sum over their links, and stages may be anywhere."""
    plan = Mock(pipeline=Pipeline(2, 1, shape=Shape(ranks=2, stages=2)))
    one, two = (Hello(f"h{number}", machine=f"m{number}", device="cuda:0") for number in (1, 2))
    require_ranks_together(plan, {"compute0": one, "compute1": one, "compute2": two, "compute3": two}, "compute")
    apart = {"compute0": one, "compute1": two, "compute2": two, "compute3": two}
    with pytest.raises(ConfigError, match="compute0 on m1 and compute1 on m2 are not; run a multiple of 2 workers"):
        require_ranks_together(plan, apart, "compute")
    require_ranks_together(plan, {name: Hello(hello.host) for name, hello in apart.items()}, "compute")
