"""Describes a split model in figures: its kinds of slices, and the bytes per token at every cut."""

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from lamina.core.types import AttentionSpec
from lamina.splitter.split_model import Cut, Slice, SplitModel


@dataclass(frozen=True)
class End:
    """What follows a slice: the attention, and the cut to the next slice."""

    attention: AttentionSpec
    cut: Cut


@dataclass(frozen=True)
class Kind:
    """Slices that share a graph and end at attentions alike; ``end`` is that of the first, None for the last slice."""

    indices: tuple[int, ...]
    slice: Slice
    end: End | None


def kinds(model: SplitModel) -> list[Kind]:
    """Return the distinct slices of a model in order of their first appearance."""
    found: dict[object, list[int]] = {}
    for part in model.slices:
        spec = None if part.last else replace(model.attentions[part.index], layer=0)
        found.setdefault((id(part.graph), spec), []).append(part.index)
    ends = [*map(End, model.attentions, model.cuts), None]
    return [Kind(tuple(indices), model.slices[indices[0]], ends[indices[0]]) for indices in found.values()]


@dataclass(frozen=True)
class TokenTraffic:
    """Bytes one token moves at one attention, or at all of them."""

    q: int
    kv: int
    out: int
    context: int

    def __add__(self, other: "TokenTraffic") -> "TokenTraffic":
        pairs = zip(asdict(self).values(), asdict(other).values(), strict=True)
        return TokenTraffic(*(mine + theirs for mine, theirs in pairs))


def traffic(model: SplitModel, index: int) -> TokenTraffic:
    """Bytes per token at attention ``index``: q, k and v to memory workers, out back, context to the next slice."""
    spec = model.attentions[index]
    return TokenTraffic(
        q=spec.query_bytes_per_token(model.dtype),
        kv=spec.kv_bytes_per_token(model.dtype),
        out=spec.query_heads * spec.v_dim * model.dtype.itemsize,
        context=model.cuts[index].bytes_per_token,
    )


def total_traffic(model: SplitModel) -> TokenTraffic:
    """Bytes per token at all attentions together."""
    return sum((traffic(model, spec.layer) for spec in model.attentions), TokenTraffic(0, 0, 0, 0))


def weight_bytes(model: SplitModel, part: Slice) -> int:
    """Bytes of the weights that a slice reads."""
    return sum(model.weights[name].nbytes for name in part.weights)


def run_order(part: Slice) -> tuple[list[str], list[str]]:
    """The slice's weights in the order they are first used: (until q exists, afterwards)."""
    graph = part.graph.graph
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    names = dict(zip(inputs, part.weights, strict=False))
    results: Any = graph.output_node().args[0]
    before_q: list[str] = []
    after_q: list[str] = []
    current = before_q
    for node in graph.nodes:
        if node.op == "call_function":
            current += [
                names[source]
                for source in node.all_input_nodes
                if source in names and names[source] not in (*before_q, *after_q)
            ]
        if node is results[0]:
            current = after_q
    return before_q, after_q


def ranges(indices: Iterable[int]) -> str:
    """``0, 2-5`` for 0, 2, 3, 4, 5."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def attention_summary(spec: AttentionSpec) -> str:
    """``64 q heads, 8 kv heads, size 128, window 4096``."""
    size = f"size {spec.qk_dim}" if spec.qk_dim == spec.v_dim else f"sizes {spec.qk_dim} and {spec.v_dim}"
    extras = [
        f"window {spec.window}" if spec.window else "",
        f"chunk {spec.chunk}" if spec.chunk else "",
        f"softcap {spec.softcap:g}" if spec.softcap else "",
        "sinks" if spec.sinks else "",
        "alibi" if spec.alibi_slopes else "",
    ]
    return ", ".join(filter(None, [f"{spec.query_heads} q heads", f"{spec.kv_heads} kv heads", size, *extras]))


def short(name: str) -> str:
    """Return a weight's module without the model's prefix: ``layers.3.mlp.up_proj``."""
    name = re.sub(r"\.(weight|bias)$", "", name)
    match = re.search(r"[a-z_]+\.\d+\..*", name)
    return match.group() if match else name.rsplit(".", 1)[-1]


def as_dict(model: SplitModel) -> dict[str, Any]:
    """Everything about a split except weights' values, as JSON values. Sizes are in bytes."""
    return {
        "model_type": model.config.model_type,
        "dtype": model.dtype.value,
        "bytes_per_token": asdict(total_traffic(model)),
        "slices": [
            {
                "index": part.index,
                "weights": list(part.weights),
                "weight_bytes": weight_bytes(model, part),
                "linears_before_q": part.linears_before_q[0],
                "linears": part.linears_before_q[1],
            }
            for part in model.slices
        ],
        "cuts": [
            {
                "index": cut.index,
                "attention": asdict(model.attentions[cut.index]),
                "sinks": model.sinks[cut.index],
                "bytes_per_token": asdict(traffic(model, cut.index)),
                "context": [
                    {
                        "name": crossing.name,
                        "shape": list(crossing.shape),
                        "dtype": str(crossing.dtype).removeprefix("torch."),
                    }
                    for crossing in cut.context
                ],
            }
            for cut in model.cuts
        ],
    }
