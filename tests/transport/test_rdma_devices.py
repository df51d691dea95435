"""Selection of the RDMA port, on inventories like those of real machines, and errors without a usable port."""

import ipaddress
import sys
from pathlib import Path
from typing import Any

import pytest

from lamina.core.errors import TransportError
from lamina.transport.rdma import endpoint as rdma
from lamina.transport.rdma.endpoint import RdmaEndpoint
from lamina.transport.rdma.ports import (
    ETHERNET,
    INFINIBAND,
    ROCE_V2,
    Gid,
    Port,
    choose,
    inventory,
    own_numa_node,
)
from tests.transport.far import SECRET

ROCE_V1 = "IB/RoCE v1"


def gid(index: int, address: str, kind: str = ROCE_V2) -> Gid:
    return Gid(index, kind, ipaddress.IPv6Address(address))


def ethernet_gids(address: str, suffix: int) -> tuple[Gid, ...]:
    """The GIDs that the kernel gives a RoCE port with one IPv4 address: each address once per version of RoCE."""
    link_local, mapped = f"fe80::{suffix:x}", f"::ffff:{address}"
    return (
        gid(0, link_local, ROCE_V1),
        gid(1, link_local),
        gid(2, mapped, ROCE_V1),
        gid(3, mapped),
    )


def port(device: str, gids: tuple[Gid, ...], **changes: Any) -> Port:
    values = {
        "number": 1,
        "active": True,
        "link_layer": ETHERNET,
        "gigabits_per_s": 100.0,
        "numa_node": -1,
        "lid": 0,
    }
    return Port(device=device, gids=gids, **{**values, **changes})


SOFT = port("rxe0", (gid(0, "fe80::1"), gid(1, "::ffff:10.77.0.1")), gigabits_per_s=2.5)
SLOW = port("mlx5_0", ethernet_gids("192.0.2.1", 1), gigabits_per_s=25.0, numa_node=0)
NEAR = port("mlx5_1", ethernet_gids("192.0.2.2", 2), numa_node=0)
FAR = port("mlx5_2", ethernet_gids("192.0.2.3", 3), gigabits_per_s=400.0, numa_node=1)
DOWN = port("mlx5_3", ethernet_gids("192.0.2.4", 4), active=False)
FABRIC = port("mlx5_4", (gid(0, "fe80::9", ROCE_V1),), link_layer=INFINIBAND, gigabits_per_s=400.0, lid=7)
SECOND = port("mlx4_0", ethernet_gids("192.0.2.5", 5), number=2)
ONLY_V1 = port("old0", (gid(0, "fe80::6", ROCE_V1), gid(1, "::ffff:192.0.2.6", ROCE_V1)))
WITHOUT_IPV4 = port("six0", (gid(0, "fe80::7", ROCE_V1), gid(1, "fe80::7"), gid(5, "2001:db8::7")))


@pytest.mark.parametrize(
    ("ports", "numa_node", "wanted", "device", "number", "index"),
    [
        ([SOFT], -1, "", "rxe0", 1, 1),
        ([SLOW, NEAR, FAR], -1, "", "mlx5_2", 1, 3),  # the fastest
        ([SLOW, NEAR, FAR], 0, "", "mlx5_1", 1, 3),  # the fastest of this node
        ([SLOW, NEAR, FAR], 1, "", "mlx5_2", 1, 3),
        ([FABRIC, SLOW], -1, "", "mlx5_0", 1, 3),  # RoCE v2 with IPv4 before InfiniBand
        ([FABRIC, WITHOUT_IPV4], -1, "", "mlx5_4", 1, 0),
        ([WITHOUT_IPV4, ONLY_V1], -1, "", "six0", 1, 5),  # an address that is routed before a link's own
        ([DOWN, SOFT], -1, "", "rxe0", 1, 1),
        ([SLOW, SECOND], 0, "mlx4_0", "mlx4_0", 2, 3),
        ([SLOW, SECOND], 0, "mlx4_0:2", "mlx4_0", 2, 3),
    ],
)
def test_the_best_port_is_chosen(
    ports: list[Port], numa_node: int, wanted: str, device: str, number: int, index: int
) -> None:
    for order in (ports, ports[::-1]):
        choice = choose(order, wanted=wanted, numa_node=numa_node)
        assert (choice.port.device, choice.port.number, choice.gid.index) == (device, number, index)
        assert f"{device}:{number}" in choice.reason


