"""Measures the start: `lamina --help`, the bundled model until it is ready, and the stages of a compute worker.

    python -m bench.runtime.startup [--rounds 3] [--json FILE]

Targets: ``lamina --help`` within 0.4 s, the bundled model ready to generate within 4 s of the command, the first time
too, when it has to be split. The stages are those of a compute worker, which everything else waits for, one after
another in a process of their own, for a first and for a later start.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

LAMINA = Path(sys.executable).with_name("lamina")
TIMEOUT_S = 120

READY = """
from lamina import Lamina
with Lamina():
    print("ready", flush=True)
"""

FIRST = {
    "import torch": "from lamina.compute.late_imports import before_imports; before_imports('cpu'); import torch",
    "import transformers": """
from lamina.compute.late_imports import import_transformers
import_transformers()
""",
    "import the compute worker": "import lamina.compute.worker",
    "split and lower": """
from lamina.compute.split_cache import prepare
from lamina.compute.device.cpu import SliceRunner
from lamina.models import directory, tensors
place = directory.find(None)
prepared = prepare(place, None, lambda: None)
""",
    "load weights": "loaded = tensors.load(place, prepared.lowered.weights, prepared.weights)",
    "pack weights": "SliceRunner(prepared.lowered, loaded)",
}
LATER = {
    stage.replace("split and lower", "recall the split model"): code
    for stage, code in FIRST.items()
    if stage != "import transformers"
}
TIMED = """
import json, sys, time
seconds = {}
for stage, code in json.load(sys.stdin).items():
    start = time.perf_counter()
    exec(code)
    seconds[stage] = time.perf_counter() - start
print(json.dumps(seconds))
"""


def help_seconds() -> float:
    start = time.perf_counter()
    subprocess.run([LAMINA, "--help"], check=True, capture_output=True, timeout=TIMEOUT_S)
    return time.perf_counter() - start


def ready_seconds(cache: str) -> float:
    """Return seconds from the command until a prompt could be given, with the cache folder ``cache``."""
    start = time.perf_counter()
    environment = os.environ | {"LAMINA_CACHE_DIR": cache}
    with subprocess.Popen([sys.executable, "-c", READY], stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = time.perf_counter() - start
    if line != b"ready\n":
        raise SystemExit("error: the bundled model did not start; `lamina doctor` says more")
    return seconds


def stage_seconds(stages: dict[str, str], cache: str) -> dict[str, float]:
    process = subprocess.run(
        [sys.executable, "-c", TIMED],
        input=json.dumps(stages),
        env=os.environ | {"LAMINA_CACHE_DIR": cache},
        check=True,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    seconds: dict[str, float] = json.loads(process.stdout)
    return seconds


def one_round() -> dict[str, float]:
    seconds = {"lamina --help": help_seconds()}
    with (
        tempfile.TemporaryDirectory() as whole,
        tempfile.TemporaryDirectory() as staged,
    ):  # empty before the first start
        for start, stages in (("first", FIRST), ("later", LATER)):
            seconds[f"{start} start: bundled model ready"] = ready_seconds(whole)
            found = stage_seconds(stages, staged)
            seconds |= {f"{start} start, worker: {stage}": value for stage, value in found.items()}
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    rounds = [one_round() for _ in range(args.rounds)]
    medians = {name: statistics.median(seconds[name] for seconds in rounds) for name in rounds[0]}
    table = Table("what", "seconds", title=f"startup, median of {args.rounds}")
    for name, seconds in medians.items():
        table.add_row(name, f"{seconds:.2f}")
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps(medians, indent=1))


if __name__ == "__main__":
    main()
