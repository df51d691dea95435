"""`lamina models`: lists the models in the Hugging Face cache, and whether each fits this machine."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from lamina.core.errors import LaminaError


def models(as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False) -> None:
    """List the models in the Hugging Face cache, and whether each fits this machine."""
    from lamina.models.hub import cached_models
    from lamina.worker.process import free_memory

    free = free_memory()
    rows = [_describe(name, commit, place, nbytes, free) for name, commit, place, nbytes in cached_models()]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    from rich.table import Table

    from lamina.cli.console import print_table, print_text

    if not rows:
        print_text("No models are in the Hugging Face cache. --model OWNER/NAME downloads one.\n")
        return
    table = Table(title=f"{free / 2**30:.1f} GiB of memory are free", title_justify="left", title_style="bold")
    for heading in ("model", "revision", "on disk", "weights", "KV tokens here"):
        table.add_column(heading, justify="left" if heading in ("model", "revision") else "right")
    for row in rows:
        fits = row["why_not"] or f"{row['kv_tokens']:,}"
        weights = "-" if row["weight_bytes"] is None else _size(row["weight_bytes"])
        table.add_row(row["model"], row["revision"][:8], _size(row["bytes"]), weights, fits)
    print_table(table)


def _describe(name: str, commit: str, place: Path, nbytes: int, free: int) -> dict[str, Any]:
    """Return one row: what the model takes, how many tokens of KV memory workers hold beside it, or why it does not
    run."""
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
        return row | {"why_not": f"needs {_size(-left)} more"}
    return row | {"kv_tokens": int(left * KV_SHARE) // per_token, "why_not": ""}


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"
