"""Balancing policies: proposals that must never occur, and cases worked out by hand."""

import random
from dataclasses import replace

import pytest

from lamina.core.types import Balance
from lamina.kv.balancing import (
    LEAST,
    LENGTHENED,
    LENT_AT_MOST,
    POLICIES,
    SHORT,
    UNEVEN,
    ByBandwidth,
    ByDebt,
    ByThroughput,
    HeldTokens,
    Load,
    Policy,
    Proposal,
    View,
    debts,
)


def pool(draw: random.Random) -> View:
    """Requests whose tokens are spread over workers of different speeds, at random."""
    names = [f"memory{number}" for number in range(draw.randint(1, 6))]
    held = [
        HeldTokens(str(request), worker, home, draw.randint(1, 3000), readers)
        for request in range(draw.randint(0, 12))
        for home, readers in [(draw.choice(names), draw.choice([1, 1, 2, 4]))]
        for worker in draw.sample(names, draw.randint(1, len(names)))
    ]
    loads = {}
    for name in names:
        tokens = sum(one.tokens for one in held if one.worker == name)
        reads = sum(one.tokens * one.readers for one in held if one.worker == name)
        capacity = tokens + draw.choice([0, 100, 2000, 20000])
        sequences = sum(one.readers for one in held if one.worker == one.home == name)
        loads[name] = Load(max(capacity, 1), capacity - tokens, sequences, reads, draw.choice([1.0, 1.0, 3.0]))
    return View(loads, held, lambda rows: 100.0 + rows)


def made(view: View, proposals: list[Proposal]) -> View:
    """The view once all proposals have been granted, each by its first target; none may take what is not there."""
    tokens = {(one.request, one.worker): one for one in view.held}
    free = {worker: load.free for worker, load in view.loads.items()}
    for proposal in proposals:
        one = tokens[proposal.request, proposal.source]
        assert 0 < proposal.tokens <= one.tokens and proposal.source not in proposal.targets
        target = proposal.targets[0]
        free[target] -= proposal.tokens
        there = tokens.get((proposal.request, target))
        tokens[proposal.request, proposal.source] = HeldTokens(
            one.request, one.worker, one.home, one.tokens - proposal.tokens, one.readers
        )
        before = 0 if there is None else there.tokens
        tokens[proposal.request, target] = HeldTokens(
            one.request, target, one.home, before + proposal.tokens, one.readers
        )
    assert min(free.values(), default=0) >= 0, "more is to come than fits"
    held = [one for one in tokens.values() if one.tokens]
    loads = {
        worker: Load(
            load.capacity,
            load.capacity - sum(one.tokens for one in held if one.worker == worker),
            load.sequences,
            sum(one.tokens * one.readers for one in held if one.worker == worker),
            load.token_s,
        )
        for worker, load in view.loads.items()
    }
    return View(loads, held, view.dense_s)


@pytest.mark.parametrize("name", POLICIES)
def test_no_policy_proposes_more_tokens_than_there_are(name: Balance) -> None:
    """Every token keeps an owner, and targets have slots for all proposals of a view together."""
    proposed = 0
    for seed in range(300):
        view, policy = pool(random.Random(seed)), POLICIES[name]()
        for _ in range(4):
            proposals = policy.propose(view)
            total = sum(one.tokens for one in view.held)
            view = made(view, proposals)
            assert sum(one.tokens for one in view.held) == total
            proposed += len(proposals)
    assert proposed > 30


def test_bandwidth_evens_out_the_time_to_read_not_the_tokens() -> None:
    """A worker twice as slow gets half as many."""
    view = View(
        {"slow": Load(10000, 4000, 1, 6000, 2.0), "fast": Load(10000, 10000, 0, 0, 1.0)},
        [HeldTokens("long", "slow", "slow", 6000)],
    )
    assert ByBandwidth().propose(view) == [Proposal("long", "slow", ("fast",), 4000)]
    after = made(view, ByBandwidth().propose(view))
    assert after.loads["slow"].seconds == after.loads["fast"].seconds == 4000


def test_bandwidth_leaves_no_worker_slower_than_another_that_has_room() -> None:
    for seed in range(100):
        view = pool(random.Random(seed))
        for _ in range(60):
            if not (proposals := ByBandwidth().propose(view)):
                break
            worst = max(load.seconds for load in view.loads.values())
            view = made(view, proposals)
            assert max(load.seconds for load in view.loads.values()) <= worst
        slowest = max(view.loads, key=lambda one: view.loads[one].seconds)
        movable = [one for one in view.held if one.worker == slowest and one.tokens >= LEAST * 8]
        for load in view.loads.values():
            even = (view.loads[slowest].seconds - load.seconds) / 16  # 4 readers, tokens of 3 and 1 seconds
            assert (
                not movable or load.free < LEAST or even < LEAST or view.loads[slowest].seconds <= UNEVEN * load.seconds
            )


