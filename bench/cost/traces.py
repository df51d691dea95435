"""Writes traces with published lengths, in Mooncake's format, for `lamina plan --trace` and `lamina simulate --trace`.

    python -m bench.cost.traces reasoning --out reasoning.jsonl [--requests 1000] [--rate 1]
    python -m bench.cost.traces bursts --out bursts.jsonl
    python -m bench.cost.traces documents --out documents.jsonl
    python -m bench.cost.traces agents --out agents.jsonl

reasoning  short questions, long answers: DeepSeek-R1-Distill-Llama-70B on AIME, 360 answers with at most 32,768 tokens.
           Published are mean lengths if answers are cut off at some budgets (github.com/droodman/inference-cost,
           data/cost_truncated_curves.csv). Their slopes are the shares of answers longer than a budget, which is taken
           to fall linearly between budgets.
bursts     reasoning, and besides, in half a minute of every ten, as many questions with contexts of 65,536 tokens.

documents  questions about long documents, each document sent again with each question: lengths from 2,700 to 210,500
           tokens, the range of L-Eval (LoongServe, section 7.1), here log-uniform; four questions a document (L-Eval:
           508 documents, over 2,000 questions), THINK_S apart on average. Answers are as long as Mooncake's
           conversations have them on average, 343 tokens, at random.
agents     prompts of 7,590 and outputs of 182 tokens on average, half of the prompts found in a cache (Mooncake,
           arXiv 2407.00079, section 4.2): half of each is the tools of one of TOOLS agents. Lengths are at random.

Mooncake's own traces, whose ``hash_ids`` say what prompts have in common, are read as they are.
"""

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np

from lamina.planning.plan.kernel_times import Floats
from lamina.planning.plan.workload import Content, TracedRequest

PROMPT = 178
BUDGETS = (0, 2048, 4096, 8192, 16384, 32768)
CUT_MEANS = (0.0, 2046.8, 3959.1, 6936.4, 11233.0, 17061.9)
"""Mean output tokens of DeepSeek-R1-Distill-Llama-70B if it is stopped at each budget."""

SHORTEST, LONGEST, QUESTIONS, QUESTION, ANSWER = 2_700, 210_500, 4, 100, 343
"""Of documents: tokens, questions about each, and tokens of a question and of an answer."""

THINK_S = 60.0
"""Mean time between two questions of one user; assumed."""

AGENT_PROMPT, AGENT_OUTPUT, TOOLS = 7_590, 182, 20
"""Mean tokens of an agent's prompt and output; number of agents, each with tools of its own (assumed)."""

PERIOD_S, BURST_S, BURST_CONTEXT = 600.0, 30.0, 65_536


def longer() -> list[float]:
    """Share of answers longer than each budget."""
    shares = [1.0]
    for low, high, before, after in zip(BUDGETS, BUDGETS[1:], CUT_MEANS, CUT_MEANS[1:], strict=False):
        # The mean grows between two budgets by the mean share of longer answers, which is that of both ends.
        shares.append(min(shares[-1], max(0.0, 2 * (after - before) / (high - low) - shares[-1])))
    return shares


def outputs(count: int, random: np.random.Generator) -> Floats:
    """Lengths of answers: those longer than the last budget are cut off there."""
    shares = longer()
    drawn = random.uniform(size=count)  # the share of answers that are longer
    return np.asarray(np.round(np.interp(drawn, shares[::-1], BUDGETS[::-1])).clip(1), dtype=np.float64)


def reasoning(count: int, rate: float, seed: int = 0) -> list[TracedRequest]:
    random = np.random.default_rng(seed)
    times, lengths = np.cumsum(random.exponential(1 / rate, count)), outputs(count, random)
    return [TracedRequest(float(at), PROMPT, int(length)) for at, length in zip(times, lengths, strict=True)]


def bursts(count: int, rate: float, seed: int = 0) -> list[TracedRequest]:
    """Return ``reasoning`` requests, plus long contexts at the same rate in the first ``BURST_S`` of every period."""
    short = reasoning(count, rate, seed)
    long = [
        TracedRequest(one.arrival_s, BURST_CONTEXT, one.output)
        for one in reasoning(count, rate, seed + 1)
        if one.arrival_s % PERIOD_S < BURST_S
    ]
    return sorted([*short, *long], key=lambda one: one.arrival_s)


def documents(count: int, rate: float, seed: int = 0) -> list[TracedRequest]:
    """Conversations about documents, ``rate`` questions a second; ids below ``count`` are documents."""
    random = np.random.default_rng(seed)
    ids, made = itertools.count(count), []
    begun = np.cumsum(random.exponential(QUESTIONS / rate, -(-count // QUESTIONS)))
    for document, start_s in enumerate(begun.tolist()):
        length = round(float(np.exp(random.uniform(np.log(SHORTEST), np.log(LONGEST)))))
        content: Content = ((document, length),)
        at = start_s
        for _ in range(QUESTIONS):
            content = (*content, (next(ids), QUESTION))
            output, answer = 1 + int(random.exponential(ANSWER)), next(ids)
            made.append(TracedRequest(at, sum(tokens for _, tokens in content), output, content, answer))
            content = (*content, (answer, output))
            at += float(random.exponential(THINK_S))
    return sorted(made, key=lambda one: one.arrival_s)[:count]


def agents(count: int, rate: float, seed: int = 0) -> list[TracedRequest]:
    """Calls of agents, each prompt behind the tools of its agent; ids below ``TOOLS`` are agents."""
    random = np.random.default_rng(seed)
    times = np.cumsum(random.exponential(1 / rate, count))
    own, outputs = (1 + random.exponential(mean, count).astype(int) for mean in (AGENT_PROMPT / 2, AGENT_OUTPUT))
    tools = round(AGENT_PROMPT / 2)
    return [
        TracedRequest(float(at), tools + int(mine), int(output), ((int(agent), tools), (TOOLS + index, int(mine))))
        for index, (at, mine, output, agent) in enumerate(
            zip(times, own, outputs, random.integers(TOOLS, size=count), strict=True)
        )
    ]


TRACES = {"reasoning": reasoning, "bursts": bursts, "documents": documents, "agents": agents}


def row(one: TracedRequest) -> dict[str, Any]:
    lengths = {"timestamp": round(1e3 * one.arrival_s), "input_length": one.prompt, "output_length": one.output}
    content = {"content": one.content} if one.content else {}
    return lengths | content | ({"answer": one.answer} if one.answer is not None else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", choices=TRACES)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=1.0)
    args = parser.parse_args()
    made = TRACES[args.trace](args.requests, args.rate)
    args.out.write_text("".join(json.dumps(row(one)) + "\n" for one in made))
    print(f"{args.out}: {len(made)} requests")


if __name__ == "__main__":
    main()