@pytest.mark.parametrize(
    ("cores", "node"),
    [({0, 3}, 0), ({4, 11}, 1), ({8}, 0), ({3, 4}, -1), ({99}, -1)],  # on one node, across two, on none
)
def test_the_node_of_a_process_is_that_of_its_cores(tmp_path: Path, cores: set[int], node: int) -> None:
    """Files as a kernel with two nodes shows them."""
    for name, cpulist in {"node0": "0-3,8", "node1": "4-7,9-11", "has_cpu": "0-1"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpulist").write_text(cpulist + "\n")
    assert own_numa_node(cores, tmp_path) == node
    assert own_numa_node(cores, tmp_path / "nothing") == -1


def test_the_choice_says_where_peers_find_it() -> None:
    assert choose([SLOW]).host == "192.0.2.1"
    assert choose([WITHOUT_IPV4]).host is None
    assert choose([SLOW, FAR]).reason == ("mlx5_2:1 with RoCE v2 address 192.0.2.3 (GID 3), best of 2 usable ports")
    assert "named by LAMINA_RDMA_DEVICE" in choose([SLOW, FAR], wanted="mlx5_0").reason


@pytest.mark.parametrize(
    ("ports", "wanted", "message"),
    [
        ([], "", "found none; bring a port up"),
        ([DOWN], "", r"found mlx5_3:1 \(Ethernet, down, 4 addresses\)"),
        ([ONLY_V1], "", "use tcp"),
        ([SLOW], "mlx5_9", r"named mlx5_9: found mlx5_0:1 .* unset LAMINA_RDMA_DEVICE or name one of them"),
        ([SLOW, DOWN], "mlx5_3", "bring a port up"),  # named, and never silently replaced
        ([SLOW], "mlx5_0:2", "named mlx5_0:2"),
    ],
)
def test_nothing_usable_is_an_error_that_says_what_there_is(ports: list[Port], wanted: str, message: str) -> None:
    with pytest.raises(TransportError, match=message):
        choose(ports, wanted=wanted)


def test_the_inventory_is_what_sysfs_says(tmp_path: Path) -> None:
    """Files as a kernel with Soft-RoCE shows them."""
    files = {
        "device/numa_node": "1",
        "ports/1/state": "4: ACTIVE",
        "ports/1/rate": "2.5 Gb/sec (1X SDR)",
        "ports/1/lid": "0x0",
        "ports/1/link_layer": "Ethernet",
        "ports/1/gids/0": "fe80:0000:0000:0000:5c1b:93ff:fe0a:1d2e",
        "ports/1/gids/1": "0000:0000:0000:0000:0000:ffff:0a4d:0001",
        "ports/1/gids/2": "0000:0000:0000:0000:0000:0000:0000:0000",  # no address
        "ports/1/gid_attrs/types/0": "RoCE v2",
        "ports/1/gid_attrs/types/1": "RoCE v2",
    }
    for name, text in files.items():
        file = tmp_path / "rxe0" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    (found,) = inventory(tmp_path)
    assert found == Port(
        "rxe0",
        1,
        True,
        "Ethernet",
        2.5,
        1,
        0,
        (gid(0, "fe80::5c1b:93ff:fe0a:1d2e"), gid(1, "::ffff:10.77.0.1")),
    )
    assert inventory(tmp_path / "nothing") == []


def test_without_a_device_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdma, "inventory", list)
    with pytest.raises(TransportError, match=r"found none; bring a port up .* or use tcp"):
        RdmaEndpoint("near", secret=SECRET).register(4096, 1)


def test_without_pyverbs_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdma, "inventory", lambda: [SOFT])
    monkeypatch.setitem(sys.modules, "pyverbs", None)
    with pytest.raises(TransportError, match="apt-get install python3-pyverbs"):
        RdmaEndpoint("near", secret=SECRET).register(4096, 1)


def test_a_device_named_by_the_environment_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdma, "inventory", lambda: [SOFT])
    monkeypatch.setenv("LAMINA_RDMA_DEVICE", "mlx5_0")
    with pytest.raises(TransportError, match="named mlx5_0: found rxe0:1"):
        RdmaEndpoint("near", secret=SECRET).register(4096, 1)
