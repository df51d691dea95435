"""Sums over ranks, through shared memory between threads."""

import contextlib
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from unittest.mock import Mock, call

import pytest
import torch

from lamina.compute.ranks import ANNOUNCED, Ranks, RankWait, SliceOrder
from lamina.control.messages import Step
from lamina.core.errors import DeadlineError, PeerLostError
from lamina.dataplane.leases import ArenaPlan, Lease, lease_nbytes
from lamina.dataplane.slot import Outbox, Slot
from lamina.splitter.parts import Rank
from lamina.transport.base import Arena
from lamina.transport.shm import ShmEndpoint
from tests.support.channels import Station, link
from tests.support.linked_workers import SHM, Cluster

SLOT_NBYTES = 4096
TIMEOUT_S = 60.0


@dataclass
class Ends:
    """What ranks use of ``Links``."""

    station: Station
    stations: dict[str, Station]

    @property
    def name(self) -> str:
        return self.station.name

    @property
    def arena(self) -> Arena:
        return self.station.arena

    def leases(self, name: str) -> tuple[Lease, Lease]:
        return self.station.leases[name], self.stations[name].leases[self.name]

    def outbox(self, name: str, slot: Slot) -> Outbox:
        return Outbox(self.station.endpoint, self.station.peers[name], slot)


@contextlib.contextmanager
def linked(count: int) -> Iterator[list[Ends]]:
    names = [f"compute{number}" for number in range(count)]
    plan = ArenaPlan(0, False, 0, {lease_nbytes(SLOT_NBYTES): count})
    with contextlib.ExitStack() as resources:
        stations = {
            name: Station(name, resources.enter_context(contextlib.closing(ShmEndpoint(name))), plan) for name in names
        }
        link(stations.values(), {(a, b): SLOT_NBYTES for a in names for b in names if a != b})
        yield [Ends(station, stations) for station in stations.values()]


@contextlib.contextmanager
def connected(count: int) -> Iterator[list[Ranks]]:
    with linked(count) as ends:
        names = [each.name for each in ends]
        ranks = [Ranks(Rank(number, count)) for number in range(count)]
        for each, one in zip(ends, ranks, strict=True):
            one.connect(each, each.station.endpoint.wait, names)  # type: ignore[arg-type]
        yield ranks


def test_a_plan_that_must_wait_for_the_end_of_a_sum_delays_later_ones() -> None:
    plans = [Mock(spec=Step) for _ in range(3)]
    control, meanwhile = Mock(poll=Mock(side_effect=[*plans, None])), Mock()
    meanwhile.targets_meanwhile.return_value = []
    meanwhile.apply_meanwhile.side_effect = lambda plan: plan is plans[0]
    waiting = RankWait(Mock(side_effect=[DeadlineError("nothing rings"), 0]), control, Mock(), meanwhile)
    assert waiting([(0, 1)], TIMEOUT_S) == 0
    assert meanwhile.apply_meanwhile.mock_calls == [call(plans[0]), call(plans[1])]
    assert list(waiting.unread) == plans[1:]


@pytest.mark.parametrize(("lost", "error"), [("newcomer", DeadlineError), ("member", PeerLostError)])
def test_the_loss_of_a_peer_that_is_no_member_does_not_end_a_sum(lost: str, error: type[Exception]) -> None:
    cluster = Cluster(["rank", "member", "newcomer"])
    with contextlib.ExitStack() as resources:
        for links in cluster.links.values():
            resources.enter_context(contextlib.closing(links))
        cluster.link({("rank", "member"): SHM})
        own = cluster.links["rank"]
        wait = own.close_unused_endpoints()
        cluster.link({("rank", "newcomer"): SHM}, round_=2)
        cluster.links[lost].close()
        with pytest.raises(error):
            RankWait(wait, Mock(poll=Mock(return_value=None)), own, None)([(0, 1)], 0.2)
        assert own.has("member")
        assert own.has("newcomer") == (lost == "member")


def test_ranks_go_on_once_all_have_come() -> None:
    come: list[int] = []
    with connected(3) as ranks, ThreadPoolExecutor(3) as pool:

        def meet(one: Ranks) -> list[list[int]]:
            seen = []
            for _ in range(20):
                time.sleep(random.random() * 2e-3)
                come.append(one.rank.number)
                one.meet()
                seen.append(list(come))
            return seen

        for seen in pool.map(meet, ranks):
            assert all(
                sum(number == other for other in found) > turn for turn, found in enumerate(seen) for number in range(3)
            )


@pytest.mark.parametrize("count", [2, 3])
def test_all_ranks_get_the_same_bits(count: int) -> None:
    """Also of tensors that are larger than a slot, and of views."""
    torch.manual_seed(count)
    shapes = [(1, 5, 16), (3,), (1, 700, 9), (2, 2, 2)] * 5
    types = [torch.float32, torch.bfloat16, torch.int64]
    inputs = [
        [(torch.randn(shape) * 9).to(types[number % 3]) for number, shape in enumerate(shapes)] for _ in range(count)
    ]
    wanted = [torch.stack(each).double().sum(0) for each in zip(*inputs, strict=True)]
    with connected(count) as ranks, ThreadPoolExecutor(count) as pool:
        sums = list(
            pool.map(
                lambda one, tensors: [one.reduce(x.transpose(0, -1)).transpose(0, -1) for x in tensors], ranks, inputs
            )
        )
    for number, right in enumerate(wanted):
        each = [tensors[number] for tensors in sums]
        assert all(torch.equal(each[0], other) for other in each)
        torch.testing.assert_close(each[0].double(), right, rtol=0.02, atol=0.2)


def test_ranks_run_slices_in_the_order_of_the_first() -> None:
    """Which is never more slices ahead than there is room for announcements, however late the others are."""
    draw = random.Random(3)
    lanes = [draw.randrange(5) for _ in range(4 * ANNOUNCED)]
    ran: dict[str, list[int]] = {"compute0": [], "compute1": [], "compute2": []}

    def follow(order: SliceOrder, ends: Ends) -> None:
        own, late = ran[ends.name], random.Random(ends.name)
        while len(own) < len(lanes):
            if late.random() < 0.05:
                time.sleep(2e-3)
            ends.station.endpoint.wait(order.announcements or [(0, 0)], TIMEOUT_S)
            assert not order.announcements
            (lane,) = (lane for lane in range(5) if order.may_run(lane))
            order.on_slice(lane)
            own.append(lane)

    def lead(order: SliceOrder) -> None:
        for lane in lanes:
            order.on_slice(lane)
            ran["compute0"].append(lane)
            assert len(ran["compute0"]) - min(map(len, ran.values())) <= ANNOUNCED

    with linked(3) as ends, ThreadPoolExecutor(3) as pool:
        names = [each.name for each in ends]
        orders = [SliceOrder(each, each.station.endpoint.wait, names) for each in ends]  # type: ignore[arg-type]
        assert [order.leads for order in orders] == [True, False, False]
        assert orders[0].may_run(4) and not orders[1].may_run(4)
        followers = [pool.submit(follow, *pair) for pair in list(zip(orders, ends, strict=True))[1:]]
        lead(orders[0])
        for each in followers:
            each.result()
    assert all(each == lanes for each in ran.values())
