"""What is close to what, read from made-up trees of sysfs like those of real machines."""

from pathlib import Path

import pynvml
import pytest

from lamina.cli.doctor import topology_lines
from lamina.cluster.locality import Route, core_list, find, near_cores
from lamina.kernels.gpu.device import Gpu, reach

EVERY = frozenset(range(16))


class Tree:
    """A folder like /sys."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def node(self, number: int, cores: str, kib: int) -> None:
        folder = self.root / f"devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cores}\n")
        (folder / "meminfo").write_text(f"Node {number} MemTotal:       {kib} kB\nNode {number} MemFree: 1 kB\n")

    def device(self, path: str, node: int) -> Path:
        """A PCI device behind its bridges: "pci0000:3a/0000:3a:00.0/0000:3b:00.0"."""
        folder = self.root / "devices" / path
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
        bus = self.root / "bus/pci/devices"
        bus.mkdir(parents=True, exist_ok=True)
        (bus / folder.name).symlink_to(folder)
        return folder

    def interface(self, kind: str, name: str, device: Path | None, speed: str = "") -> None:
        own = self.root / "class" / kind / name
        own.mkdir(parents=True)
        (own / "speed").write_text(speed)
        if device is not None:
            (own / "device").symlink_to(device)


@pytest.fixture
def server(tmp_path: Path) -> Path:
    """Two sockets; the first has a switch with a GPU and an RDMA interface, and a second GPU beside it."""
    tree = Tree(tmp_path)
    tree.node(0, "0-3,8-11", 64 << 20)
    tree.node(1, "4-7,12-15", 64 << 20)
    switch = "pci0000:3a/0000:3a:00.0/0000:3b:00.0"
    tree.device(f"{switch}/0000:3c:00.0/0000:3d:00.0", 0)
    nic = tree.device(f"{switch}/0000:3c:01.0/0000:3e:00.0", 0)
    tree.device("pci0000:3a/0000:3a:02.0/0000:5e:00.0", 0)
    tree.device("pci0000:d7/0000:d7:00.0/0000:d8:00.0", 1)
    slow = tree.device("pci0000:00/0000:00:03.0", 0)
    (slow / "virtio2").mkdir()
    tree.interface("net", "ens1", nic, "200000")
    tree.interface("infiniband", "mlx5_0", nic)
    tree.interface("net", "eth0", slow / "virtio2", "-1")
    tree.interface("net", "lo", None)
    return tmp_path


GPUS = tuple(
    Gpu("NVIDIA A100", 80, address=address) for address in ("00000000:3D:00.0", "00000000:5E:00.0", "00000000:D8:00.0")
)


def test_gpus_are_placed_beside_interfaces_and_cores(server: Path) -> None:
    found = find(GPUS, server, frozenset({(0, 1), (1, 0), (0, 2)}))
    near, beside, far = found.gpus
    assert [nic.name for nic in found.nics] == ["eth0", "mlx5_0 (ens1)"]
    nearest = [found.nearest(gpu) for gpu in found.gpus]
    assert [(each[0].name, each[1]) for each in nearest if each] == [
        ("mlx5_0 (ens1)", Route.SWITCH),
        ("mlx5_0 (ens1)", Route.HOST_BRIDGE),
        ("eth0", Route.SYSTEM),
    ]
    assert found.way(near, beside) is Route.HOST_BRIDGE and found.way(beside, found.nics[0]) is Route.NODE
    assert [found.node(gpu) for gpu in (near, beside, far)] == [0, 0, 1]
    assert near_cores(found, "cuda:2", EVERY) == frozenset([*range(4, 8), *range(12, 16)])
    assert near_cores(found, "cuda:2", frozenset({1, 2, 5})) == {5}
    assert near_cores(found, "cuda:2", frozenset({1, 2})) == {1, 2}, "none of its own may be used"
    assert near_cores(found, "cpu", EVERY) == near_cores(found, "cuda:9", EVERY) == EVERY
    shown = dict(topology_lines(found))
    assert shown["NUMA node 0"] == "cores 0-3,8-11, 64.0 GiB"
    assert shown["mlx5_0 (ens1)"] == "200 Gbit/s, 0000:3e:00.0, NUMA node 0"
    assert shown["cuda:2"] == "NVIDIA A100, 0000:d8:00.0, NUMA node 1"
    neighbours = [text for part, text in topology_lines(found) if not part]
    assert neighbours[0] == (
        "its worker runs on cores 0-3,8-11; mlx5_0 (ens1) is behind the same PCIe switch; it writes into the memory of "
        "cuda:1, cuda:2"
    )
    assert neighbours[2].endswith("; it writes into the memory of no other GPU")


def test_the_driver_says_which_gpus_write_into_each_others_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def status(one: str, other: str, index: int) -> int:
        asked.append((one, other, index))
        if other == "c":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return int(pynvml.NVML_P2P_STATUS_OK if one != "c" else pynvml.NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED)

    for name in ("nvmlInit", "nvmlShutdown"):
        monkeypatch.setattr(pynvml, name, lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: uuid)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetP2PStatus", status)
    assert reach([Gpu("", 80, uuid=uuid) for uuid in "abc"]) == {(0, 1), (1, 0)}
    assert len(asked) == 6 and {index for *_, index in asked} == {pynvml.NVML_P2P_CAPS_INDEX_WRITE}


def test_a_machine_that_says_little_is_described_as_far_as_it_goes(tmp_path: Path) -> None:
    """One node, devices that report none, a GPU whose place is unknown; then nothing at all."""
    tree = Tree(tmp_path)
    tree.node(0, "0-1", 0)
    tree.interface("net", "eth0", tree.device("pci0000:00/0000:00:03.0", -1))
    found = find((Gpu("NVIDIA T4", 75, address="00000000:0A:00.0"), Gpu("NVIDIA T4", 75)), tmp_path)
    assert [(card.address, found.node(card)) for card in (*found.gpus, *found.nics)] == [
        ("", 0),
        ("", 0),
        ("0000:00:03.0", 0),
    ]
    assert near_cores(found, "cuda:0", EVERY) == {0, 1}
    nothing = find((), tmp_path / "nothing")
    assert dict(topology_lines(nothing)) == {
        "NUMA": "the kernel does not report nodes",
        "network": "no interface with a device of its own",
        "GPUs": "none",
    }


def test_cores_are_listed_as_taskset_takes_them() -> None:
    assert core_list(frozenset({0, 1, 2, 5, 7, 8})) == "0-2,5,7-8"
    assert core_list(frozenset()) == ""
