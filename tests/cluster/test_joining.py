"""The room that the arenas of workers that join have for links."""

from unittest.mock import Mock

from lamina.cluster.joining import Fabric
from lamina.core.pipeline import Pipeline
from lamina.core.topology import FIRST, Member, Topology
from lamina.core.types import AttentionSpec, DType
from lamina.dataplane.leases import Leases, messages


def test_a_memory_worker_that_joins_before_lost_workers_are_replaced_has_room_for_them() -> None:
    """Also where RDMA pins arenas, which get no room for more workers than the pools are to have."""
    sizes = messages([AttentionSpec(0, 4, 2, 64, 64, 1.0)], DType.FLOAT32, 16, 0)
    plan = Mock(greetings={}, config=Mock(transport="tcp"))
    fabric = Fabric(Mock(), plan, Mock(), Mock(), sizes, pinned={"memory2"})
    names = ["compute0", "memory1", "memory2"]
    members = tuple(Member(name, "compute" if "compute" in name else "memory", "cpu", "") for name in names)
    register = fabric.register_message(members[-1], Topology(FIRST, members, Pipeline(1, 1)), missing=3)
    leases = Leases(register.arena)
    for slot_nbytes in (0, *[sizes.request] * 4):  # memory1, compute0, and three compute workers that come later
        leases.lease(slot_nbytes)
    assert fabric.most_links == {"memory2": 5}
