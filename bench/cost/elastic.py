"""LoongServe's elastic sequence parallelism in the cost model: the cost of changing the degree (Figure 14).

An instance is a tensor-parallel group. Prompts, and the KV of decoding sequences, are spread over ``degree`` instances.
Each instance is the master of an equal share of the sequences: it computes their slices, sends their queries to the
other instances, and merges the partials.
"""

import math
from collections.abc import Mapping
from typing import Any

from bench.cost.lamina_paper import cost_model
from bench.cost.long_context import prefill_seconds
from bench.cost.page import Section
from bench.cost.published import Comparison
from bench.cost.transfers import send_recv_seconds
from bench.pictures import axes
from lamina.planning.plan import model_shapes
from lamina.planning.plan.cost import CostModel
from lamina.planning.plan.hardware import Catalogue

PROMPTS = (1_000, 10_000, 100_000)
CONTEXT = 1_000
BATCHES = (1, 4, 16, 64, 256, 1024)
"""Prompts of a prefill, tokens of a sequence that decodes, and batches of those. The paper states none of them."""


def scaling_down(model: CostModel, prompt: int, tensor_parallel: int, degree: int, left: int = 1) -> float:
    """Return the relative slowdown of a prefill on ``degree`` instances if ``left`` of them store all of its KV.

    Keys and values pass every instance anyway; the instances that store them write more.
    """
    written = prompt * model.shape.kv_bytes_per_token / tensor_parallel / model.hardware.memory_bytes_s
    added = written * (1 / left - 1 / degree)
    return added / prefill_seconds(model, [prompt], tensor_parallel, degree)


def iteration(model: CostModel, batch: int, context: int, tensor_parallel: int, degree: int) -> float:
    """Seconds of a decode step of ``batch`` sequences of ``context`` tokens on ``degree`` instances."""
    shape = model.shape
    own = math.ceil(batch / degree)  # sequences of a master
    attention = float(model.attention_seconds(batch * context / degree, batch, 1 / tensor_parallel))
    sent = (degree - 1) * own * shape.query_heads * shape.head_size * shape.dtype.itemsize / tensor_parallel
    messages = 2 * float(send_recv_seconds(model, sent)) if degree > 1 else 0.0
    return float(model.pass_seconds(own, tensor_parallel)) + shape.layers * (attention + messages)


def scaling(published: Mapping[str, Any], catalogue: Catalogue) -> Section:
    section = Section("LoongServe, Figure 14: what scaling costs", published["paper"])
    model = cost_model(model_shapes.find(published["model"]), catalogue[published["kind"]])
    own, table = published["tensor_parallel"], published["figure_14"]
    degrees = [one for one in published["degrees"] if one > 1]
    down = [100 * scaling_down(model, prompt, own, degree) for prompt in PROMPTS for degree in degrees]
    curves = {
        degree: [iteration(model, batch, CONTEXT, own, degree) for batch in BATCHES] for degree in published["degrees"]
    }
    small, large = ([curves[1][place] / curves[degree][place] for degree in degrees] for place in (0, -1))
    which = f"{degrees[0]} to {degrees[-1]} instances"
    section.compare(
        f"{model.shape.name}, {published['kind']}, instances of tensor parallelism {own}",
        [
            Comparison(
                f"prefill on {which} whose KV stays on one, over one without scaling, less 1",
                "%",
                table["down"]["source"],
                tuple(table["down"]["percent"]),
                (min(down), max(down)),
                "Ours is the time in which one instance writes the K and V that the others would have kept.",
            ),
            Comparison(
                f"step of {BATCHES[-1]} sequences on one instance, over that on {which}",
                "times",
                table["up"]["source"],
                table["up"]["times"],
                (min(large), max(large)),
                f"The paper names neither batch nor degrees: ours is {min(large):.1f} times on {degrees[0]} instances.",
            ),
            Comparison(
                f"step of one sequence on {which}, over that on one, less 1",
                "%",
                table["up_small"]["source"],
                tuple(table["up_small"]["percent"]),
                (100 * (1 / max(small) - 1), 100 * (1 / min(small) - 1)),
                "Ours adds a message each way, by NCCL over NVLink, to every layer.",
            ),
        ],
    )
    plot, (left,) = axes()
    for degree, seconds in curves.items():
        left.plot(BATCHES, [1e3 * one for one in seconds], "-o", label=f"{degree} instance{'s' if degree > 1 else ''}")
    left.set(xscale="log", yscale="log", xlabel=f"sequences of {CONTEXT} tokens", ylabel="step (ms)")
    left.legend()
    section.figure("figure-14-loongserve", "Ours: a decode step by batch and degree.", plot)
    return section
