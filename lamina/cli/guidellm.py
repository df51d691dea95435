"""Drives GuideLLM, if it is installed, in place of the client of `lamina bench serve`."""

import json
import math
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lamina.core.errors import ConfigError, LaminaError


def scenario(
    base: str,
    fields: Mapping[str, Any],
    api_key: str | None,
    tokenizer: str | None,
    load: tuple[int, float, float],
    shape: tuple[int, int, int],
    files: Mapping[str, Path | None],
) -> dict[str, Any]:
    """Return the scenario for GuideLLM's ``--config``, as of GuideLLM 0.8.

    Args:
        fields: The model, and fields of each request's body besides GuideLLM's own.
        tokenizer: Directory or name of the tokenizer that makes prompts; None: GuideLLM looks for that of the model.
        load: Requests, requests per second (inf: all at once), and the longest seconds of a request.
        shape: Turns, tokens of each prompt, tokens of each answer.
        files: Files to write, by GuideLLM's name of their form; None: not this one.
    """
    (requests, rate, timeout), (turns, prompt, output) = load, shape
    extra = {name: value for name, value in fields.items() if name != "model"}
    backend = {"kind": "openai_http", "target": base, "model": fields["model"], "timeout": timeout}
    backend |= ({"api_key": api_key} if api_key else {}) | ({"extras": {"body": extra}} if extra else {})
    at_once = math.isinf(rate)
    spec: dict[str, Any] = {
        "backend": backend,
        "profile": {"kind": "throughput"} if at_once else {"kind": "poisson", "rate": [rate]},
        "constraints": [{"kind": "max_requests", "count": requests * turns}],
        "data": [{"kind": "synthetic_text", "prompt_tokens": prompt, "output_tokens": output, "turns": turns}],
        "outputs": [{"kind": "console"}, *({"kind": kind, "path": str(to)} for kind, to in files.items() if to)],
    }
    if tokenizer is not None:
        spec["tokenizer"] = {"kind": "huggingface_auto", "model": tokenizer}
    return {"spec": spec}


def run(wanted: Mapping[str, Any]) -> None:
    """Run GuideLLM with a scenario; its output goes where this program's goes.

    Raises ConfigError if it is not installed, LaminaError if it fails.
    """
    program = shutil.which("guidellm")
    if program is None:
        raise ConfigError("--client guidellm: it is not installed: pip install guidellm, or leave --client out")
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:  # only this user may read the key in it
        json.dump(wanted, file)
        file.flush()
        done = subprocess.run([program, "run", "--config", file.name], check=False)
    if done.returncode:
        raise LaminaError(f"GuideLLM ended with status {done.returncode}; its output says why")
