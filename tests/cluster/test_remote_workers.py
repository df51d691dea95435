"""Agents of other machines, as the engine sees them."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import msgspec
import pytest
import zmq

from lamina.cluster import remote_workers
from lamina.cluster.agent import Keys, keys_of
from lamina.cluster.remote_workers import RemoteWorkers
from lamina.control.agent_messages import Apply, Leaving, Refused, Start, ToAgent, ToEngine
from lamina.control.secret import new
from lamina.control.sockets import ENGINE, Bootstrap
from lamina.core import __version__
from lamina.core.errors import TransportError
from lamina.core.topology import Pool
from lamina.transport.listener import LOOPBACK
from tests.support.waiting import wait_until

NAMES = ["memory0", "memory1", "memory2"]
FOR_EVER = 1e6


@contextmanager
def agent(
    keys: Keys, port: int, identity: bytes, version: str = __version__, pool: Pool = "memory"
) -> "Iterator[zmq.Socket[bytes]]":
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.identity, dealer.linger = identity, 0
        dealer.curve_serverkey, dealer.curve_publickey, dealer.curve_secretkey = keys.engine, keys.public, keys.secret
        dealer.connect(f"tcp://{LOOPBACK}:{port}")
        send(dealer, Apply(version, pool, "cpu", "another host", "far"))
        yield dealer


def send(dealer: "zmq.Socket[bytes]", message: ToEngine) -> None:
    dealer.send(msgspec.msgpack.encode(message))


def received(dealer: "zmq.Socket[bytes]") -> ToAgent:
    assert dealer.poll(30_000)
    return msgspec.msgpack.decode(dealer.recv(), type=ToAgent)


def appointed(dealer: "zmq.Socket[bytes]") -> str:
    """The worker that it is given."""
    message = received(dealer)
    assert isinstance(message, Start)
    return message.bootstrap.name


def test_of_a_silent_machine_s_workers_only_the_first_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps stand still meanwhile. Peers that have not cut a worker off must not be told that it has ended."""
    secret = new()
    workers = RemoteWorkers(LOOPBACK, 0, secret, secret.curve_keys(ENGINE))
    keys = keys_of(secret)
    for name in NAMES:
        workers.start(Start("memory", "cpu", Bootstrap(name, "", b"", b"", b"", b"", os.getpid())))
    with (
        agent(keys, workers.port, b"a") as first,
        agent(keys, workers.port, b"b") as second,
        agent(keys, workers.port, b"c") as third,
    ):
        found = [appointed(one) for one in (first, second, third)]
        assert sorted(found) == NAMES
        monkeypatch.setattr(remote_workers, "STOP_TIMEOUT_S", 0.2)
        workers.kill_worker(found[0], cut=True)
        monkeypatch.setattr(remote_workers, "STOP_TIMEOUT_S", FOR_EVER)
        workers.kill_worker(found[1], cut=True)
        assert workers.ended().keys() == {found[2]}, "its memory may be mapped by one that nobody can end"
        with pytest.raises(TransportError, match="on far does not answer, so that the worker cannot be ended"):
            workers.kill_worker(found[2])
    monkeypatch.setattr(remote_workers, "STOP_TIMEOUT_S", 0.0)
    workers.close()


def test_a_machine_with_another_release_is_refused_and_its_place_stays_free(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = new()
    workers = RemoteWorkers(LOOPBACK, 0, secret, secret.curve_keys(ENGINE))
    keys = keys_of(secret)
    workers.start(Start("memory", "cpu", Bootstrap(NAMES[0], "", b"", b"", b"", b"", os.getpid())))
    with agent(keys, workers.port, b"a", "9.9.9") as other, agent(keys, workers.port, b"b") as same:
        reason = f"it runs lamina 9.9.9, the engine {__version__}; install the same release"
        assert received(other) == Refused(reason)
        assert appointed(same) == NAMES[0]
    monkeypatch.setattr(remote_workers, "STOP_TIMEOUT_S", 0.0)
    workers.close()


def test_machines_for_prompts_run_only_workers_for_prompts_and_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine for compute workers runs such a worker too if no other one is vacant."""
    secret = new()
    workers = RemoteWorkers(LOOPBACK, 0, secret, secret.curve_keys(ENGINE))
    keys = keys_of(secret)
    pools: list[Pool] = ["prefill", "prefill", "compute"]
    for number, pool in enumerate(pools):
        workers.start(Start(pool, "cpu", Bootstrap(f"compute{number}", "", b"", b"", b"", b"", os.getpid())))
    with ExitStack() as stack:
        enter, port = stack.enter_context, workers.port
        assert appointed(enter(agent(keys, port, b"a", pool="compute"))) == "compute2"
        assert appointed(enter(agent(keys, port, b"b", pool="prefill"))) == "compute0"
        assert appointed(enter(agent(keys, port, b"c", pool="compute"))) == "compute1"
        enter(agent(keys, port, b"d", pool="compute"))
        wait_until(lambda: workers.offers() == ["compute"])
        other = enter(agent(keys, port, b"e", pool="prefill"))
        wait_until(lambda: workers.offers() == ["compute", "prefill"])
        workers.start(Start("prefill", "cpu", Bootstrap("compute3", "", b"", b"", b"", b"", os.getpid())))
        assert appointed(other) == "compute3"
        refused = enter(agent(keys, port, b"f", pool="prefill"))
        wait_until(lambda: workers.offers() == ["compute", "prefill"])
        workers.refuse_offers("prefill", "there is none")
        assert received(refused) == Refused("there is none") and workers.offers() == ["compute"]
    monkeypatch.setattr(remote_workers, "STOP_TIMEOUT_S", 0.0)
    workers.close()


def test_agents_that_have_gone_wait_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = new()
    workers = RemoteWorkers(LOOPBACK, 0, secret, secret.curve_keys(ENGINE))
    keys = keys_of(secret)
    with agent(keys, workers.port, b"a") as first, agent(keys, workers.port, b"b"):
        wait_until(lambda: workers.offers() == ["memory", "memory"])
        send(first, Leaving())
        wait_until(lambda: workers.offers() == ["memory"])
        workers.start(Start("memory", "cpu", Bootstrap(NAMES[0], "", b"", b"", b"", b"", os.getpid())))
        assert not workers.offers()
    monkeypatch.setattr(remote_workers, "STOP_TIMEOUT_S", 0.0)
    workers.close()