def test_throughput_is_the_best_of_all_numbers_of_blocks() -> None:
    """Against the sum of both workers' tokens a second, for every number."""
    view = View(
        {"debtor": Load(8000, 0, 1, 8000, 0.01), "creditor": Load(8000, 6000, 8, 2000, 0.01)},
        [HeldTokens("long", "debtor", "debtor", 7900)],
        lambda rows: 40.0 + rows,
    )

    def rate(count: int) -> float:
        length, grown = 8000, 1 + count / 8000
        debtor_s = 40 + grown + (8000 - count + (grown - 1) * length) * 0.01
        return grown / debtor_s + 8 / (40 + 8 + (2000 + count) * 0.01)

    best = max(range(0, 6001, LEAST), key=rate)
    proposals = ByThroughput().propose(view)
    assert [proposal.tokens for proposal in proposals] == ([best] if best else [])


def test_throughput_uses_a_worker_without_sequences_where_steps_of_no_rows_take_no_time() -> None:
    """Measured times of steps are proportional to rows if arithmetic takes all of them."""
    busy = Load(8000, 0, 8, 8000, 0.01)
    view = View(
        {"debtor": Load(8000, 0, 1, 8000, 0.01), "idle": Load(8000, 8000, 0, 0, 0.01), "busy": busy},
        [HeldTokens("long", "debtor", "debtor", 7900)],
        lambda rows: 1e-3 * rows,
    )
    (proposal,) = ByThroughput().propose(view)
    assert (proposal.source, proposal.targets) == ("debtor", ("idle",))


def test_a_worker_that_runs_short_borrows_of_three_others_within_their_caps_in_the_order_of_arrival() -> None:
    loads = {f"memory{number}": Load(1000, free, 2, 500) for number, free in enumerate((20, 900, 800, 700, 600, 50))}
    held = [HeldTokens("a", "memory0", "memory0", 900), HeldTokens("b", "memory5", "memory5", 800)]
    policy = ByDebt()
    first = policy.propose(View(loads, held))
    assert first[0] == Proposal("a", "memory0", ("memory1", "memory2", "memory3"), int(2 * SHORT * 1000) - 20)
    assert [proposal.request for proposal in first] == ["a", "b"]
    lent = [*held, *(HeldTokens("c", worker, "memory0", int(LENT_AT_MOST * 1000)) for worker in ("memory1", "memory2"))]
    assert policy.propose(View(loads, lent))[0].targets == ("memory3", "memory4"), "the others have lent all they may"
    swapped = {**loads, "memory0": Load(1000, 500, 2, 500)}
    policy.propose(View(swapped, held))
    again = policy.propose(View(loads, held))
    assert [proposal.request for proposal in again] == ["b", "a"], "it has run short later"


def test_debts_in_a_cycle_are_cleared() -> None:
    """Each of three workers has lent to the next: all go home, and nothing is owed any more."""
    names = ["memory0", "memory1", "memory2"]
    held = [
        HeldTokens(str(number), names[(number + 1) % 3], home, 200 + 50 * number) for number, home in enumerate(names)
    ]
    view = View({name: Load(1000, 600, 1, 300) for name in names}, held)
    proposals = ByDebt().propose(view)
    assert {(one.request, one.targets) for one in proposals} == {(str(n), (home,)) for n, home in enumerate(names)}
    assert {(one.tokens, one.returns) for one in proposals} == {(200, True)}, "the least of the debts"
    after = debts(made(view, proposals))
    assert sorted(after.values()) == [50, 100] and not [one for one in ByDebt().propose(made(view, proposals))]


def test_full_workers_exchange_what_they_have_lent_through_a_few_free_slots_of_one() -> None:
    """Tokens come home look by look, into the slots that others have left. At last, none owe more than fits at once."""
    names = ["memory0", "memory1", "memory2"]
    held = [HeldTokens(home, names[(number + 1) % 3], home, 200) for number, home in enumerate(names)]
    loads = {name: Load(1000, free, 1, 200) for name, free in zip(names, (20, 0, 0), strict=True)}
    filled = [HeldTokens(f"own {name}", name, name, 800 - loads[name].free) for name in names]
    view, looks = View(loads, [*held, *filled]), 0
    while max(debts(view).values()) > 20:
        before = debts(view)
        view, looks = made(view, ByDebt().propose(view)), looks + 1
        assert debts(view) != before
    assert looks <= 3 * 200 / 16 and sum(load.free for load in view.loads.values()) == 20


LENDING: list[type[Policy]] = [ByThroughput, ByDebt]


