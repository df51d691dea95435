"""The pinned versions fit together on every Python that is supported, with both builds of torch.

Resolved from packages' metadata alone; what uv has once read stays in its cache.
"""

import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
RESOLVE_S = 100.0
NOT_REACHED = ("error sending request", "Failed to fetch", "dns error", "operation timed out")


def resolve(python: str, *options: str) -> list[str]:
    """The packages of a development install on Linux, as ``name==version``. Skips where the index cannot be reached."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--no-build"]
    command += ["--python-version", python, "--python-platform", "x86_64-manylinux_2_31"]
    command += ["--extra", "dev", "-c", "constraints.txt", *options, "pyproject.toml"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=RESOLVE_S, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"the package index did not answer within {RESOLVE_S:g} s")
    if done.returncode and any(reason in done.stderr for reason in NOT_REACHED):
        pytest.skip(f"the package index cannot be reached: {done.stderr.splitlines()[0]}")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def canonical(pin: str) -> str:
    """A pin with its name as the resolver writes it."""
    name, _, version = pin.partition("==")
    return f"{canonicalize_name(name)}=={version}"


def write_cpu_build(folder: Path, version: str) -> None:
    """A wheel of torch without content that requires what the CPU build does: all but CUDA's packages and triton, which
    are required on Linux alone."""
    required = [text for text in metadata.requires("torch") or () if "platform_system" not in text]
    assert not [text for text in required if Requirement(text).name == "triton"]
    about = f"torch-{version}+cpu.dist-info"
    lines = [
        "Metadata-Version: 2.1",
        "Name: torch",
        f"Version: {version}+cpu",
        *(f"Requires-Dist: {r}" for r in required),
    ]
    with zipfile.ZipFile(folder / f"torch-{version}+cpu-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{about}/METADATA", "\n".join(lines) + "\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")


@pytest.mark.parametrize(
    "python", ["3.12", *(pytest.param(version, marks=pytest.mark.slow) for version in ("3.11", "3.13"))]
)
def test_constraints_resolve_with_torch_for_cuda_and_for_the_cpu(python: str, tmp_path: Path) -> None:
    pinned = {canonical(line) for line in (ROOT / "constraints.txt").read_text().splitlines()}
    torch = next(pin for pin in pinned if pin.startswith("torch=="))

    for_cuda = resolve(python)
    assert torch in for_cuda and any(package.startswith("nvidia-cudnn") for package in for_cuda)
    ours = {package for package in for_cuda if not package.startswith(("nvidia-", "cuda-", "setuptools="))}
    assert not ours - pinned, "constraints.txt does not pin them"

    if canonical(f"torch=={metadata.version('torch').partition('+')[0]}") != torch:
        pytest.skip(f"what {torch} requires is not known here: PyTorch {metadata.version('torch')} is installed")
    write_cpu_build(tmp_path, torch.removeprefix("torch=="))
    for_cpu = resolve(python, "--find-links", str(tmp_path), "--offline")  # all else has just been read
    assert f"{torch}+cpu" in for_cpu and not [
        package for package in for_cpu if package.startswith("nvidia-") and "-ml-py" not in package
    ]
    assert set(for_cpu) - {f"{torch}+cpu"} <= set(for_cuda)
