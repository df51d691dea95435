"""Writes traces with published lengths, in Mooncake's format, for `lamina plan --trace` and `lamina simulate --trace`.

    python -m bench.cost.traces reasoning --out reasoning.jsonl [--requests 1000] [--rate 1]
    python -m bench.cost.traces bursts --out bursts.jsonl

reasoning  short questions, long answers: DeepSeek-R1-Distill-Llama-70B on AIME, 360 answers with at most 32,768 tokens.
           Published are mean lengths if answers are cut off at some budgets (github.com/droodman/inference-cost,
           data/cost_truncated_curves.csv). Their slopes are the shares of answers longer than a budget, which is taken
           to fall linearly between budgets.
bursts     reasoning, and besides, in half a minute of every ten, as many questions with contexts of 65,536 tokens.

Long documents: Mooncake's own conversations (mean prompt 12,035 tokens, output 343). Agents with shared prefixes are
left out: without a prefix cache they are long prompts like any other.
"""

import argparse
import json
from pathlib import Path

import numpy as np

from lamina.plan.gemm import Floats
from lamina.plan.workload import TracedRequest

PROMPT = 178
BUDGETS = (0, 2048, 4096, 8192, 16384, 32768)
CUT_MEANS = (0.0, 2046.8, 3959.1, 6936.4, 11233.0, 17061.9)
"""Mean output tokens of DeepSeek-R1-Distill-Llama-70B if it is stopped at each budget."""

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
    """Requests at ``rate`` a second, at random."""
    random = np.random.default_rng(seed)
    times, lengths = np.cumsum(random.exponential(1 / rate, count)), outputs(count, random)
    return [TracedRequest(float(at), PROMPT, int(length)) for at, length in zip(times, lengths, strict=True)]


def bursts(count: int, rate: float, seed: int = 0) -> list[TracedRequest]:
    """The same, with long contexts at the same rate besides, in the first ``BURST_S`` of every period."""
    short = reasoning(count, rate, seed)
    long = [
        TracedRequest(one.arrival_s, BURST_CONTEXT, one.output)
        for one in reasoning(count, rate, seed + 1)
        if one.arrival_s % PERIOD_S < BURST_S
    ]
    return sorted([*short, *long], key=lambda one: one.arrival_s)


TRACES = {"reasoning": reasoning, "bursts": bursts}


def main() -> None:
    """Write a trace."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", choices=TRACES)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=1.0)
    args = parser.parse_args()
    made = TRACES[args.trace](args.requests, args.rate)
    rows = (
        {"timestamp": round(1e3 * one.arrival_s), "input_length": one.prompt, "output_length": one.output}
        for one in made
    )
    args.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{args.out}: {len(made)} requests")


if __name__ == "__main__":
    main()
