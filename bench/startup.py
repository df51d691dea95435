"""How long the command line takes to answer and the bundled model to be ready, and where that time goes.

    python bench/startup.py [--rounds 3] [--json FILE]

Targets: ``lamina --help`` within 0.4 s, the bundled model ready to generate within 4 s of the command. The stages are
those of a compute worker, which everything else waits for, one after another in a process of their own.
"""

import argparse
import json
import statistics
import subprocess
import sys
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

STAGES = {
    "import torch": "import torch",
    "import transformers": "import transformers.modeling_utils",
    "import the compute worker": "import lamina.compute.worker",
    "read the config": """
from lamina.compute.runner import SliceRunner
from lamina.models import directory, weights
from lamina.models.config import load_config, resolve_dtype
from lamina.splitter import split
place = directory.find(None)
config = load_config(place)
dtype = resolve_dtype(config, "auto")
""",
    "split": "model = split(config, dtype)",
    "load weights": "tensors = weights.load(place, sorted(model.weights), config, dtype)",
    "lower": "SliceRunner(model, tensors)",
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
    """From the command to its end."""
    start = time.perf_counter()
    subprocess.run([LAMINA, "--help"], check=True, capture_output=True, timeout=TIMEOUT_S)
    return time.perf_counter() - start


def ready_seconds() -> float:
    """From the command to the moment a prompt could be given."""
    start = time.perf_counter()
    with subprocess.Popen([sys.executable, "-c", READY], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = time.perf_counter() - start
    if line != b"ready\n":
        raise SystemExit("error: the bundled model did not start; `lamina doctor` says more")
    return seconds


def stage_seconds() -> dict[str, float]:
    """Every stage of one compute worker."""
    process = subprocess.run(
        [sys.executable, "-c", TIMED], input=json.dumps(STAGES), check=True, capture_output=True, text=True
    )
    seconds: dict[str, float] = json.loads(process.stdout)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    rounds = [
        {"lamina --help": help_seconds(), "bundled model ready": ready_seconds(), **stage_seconds()}
        for _ in range(args.rounds)
    ]
    medians = {name: statistics.median(seconds[name] for seconds in rounds) for name in rounds[0]}
    table = Table("what", "seconds", title=f"startup, median of {args.rounds}")
    for name, seconds in medians.items():
        table.add_row(name if name not in STAGES else f"  worker: {name}", f"{seconds:.2f}")
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps(medians, indent=1))


if __name__ == "__main__":
    main()
