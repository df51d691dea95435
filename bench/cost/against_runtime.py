"""The simulator against the real runtime: one short trace on both, throughput and latencies side by side.

    lamina plan --measure machine.toml
    python -m bench.cost.against_runtime machine.toml [--load 0.8] [--lanes 1] [--rounds 3] [--json FILE]

Requests with prompts of 16 to 384 tokens and outputs of 16 to 96 arrive at random on one compute worker and two memory
workers, each pool on half of the cores. Half of the prompts share a prefix with others. The memory workers have so
little KV that some requests are preempted. The simulator uses the profile of this machine and the same slots, lanes and
limits; nothing is fitted to this measurement. The profile is of one memory worker with half of the cores; each of the
two is simulated at half of its speed. ``--load`` is the share of the throughput that the simulator reaches when all
requests arrive at once.

Target: a median error of 10%. The comparison is refused if slices now take another time than in the profile, and is
invalid if other processes disturbed the profile or this run. Exit status: 1 if it is refused or invalid.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.failures import Failures
from lamina.config.engine_config import EngineConfig
from lamina.core.errors import ConfigError
from lamina.core.sampling import SamplingParams
from lamina.engine.engine import Engine
from lamina.engine.updates import RequestUpdate
from lamina.launch import launch
from lamina.planning.plan import hardware, model_shapes
from lamina.planning.plan.cost import MEMORY_SHARE_USABLE
from lamina.planning.plan.fit_store import ProfileStore
from lamina.planning.plan.model_shapes import ModelShape
from lamina.planning.plan.workload import Content
from lamina.planning.profiling import profile
from lamina.planning.profiling.measure import Watch
from lamina.planning.simulate import Arrivals, Deployment, Fault, Result, simulate

MEMORY_WORKERS = 2
PROMPTS, OUTPUTS = (16, 384), (16, 96)
FAMILIES, SHARED = 4, 64
"""Prompts that begin alike: in how many ways, and for how many tokens."""

ROWS = 256
"""Of a step: longer prompts are divided into chunks."""

AT_ONCE = 10
"""The memory workers hold this many requests of mean length."""

TARGET = 0.1
STALE = 0.15
"""Share by which slices may take another time than when the profile was measured: twice what idle machines vary by."""

TIMEOUT_S = 300.0


@dataclasses.dataclass(frozen=True)
class Figures:
    """One run: output tokens per second of the whole run, latencies in seconds, and counts."""

    tokens_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    tbt_p50_s: float
    tbt_p90_s: float
    tbt_p99_s: float
    preempted: int
    steps: int
    prefix_tokens: int


def lengths(requests: int) -> tuple[list[int], list[int]]:
    """Prompts and outputs, log-uniform between their bounds."""
    random = np.random.default_rng(0)
    prompts, outputs = (
        np.exp(random.uniform(np.log(low), np.log(high), size=requests)) for low, high in (PROMPTS, OUTPUTS)
    )
    return prompts.round().astype(int).tolist(), outputs.round().astype(int).tolist()


def arrivals(requests: int, rate: float) -> Arrivals:
    """Requests in a Poisson process of ``rate`` per second; infinite: all at once."""
    prompts, outputs = lengths(requests)
    random = np.random.default_rng(1)
    gaps = random.exponential(1 / rate, size=requests)
    families = random.integers(2 * FAMILIES, size=requests).tolist()  # half of them are no family's
    contents: list[Content] = []
    for index, (prompt, family) in enumerate(zip(prompts, families, strict=True)):
        alike = min(SHARED, prompt - 1) if family < FAMILIES else 0
        runs = ((family, alike), (FAMILIES + index, prompt - alike))
        contents.append(tuple(run for run in runs if run[1]))
    arrived = np.cumsum(gaps) - gaps[0]
    answers = [None] * requests
    return Arrivals(
        arrived, np.array(prompts, np.int64), np.array(outputs, np.int64), contents=contents, answers=answers
    )


def token_ids(content: Content) -> list[int]:
    """Return token ids of a prompt: equal runs at the same position have the same tokens."""
    names = [name for name, tokens in content for _ in range(tokens)]
    return [7 + (37 * name + place) % 900 for place, name in enumerate(names)]


def slots(offered: Arrivals) -> int:
    held = offered.prompt + offered.output
    return int(max(held.max() * 1.2, AT_ONCE * held.mean() / MEMORY_WORKERS))


def require_current(store: ProfileStore) -> None:
    """Raise SystemExit if the profile is out of date; warn if a busy machine prevents the check."""
    watch = Watch()
    drift = _drift(store)
    print(f"slices take {1 + drift:.2f} of the time they took when the profile was measured")
    if abs(drift) <= STALE:
        return
    disturbance = watch.so_far()
    if not disturbance.disturbed:
        raise SystemExit(
            f"error: {store.file} was measured with other kernels, on another machine, or while this one was busy; "
            "write a new profile with lamina plan --measure"
        )
    print(f"{disturbance} meanwhile: whether the profile is current cannot be told")


def _drift(store: ProfileStore) -> float:
    """Measure slices again and return their time over the profile's, less 1: the median over rows. Takes seconds.

    Raises ConfigError if the store has no slices.
    """
    width = profile.WIDTHS[-1]
    operator = profile.slice_operator(width)
    known = {one.size: one.measured_s for one in store.samples("slices", "cpu") if one.operator == operator}
    if not known:
        raise ConfigError(f"{store.file} has no measured slices of cpu; write them with lamina plan --measure")
    with tempfile.TemporaryDirectory(prefix="lamina-profile-") as place, profile.on_cores(profile.halves()[0]):
        path = profile.random_llama(Path(place) / "model", width, profile.LAYERS)
        now = profile.slice_seconds(path, list(known))
    return statistics.median(seconds / before for seconds, before in zip(now, known.values(), strict=True)) - 1


def simulated(file: Path, shape: ModelShape, offered: Arrivals, capacity: int, lanes: int) -> Result:
    entry = hardware.load(file)["cpu"]
    nbytes = (capacity + 0.5) * shape.kv_bytes_per_token / MEMORY_SHARE_USABLE
    deployment = Deployment(
        model=shape,
        compute=entry,
        compute_workers=1,
        memory=dataclasses.replace(entry, memory_bytes=nbytes),
        memory_workers=MEMORY_WORKERS,
        lanes=lanes,
        max_num_batched_tokens=ROWS,
        profile=ProfileStore.beside(file),
    )
    shared = [Fault("memory", index, 0.0, MEMORY_WORKERS) for index in range(MEMORY_WORKERS)]
    return simulate(deployment, offered, faults=shared)


def of_simulation(result: Result) -> Figures:
    ttft, tbt = result.ttft_s, result.tbt_s
    return Figures(
        result.tokens_s,
        ttft.p50,
        ttft.p90,
        tbt.p50,
        tbt.p90,
        tbt.p99,
        result.preempted,
        result.steps,
        result.prefix_hit,
    )


def measured(engine: Engine, offered: Arrivals, salt: str) -> Figures:
    """Run the requests on the runtime. ``salt``: keeps runs from sharing cached prefixes."""
    drawn: list[list[float]] = [[] for _ in range(len(offered))]
    left, ended, before = set(range(len(offered))), threading.Event(), engine.stats()
    failures = Failures()

    def on_update(update: RequestUpdate) -> None:
        failures.note(update)
        index = int(update.request.request_id)
        drawn[index].extend([time.perf_counter()] * update.tokens)
        if update.finished:
            left.discard(index)
            if not left:
                ended.set()

    begun = time.perf_counter()
    wanted = zip(offered.arrival_s.tolist(), offered.contents, offered.output.tolist(), strict=True)
    for index, (arrival_s, content, output) in enumerate(wanted):
        time.sleep(max(0.0, begun + arrival_s - time.perf_counter()))
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, cache_salt=salt)
        engine.submit(str(index), token_ids(content), params, on_update)
    if not ended.wait(TIMEOUT_S):
        raise SystemExit(f"error: {len(left)} requests have not ended within {TIMEOUT_S:.0f} s; {engine.stats()}")
    failures.check()
    after = engine.stats()
    waits = [times[0] - begun - arrival_s for times, arrival_s in zip(drawn, offered.arrival_s.tolist(), strict=True)]
    gaps = np.concatenate([np.diff(times) for times in drawn])
    (ttft_p50, ttft_p90), (tbt_p50, tbt_p90, tbt_p99) = (
        [float(value) for value in np.quantile(values, shares)]
        for values, shares in ((waits, (0.5, 0.9)), (gaps, (0.5, 0.9, 0.99)))
    )
    return Figures(
        sum(map(len, drawn)) / (max(times[-1] for times in drawn) - begun),
        ttft_p50,
        ttft_p90,
        tbt_p50,
        tbt_p90,
        tbt_p99,
        after.preempted - before.preempted,
        after.steps - before.steps,
        after.prefix_hits - before.prefix_hits,
    )


def on_runtime(path: Path, offered: Arrivals, capacity: int, lanes: int, rounds: int) -> Figures:
    nbytes = capacity * model_shapes.find(str(path)).kv_bytes_per_token
    compute, memory = (",".join(map(str, cores)) for cores in profile.halves())
    config = EngineConfig(
        model=str(path),
        load_format="dummy",
        memory=f"cpu:{MEMORY_WORKERS}",
        lanes=lanes,
        max_num_batched_tokens=ROWS,
        kv_cache_memory_bytes=nbytes,
        compute_cores=compute,
        memory_cores=memory,
    )
    engine = launch(config)
    try:
        measured(engine, arrivals(8, 20.0), "warm-up")
        runs = [measured(engine, offered, f"round {number}") for number in range(rounds)]
    finally:
        engine.close()
    return Figures(*(statistics.median(values) for values in zip(*map(dataclasses.astuple, runs), strict=True)))


def errors(ours: Figures, real: Figures) -> dict[str, float]:
    names = [field.name for field in dataclasses.fields(Figures) if field.name.endswith("_s")]
    return {name: getattr(ours, name) / getattr(real, name) - 1 for name in names}


def table(title: str, ours: Figures, real: Figures) -> Table:
    made = Table("", title=title)
    for heading in ("runtime", "simulated", "error"):
        made.add_column(heading, justify="right")
    off = errors(ours, real)
    for name, value in vars(ours).items():
        theirs, scale = getattr(real, name), 1e3 if name[0] == "t" and "p" in name else 1
        digits = 0 if isinstance(value, int) else 1
        shown = name.replace("_s", " (ms)" if scale > 1 else "/s") if name.endswith("_s") else name
        error = f"{off[name]:+.1%}" if name in off else ""
        made.add_row(shown.replace("_", " "), f"{theirs * scale:.{digits}f}", f"{value * scale:.{digits}f}", error)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hardware", type=Path, help="what lamina plan --measure wrote")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--load", type=float, default=0.8)
    parser.add_argument("--lanes", type=int, default=1)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    store = ProfileStore(args.hardware.with_suffix(".sqlite"))
    fit = store.fit("runtime", "cpu") if store.file.is_file() else None
    if fit is None:
        raise SystemExit(f"error: {store.file} has no profile of the runtime; write one with lamina plan --measure")
    watch = Watch()
    require_current(store)
    with tempfile.TemporaryDirectory(prefix="lamina-against-") as place:
        path = profile.random_llama(Path(place) / "model", args.width, args.layers)
        shape = model_shapes.find(str(path))
        at_once = arrivals(args.requests, float("inf"))
        capacity = slots(at_once)
        rate = args.load * simulated(args.hardware, shape, at_once, capacity, args.lanes).requests_s
        offered = arrivals(args.requests, rate)
        ours = of_simulation(simulated(args.hardware, shape, offered, capacity, args.lanes))
        real = on_runtime(path, offered, capacity, args.lanes, args.rounds)
    title = f"{args.requests} requests, {rate:.2f}/s, {args.lanes} lanes, {MEMORY_WORKERS} x {capacity} slots"
    Console().print(table(title, ours, real))
    median = statistics.median(map(abs, errors(ours, real).values()))
    print(f"median error {median:.1%}; target {TARGET:.0%}. Profile: {fit.source}.")
    disturbance = watch.so_far()
    valid = not disturbance.disturbed and fit.source == profile.SOURCE
    if not valid:
        print(f"Not a valid comparison: {disturbance} during this run. Profile and compare again on an idle machine.")
    if args.json:
        found = {"runtime": vars(real), "simulated": vars(ours), "errors": errors(ours, real)}
        about = {"rate": rate, "lanes": args.lanes, "profile": fit.source, "others": disturbance.others}
        args.json.write_text(json.dumps(found | about, indent=1) + "\n")
    sys.exit(0 if valid else 1)


if __name__ == "__main__":
    main()
