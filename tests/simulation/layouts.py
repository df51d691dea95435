"""The cluster that a seed chooses."""

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lamina.cluster.degrees import shapes
from lamina.cluster.pool import CPU, LOCAL
from lamina.cluster.refusals import refusals
from lamina.config.engine_config import EngineConfig
from lamina.core.errors import ConfigError
from lamina.core.types import Partition
from lamina.engine.scaling import Windows
from tests.simulation.model import LAYERS
from tests.simulation.themes import Theme, theme

LONGEST = 160  # tokens of a request


@dataclass(frozen=True)
class Pace:
    """How long processes take, in seconds of simulated time.

    Attributes:
        start_s: For a process to start.
        slice_s: For a slice, and for each of its rows a hundredth of that.
    """

    start_s: float = 0.5
    slice_s: float = 2e-3


KNOBS: Mapping[tuple[str, str], Sequence[float]] = {
    ("lamina.memory.device.windows", "FEWEST"): [1, 1, 48, 1024],
    ("lamina.schedule.moves", "TOKENS_PER_STEP"): [1, 16, 256],
    ("lamina.schedule.balancing", "LOOK_STEPS"): [2, 32],
    ("lamina.schedule.balancing", "BACK_STEPS"): [4, 256],
    ("lamina.kv.balancing", "LEAST"): [4, 64],
    ("lamina.kv.prefix_tree", "GRAIN"): [1, 8, 64],
    ("lamina.schedule.growth", "CHEAP"): [0, 0, 32],
    ("lamina.schedule.recipients", "RELEASE_S"): [0.05, 1.0],
    ("lamina.schedule.batches", "SMALLEST"): [4, 64],
    ("lamina.memory.device.windows", "SPARE"): [8, 8, 1_000_000],
    ("lamina.schedule.moves", "MOST_TOKENS"): [8, 256],
    ("lamina.schedule.admission", "PAUSE"): [2, 32],
    ("lamina.schedule.admission", "PATIENCE"): [4, 256],
    ("lamina.schedule.admission", "MOST_SKIPPED"): [1, 32],
    ("lamina.kv.prefix_cache", "SHORTEST"): [2, 16],
    ("lamina.cluster.slabs", "LEAST_GAIN"): [0.0, 1.2],  # else no layer drops tokens if prefixes are cached
}
"""Constants of the product that make a branch rare with small clusters and short requests, and values to choose from
instead. None of them may change a token."""


@dataclass(frozen=True)
class Layout:
    """The cluster of a run.

    Attributes:
        computes: Number of compute workers, those for prompts alone included.
        memories: Number of memory workers.
        local: Whether compute workers hold KV.
        config: Settings of the engine.
        jitter: How much longer messages take than on a quiet network, by plane, as ``Network.jitter``.
        pace: How long processes take, as ``Pace``.
        knobs: Values of constants of the product and of the model, by module and name.
        frontends: Number of processes through which clients send requests; 0: they are in the engine's process.
        one_way: Whether replicas attend for each other as those of several GPUs do (``Pipeline.one_way``).
    """

    computes: int
    memories: int
    local: bool
    config: EngineConfig
    jitter: Mapping[str, float]
    pace: Pace
    knobs: Mapping[tuple[str, str], object]
    frontends: int = 0
    one_way: bool = False


def layout(seed: int) -> Layout:
    """Return the cluster that a seed has."""
    chance, themed = random.Random(f"layout {seed}"), theme(seed)
    while True:
        try:
            made = _themed(_layout(chance), themed)
            if made.memories < themed.memories:
                continue
        except ConfigError:
            continue
        if _is_allowed(made) and not (made.local and made.config.pipeline_parallel > 1):  # that is a variant
            break
    frontends = random.Random(f"frontends {seed}").choice([0, 1, 2])
    made = dataclasses.replace(made, frontends=frontends)
    for name, variant in VARIANTS.items():
        varied = random.Random(f"{name} {seed}")
        if varied.random() < variant.share and _is_allowed(other := variant.change(made, varied)):
            made = other
    return made


def _is_allowed(made: Layout) -> bool:
    pools = [CPU] * made.computes, [LOCAL] * made.local + [CPU] * made.memories
    return next(refusals(made.config, *pools), None) is None


def _loongserve(made: Layout, chance: random.Random) -> Layout:
    """Return a cluster with a policy that moves requests between lanes."""
    return dataclasses.replace(made, config=dataclasses.replace(made.config, policy="loongserve", slo_ttft_ms=None))


