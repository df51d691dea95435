"""`lamina plan` as it is typed."""

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest
from click import Context
from typer.main import get_command
from typer.testing import CliRunner

from lamina.cli import app
from lamina.cli.options import as_lanes
from lamina.cluster import sizing
from lamina.config import EngineConfig
from lamina.errors import UserError
from lamina.pipeline import Pipeline
from lamina.plan import hardware, models
from lamina.plan.store import Fit
from lamina.profiling import measure, profile

MEASUREMENTS = Path(__file__).parents[2] / "bench" / "cost" / "measurements"
PAIR = "--model Llama-3-70B --compute h100 --memory h20"


def plan(line: str) -> str:
    """What `lamina plan LINE` prints."""
    return CliRunner().invoke(app, ["plan", *shlex.split(line)], catch_exceptions=False).output


def test_a_plan_says_what_to_launch_and_what_it_waits_for() -> None:
    printed = plan(f"{PAIR} --budget 44.24")
    assert "lamina launch --model Llama-3-70B --compute h100:2 --memory h20:4" in printed
    assert "Waits for compute" in printed
    assert "8 h20 instead of 4:" in printed
    assert "was made for" not in printed
    assert "Llama-3-70B was made for 8192 tokens; what it is to serve has up to 9000" in plan(f"{PAIR} --context 9000")


def parsed(line: str) -> dict[str, Any]:
    """What the real command line makes of `lamina launch ...`, which it does not run."""
    words = shlex.split(line)
    assert words[:2] == ["lamina", "launch"]
    root = get_command(app)
    launch = root.get_command(Context(root), "launch")  # type: ignore[attr-defined,arg-type]
    found: dict[str, Any] = launch.make_context("launch", words[2:]).params
    return found


@pytest.mark.parametrize(
    ("arguments", "compute", "memory"),
    [
        (f"{PAIR} --budget 44.24", "h100:2", "h20:4"),
        ("--model LLaMA-7B --compute h200:1 --memory h20 --context 256", "h200:1", "h20:16"),
        ("--model LLaMA-7B --compute a100:3 --memory rtx3090:9 --context 512", "a100:3", "rtx3090:9"),
    ],
)
def test_the_advised_line_is_one_that_launch_takes(arguments: str, compute: str, memory: str) -> None:
    result = json.loads(plan(f"{arguments} --json"))
    for one in (result["recommended"], *result["front"]):
        settings = parsed(one["launch"])
        assert settings["model"] == result["model"]
        assert settings["compute"] == f"{compute.split(':', maxsplit=1)[0]}:{one['compute']['workers']}"
        assert settings["memory"] == f"{memory.split(':', maxsplit=1)[0]}:{one['memory']['workers']}"
        assert as_lanes(settings["lanes"]) == one["lanes"]
        # The runtime's own pipeline takes these lanes in this order, and lets the whole batch in.
        pipeline = Pipeline(one["lanes"], one["compute"]["replicas"], settings["pipelining"] == "rotational")
        names = ("max_num_seqs", "max_num_batched_tokens")
        config = EngineConfig(**{name: settings[name] for name in names})
        sizing.check(config)
        assert sizing.most_sequences(config, pipeline) >= one["batch"]
    printed = plan(arguments)
    launched = next(line.strip() for line in printed.splitlines() if line.strip().startswith("lamina launch"))
    assert launched == result["recommended"]["launch"]
    assert "does not run workers on" in printed


def test_json_holds_the_front_with_the_units_in_its_names() -> None:
    result = json.loads(plan(f"{PAIR} --budget 44.24 --json"))
    best = result["recommended"]
    assert (best["compute"]["workers"], best["memory"]["workers"], best["lanes"]) == (2, 4, 2)
    assert best["usd_per_hour"] == pytest.approx(2 * 11.06 + 4 * 4.63)
    assert best["usd_per_million_out"] == pytest.approx(best["usd_per_hour"] / 3600 / best["tokens_s"] * 1e6)
    assert best["tokens_s"] == pytest.approx(best["batch"] / best["tbt_s"])
    assert {"launch", "bottleneck", "limit", "network_bytes_s", "ttft_s"} <= result["front"][0].keys()


def test_owned_devices_cost_what_they_cost_to_buy() -> None:
    result = json.loads(plan(f"{PAIR} --owned --json"))["recommended"]
    h100, h20 = result["compute"]["workers"], result["memory"]["workers"]
    owned = h100 * (36500 / 26280 + 0.084) + h20 * (12500 / 26280 + 0.048)
    assert result["usd_per_hour"] == pytest.approx(owned)


