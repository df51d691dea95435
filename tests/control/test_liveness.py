"""Silence is counted by a clock that stands still while the engine does."""

from lamina.control.liveness import LOST_S, PING_S, SUSPECT_S, Liveness


def turns(liveness: Liveness, start: float, seconds: float, *, answering: tuple[str, ...] = ()) -> float:
    """Turns every 0.1 s for so long, in which these workers answer; returns the time after them."""
    for tick in range(round(seconds * 10)):
        liveness.turn(start + tick / 10)
        for worker in answering:
            liveness.on_message(worker)
    return start + seconds


def test_a_silent_worker_is_suspected_and_then_lost_and_others_are_not() -> None:
    liveness = Liveness(100.0)
    now = turns(liveness, 100.0, 2.0, answering=("compute0", "memory0"))
    now = turns(liveness, now, SUSPECT_S - 0.5, answering=("compute0",))
    assert not liveness.suspects()
    now = turns(liveness, now, 1.0, answering=("compute0",))
    assert set(liveness.suspects()) == {"memory0"} and not liveness.lost()
    now = turns(liveness, now, LOST_S - SUSPECT_S, answering=("compute0",))
    assert set(liveness.lost()) == {"memory0"} and LOST_S <= liveness.lost()["memory0"] < LOST_S + 1
    turns(liveness, now, 0.1, answering=("memory0",))
    assert not liveness.suspects(), "one that comes back is well"


def test_a_pause_of_the_engine_is_not_held_against_its_workers() -> None:
    liveness = Liveness(0.0)
    now = turns(liveness, 0.0, 1.0, answering=("memory0",))
    turns(liveness, now + 3600.0, 0.1)
    assert not liveness.suspects()
    assert liveness.awake_s < 3.0


def test_one_that_has_not_been_heard_yet_is_starting() -> None:
    liveness = Liveness(0.0)
    turns(liveness, 0.0, 2 * LOST_S)
    assert not liveness.suspects()


def test_pings_are_sent_once_a_second_however_often_the_engine_turns() -> None:
    liveness = Liveness(0.0)
    sent = sum(liveness.turn(tick / 1000) for tick in range(10_000))
    assert sent == 10 / PING_S
