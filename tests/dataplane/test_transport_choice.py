"""Which transport a pair of workers uses, from what both offer and what has failed."""

import itertools

import pytest

from lamina.core.errors import TransportError
from lamina.dataplane.transport_choice import Choice, Offer, Transport, candidates, choose, summary

SHM, RDMA, TCP = Transport.SHM, Transport.RDMA, Transport.TCP


def offer(host: str, *transports: Transport, **obstacles: str) -> Offer:
    return Offer(
        host,
        {transport: transport.encode() for transport in transports},
        {Transport(name): reason for name, reason in obstacles.items()},
    )


def test_one_host_shares_memory() -> None:
    assert choose("auto", offer("a", SHM, TCP), offer("a", SHM, TCP), {}) == Choice(SHM, "same host")


def test_two_hosts_use_rdma_if_both_can() -> None:
    everything = SHM, RDMA, TCP
    assert choose("auto", offer("a", *everything), offer("b", *everything), {}) == Choice(RDMA, "different hosts")


@pytest.mark.parametrize("order", [1, -1])
def test_two_hosts_use_tcp_if_one_has_no_rdma_and_say_so(order: int) -> None:
    near, far = [offer("a", SHM, RDMA, TCP), offer("b", SHM, TCP, rdma="memory0: no usable port")][::order]
    choice = choose("auto", near, far, {})
    assert choice == Choice(TCP, "different hosts; no rdma: memory0: no usable port")


def test_a_link_that_was_not_proved_is_not_chosen_again() -> None:
    everything = SHM, RDMA, TCP
    near, far = offer("a", *everything), offer("b", *everything)
    assert choose("auto", near, far, {RDMA: "nothing arrived"}).reason == "different hosts; no rdma: nothing arrived"
    with pytest.raises(TransportError, match=r"no rdma: nothing arrived; no tcp: a firewall; fix one of these$"):
        choose("auto", near, far, {RDMA: "nothing arrived", TCP: "a firewall"})


@pytest.mark.parametrize("wanted", Transport)
@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_one_asked_for_by_name_never_falls_back(wanted: Transport, hosts: str) -> None:
    near, far = (offer(host, *Transport) for host in hosts)
    assert choose(wanted.value, near, far, {}) == Choice(wanted, "requested by name")
    with pytest.raises(TransportError, match=f"no {wanted}: it broke; fix that, or select another transport"):
        choose(wanted.value, near, far, {wanted: "it broke"})
    without = offer(hosts[1], *(set(Transport) - {wanted}), **{wanted: "cannot"})
    with pytest.raises(TransportError, match=f"no {wanted}: cannot"):
        choose(wanted.value, near, without, {})


@pytest.mark.parametrize("wanted", ["auto", "shm", "rdma", "tcp"])
@pytest.mark.parametrize("hosts", ["a", "aa", "ab", "aab"])
def test_workers_offer_whatever_some_pair_may_choose(wanted: str, hosts: str) -> None:
    offered = candidates(wanted, hosts)  # type: ignore[arg-type]
    for near, far in itertools.combinations(hosts, 2):
        failures: dict[Transport, str] = {}
        while True:
            try:
                chosen = choose(wanted, offer(near, *offered), offer(far, *offered), failures).transport  # type: ignore[arg-type]
            except TransportError:
                break
            assert chosen in offered
            failures[chosen] = "tried"
    assert RDMA not in candidates("auto", "aa")  # registers memory, which no pair there would use


def test_a_summary_counts_pairs_by_transport_and_reason() -> None:
    same, other = Choice(SHM, "same host"), Choice(TCP, "different hosts; no rdma: none")
    choices = {("compute0", "memory0"): same, ("compute0", "memory1"): other, ("compute1", "memory1"): other}
    assert summary(choices) == [
        "shm between 1 pair of workers (same host)",
        "tcp between 2 pairs of workers (different hosts; no rdma: none)",
    ]
