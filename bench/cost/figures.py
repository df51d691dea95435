"""The papers' serving figures, simulated with the runtime's own decisions, and what their texts leave out.

    python -m bench.cost.figures [--paper Mnemosyne] [--json FILE] [--picture FILE.svg]     # a minute or two

Published numbers are in ``published.toml``, under ``figures``. A *server* is eight devices as one worker: their
bandwidth, FLOP/s and network together, as if heads were divided among them.
"""

import argparse
import json
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.cost import pooled, published
from bench.cost.figures_picture import draw
from bench.cost.page import show
from bench.cost.published import Comparison, Number
from lamina.core.pipeline import Shape
from lamina.planning.plan import hardware, model_shapes
from lamina.planning.plan.hardware import Hardware
from lamina.planning.simulate import Arrivals, Deployment, Result, System, simulate
from lamina.planning.simulate.scenario import Ints

Lengths: TypeAlias = tuple[Ints, Ints]
"""Prompt and output tokens of each request."""

MILLION = 1_000_000
CHUNK = 4096
PAGE = 16  # tokens of a page of vLLM's and Sarathi-Serve's
NEVER = 10**6  # output tokens of a sequence that decodes for as long as a run takes
DEVICES = hardware.load()


def server(device: Hardware, count: int = 8) -> Hardware:
    """Return ``count`` devices as one."""
    return replace(
        device,
        kind=f"{count} {device.kind}",
        like=device.kind,
        processors=count * device.processors,
        flops={dtype: count * flops for dtype, flops in device.flops.items()},
        memory_bytes=count * device.memory_bytes,
        memory_bytes_s=count * device.memory_bytes_s,
        nic_bytes_s=count * device.nic_bytes_s,
    )


def servers(model: str, stages: int, memories: int, chunk: int = CHUNK, **settings: Any) -> Deployment:
    """Return Mnemosyne's layout: stages of eight H100, two lanes each, and ``memories`` servers that hold the KV."""
    own = {"kv_tokens_per_worker": CHUNK if memories > 1 else None, "memory": server(DEVICES["h100"]), **settings}
    return Deployment(
        model=model_shapes.find(model),
        compute=DEVICES["h100"],
        compute_workers=8 * stages,
        shape=Shape(8, stages),
        memory_workers=memories,
        lanes=2 * stages,
        pipelining="fixed",
        max_num_seqs=min(256, chunk),
        max_num_batched_tokens=chunk,
        **own,
    )


def beside(deployment: Deployment, prompt: int, decoding: int = 0, output: int = 1, context: int = 16) -> Result:
    """Run a prompt that arrives ten seconds after ``decoding`` sequences, until it has drawn ``output`` tokens."""
    arrivals = Arrivals(
        np.array([0.0] * decoding + [10.0 if decoding > 1 else 0.0]),
        np.array([context] * decoding + [prompt]),
        np.array([NEVER] * decoding + [output]),
    )
    return simulate(deployment, arrivals, stops=lambda log, now: bool(log.drawn[-1] >= output))


@cache
def ttft(model: str, prompt: int, stages: int, memories: int, chunk: int = CHUNK) -> float:
    """Return the seconds of one prompt."""
    return float(beside(servers(model, stages, memories, chunk), prompt).log.first_s[-1])


def best_of(model: str, prompt: int, total: int = 16) -> float:
    """Return the seconds of a prompt on ``total`` servers, of which the best number hold the KV."""
    return min(ttft(model, prompt, stages, total - stages) for stages in (2, 4, 8))