def _one_way(made: Layout, chance: random.Random) -> Layout:
    """Return a cluster of replicas of two ranks: some only run prompts, and the others hold all KV."""
    prefill, decode = chance.choice([1, 1, 2]), chance.choice([1, 2, 2])
    lanes, stages = chance.choice([1, 1, 2]), chance.choice([1, 1, 2])
    prefills, decodes = (2 * stages * each for each in (prefill, decode))
    config = dataclasses.replace(
        made.config,
        compute=f"{CPU}:{decodes}",
        prefill=f"{CPU}:{prefills}",
        tensor_parallel=2,
        pipeline_parallel=stages,
        memory=LOCAL,
        kv_tokens_per_worker=None,
        kv_overcommit=1.0,
        kv_spill_dir=None,
        partition="auto",
        balance="auto",
        lanes=(prefill + decode) * stages * lanes,
    )
    jitter = _calmer(made) if stages > 1 else made.jitter
    return dataclasses.replace(
        made, computes=prefills + decodes, memories=0, local=True, config=config, jitter=jitter, one_way=True
    )


def _instances(made: Layout, chance: random.Random) -> Layout:
    """Return a cluster of replicas that hold all KV and lend each other memory, one of which may only run prompts."""
    replicas, prefill = chance.choice([2, 2, 3]), chance.choice([0, 0, 1])
    config = dataclasses.replace(
        made.config,
        compute=f"{CPU}:{replicas}",
        prefill=f"{CPU}:{prefill}" if prefill else None,
        tensor_parallel=1,
        pipeline_parallel=1,
        memory=LOCAL,
        kv_overcommit=1.0,
        kv_spill_dir=None,
        partition="auto",
        pipelining="fixed",
        prompt_attention=chance.choice(["auto", "compute"]) if prefill else "memory",
        balance=chance.choice(["auto", "throughput", "ledger"]),
        lanes=(replicas + prefill) * chance.choice([1, 2]),
    )
    return dataclasses.replace(made, computes=replicas + prefill, memories=0, local=True, config=config, one_way=False)


def _staged(made: Layout, chance: random.Random) -> Layout:
    """Return a cluster whose stages each hold the KV of their own layers, and attend for the same stage of other
    replicas. One replica may only run prompts. The last of many stages has no layer's attention."""
    ranks, stages, replicas = chance.choice([1, 1, 2]), chance.choice([2, 2, LAYERS, LAYERS + 1]), chance.choice([1, 2])
    memories, lanes, more = chance.choice([0, 0, 1]), chance.choice([1, 2]), chance.choice([0, 1])
    prefill = chance.choice([0, 0, 1])
    computes, prefills = replicas * ranks * stages, prefill * ranks * stages
    config = dataclasses.replace(
        made.config,
        compute=f"{CPU}:{computes}",
        prefill=f"{CPU}:{prefills}" if prefill else None,
        tensor_parallel=ranks,
        pipeline_parallel=stages,
        memory=f"{LOCAL},{CPU}:{memories}" if memories else LOCAL,
        kv_overcommit=1.0,
        kv_spill_dir=None,
        partition="auto",
        balance="auto",
        pipelining="fixed",
        prompt_attention=made.config.prompt_attention if memories or prefill else "memory",
        lanes=(replicas + prefill) * stages * lanes + more,
    )
    return dataclasses.replace(
        made,
        computes=computes + prefills,
        memories=memories,
        local=True,
        config=config,
        jitter=_calmer(made),
        one_way=False,
    )


def _calmer(made: Layout) -> dict[str, float]:
    """Return the jitter of a cluster of stages, whose steps pass many messages in turn."""
    return {plane: min(each, 20.0) for plane, each in made.jitter.items()}


def _dividing(made: Layout, chance: random.Random) -> Layout:
    """Return a cluster of replicas with room for others that divide long prompts, several of which run at once."""
    made, replicas = _instances(made, chance), chance.choice([3, 4, 5])
    config = dataclasses.replace(
        made.config,
        compute=f"{CPU}:{replicas}",
        prefill=None,
        prompt_attention="memory",
        kv_tokens_per_worker=None,
        max_num_batched_tokens=max(made.config.max_num_seqs, 16),
        lanes=replicas * chance.choice([1, 1, 2]),
    )
    knobs = {**made.knobs, ("lamina.schedule.admission", "LEAST_SEGMENT"): chance.choice([1, 4, 16])}
    return dataclasses.replace(made, computes=replicas, config=config, knobs=knobs)


def _apart(made: Layout, chance: random.Random) -> Layout:
    """Return a cluster whose prompts run apart, attend to scratch memory, and need many steps."""
    prefill, decode = chance.choice([1, 1, 2]), chance.choice([1, 1, 2])
    config = dataclasses.replace(
        made.config,
        compute=f"{CPU}:{decode}",
        prefill=f"{CPU}:{prefill}",
        tensor_parallel=1,
        pipeline_parallel=1,
        pipelining="fixed",
        prompt_attention="compute",
        max_num_batched_tokens=max(made.config.max_num_seqs, 16),
        lanes=(prefill + decode) * chance.choice([1, 2]),
    )
    return dataclasses.replace(made, computes=prefill + decode, config=config, one_way=False)


