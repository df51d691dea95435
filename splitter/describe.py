"""Describes a split model, its kinds of slices and the bytes per token at every cut, as JSON and as an SVG drawing.

Only distinct slices are drawn. Colours follow the reader's light or dark theme.
"""

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any
from xml.sax.saxutils import escape

from lamina.core.types import AttentionSpec
from lamina.splitter.split_model import Cut, Slice, SplitModel

_MARGIN, _LINE = 24, 18
_SLICE_X, _SLICE_WIDTH = _MARGIN, 330
_ATTENTION_X, _ATTENTION_WIDTH = 560, 300
_WIDTH = _ATTENTION_X + _ATTENTION_WIDTH + _MARGIN
_MOST_KINDS = 8

_STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1f2328 }
  .title { font-weight: 600 } .quiet { font-size: 12px; fill: #59636e }
  .back { fill: #ffffff } .slice { fill: #ddf4ff; stroke: #818b98 } .attention { fill: #fff1e5; stroke: #818b98 }
  .arrow { stroke: #818b98; stroke-width: 1.5; fill: none; marker-end: url(#head) } .head { fill: #818b98 }
  .divider { stroke: #818b98; stroke-dasharray: 4 4 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .quiet { fill: #9198a1 }
    .back { fill: #0d1117 } .slice { fill: #0c2d4d } .attention { fill: #4a2a10 }
  }
"""


@dataclass(frozen=True)
class End:
    """The attention after a slice, and the cut to the next slice."""

    attention: AttentionSpec
    cut: Cut


@dataclass(frozen=True)
class Kind:
    """Slices with equal graphs and equal attentions. ``end`` belongs to the first of them; None: the last slice."""

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
    """Bytes sent per token at one attention, or at all of them."""

    q: int
    kv: int
    out: int
    context: int

    def __add__(self, other: "TokenTraffic") -> "TokenTraffic":
        pairs = zip(asdict(self).values(), asdict(other).values(), strict=True)
        return TokenTraffic(*(mine + theirs for mine, theirs in pairs))


def traffic(model: SplitModel, index: int) -> TokenTraffic:
    """Return the bytes per token at attention ``index``."""
    spec = model.attentions[index]
    return TokenTraffic(
        q=spec.query_bytes_per_token(model.dtype),
        kv=spec.kv_bytes_per_token(model.dtype),
        out=spec.query_heads * spec.v_dim * model.dtype.itemsize,
        context=model.cuts[index].bytes_per_token,
    )


def total_traffic(model: SplitModel) -> TokenTraffic:
    """Return the bytes per token at all attentions together."""
    return sum((traffic(model, spec.layer) for spec in model.attentions), TokenTraffic(0, 0, 0, 0))


def weight_bytes(model: SplitModel, part: Slice) -> int:
    """Return the bytes of the weights that a slice reads."""
    return sum(model.weights[name].nbytes for name in part.weights)


def run_order(part: Slice) -> tuple[list[str], list[str]]:
    """Return the slice's weights in the order of their first use: those used until q exists, and the others."""
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
    """Return indices as text: ``0, 2-5`` for 0, 2, 3, 4, 5."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def attention_summary(spec: AttentionSpec) -> str:
    """Return a spec as text: ``64 q heads, 8 kv heads, size 128, window 4096``."""
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
    """Return the split as JSON values, without the weights' values. Sizes are in bytes."""
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


def svg(model: SplitModel) -> str:
    shown = kinds(model)
    hidden = len(shown) - _MOST_KINDS
    if hidden > 0:
        shown = [*shown[: _MOST_KINDS - 1], shown[-1]]
    parts: list[str] = []
    top = 108
    for place, kind in enumerate(shown):
        lines = _slice_lines(kind)
        height = _LINE * (len(lines) + 1) + 18
        parts += _box("slice", _SLICE_X, top, _SLICE_WIDTH, height, _slice_title(kind), lines)
        if kind.end is not None:
            parts += _crossings(model, kind, kind.end, top, height)
        if hidden > 0 and place == _MOST_KINDS - 2:
            parts.append(_text(_ATTENTION_X, top + height + 44, f"... {hidden} more kinds of slices ...", "quiet"))
        top += height + _gap(kind)
    return "\n".join([*_head(model, top - _gap(shown[-1]) + _MARGIN), *parts, "</svg>\n"])


def _head(model: SplitModel, height: int) -> list[str]:
    total = total_traffic(model)
    border = _ATTENTION_X - 36
    summary = (
        f"{model.config.model_type}, {model.dtype.value}: {len(model.attentions)} attentions, "
        f"{len(model.slices)} slices of {len(kinds(model))} kinds"
    )
    cost = (
        f"Per token: {size(total.q + total.kv)} to memory workers, {size(total.out)} back, "
        f"{size(total.context)} between slices"
    )
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}">',
        f"<title>{escape(summary)}</title><style>{_STYLE}</style>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z" class="head"/></marker></defs>',
        f'<rect class="back" width="{_WIDTH}" height="{height}"/>',
        _text(_MARGIN, 34, summary, "title"),
        _text(_MARGIN, 54, cost, "quiet"),
        _text(_SLICE_X, 94, "Compute workers", "title"),
        _text(_ATTENTION_X, 94, "Memory workers", "title"),
        f'<line class="divider" x1="{border}" y1="80" x2="{border}" y2="{height - _MARGIN}"/>',
    ]


def _gap(kind: Kind) -> int:
    """Return the height between a slice and the next: that of the reply's arrow and one line per context tensor."""
    return 60 + 16 * (len(kind.end.cut.context) if kind.end else 0)


def _slice_title(kind: Kind) -> str:
    word = "Slice" if len(kind.indices) == 1 else "Slices"
    return f"{word} {ranges(kind.indices)}"


def _slice_lines(kind: Kind) -> list[str]:
    before_q, after_q = (_modules(names) for names in run_order(kind.slice))
    if kind.end is None:
        return before_q + after_q
    return [*before_q, "— q is complete —", *(name for name in after_q if name not in before_q)]


def _modules(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(short(name) for name in names))


def _crossings(model: SplitModel, kind: Kind, end: End, top: int, height: int) -> list[str]:
    """Return the attention beside the gap after a slice, and arrows: q, k, v there, the result back, context down."""
    cost = traffic(model, kind.slice.index)
    edge, bottom = _SLICE_X + _SLICE_WIDTH, top + height
    middle = (edge + _ATTENTION_X) // 2 - 18
    lines = attention_summary(end.attention).split(", ")
    lines = [", ".join(lines[:2]), ", ".join(lines[2:])]
    box_top, down = bottom - 66, _SLICE_X + 40
    context = [f"{crossing.name.removeprefix('model.')} {list(crossing.shape)}" for crossing in end.cut.context]
    title = f"Attention{'s' if len(kind.indices) > 1 else ''} {ranges(kind.indices)}"
    return [
        *_box("attention", _ATTENTION_X, box_top, _ATTENTION_WIDTH, 72, title, lines),
        f'<path class="arrow" d="M{edge} {bottom - 50}H{_ATTENTION_X}"/>',
        _text(middle, bottom - 55, f"q {size(cost.q)}", "quiet", "middle"),
        f'<path class="arrow" d="M{edge} {bottom - 20}H{_ATTENTION_X}"/>',
        _text(middle, bottom - 25, f"k, v {size(cost.kv)}", "quiet", "middle"),
        f'<path class="arrow" d="M{_ATTENTION_X + 40} {bottom + 6}V{bottom + 26}H{edge - 20}V{bottom + _gap(kind)}"/>',
        _text(middle, bottom + 21, f"out {size(cost.out)}", "quiet", "middle"),
        f'<path class="arrow" d="M{down} {bottom}V{bottom + _gap(kind)}"/>',
        _text(down + 10, bottom + 44, f"context {size(cost.context)}", "quiet"),
        *(_text(down + 10, bottom + 60 + 16 * row, line, "quiet") for row, line in enumerate(context)),
    ]


def _box(kind: str, x: int, y: int, width: int, height: int, title: str, lines: list[str]) -> list[str]:
    return [
        f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>',
        _text(x + 12, y + 22, title, "title"),
        *(_text(x + 12, y + 22 + _LINE * (row + 1), line, "quiet") for row, line in enumerate(lines)),
    ]


def _text(x: int, y: int, text: str, style: str, anchor: str = "start") -> str:
    return f'<text class="{style}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'


def size(nbytes: int) -> str:
    """Return a number of bytes as text, such as ``1536 B``, ``16 KiB``, ``2.5 MiB``."""
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 10_000 and ((unit == "B" and value % 1024) or value < 1024):
            break
        value, unit = value / 1024, larger
    return f"{value:.4g} {unit}"
