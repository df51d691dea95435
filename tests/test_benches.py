"""Every module of ``bench`` imports, and every program among them answers ``--help``."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OPTIONAL = {"cupy", "gguf", "llama_cpp", "openvino", "vllm"}
"""What only a machine with a GPU, or a peer's own environment, has installed."""

START = """
import contextlib, io, json, runpy, sys
outcomes = {}
for module in json.load(sys.stdin):
    sys.argv = [module, "--help"]
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_module(module, run_name="__main__")
        outcomes[module] = "imported"
    except SystemExit as end:
        outcomes[module] = f"exit {end.code}: {printed.getvalue()[:6]}"
    except ModuleNotFoundError as error:
        outcomes[module] = f"needs {error.name}"
print(json.dumps(outcomes))
"""


@pytest.mark.slow  # it imports everything
def test_every_module_starts() -> None:
    sources = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text()
        for path in (ROOT / "bench").rglob("*.py")
        if path.name != "__init__.py" and path != ROOT / "bench" / "gpu.py"
    }
    command = [sys.executable, "-W", "ignore", "-c", START]
    done = subprocess.run(
        command, input=json.dumps(list(sources)), capture_output=True, text=True, cwd=ROOT, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    allowed = {f"needs {name}" for name in OPTIONAL}
    expected = {
        module: "exit 0: usage:" if '__name__ == "__main__"' in source else "imported"
        for module, source in sources.items()
    }
    outcomes = json.loads(done.stdout.splitlines()[-1])
    assert {module: outcome for module, outcome in outcomes.items() if outcome not in allowed} == {
        module: outcome for module, outcome in expected.items() if outcomes[module] not in allowed
    }
    assert len(outcomes) > 20 and "exit 0: usage:" in outcomes.values()