@pytest.mark.parametrize("policy", LENDING)
def test_creditors_that_decode_attend_for_debtors_for_a_share_of_their_step_at_most(policy: type[Policy]) -> None:
    """By hand: a step of 40 s may take 10 s longer, in which 1,000 tokens are read; 400 are read already."""
    held = [HeldTokens("long", "debtor", "debtor", 7900), HeldTokens("other", "creditor", "debtor", 400)]
    full = {"debtor": Load(8000, 0, 1, 8000, 0.01, step_s=120.0), "full": Load(8000, 0, 8, 8000, 0.01, step_s=120.0)}

    def moved(creditor: Load) -> int:
        proposals = policy().propose(View(full | {"creditor": creditor}, held, lambda rows: 300.0 + rows))
        return sum(one.tokens for one in proposals if one.source == "debtor")

    busy = Load(8000, 7000, 2, 2400, 0.01, step_s=40.0)
    assert LENGTHENED == 0.25 and 600 - LEAST < moved(busy) <= 600
    assert moved(replace(busy, token_s=0.1)) == 0, "100 tokens may be read in a step, and 400 are"
    free = moved(replace(busy, sequences=0))
    assert free > 600 and moved(replace(busy, step_s=0.0)) > 600, "nothing suffers, or nothing is known"


@pytest.mark.parametrize("policy", LENDING)
def test_no_proposals_together_lengthen_a_step_by_more_than_the_share(policy: type[Policy]) -> None:
    """With many workers and requests at random: what is too much already grows no further."""
    grown = 0
    for seed in range(300):
        draw = random.Random(seed)
        view = pool(draw)
        loads = {name: replace(load, step_s=draw.choice([0.0, 400.0, 4000.0])) for name, load in view.loads.items()}
        view = replace(view, loads=loads)
        after = made(view, policy().propose(view))
        for name, load in loads.items():
            before_s, after_s = (load.token_s * _lent(one, name) for one in (view, after))
            grown += after_s > before_s
            if load.step_s and load.sequences:
                assert after_s <= max(before_s, LENGTHENED * load.step_s)
    assert grown > 20


def _lent(view: View, worker: str) -> int:
    return sum(one.tokens * one.readers for one in view.held if one.worker == worker != one.home)


@pytest.mark.parametrize("policy", LENDING)
def test_a_creditor_short_of_slots_gets_back_what_its_debtor_has_room_for(policy: type[Policy]) -> None:
    held = [HeldTokens("lent", "creditor", "debtor", 500), HeldTokens("own", "creditor", "creditor", 450)]
    short = {"creditor": Load(1000, 50, 1, 950), "debtor": Load(1000, 900, 1, 100)}
    (back,) = policy().propose(View(short, held))
    assert back == Proposal("lent", "creditor", ("debtor",), int(2 * SHORT * 1000) - 50, returns=True)
    for creditor, debtor in (
        (200, 900),
        (50, int(SHORT * 1000) + LEAST - 1),
    ):  # it is not short, or the debtor would be
        view = View({"creditor": Load(1000, creditor, 1, 800), "debtor": Load(1000, debtor, 1, 900)}, held)
        assert not [one for one in policy().propose(view) if one.targets == ("debtor",)]


@pytest.mark.parametrize("slope", [1200.0, 1500.0, 1600.0, 2000.0])
def test_throughput_moves_as_much_as_maximises_both_workers_tokens_per_second(slope: float) -> None:
    """What the debtor lends makes room for more sequences of its mean length, so that its step reads as much."""
    whole, others = 4000, 1200
    view = View(
        {"memory0": Load(5000, 1000, 1, whole), "memory1": Load(8000, 6800, 12, others)},
        [HeldTokens("long", "memory0", "memory0", whole)]
        + [HeldTokens(str(number), "memory1", "memory1", 100) for number in range(12)],
        lambda rows: 100.0 + slope * rows,
    )

    def both(count: int) -> float:
        sequences = 1 + count / whole
        return sequences / (view.dense_s(sequences) + whole) + 12 / (view.dense_s(12) + others + count)

    best = max(range(0, whole + 1, LEAST), key=both)
    proposals = ByThroughput().propose(view)
    assert [one.tokens for one in proposals if one.request == "long"] == ([best] if best else [])


@pytest.mark.parametrize("name", ["throughput", "ledger"])
def test_creditors_on_the_debtor_s_host_come_before_all_others(name: Balance) -> None:
    """Each worker that would lend if it were the only creditor is found by asking for every one alone."""

    def borrowed(view: View) -> list[Proposal]:
        return [proposal for proposal in POLICIES[name]().propose(view) if not proposal.returns]

    near_before_far = 0
    for seed in range(400):
        draw = random.Random(seed)
        view = pool(draw)
        hosts = {worker: draw.choice("ab") for worker in view.loads}
        loads = {worker: replace(load, host=hosts[worker]) for worker, load in view.loads.items()}
        view = View(loads, [one for one in view.held if one.worker == one.home], view.dense_s)  # nothing is lent yet
        if not (proposals := borrowed(view)):
            continue
        source, first = proposals[0].source, proposals[0].targets[0]
        able = set[str]()
        for worker in loads.keys() - {source}:
            alone = {one: replace(load, accepts=one == worker) for one, load in loads.items()}
            if any(one.source == source for one in borrowed(View(alone, view.held, view.dense_s))):
                able.add(worker)
        near = {worker for worker in able if hosts[worker] == hosts[source]}
        assert first in (near or able)
        near_before_far += 0 < len(near) < len(able)
    assert near_before_far > 5