def _lent_degrees(made: Layout, chance: random.Random) -> Layout:
    """Return a cluster whose replicas of different ranks or stages hold KV, and attend for each other."""
    made, memories, one_way = _degrees(made, chance), chance.choice([0, 0, 1]), chance.random() < 0.2
    memories = 0 if one_way else memories
    config = dataclasses.replace(
        made.config,
        memory=f"{LOCAL},{CPU}:{memories}" if memories else LOCAL,
        kv_overcommit=1.0,
        kv_spill_dir=None,
        kv_tokens_per_worker=None if one_way else made.config.kv_tokens_per_worker,
        partition="auto" if one_way else chance.choice(["auto", "auto", "token"]),
        balance="auto" if one_way else chance.choice(["auto", "throughput", "ledger"]),
    )
    return dataclasses.replace(made, memories=memories, local=True, config=config, one_way=one_way)


def _degrees(made: Layout, chance: random.Random) -> Layout:
    """Return a cluster whose replicas for prompts have other ranks or stages than those that decode."""
    shapes = [(ranks, stages) for ranks in (1, 2) for stages in (1, 2, LAYERS)]
    (early, late), prefill, decode = chance.sample(shapes, 2), chance.choice([1, 1, 2]), chance.choice([1, 1, 2])
    prefills, computes = prefill * early[0] * early[1], decode * late[0] * late[1]
    memories = max(1, made.memories)
    config = dataclasses.replace(
        made.config,
        compute=f"{CPU}:{computes}/tp{late[0]}/pp{late[1]}",
        prefill=f"{CPU}:{prefills}/tp{early[0]}/pp{early[1]}",
        memory=f"{CPU}:{memories}",
        pipelining="fixed",
        lanes=(prefill + decode) * max(early[1], late[1]) * chance.choice([1, 2]),
    )
    return dataclasses.replace(
        made,
        computes=prefills + computes,
        memories=memories,
        local=False,
        config=config,
        jitter=_calmer(made),
        one_way=False,
    )


USERS_OF_BLOCKS = "core.steps", "kv.disk", "memory.disk_tier", "memory.holdings"


def _spilled(made: Layout, chance: random.Random) -> Layout:
    """Return a cluster with disks, to which short blocks are copied early."""
    config = dataclasses.replace(
        made.config,
        kv_overcommit=3.0,
        kv_spill_dir="disk",
        prefix_cache=True,
        kv_cache_memory_bytes=chance.choice([70_000, 100_000, 150_000]),  # so that prefixes are evicted
    )
    block = chance.choice([4, 8, 16])
    short = {(f"lamina.{module}", "BLOCK"): block for module in USERS_OF_BLOCKS}
    knobs = {**made.knobs, **short, ("lamina.kv.disk", "FULL"): chance.choice([0.0, 0.3])}
    return dataclasses.replace(made, config=config, knobs=knobs)


def _coded(made: Layout, chance: random.Random) -> Layout:
    """Return a cluster whose KV has int8 codes, which are exact for this model's values."""
    kept = (made.config.kv_cache_memory_bytes or 0) * 3 // 8
    config = dataclasses.replace(made.config, kv_cache_dtype="int8", kv_cache_memory_bytes=kept)
    exact = {("tests.simulation.model", "VALUES"): 128, ("tests.simulation.model", "PEAK"): 127}
    return dataclasses.replace(made, config=config, knobs={**made.knobs, **exact})


def _scaled(made: Layout, chance: random.Random) -> Layout:
    """Return a cluster whose pools grow and shrink by load, soon and often."""
    each = shapes(made.config)[1].workers
    chosen = chance.sample(["memory=1:3", f"compute={each}:{3 * each}"], chance.choice([1, 1, 2]))
    windows = dict.fromkeys(("compute", "memory"), Windows(0.5, chance.choice([1, 5])))
    config = dataclasses.replace(made.config, autoscale=",".join(chosen))
    return dataclasses.replace(made, config=config, knobs={**made.knobs, ("lamina.engine.scaling", "WINDOWS"): windows})


def _balanced(made: Layout, chance: random.Random) -> Layout:
    """Return a cluster whose replicas change their role by targets, soon and often."""
    workers, replicas = made.config.tensor_parallel * made.config.pipeline_parallel, chance.choice([3, 4])
    config = dataclasses.replace(
        made.config,
        compute=f"{CPU}:{(replicas - 1) * workers}",
        prefill=f"{CPU}:{workers}",
        autoscale=f"prefill={workers}:{chance.choice([2, 3]) * workers}",
        slo_ttft_ms=chance.choice([2, 20, 200]),
        slo_tbt_ms=chance.choice([10, 50, 200]),
        pipelining="fixed",
        lanes=replicas * made.config.pipeline_parallel * chance.choice([1, 2]),
    )
    knobs = {**made.knobs, ("lamina.schedule.roles", "HOLD_S"): chance.choice([0.0, 0.3, 1.0])}
    return dataclasses.replace(made, computes=replicas * workers, config=config, knobs=knobs)


