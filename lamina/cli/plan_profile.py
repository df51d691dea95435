"""`lamina plan --measure`: a profile of this machine for the cost model."""

from pathlib import Path

from lamina.config.engine_config import check_writable
from lamina.core.errors import ConfigError


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
