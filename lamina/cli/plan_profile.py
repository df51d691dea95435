"""`lamina plan --validate` and `--measure`: the cost model against measurements, and a profile of this machine."""

from pathlib import Path
from typing import TYPE_CHECKING

from lamina.config.engine_config import check_writable
from lamina.core.errors import ConfigError

if TYPE_CHECKING:
    from lamina.planning.plan.hardware import Catalogue, Hardware


def validate(file: Path, model: str | None, kind: str | None, catalogue: "Catalogue") -> None:
    """Print the cost model's errors against a CSV of measurements of ``kind``, by band. Raises ConfigError."""
    from rich.table import Table

    from lamina.cli.console import print_table
    from lamina.planning.plan import model_shapes
    from lamina.planning.plan.cost import CostModel, Fits
    from lamina.planning.profiling.validate import SHAPELESS, errors, needs_model

    if kind is None:
        raise ConfigError("--validate needs --kind KIND: the hardware that the file was measured on")
    if needs_model(file) and model is None:
        raise ConfigError("--validate of a layer's operators needs --model: the model that was measured")
    entry = catalogue[kind]
    shape = model_shapes.find(model) if needs_model(file) and model else SHAPELESS
    table = Table(
        title=f"Predicted against measured: {file.name} on {entry.kind}",
        caption="Relative errors of single measurements; bias: median with its sign, negative where predictions are "
        f"too fast. {_fitted_to(entry)}",
        caption_justify="left",
    )
    table.add_column("operator")
    table.add_column("band")
    for heading in ("measured", "median error", "95th percentile", "bias"):
        table.add_column(heading, justify="right")
    for row in errors(file, CostModel(shape, entry, Fits.load(entry))):
        table.add_row(
            row.operator,
            row.band,
            str(row.count),
            f"{row.median:.1%}",
            f"{row.p95:.1%}",
            f"{row.bias:+.1%}",
            style="bold" if row.is_total else None,
            end_section=row.is_total,
        )
    print_table(table)


def _fitted_to(entry: "Hardware") -> str:
    """What the predictions for a kind were fitted to."""
    from lamina.planning.plan.fit_store import packaged_fit

    names = ("gemm", "decode", "prefill", "pcie" if entry.link.startswith("PCIe") else "nvlink")
    sources = dict.fromkeys(packaged_fit(name, entry.like or entry.kind).source for name in names)
    return f"Fitted to {', '.join(sources)}."


def measure(file: Path) -> None:
    """Measure this machine, write kind cpu to ``file`` and a profile beside it, and say if others disturbed it.

    Raises:
        ConfigError: a file exists already or cannot be written. LaminaError: the runtime failed.
    """
    from lamina.cli.console import print_text
    from lamina.observe.progress import waiting
    from lamina.planning.plan import hardware
    from lamina.planning.plan.fit_store import ProfileStore
    from lamina.planning.profiling import measure as machine
    from lamina.planning.profiling import profile
    from lamina.planning.profiling.measure import Watch

    store = ProfileStore(file.with_suffix(".sqlite"))
    if store.file == file:
        raise ConfigError(f"--measure is {file}, where its profile would be written; give a name that ends in .toml")
    for existing in (file, store.file):
        if existing.exists():
            raise ConfigError(f"{existing} already exists; remove it, or give --measure another file")
    check_writable("--measure", file)
    if (before := Watch.sample()).disturbed:
        print_text(
            f"Warning: {before}; times measured now will be too long. Wait until the machine is idle.\n", style="yellow"
        )
    watch = Watch()
    compute, _ = profile.halves()
    with waiting("Measuring the peaks of this machine"), profile.on_cores(compute):
        values = machine.entry()
    file.write_text(machine.as_toml(values))
    with waiting("Measuring slices, attention and the runtime, about a minute"):
        profile.measure("cpu", store)
    entry = hardware.load(file)["cpu"]
    rates = ", ".join(f"{flops / 1e9:.0f} GFLOP/s {dtype.value}" for dtype, flops in entry.flops.items())
    print_text(f"{entry.device}: {entry.memory_bytes_s / 1e9:.1f} GB/s, {rates}\n")
    if (disturbance := watch.so_far()).disturbed:
        print_text(
            f"Warning: {disturbance} meanwhile, so all figures are too slow by an unknown factor. Remove {file} and "
            f"{store.file}, and repeat this on an idle machine.\n",
            style="yellow",
        )
    print_text(
        f"To plan with it: lamina plan --model NAME --hardware {file} --compute cpu:1 --memory cpu:1 "
        "--prices FILE\n(FILE has what an hour of it costs you: [kinds.cpu] with usd_per_hour, source and date.)\n"
    )