def between(model: str, context: int, stages: int, groups: int) -> float:
    """Return the seconds between tokens of one sequence whose KV is on ``groups`` servers, each with room for all."""
    large = replace(server(DEVICES["h100"]), memory_bytes=1e14)
    deployment = servers(model, stages, groups, 32_768, memory=large, kv_tokens_per_worker=-(-context // groups))
    return float(beside(deployment, context, output=8).tbt_s.p50)


def behind(deployment: Deployment, prompt: int) -> tuple[float, float]:
    """Return the TTFT of a prompt and the 95th percentile of the time between tokens of a sequence beside it."""
    log = beside(deployment, prompt, decoding=1).log
    times, counts = log.gaps
    order = np.argsort(times)
    place = np.searchsorted(np.cumsum(counts[order]), 0.95 * counts.sum())
    return float(log.first_s[-1]), float(times[order][place])


def joining(model: str, prompt: int, groups: int) -> list[float]:
    """Return the share of a prompt after which each of ``groups`` servers, in order, first attends to a part of it."""
    deployment = servers(model, 1, groups, kv_tokens_per_worker=-(-prompt // groups))
    arrivals = Arrivals(np.zeros(1), np.array([prompt]), np.array([1]))
    spans = simulate(deployment, arrivals, recorded=10**7).spans
    steps = np.array([span.begin_ns for span in spans["compute0"]])
    attended = [
        [span.begin_ns for span in spans[f"memory{group}"] if span.stage == "attention"] for group in range(groups)
    ]
    return sorted(float((steps < min(begun)).mean()) for begun in attended)


def striped(model: str, prompt: int, total: int = 16) -> float:
    """Return the seconds of Striped Attention on ``total`` servers: a ring, which the simulator does not have.

    Every server computes an equal share of the rows, and attends to one server's keys while the next ones travel.
    """
    cost = servers(model, 1, 1).compute_cost
    rows, layers = prompt // total, cost.shape.layers
    dense = float(cost.slice_seconds(rows, 8))
    block = float(cost.chunk_attention_seconds(rows, 0, 8))  # causal: half of all pairs
    sent = float(cost.wire_seconds(rows * cost.shape.kv_bytes_per_token / layers / 8))
    return layers * (dense + total * max(block, sent))


def resent_s(context: int) -> float:
    """Return processor seconds of this machine to pickle and unpickle the tokens and the page table of a sequence.

    Sarathi-Serve's scheduler sends them to its workers in every step.
    """
    message, seconds = (list(range(context)), list(range(context // PAGE))), []
    for _ in range(3):
        begun = time.process_time()
        pickle.loads(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
        seconds.append(time.process_time() - begun)
    return min(seconds)


def mnemosyne() -> dict[str, Number]:
    """Figures 8, 13 to 15, 17 to 19 and 22."""
    small, large = "Llama-3-8B", "Llama-3-70B"
    grid = {
        (prompt, chunk, groups): behind(
            servers(small, 4, groups, chunk, kv_tokens_per_worker=-(-prompt // groups)), prompt
        )
        for prompt in (MILLION, 4 * MILLION)
        for chunk in (512, CHUNK)
        for groups in (1, 4)
    }
    better = [
        later < sooner
        for prompt in (MILLION, 4 * MILLION)
        for chunk in (512, CHUNK)
        for sooner, later in zip(grid[prompt, chunk, 1], grid[prompt, chunk, 4], strict=True)
    ]
    alone, adapted = (behind(servers(small, 1, 4, CHUNK, slo_tbt_ms=slo), MILLION) for slo in (None, 100))
    fixed = behind(servers(small, 1, 4, 128), MILLION)
    beside_128 = {}
    for stages in (1, 4):
        steps = [beside(servers(small, stages, 4), MILLION, decoding, context=1024) for decoding in (2, 128)]
        few, many = (float(run.log.first_s[-1]) - 10 for run in steps)
        beside_128[stages] = 100 * (many / few - 1)
    return {
        "8 tbt": adapted[1] / alone[1],
        "8 ttft": adapted[0] / fixed[0],
        "13b": 1 + resent_s(MILLION) / between(small, MILLION, 1, 1),
        "14a ttft": best_of(small, MILLION),
        "14a": striped(small, MILLION) / best_of(small, MILLION),
        "14b": 1e3 * behind(servers(small, 4, 12), MILLION)[1],
        "15 small": ttft(small, MILLION, 1, 1) / ttft(small, MILLION, 16, 16) / 16,
        "15 large": ttft(large, MILLION, 1, 1) / ttft(large, MILLION, 16, 16) / 16,
        "15 ttft": best_of(small, 2 * MILLION),
        "17 stages small": between(small, 2 * MILLION, 16, 1) / between(small, 2 * MILLION, 1, 1),
        "17 stages large": between(large, 2 * MILLION, 16, 1) / between(large, 2 * MILLION, 1, 1),
        "17 small": 1e3 * between(small, 4 * MILLION, 4, 1),
        "17 large": 1e3 * between(large, 2 * MILLION, 4, 1),
        "17 groups 4M": between(small, 4 * MILLION, 4, 1) / between(small, 4 * MILLION, 4, 4),
        "17 groups 10M": between(small, 10 * MILLION, 4, 1) / between(small, 10 * MILLION, 4, 4),
        "18": sum(better) / len(better),
        "19": len(set(joining(large, 2 * MILLION, 4))),
        "22": beside_128[1],
        "22 stages": beside_128[4],
    }


def lengths(dataset: str, count: int, seed: int = 1) -> Lengths:
    """Return lengths that are log-uniform over the range that the paper prints.

    Half of a ShareGPT request is its output; requests of the others have 100 output tokens.
    """
    random = np.random.default_rng(seed)
    spans = {"ShareGPT": (4, 2300), "L-Eval": (2700, 210_500), "LV-Eval": (15_100, 497_300)}
    if dataset == "Mixed":
        drawn = [lengths(one, count, seed + number + 1) for number, one in enumerate(spans)]
        chosen = random.integers(len(spans), size=count)
        return tuple(np.choose(chosen, [one[part] for one in drawn]) for part in (0, 1))  # type: ignore[return-value]
    low, high = spans[dataset]
    total = np.exp(random.uniform(np.log(low), np.log(high), count)).astype(np.int64)
    output = np.maximum(1, total // 2) if dataset == "ShareGPT" else np.full(count, 100)
    return np.maximum(1, total - output), output


def a800s(compute: int, degree: int, memory: int = 0, **settings: Any) -> Deployment:
    """Return LoongServe's model and devices."""
    return Deployment(
        model=model_shapes.find("Llama-2-7B"),
        compute=DEVICES["a800"],
        compute_workers=compute,
        shape=Shape(degree),
        memory=DEVICES["a800"] if memory else None,
        memory_workers=memory,
        prefix_cache=False,
        max_num_batched_tokens=8192,
        **settings,
    )


REQUESTS, SHARE, SLO = 60, 0.9, 25.0
"""Requests of a run; the share of them that keeps the target; and the target, in times of the request alone on TP8."""


def goodput(deployment: Deployment, system: System, requests: Lengths) -> float:
    """Return the highest rate, within 8%, at which ``SHARE`` of the requests keep the target; 0 below 0.01 a second."""
    prompt, output = requests
    cost = a800s(8, 8).compute_cost
    token_s = cost.pass_seconds(1, 8) + cost.shape.layers * cost.attention_seconds(prompt, 1, 1 / 8)
    target_s = SLO * (np.array([cost.prefill_seconds(one, 2048, 8) for one in prompt.tolist()]) + output * token_s)
    gaps = np.random.default_rng(7).exponential(1.0, len(prompt)).cumsum()

    def keeps(rate: float) -> bool:
        come = (gaps - gaps[0]) / rate
        log = simulate(deployment, Arrivals(come, prompt, output), system).log
        return bool(((log.end_s - come <= target_s) & log.finished).mean() >= SHARE)

    low = 0.01
    if not keeps(low):
        return 0.0
    while keeps(4 * low):
        low *= 4
    high = 4 * low
    while high / low > 1.08:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low


def loongserve() -> dict[str, Number]:
    """Figures 10 to 12. Ours is eight copies, each with KV beside its weights, which lend each other memory; on two
    servers, sixteen, and every system uses the same network between any two devices.

    A system that serves a dataset at no rate is left out of the comparison with it.
    """
    found: dict[str, list[float]] = {"vllm": [], "splitfuse": [], "distserve": [], "static": []}
    for dataset in ("L-Eval", "LV-Eval", "Mixed"):  # of ShareGPT, all requests of a run at once keep the target
        requests = lengths(dataset, REQUESTS)
        ours = goodput(a800s(8, 1, local=True), System.LAMINA, requests)
        for name, deployment, system in (
            ("vllm", a800s(8, 8), System.TENSOR_PARALLEL),
            ("splitfuse", a800s(8, 8), System.CHUNKED_PREFILL),
            ("distserve", a800s(4, 4, 4), System.DISAGGREGATED),
            ("static", a800s(8, 2), System.TENSOR_PARALLEL),
        ):
            theirs = goodput(deployment, system, requests)
            if theirs:
                found[name].append(ours / theirs)
    mixed = lengths("Mixed", REQUESTS)
    ours = goodput(a800s(16, 1, local=True), System.LAMINA, mixed)
    pairs = {"vllm": System.TENSOR_PARALLEL, "splitfuse": System.CHUNKED_PREFILL}
    two_servers = {f"11 {name}": ours / goodput(a800s(16, 8), system, mixed) for name, system in pairs.items()}
    return {f"10 {name}": (min(ratios), max(ratios)) for name, ratios in found.items()} | two_servers


def copies(model: str, count: int, degree: int, **settings: Any) -> Deployment:
    """Return ``count`` copies, each on ``degree`` A100s as one device, which lend each other KV memory."""
    return Deployment(
        model=model_shapes.find(model),
        compute=server(DEVICES["a100"], degree),
        compute_workers=count,
        prefix_cache=False,
        **settings,
    )


def served(deployment: Deployment, contexts: Ints, system: System) -> float:
    """Return requests per second, all of which come at once, until 70% of them have ended: later, copies are idle."""
    output = np.minimum(256, contexts // 2)
    log = simulate(deployment, Arrivals(np.zeros(len(contexts)), contexts - output, output), system).log
    ends = np.sort(log.end_s[log.finished])
    last = int(0.7 * len(ends)) - 1
    return (last + 1) / float(ends[last])


def infinite_llm() -> dict[str, Number]:
    """Figures 9 and 10(a): copies that lend each other memory, over one group of all devices and over plain copies."""
    short, uneven = [], []
    for model, count, degree in (("Llama-2-7B", 2, 1), ("Llama-2-13B", 2, 2), ("Llama-2-70B", 2, 4)):
        whole = replace(
            copies(model, 1, 1), compute=DEVICES["a100"], compute_workers=count * degree, shape=Shape(count * degree)
        )
        contexts = np.full(600, 1000)
        ours = served(copies(model, count, degree, local=True), contexts, System.LAMINA)
        short.append(ours / served(whole, contexts, System.TENSOR_PARALLEL))
    for mean, deviation in ((1233, 7785.68), (469, 3506.36)):
        contexts = pooled.lengths(mean, deviation, 60_000, 400)
        for count in (2, 8):
            ours = served(copies("Llama-2-7B", count, 1, local=True), contexts, System.LAMINA)
            uneven.append(ours / served(copies("Llama-2-7B", count, 1), contexts, System.TENSOR_PARALLEL))
    many, one = (copies("Llama-2-7B", count, 1, local=True).kv_tokens * count for count in (32, 1))
    return {
        "9 short": (min(short), max(short)),
        "9 long": many / one,
        "10a": (min(uneven), max(uneven)),
    }


def distkv_llm() -> dict[str, Number]:
    """Figure 10: four copies of TP2, debts cleared over not cleared."""
    contexts = pooled.ranges(240_000, 480_000, 0.1, 100)
    cleared, kept = (
        served(
            copies("Llama-2-13B", 4, 2, local=True, balance=balance, max_num_batched_tokens=8192),
            contexts,
            System.LAMINA,
        )
        for balance in ("ledger", "off")
    )
    return {"10": cleared / kept}


def messages(batch: int) -> tuple[float, float]:
    """Return the share of messages in the time between slices, and in all of the time: one compute worker with one lane
    and three memory workers."""
    deployment = Deployment(
        model=model_shapes.find("LLaMA-13B"),
        compute=DEVICES["a100-40g"],
        compute_workers=1,
        memory=DEVICES["a100-40g"],
        memory_workers=3,
        lanes=1,
        pipelining="fixed",
    )
    arrivals = Arrivals(np.zeros(batch), np.ones(batch, np.int64), np.full(batch, 512))
    compute, memory = simulate(deployment, arrivals).pools
    waits = 1 - compute.busy
    return (waits - memory.busiest) / waits, waits - memory.busiest


def lamina() -> dict[str, Number]:
    """Figures 15 and 16: messages by batch."""
    return {"15": 100 * messages(3)[0], "16": 100 * messages(256)[1]}


PAPERS: dict[str, Callable[[], dict[str, Number]]] = {
    "Mnemosyne": mnemosyne,
    "LoongServe": loongserve,
    "Infinite-LLM": infinite_llm,
    "DistKV-LLM": distkv_llm,
    "Lamina": lamina,
}


def rows(papers: Sequence[str]) -> list[Comparison]:
    """Return the published numbers of these papers beside the simulated ones."""
    table = published.load()["figures"]["rows"]
    found = {f"{paper} {key}": value for paper in papers for key, value in PAPERS[paper]().items()}
    made = []
    for row in table:
        name = f"{row['paper']} {row['key']}"
        if name in found:
            value = tuple(row["published"]) if isinstance(row["published"], list) else row["published"]
            figure = f"{row['paper']} {row['figure'].split(maxsplit=1)[1]}"
            made.append(Comparison(row["what"], row["unit"], figure, value, found[name], row["why"]))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--paper", choices=PAPERS, action="append", help="only this paper")
    parser.add_argument("--json", type=Path, help="write the rows, and what is left out, to this file")
    parser.add_argument("--picture", type=Path, help="draw them to this .svg or .png file")
    args = parser.parse_args()
    found, left_out = rows(args.paper or [*PAPERS]), published.load()["figures"]["left_out"]
    table = Table("figure", "quantity", "paper", "ours", "ratio", box=None, padding=(0, 1, 0, 0))
    for row in found:
        unit = "" if row.unit in ("share", "times") else f" {row.unit}"
        table.add_row(row.source, row.what + unit, show(row.published), show(row.ours), row.ratio)
    console = Console(width=80)
    console.print(table)
    for one in left_out:
        console.print(f"{one['figure']}: {one['why']}", style="dim")
    if args.json:
        figures = [asdict(row) | {"ratio": row.ratio} for row in found]
        args.json.write_text(json.dumps({"figures": figures, "left_out": left_out}, indent=1) + "\n")
    if args.picture:
        draw(found, args.picture)


if __name__ == "__main__":
    main()
