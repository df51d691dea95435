"""`lamina doctor`: what it finds, and what to do about it."""

import dataclasses
import errno
import ipaddress
from typing import Any

import pytest

from lamina.cli import doctor
from lamina.cli.doctor import Status, _cpu, examine
from lamina.transport.rdma.ports import Gid, Port
from tests.support.commands import run


def test_doctor_reports_and_exits_by_what_it_found() -> None:
    done = run("doctor")
    problems = [finding for finding in examine() if finding.status is Status.PROBLEM]
    assert done.returncode == (1 if problems else 0)
    for subject in ("Python", "native module", "CPU", "RAM", "kernel", "GPUs", "RDMA", "transport", "bundled model"):
        assert subject in done.stdout


def test_every_finding_that_is_not_well_has_a_remedy() -> None:
    findings = [*examine(), *(_cpu(frozenset(flags)) for flags in ((), ("avx2",), ("avx2", "avx512_bf16")))]
    assert all(bool(finding.remedy) == (finding.status is not Status.OK) for finding in findings)


def test_doctor_tries_the_transports(monkeypatch: pytest.MonkeyPatch) -> None:
    shm, tcp, chosen = doctor.transports(has_rdma=False)
    assert (shm.status, tcp.status) == (Status.OK, Status.OK)
    assert chosen.found == "shm on one host; tcp between hosts, if a test write succeeds"

    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("os.pidfd_open", refuse)
    findings = list(doctor.transports(has_rdma=True))
    assert findings[0].status is Status.PROBLEM and "not permitted" in findings[0].found and findings[0].remedy
    assert "no usable RDMA port" in findings[1].found and findings[1].status is Status.NOTE
    assert "tcp between hosts" in findings[-1].found

    def unreachable(*_: object, **__: Any) -> None:
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr("socket.create_connection", unreachable)
    monkeypatch.setattr(doctor, "TRY_S", 0.1)
    _, tcp, _ = doctor.transports(has_rdma=False)
    assert tcp.status is Status.PROBLEM and "unreachable" in tcp.found and "ip link set lo up" in tcp.remedy


def test_doctor_says_what_rdma_lacks() -> None:
    address = Gid(1, "RoCE v2", ipaddress.IPv6Address("::ffff:192.0.2.1"))
    port = Port("mlx5_0", 1, True, "Ethernet", 100.0, -1, 0, (address,))
    good = doctor.rdma([port], frozenset({"ib_uverbs"}))
    assert good.status is Status.OK and "would use mlx5_0:1 with RoCE v2 address 192.0.2.1 (GID 1)" in good.found
    assert "modprobe ib_uverbs" in doctor.rdma([port], frozenset({"mlx5_ib"})).remedy
    down = doctor.rdma([dataclasses.replace(port, active=False)], frozenset({"ib_uverbs"}))
    assert down.status is Status.NOTE and "bring a port up" in down.remedy
    modules = doctor.rdma_modules(frozenset({"mlx5_ib", "ib_uverbs", "rdma_rxe", "ext4", "bnxt_re"}))
    assert modules.found == "bnxt_re, ib_uverbs, mlx5_ib, rdma_rxe"
    assert doctor.locked_memory(-1).status is Status.OK
    little = doctor.locked_memory(8 << 20)
    assert little.found == "at most 8 MiB" and "ulimit -l unlimited" in little.remedy


def test_doctor_says_whether_rdma_reaches_gpus_and_why_not() -> None:
    both = doctor.peer_memory({"cuda:0": ""}, "mlx5_0", "", frozenset({"nvidia_peermem"}))
    assert both.status is Status.OK
    assert both.found == (
        "mlx5_0 registers dma-bufs; cuda:0 exports dma-bufs; module nvidia_peermem is loaded but not needed"
    )
    for exports, refusal in (
        ({"cuda:0": "too old"}, ""),
        ({"cuda:0": ""}, "too old"),
        ({"cuda:0": "", "cuda:1": "too old"}, ""),
    ):
        one = doctor.peer_memory(exports, "mlx5_0", refusal, frozenset())
        assert one.status is Status.NOTE and "too old" in one.found and "through host memory" in one.remedy
    assert doctor.peer_memory({}, "rxe0", "too old", frozenset()).found == (
        "rxe0 cannot register dma-bufs: too old; no GPU here"
    )


def test_doctor_says_what_encryption_lacks() -> None:
    assert doctor.encryption("").remedy == ""
    lacking = doctor.encryption("OpenSSL 3 cannot be opened (no such file): install it (Debian: ...)")
    assert (lacking.found, lacking.remedy) == (
        "tcp cannot be encrypted: OpenSSL 3 cannot be opened (no such file)",
        "install it (Debian: ...)",
    )
    other = doctor.encryption("this OpenSSL cannot do TLS 1.3 with X")
    assert (other.found, other.remedy) == ("tcp cannot be encrypted: this OpenSSL cannot do TLS 1.3 with X", "")