def test_a_file_of_one_s_own_prices(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[h100]\nprice_usd_per_hour = 2\n[h20]\nprice_usd_per_hour = 1\n")
    result = json.loads(plan(f"{PAIR} --hardware {file} --budget 8 --json"))["recommended"]
    assert result["usd_per_hour"] == 2 * result["compute"]["workers"] + result["memory"]["workers"] <= 8


def test_validation_prints_every_operator() -> None:
    printed = plan(f"--model Llama-2-7B --kind a40 --validate {MEASUREMENTS / 'a40_llama2_7b_mlp.csv'}")
    for operator in ("attn_pre_proj", "mlp_down_proj", "attn_rope", "matrix products", "other operators"):
        assert operator in printed
    assert "fitted to a100_llama2_7b_mlp.csv alone" in " ".join(printed.split())


def test_measurements_that_cannot_be_are_refused(tmp_path: Path) -> None:
    head, *rows = (MEASUREMENTS / "a40_llama2_7b_mlp.csv").read_text().splitlines()[:5]
    place = head.split(",").index("time_stats.mlp_up_proj.median")
    for value in ("", "0", "-1", "nan", "inf", "fast"):
        cells = [row.split(",") for row in rows]
        changed = [",".join([*own[:place], value, *own[place + 1 :]]) for own in cells]
        (tmp_path / "odd.csv").write_text("\n".join([head, *changed]))
        with pytest.raises(UserError, match=r"time_stats\.mlp_up_proj\.median"):
            plan(f"--model Llama-2-7B --kind a40 --validate {tmp_path / 'odd.csv'}")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--model Llama-3-70B", "give --compute KINDS and --memory KINDS"),
        (f"{PAIR} --slo-tbt 50", r"--slo-tbt '50' is no time.*did you mean 50ms"),
        (f"{PAIR} --slo-ttft 0s", "--slo-ttft '0s' is no time"),
        (f"{PAIR} --slo-ttft 2minutes", "--slo-ttft '2minutes' is no time"),
        (f"{PAIR} --slo-tbt 1ms", "no plan reaches --slo-tbt 1ms; the nearest is"),
        (f"{PAIR} --context 0", "the context is 0 tokens"),
        (f"{PAIR} --context 9 --trace x.csv", "give one of them"),
        (f"{PAIR} --trace /nowhere.csv", "the trace /nowhere.csv cannot be read"),
        ("--measure /nowhere/cpu.toml", "in a folder that does not exist"),
        ("--measure cpu.sqlite", "which is where its profile goes"),
        (f"{PAIR} --kind h100", "--kind goes with --validate"),
        ("--model Llama-3-8B --compute tpu-v6e --memory h20 --owned", "tpu-v6e has no price to buy"),
        ("--model Llama-3-70B --compute h100 --memory h21", "did you mean h20"),
        ("--model Llama-9 --compute h100 --memory h20", "'Llama-9' is no model directory, config.json or known name"),
        (f"--model Llama-2-7B --validate {MEASUREMENTS}/a40_llama2_7b_mlp.csv", "--validate needs --kind"),
        (f"--model LLaMA-13B --kind a40 --validate {MEASUREMENTS}/a40_llama2_7b_mlp.csv", "measured with n_embd 4096"),
        (
            f"--model LLaMA-13B --kind a40 --validate {MEASUREMENTS}/a100_dgx_send_recv.csv",
            "lacks the columns num_tokens",
        ),
    ],
)
def test_what_cannot_be_is_refused(line: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan(line)


def test_a_measured_machine_can_be_planned_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "READ_BYTES", 2**22)
    monkeypatch.setattr(measure, "PRODUCT", (8, 64, 64))
    measured = Fit("slices", "cpu", "a test", {"rows": [1, 64], "slice_s": [1e-4] * 2, "weight_s": [1e-10] * 2}, 0, 0)
    # What it really measures is under test in test_profile.py.
    monkeypatch.setattr(profile, "measure", lambda kind, store: store.write(measured, []))
    file = tmp_path / "cpu.toml"
    printed = plan(f"--measure {file}")
    assert "GB/s" in printed
    entry = hardware.load(file)["cpu"]
    assert entry.processors == max(1, len(os.sched_getaffinity(0)) // 2)
    assert file.with_suffix(".sqlite").is_file()
    assert entry.memory_bytes_s > 1e8 and min(entry.flops.values()) > 1e6
    result = json.loads(plan(f"--model LLaMA-7B --hardware {file} --compute cpu:1 --memory cpu:2 --context 512 --json"))
    best = result["recommended"]
    assert best["launch"].startswith("lamina launch --model LLaMA-7B --compute cpu:1 --memory cpu:")
    # Slices cost what the profile beside the file says: 1e-10 s a weight, 1e-4 s a slice, and the output head.
    dense_s = 32 * 1e-4 + models.find("LLaMA-7B").layer_parameters * 32e-10 + 1e-4 + 32000 * 4096e-10
    assert best["compute_busy"] * best["tbt_s"] == pytest.approx(best["lanes"] * dense_s, rel=1e-6)
    with pytest.raises(UserError, match="exists; give --measure another file"):
        plan(f"--measure {file}")
    with pytest.raises(UserError, match="give --model"):
        plan("--compute h100 --memory h20")
