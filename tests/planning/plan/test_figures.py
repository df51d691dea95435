"""Headline directions of the papers' serving figures, as `python -m bench.cost.figures` simulates them."""

import re
from dataclasses import replace
from typing import Any

import pytest

from bench.cost import figures, published
from bench.cost.figures import MILLION
from lamina.planning.simulate import System

WANTED = {
    "Mnemosyne": ["8", "13", "14", "15", "17", "18", "19", "22"],
    "LoongServe": ["10", "11", "12", "13"],
    "Infinite-LLM": ["9", "10"],
    "DistKV-LLM": ["10"],
    "Lamina": ["15", "16"],
}


def test_every_figure_is_simulated_or_named_as_left_out() -> None:
    table = published.load()["figures"]
    said = [f"{row['paper']}, {row['figure']}" for row in table["rows"]] + [one["figure"] for one in table["left_out"]]
    for paper, numbers in WANTED.items():
        found = {number for one in said if one.startswith(paper) for number in re.findall(r"\d+", one)}
        assert found.issuperset(numbers), paper


@pytest.mark.parametrize("model", ["Llama-3-8B", "Llama-3-70B"])
def test_sixteen_stages_are_at_least_four_fifths_of_sixteen_times_as_fast(model: str) -> None:
    """Mnemosyne, Figure 15."""
    assert 0.8 < figures.ttft(model, MILLION, 1, 1) / figures.ttft(model, MILLION, 16, 16) / 16 < 1


def test_prompts_in_stages_are_in_time() -> None:
    """Mnemosyne, Figures 14(a) and 15: below 15 s for a million tokens on 16 servers, and 30 s for two."""
    assert figures.ttft("Llama-3-8B", MILLION, 4, 12) < 15
    assert figures.ttft("Llama-3-8B", 2 * MILLION, 4, 12) < 30


def test_tokens_come_faster_with_more_groups_and_no_faster_with_more_stages() -> None:
    """Mnemosyne, Figure 17, with shorter contexts."""
    alone, spread, deep = (figures.between("Llama-3-8B", 500_000, *pools) for pools in ((4, 1), (4, 4), (16, 1)))
    assert spread < alone <= deep < 1.1 * alone


def test_groups_join_a_prompt_one_after_another() -> None:
    """Mnemosyne, Figure 19: each when the prompt reaches its part."""
    assert figures.joining("Llama-3-8B", 100_000, 4) == pytest.approx([0, 0.25, 0.5, 0.75], abs=0.06)


def test_four_replicas_share_the_chunks_of_one_prompt() -> None:
    """LoongServe's elastic sequence parallelism of prompts, with as many memory workers as replicas."""

    def seconds(replicas: int) -> float:
        pools = {"kv_tokens_per_worker": 2048 if replicas > 1 else None, "lanes": 2 * replicas, "pipelining": "fixed"}
        deployment = replace(figures.a800s(2 * replicas, 2, replicas, **pools), max_num_batched_tokens=2048)
        return float(figures.beside(deployment, 50_000).log.first_s[-1])

    assert 0.8 < seconds(1) / seconds(4) / 4 < 1


@pytest.mark.slow
def test_copies_that_lend_serve_long_prompts_faster_than_one_group() -> None:
    """LoongServe, Figure 10, L-Eval: every static baseline of the paper but copies of TP2, at fewer requests."""
    requests = figures.lengths("L-Eval", 20)

    def goodput(compute: int, degree: int, system: System, memory: int = 0, **settings: Any) -> float:
        return figures.goodput(figures.a800s(compute, degree, memory, **settings), system, requests)

    ours = goodput(8, 1, System.LAMINA, local=True)
    assert ours > goodput(8, 8, System.TENSOR_PARALLEL) and ours > goodput(8, 8, System.CHUNKED_PREFILL)
    assert ours > goodput(4, 4, System.DISAGGREGATED, memory=4)


def test_messages_take_most_of_the_time_between_slices_of_small_batches() -> None:
    """Lamina, Figures 15 and 16."""
    assert 0.4 < figures.messages(3)[0] < 0.7
    assert 0.2 < figures.messages(256)[1] < 0.4
