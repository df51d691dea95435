"""Schedulers and requests of the size that these tests need."""

from typing import Any

from lamina.core.pipeline import Pipeline
from lamina.core.sampling import SamplingParams
from lamina.core.steps import StepPlan
from lamina.core.types import NOBODY, Client, Request
from lamina.kv.placement import Placement
from lamina.schedule.limits import Limits
from lamina.schedule.policy import FIFO, Policy
from lamina.schedule.scheduler import Scheduler

LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=8, max_model_len=32)
ATTENTIONS = 3


def scheduler(
    capacities: dict[str, int],
    lanes: int = 1,
    limits: Limits = LIMITS,
    longest: int | None = None,
    prefix_cache: bool = False,
    overcommit: float = 1.0,
    window: int = 0,
    policy: Policy = FIFO,
    pipeline: Pipeline | None = None,
) -> Scheduler:
    return Scheduler(
        limits,
        Placement(capacities, longest),
        lanes,
        attentions=ATTENTIONS,
        kv_heads=2,
        prefix_cache=prefix_cache,
        overcommit=overcommit,
        window=window,
        policy=policy,
        pipeline=pipeline,
    )


def request(name: str, prompt: int, client: Client = NOBODY, **params: Any) -> Request:
    return Request(name, None, list(range(prompt)), SamplingParams(**params), client=client)


def client(number: int, clients: int) -> Client:
    """Return the client of request ``number``, where ``clients`` connections, two of each account, take turns."""
    connection = number % clients
    return Client(str(connection // 2), str(connection))


def plan_of(under_test: Scheduler) -> StepPlan:
    plan = under_test.plan(0)
    assert plan is not None
    return plan
