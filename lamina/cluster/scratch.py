"""Sets up the scratch memory of compute workers, in which prompts keep K and V while they run."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping

import msgspec

from lamina.cluster.conversations import LOAD_TIMEOUT_S, Ask, Conversation
from lamina.cluster.pool import CUDA
from lamina.cluster.sizing import ClusterPlan, boot_id
from lamina.control.messages import Hello, Inspect, MemorySetup, ModelLoaded, Reserve, Resources, SlabReady
from lamina.control.sockets import ControlServer
from lamina.core.errors import ConfigError
from lamina.core.types import KvElement, Overlap
from lamina.dataplane.leases import slot_rows
from lamina.schedule.turn import DEPTH

PROMPTS = 2  # scratch memory has room for this many of the longest prompts: a step has at most two unfinished ones
SHARE = 0.1  # share of free memory for the scratch memory of all compute workers there, if slabs are there too
GPU_SHARE = 0.5  # share of the free memory of a GPU without slabs


def make_scratch(
    control: ControlServer,
    plan: ClusterPlan,
    loaded: ModelLoaded,
    greetings: Mapping[str, Hello],
    holders: Iterable[Hello],
    taken: Callable[[Hello], int],
) -> Conversation[dict[str, int]]:
    """Have compute workers that have loaded the model allocate their scratch memory.

    Args:
        greetings: First message of each of these workers; empty if the cluster has no scratch memory.
        holders: First messages of the workers with slabs.
        taken: Returns the bytes that slabs will take of the free memory where a worker runs.

    Returns:
        By worker, the tokens that its scratch memory holds.

    Raises ConfigError.
    """
    if not greetings:
        return {}
    names, setup = list(greetings), _setup(plan, loaded)
    limits, lanes = plan.limits, plan.pipeline.lanes
    rows = slot_rows(limits.max_num_batched_tokens, 1)
    control.send(names, Reserve(setup, limits.max_num_batched_tokens, limits.max_sequences, DEPTH * lanes, rows, lanes))
    control.send(names, Inspect())
    found: dict[str, Resources] = yield Ask(Resources, names, LOAD_TIMEOUT_S)
    places = {name: memory_place(hello) for name, hello in greetings.items()}
    nbytes = scratch_bytes(
        plan, found, places, {memory_place(one) for one in holders}, {n: taken(greetings[n]) for n in names}
    )
    tokens = scratch_tokens(plan, loaded, nbytes)
    for name in names:
        threads = plan.threads("compute", greetings[name])
        control.send([name], msgspec.structs.replace(setup, capacity=max(1, tokens[name]), threads=threads))
    yield Ask(SlabReady, names, LOAD_TIMEOUT_S)
    return tokens


def kv_wanted(plan: ClusterPlan, holders: Iterable[Hello]) -> Callable[[Hello], int]:
    """Return a function for ``taken`` of ``make_scratch`` before there are slabs: the bytes that the settings ask for.

    Without ``kv_cache_memory_bytes``, slabs take a share of what scratch memory leaves.
    """
    each, workers = plan.config.kv_cache_memory_bytes or 0, Counter(memory_place(one) for one in holders)
    return lambda hello: each * workers[memory_place(hello)]


Place = tuple[str, str]
"""Memory that workers share: the machine, and the name of one of its GPUs, "" for the host's memory."""


def memory_place(hello: Hello) -> Place:
    """Return the memory that a worker uses."""
    return boot_id(hello.host), hello.device if hello.device.startswith(CUDA) else ""


def untouched_bytes(
    plan: ClusterPlan, loaded: ModelLoaded, tokens: Mapping[str, int], greetings: Mapping[str, Hello]
) -> Counter[str]:
    """Return, by host, the bytes of scratch memory that still count as free: on CPUs, until prompts use it.

    ``tokens``: By worker, how many tokens its scratch memory holds.
    """
    token, found = _token_nbytes(plan, loaded), Counter[str]()
    for name, count in tokens.items():
        if not memory_place(greetings[name])[1]:
            found[greetings[name].host] += count * token
    return found


def _setup(plan: ClusterPlan, loaded: ModelLoaded) -> MemorySetup:
    """Return the setup of scratch memory. Each worker replaces the attentions by those of its stage and rank."""
    return msgspec.structs.replace(
        plan.memory_setup(loaded, shards=1),
        capacity=PROMPTS * plan.limits.max_model_len,
        overlap=Overlap(),
        overcommit=1.0,
        ranks=1,
        forgets=False,
        polling="host",
    )


def scratch_bytes(
    plan: ClusterPlan,
    found: Mapping[str, Resources],
    places: Mapping[str, Place],
    holders: Collection[Place],
    taken: Mapping[str, int],
) -> dict[str, int]:
    """Return the bytes of each worker's scratch memory. Workers at one place share what is free there.

    Args:
        plan: The cluster's plan.
        found: Free memory, by worker.
        places: Where each worker runs.
        holders: Where workers with slabs run.
        taken: By worker, bytes of free memory that these slabs will take.
    """
    workers, nbytes = Counter(places.values()), {}
    for name, each in found.items():
        free = each.free_bytes
        if each.gpu_total:
            free = max(0, each.gpu_bytes - int(each.gpu_total * (1 - plan.config.gpu_memory_utilization)))
        share = GPU_SHARE if each.gpu_total and places[name] not in holders else SHARE
        nbytes[name] = int(max(0.0, min(share * free, free - taken[name]))) // workers[places[name]]
    return nbytes


def scratch_tokens(plan: ClusterPlan, loaded: ModelLoaded, nbytes: Mapping[str, int]) -> dict[str, int]:
    """Return how many tokens the scratch memory of each worker is to hold, given its bytes.

    Raises ConfigError if the settings ask for scratch memory and a worker has no room for the chunk of one step.
    """
    token, limits = _token_nbytes(plan, loaded), plan.limits
    least = min(limits.max_num_batched_tokens, limits.max_model_len)
    for name, own in nbytes.items():
        if plan.config.prompt_attention == "compute" and own < least * token:
            raise ConfigError(
                f"prompt_attention compute: {name} has {own} bytes for copies of prompts' KV, and one step's {least} "
                f"tokens need {least * token}. The copies get a part of the memory that is free beside the weights, "
                "and only what kv_cache_memory_bytes leaves of it. Lower kv_cache_memory_bytes or "
                "max_num_batched_tokens, or leave out prompt_attention"
            )
    return {name: min(PROMPTS * limits.max_model_len, own // token) for name, own in nbytes.items()}


def _token_nbytes(plan: ClusterPlan, loaded: ModelLoaded) -> int:
    """Return the bytes of one token's K and V on the rank and stage that have most of them, of any replica."""
    element = KvElement.from_setting(plan.config.kv_cache_dtype, loaded.dtype)
    most = 1
    for shape in plan.pipeline.shapes:
        starts = shape.starts or (0,)
        each = [spec.slab_bytes_per_token(element) / min(shape.ranks, spec.kv_heads) for spec in loaded.attentions]
        stops = *starts[1:], len(each)
        most = max(most, *(sum(map(math.ceil, each[start:stop])) for start, stop in zip(starts, stops, strict=True)))
    return most
