"""The scheduler against a brute-force account of the workers it drives: slabs, page tables and drawn tokens."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.engine.placement import Placement
from lamina.engine.scheduler import Limits, Scheduler
from lamina.errors import RequestError
from lamina.memory.slab import Slab
from lamina.types import Request, SamplingParams, StepPlan

LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=8, max_model_len=32)


class MemoryModel:
    """What a memory worker does with a plan, on a real slab, checking every position it is given."""

    def __init__(self, name: str, capacity: int) -> None:
        self.name = name
        self.slab = Slab(capacity)
        self.here: set[int] = set()

    def apply(self, plan: StepPlan) -> None:
        for fork in plan.forks:
            if fork.parent in self.here:
                self.slab.fork(fork.parent, fork.child, fork.tokens)
                self.here.add(fork.child)
        for sequence in self.here & set(plan.released):
            self.slab.free(sequence)
        self.here -= set(plan.released)
        for admission in plan.admitted:
            if admission.segments[0].worker == self.name:
                self.slab.open(admission.sequence)
                self.here.add(admission.sequence)
        for step in plan.sequences:
            if step.sequence in self.here:
                assert self.slab.length(step.sequence) == step.start
                self.slab.append(step.sequence, len(step.tokens))  # CapacityError: admission was not exact


def scheduler(
    capacities: dict[str, int], computes: tuple[str, ...] = ("compute0",), limits: Limits = LIMITS
) -> Scheduler:
    return Scheduler(limits, Placement(capacities), computes, kv_heads=2)


def request(name: str, prompt: int, **params: int) -> Request:
    return Request(name, None, list(range(prompt)), SamplingParams(**params))


requests = st.lists(
    st.tuples(
        st.integers(1, 20),  # prompt
        st.integers(1, 12),  # max_tokens
        st.integers(1, 3),  # n
        st.integers(0, 14),  # stops by itself after that many tokens (if below max_tokens)
        st.one_of(st.none(), st.integers(0, 25)),  # aborted at this turn
        st.integers(0, 10),  # arrives at this turn
    ),
    max_size=12,
)


@settings(max_examples=200, deadline=None)
@given(requests=requests, workers=st.integers(1, 3), computes=st.integers(1, 3))
def test_every_request_ends_and_every_slot_comes_back(requests: list, workers: int, computes: int) -> None:
    names = tuple(f"compute{index}" for index in range(computes))
    memories = {f"memory{index}": MemoryModel(f"memory{index}", 60) for index in range(workers)}
    under_test = scheduler({name: 60 for name in memories}, names)
    drawn: dict[str, list[int]] = {}
    in_flight: dict[str, StepPlan] = {}
    groups = {}
    turn = 0
    while turn < 12 or not under_test.idle or len(groups) < len(requests):
        assert turn < 2000, "the scheduler does not come to rest"
        for index, (prompt, max_tokens, n, _, aborted, arrival) in enumerate(requests):
            if arrival == turn:
                groups[index] = under_test.add(request(str(index), prompt, max_tokens=max_tokens, n=n))
            if aborted is not None and aborted == turn - arrival:
                under_test.abort(str(index))
        for compute in names:
            if compute in in_flight and (turn + len(compute)) % 2:  # steps overlap turns
                plan = in_flight.pop(compute)
                for group, completion in under_test.complete(compute).values():
                    completion.generated.append(turn)
                    index = int(group.request.request_id)
                    ends = len(completion.generated) in (group.max_tokens, requests[index][3])
                    if ends:
                        drawn.setdefault(group.request.request_id, []).append(len(completion.generated))
                        under_test.finish(group, completion)
            if compute not in in_flight and (plan := under_test.plan(compute)) is not None:
                in_flight[compute] = plan
                assert sum(len(step.tokens) for step in plan.sequences) <= LIMITS.max_num_batched_tokens
                assert sum(len(step.draws) for step in plan.sequences) <= LIMITS.max_num_seqs
                for memory in memories.values():
                    memory.apply(plan)
        turn += 1
    assert all(memory.slab.used == 0 and not memory.here for memory in memories.values())
    assert all(reserved == 0 for reserved in under_test.placement.reserved.values())
    for index, (_, _, n, stops, aborted, _) in enumerate(requests):
        if aborted is None:
            expected = stops if 0 < stops < groups[index].max_tokens else groups[index].max_tokens
            assert drawn[str(index)] == [expected] * n


def test_a_long_prompt_is_cut_into_chunks_and_decoding_goes_on_beside_it() -> None:
    under_test = scheduler({"memory0": 100})
    under_test.add(request("short", 2, max_tokens=9))
    under_test.plan("compute0")
    for _, completion in under_test.complete("compute0").values():
        completion.generated.append(7)
    under_test.add(request("long", 20, max_tokens=2))
    chunks = []
    for _ in range(3):
        plan = under_test.plan("compute0")
        assert plan is not None
        decode, prompt = plan.sequences
        assert decode.tokens == [7] and decode.draws == [decode.sequence]
        chunks.append((prompt.start, len(prompt.tokens), bool(prompt.draws)))
        for _, completion in under_test.complete("compute0").values():
            completion.generated.append(7)
    assert chunks == [(0, 7, False), (7, 7, False), (14, 6, True)]


def test_first_in_first_out_even_when_a_later_request_would_fit() -> None:
    under_test = scheduler({"memory0": 20})
    for name, prompt in (("first", 10), ("large", 12), ("small", 2)):
        under_test.add(request(name, prompt, max_tokens=1))
    plan = under_test.plan("compute0")
    assert plan is not None and len(plan.admitted) == 1
    assert under_test.waiting == 2


@pytest.mark.parametrize(
    ("prompt", "params", "says"),
    [
        (0, {}, "empty"),
        (32, {}, "32 tokens; this runtime takes at most 31"),
        (4, {"n": 5}, "n is 5"),
        (20, {"max_tokens": 12}, "may need 31 KV tokens; the largest memory worker holds 30"),
    ],
)
def test_what_can_never_be_served_is_refused_with_figures(prompt: int, params: dict, says: str) -> None:
    under_test = scheduler({"memory0": 30, "memory1": 10})
    with pytest.raises(RequestError, match=says):
        under_test.add(request("r", prompt, **params))
    assert under_test.idle


def test_requests_spread_over_compute_workers_and_memory_workers() -> None:
    under_test = scheduler({"memory0": 100, "memory1": 100}, ("compute0", "compute1"))
    for name in "abcd":
        under_test.add(request(name, 2, max_tokens=4))
    seen = []
    for _ in range(3):
        for compute in ("compute0", "compute1"):
            plan = under_test.plan(compute)
            if plan is None:
                continue
            seen += [(compute, admission.segments[0].worker) for admission in plan.admitted]
            for _, completion in under_test.complete(compute).values():
                completion.generated.append(1)
    assert sorted(compute for compute, _ in seen) == ["compute0", "compute0", "compute1", "compute1"]
    assert sorted(memory for _, memory in seen) == ["memory0", "memory0", "memory1", "memory1"]


def test_the_id_of_an_aborted_request_is_free_at_once_even_while_its_step_runs() -> None:
    under_test = scheduler({"memory0": 20})
    under_test.add(request("same", 2, max_tokens=4))
    under_test.plan("compute0")
    under_test.abort("same")
    under_test.add(request("same", 3, max_tokens=1))
    assert under_test.complete("compute0") == {}
    plan = under_test.plan("compute0")
    assert plan is not None and len(plan.released) == 1 and len(plan.admitted) == 1
    ((group, completion),) = under_test.complete("compute0").values()
    under_test.finish(group, completion)
    assert under_test.plan("compute0") is not None
    under_test.complete("compute0")
    assert under_test.idle and under_test.placement.reserved == {"memory0": 0}


def test_without_max_tokens_a_request_gets_what_a_memory_worker_holds() -> None:
    under_test = scheduler({"memory0": 20, "memory1": 12})
    group = under_test.add(Request("r", None, [1] * 10, SamplingParams(max_tokens=None, n=2)))
    assert (group.max_tokens, group.tokens) == (6, 20)
    alone = under_test.add(Request("s", None, [1] * 10, SamplingParams(max_tokens=None)))
    assert (alone.max_tokens, alone.tokens) == (11, 20)
