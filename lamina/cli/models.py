"""Commands about models: `lamina models` lists those in the Hugging Face cache, `lamina split` shows how one is cut."""

import enum
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lamina.core.errors import LaminaError
from lamina.core.types import DType, DTypeName

if TYPE_CHECKING:
    from rich.table import Table

    from lamina.splitter import SplitModel


def models(as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False) -> None:
    """List the models in the Hugging Face cache, and whether each fits this machine."""
    from lamina.models.hub import cached_models
    from lamina.worker.process import free_memory

    free = free_memory()
    rows = [_model_row(name, commit, place, nbytes, free) for name, commit, place, nbytes in cached_models()]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    from rich.table import Table

    from lamina.cli.console import print_table, print_text, show_size

    if not rows:
        print_text("No models are in the Hugging Face cache. --model OWNER/NAME downloads one.\n")
        return
    table = Table(title=f"{free / 2**30:.1f} GiB of memory are free", title_justify="left", title_style="bold")
    for heading in ("model", "revision", "on disk", "weights", "KV tokens here"):
        table.add_column(heading, justify="left" if heading in ("model", "revision") else "right")
    for row in rows:
        fits = row["why_not"] or f"{row['kv_tokens']:,}"
        weights = "-" if row["weight_bytes"] is None else show_size(row["weight_bytes"])
        table.add_row(row["model"], row["revision"][:8], show_size(row["bytes"]), weights, fits)
    print_table(table)


def _model_row(name: str, commit: str, place: Path, nbytes: int, free: int) -> dict[str, Any]:
    from lamina.cli.console import show_size
    from lamina.cluster.slabs import KV_SHARE
    from lamina.models.directory import find
    from lamina.planning.plan.model_shapes import find as shape_of

    row: dict[str, Any] = {"model": name, "revision": commit, "bytes": nbytes, "weight_bytes": None, "kv_tokens": None}
    try:
        row["weight_bytes"] = weights = sum(entry.nbytes for entry in find(place).tensors.values())
        per_token = shape_of(str(place)).kv_bytes_per_token
    except LaminaError as error:
        incomplete = "neither" in str(error) or "missing" in str(error)
        return row | {"why_not": "weights are not downloaded" if incomplete else str(error).partition(";")[0]}
    left = free - weights
    if left <= 0:
        return row | {"why_not": f"needs {show_size(-left)} more"}
    return row | {"kv_tokens": int(left * KV_SHARE) // per_token, "why_not": ""}


FILE_COLUMNS = 160
"""Width of a table in a file."""


class Format(enum.Enum):
    """Output format of ``lamina split``."""

    TABLE = "table"
    JSON = "json"
    SVG = "svg"


def split(
    model: Annotated[
        Path | None,
        typer.Argument(
            help="Model directory, config.json or OWNER/NAME; weights are not needed. Default: the bundled model."
        ),
    ] = None,
    format: Annotated[Format, typer.Option(help="svg: a diagram of one period of the layers.")] = Format.TABLE,
    output: Annotated[Path | None, typer.Option(help="Write to this file instead of standard output.")] = None,
    dtype: Annotated[DTypeName, typer.Option(help="Element type; auto: that of config.json.")] = "auto",
) -> None:
    """Show how a model is cut at its attentions.

    Lists the slices, the tensors that cross each cut, and bytes per token.
    """
    from lamina.cli.console import print_table
    from lamina.config.engine_config import check_writable
    from lamina.models.directory import find_config
    from lamina.observe.progress import waiting

    if output is not None:
        check_writable("--output", output)
    place = find_config(model)  # errors come before the slow imports
    with waiting("Importing transformers and splitting the model"):
        from lamina.models.pretrained import load_config, resolve_dtype
        from lamina.splitter import split as split_model

        config = load_config(place)
        result = split_model(config, resolve_dtype(config, "auto" if dtype == "auto" else DType(dtype)))
    if format is Format.TABLE and output is None:
        print_table(_render_table(result))
        return
    if format is Format.TABLE:
        from rich.console import Console

        console = Console(width=FILE_COLUMNS, color_system=None)
        with console.capture() as capture:
            console.print(_render_table(result))
        text = capture.get()
    else:
        from lamina.splitter import describe

        text = describe.svg(result) if format is Format.SVG else json.dumps(describe.as_dict(result), indent=2)
    if output is None:
        print(text)
    else:
        output.write_text(text)


def _render_table(model: "SplitModel") -> "Table":
    """Return the split as a table: one row per group of identical slices; totals and context are in the caption."""
    from rich.table import Table

    from lamina.splitter import describe
    from lamina.splitter.describe import size

    total = describe.total_traffic(model)
    caption = [
        f"Per token, over all layers: {size(total.q + total.kv)} sent to memory workers "
        f"({size(total.kv)} stored as KV), {size(total.out)} returned, {size(total.context)} carried between slices."
    ]
    table = Table(
        title=f"{model.config.model_type}, {model.dtype.value}: {len(model.attentions)} attentions, "
        f"{len(model.slices)} slices",
        caption_justify="left",
    )
    for heading in ("slices", "weights", "linears", "heads", "q", "k, v", "out", "context"):
        table.add_column(heading, justify="left" if heading in ("slices", "heads") else "right")
    for kind in describe.kinds(model):
        slices = describe.ranges(kind.indices)
        weights = size(describe.weight_bytes(model, kind.slice))
        before_q, linears = kind.slice.linears_before_q
        if kind.end is None:
            table.add_row(slices, weights, str(linears), "logits")
            continue
        cost = describe.traffic(model, kind.slice.index)
        table.add_row(
            slices,
            weights,
            f"{linears} ({before_q} before q)",
            describe.attention_summary(kind.end.attention).replace(" heads", "").replace(", ", "\n"),
            *(size(nbytes) for nbytes in (cost.q, cost.kv, cost.out, cost.context)),
        )
        caption.append(f"Context after slice {kind.slice.index}:")
        caption += [f"  {crossing.name} {list(crossing.shape)}" for crossing in kind.end.cut.context]
    table.caption = "\n".join(caption)
    return table