@dataclass(frozen=True)
class Variant:
    """A change of the cluster that a seed would have.

    Attributes:
        share: Share of the seeds that have it, unless the runtime refuses it.
        change: Returns the changed cluster.
    """

    share: float
    change: Callable[[Layout, random.Random], Layout]


VARIANTS: Mapping[str, Variant] = {
    "policy": Variant(0.15, _loongserve),
    "one way": Variant(0.05, _one_way),
    "instances": Variant(0.1, _instances),
    "staged": Variant(0.1, _staged),
    "dividing": Variant(0.05, _dividing),
    "apart": Variant(0.1, _apart),
    "disks": Variant(0.15, _spilled),
    "int8": Variant(0.15, _coded),
    "autoscale": Variant(0.1, _scaled),
    "roles": Variant(0.1, _balanced),
    "degrees": Variant(0.1, _degrees),
    "lent degrees": Variant(0.1, _lent_degrees),
}
"""By name: what few other choices bring about. Each draws by itself, so that a new one changes no other seed."""


def _themed(made: Layout, themed: Theme) -> Layout:
    """Return a cluster with what its theme has."""
    settings = dict(themed.settings)
    if "max_num_batched_tokens" in settings:
        settings["max_num_batched_tokens"] = max(settings["max_num_batched_tokens"], made.config.max_num_seqs)
    config = dataclasses.replace(made.config, **settings)
    return dataclasses.replace(made, config=config, knobs={**made.knobs, **themed.knobs})


def _layout(chance: random.Random) -> Layout:
    """Return a cluster, which the runtime may refuse."""
    ranks, stages = chance.choice([1, 1, 1, 1, 1, 2]), chance.choice([1, 1, 1, 1, 1, 2, LAYERS])
    replicas, prefill = chance.choice([1, 1, 2, 3]), chance.choice([0, 0, 0, 1])
    memories, local = chance.choice([1, 2, 2, 3, 3]), chance.random() < 0.3
    if local:
        memories -= 1
    computes, units = (replicas + prefill) * ranks * stages, (replicas + prefill) * stages
    partition: Partition = chance.choice(["auto", "auto", "token", "request", "head", "head"])
    longest = None if partition == "request" else chance.choice([None, None, 40])
    sequences = chance.choice([2, 4, 4, 8])
    spills = chance.random() < 0.3
    pools = [LOCAL] * local + [f"{CPU}:{memories}"] * (memories > 0)
    config = EngineConfig(
        compute=f"{CPU}:{replicas * ranks * stages}",
        prefill=f"{CPU}:{prefill * ranks * stages}" if prefill else None,
        tensor_parallel=ranks,
        pipeline_parallel=stages,
        memory=",".join(pools),
        transport="tcp",
        threads=1,
        kv_cache_memory_bytes=chance.choice([70_000, 150_000, 250_000, 500_000]),
        kv_tokens_per_worker=longest,
        kv_overcommit=3.0 if spills else 1.0,
        kv_spill_dir="disk" if spills else None,
        max_num_seqs=sequences,
        max_num_batched_tokens=chance.choice([sequences, 16, 32, 64]),
        max_model_len=LONGEST,
        partition=partition,
        lanes=units * chance.choice([1, 1, 2]) + chance.choice([0, 0, 1]),
        pipelining=chance.choice(["fixed", "auto"]),
        policy=chance.choice(["fifo", "fifo", "shortest", "priority", "slo"]),
        slo_ttft_ms=chance.choice([200, 2000]),
        slo_tbt_ms=chance.choice([None, None, 30]),
        prefix_cache=chance.choice([True, True, False]),
        plan_ahead=chance.choice([True, True, False]),
        balance=chance.choice(["auto", "auto", "bandwidth", "throughput", "ledger"]),
        max_restarts=1000,
        generation_config="none",
    )
    jitter = {plane: chance.choice([1.0, 1.0, 20.0, 400.0]) for plane in ("control", "data", "fetch")}
    pace = Pace(chance.choice([0.02, 0.5]), chance.choice([5e-4, 2e-3, 2e-3, 1e-2]))
    knobs = {place: chance.choice(values) for place, values in KNOBS.items()}
    config = dataclasses.replace(config, prompt_attention=chance.choice(["memory", "auto", "compute", "compute"]))
    if config.policy != "slo":
        config = dataclasses.replace(config, slo_ttft_ms=None)
    return Layout(computes, memories, local, config, jitter, pace, knobs)
