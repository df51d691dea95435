"""Sets up the scratch memory of compute workers, in which prompts keep K and V while they run."""

import math
from collections.abc import Mapping

import msgspec

from lamina.cluster.conversations import LOAD_TIMEOUT_S, Ask, Conversation
from lamina.cluster.sizing import ClusterPlan, boot_id
from lamina.control.messages import Hello, Inspect, MemorySetup, ModelLoaded, Reserve, Resources, SlabReady
from lamina.control.sockets import ControlServer
from lamina.core.types import KvElement, Overlap
from lamina.dataplane.leases import slot_rows
from lamina.schedule.turn import DEPTH

PROMPTS = 2  # of the longest, for which there is to be scratch memory: a step has at most two unfinished ones
SHARE = 0.1  # of free memory that KV needs too, for the scratch memory of all compute workers of a machine
GPU_SHARE = 0.5  # of the free memory of a GPU that holds no other KV


def make_scratch(
    control: ControlServer, plan: ClusterPlan, loaded: ModelLoaded, greetings: Mapping[str, Hello]
) -> Conversation[dict[str, int]]:
    """Have compute workers that have loaded the model allocate their scratch memory.

    ``greetings``: First message of each of these workers.

    Returns the tokens that each of them holds; empty if the cluster has no scratch memory. Raises ConfigError.
    """
    if not plan.compute_setup.scratch:
        return {}
    names, setup = list(greetings), _setup(plan, loaded)
    limits, lanes = plan.limits, plan.pipeline.lanes
    rows = slot_rows(limits.max_num_batched_tokens, 1)
    control.send(names, Reserve(setup, limits.max_num_batched_tokens, limits.max_sequences, DEPTH * lanes, rows, lanes))
    control.send(names, Inspect())
    found: dict[str, Resources] = yield Ask(Resources, names, LOAD_TIMEOUT_S)
    machines = {name: boot_id(hello.host) for name, hello in greetings.items()}
    tokens = scratch_tokens(plan, loaded, found, machines)
    for name in names:
        threads = plan.threads("compute", greetings[name])
        control.send([name], msgspec.structs.replace(setup, capacity=max(1, tokens[name]), threads=threads))
    yield Ask(SlabReady, names, LOAD_TIMEOUT_S)
    return tokens


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


def scratch_tokens(
    plan: ClusterPlan, loaded: ModelLoaded, found: Mapping[str, Resources], machines: Mapping[str, str]
) -> dict[str, int]:
    """Return how many tokens the scratch memory of each worker is to hold, given its free memory.

    ``machines``: By worker, its machine. Workers without a GPU share the machine's memory.
    """
    token, most = _token_nbytes(plan, loaded), PROMPTS * plan.limits.max_model_len
    tokens = {}
    for name, each in found.items():
        if each.gpu_total:
            spared = each.gpu_total * (1 - plan.config.gpu_memory_utilization)
            nbytes = max(0.0, each.gpu_bytes - spared) * (SHARE if plan.compute_setup.local else GPU_SHARE)
        else:
            nbytes = SHARE * each.free_bytes / sum(machine == machines[name] for machine in machines.values())
        tokens[name] = min(most, int(nbytes / token))
    return tokens


def _token_nbytes(plan: ClusterPlan, loaded: ModelLoaded) -> int:
    """Return the bytes of one token's K and V on the rank and stage that have most of them."""
    element = KvElement.from_setting(plan.config.kv_cache_dtype, loaded.dtype)
    ranks, stops = plan.pipeline.ranks, [*loaded.starts[1:], len(loaded.attentions)]
    each = [math.ceil(spec.slab_bytes_per_token(element) / min(ranks, spec.kv_heads)) for spec in loaded.attentions]
    return max(1, *(sum(each[start:stop]) for start, stop in zip(loaded.starts, stops, strict=True)))
