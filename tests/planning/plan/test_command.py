"""`lamina plan` on the command line."""

import json
import os
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click import Context
from typer.main import get_command
from typer.testing import CliRunner

from lamina.cli import app, plan_commands, plan_ways
from lamina.cluster import sizing
from lamina.config.engine_config import EngineConfig
from lamina.core.errors import UserError
from lamina.core.pipeline import Pipeline, Shape
from lamina.core.types import DType
from lamina.models import hub
from lamina.models.directory import BUNDLED
from lamina.planning.plan import hardware, model_shapes, prices
from lamina.planning.plan.fit_store import Fit
from lamina.planning.plan.ways import Kind, Way
from lamina.planning.profiling import measure, profile

PAIR = "--model Llama-3-70B --compute h100 --memory h20 --prices paper --context 4096"


@pytest.fixture
def priced(tmp_path: Path) -> Path:
    """A market that has all kinds of these tests, at one dollar."""
    file = tmp_path / "market.toml"
    kinds = ("h100", "h200", "h20", "a100", "rtx3090", "cpu")
    file.write_text("".join(f"[kinds.{kind}]\nusd_per_hour = 1\nsource = 'a test'\ndate = 'now'\n" for kind in kinds))
    return file


def plan(line: str) -> str:
    """The output of `lamina plan LINE`."""
    return CliRunner().invoke(app, ["plan", *shlex.split(line)], catch_exceptions=False).output


def test_a_plan_says_what_to_launch_and_what_it_waits_for() -> None:
    printed = plan(f"{PAIR} --budget 44.24")
    assert "lamina launch --model meta-llama/Meta-Llama-3-70B --compute h100:2 --memory h20:4" in printed
    assert "Bottleneck: compute" in printed
    assert "8 h20 instead of 4:" in printed
    assert "supports" not in printed
    assert "Llama-3-70B supports 8192 tokens; the workload has sequences of up to 9000" in plan(
        f"{PAIR.replace('4096', '9000')}"
    )


def parsed(line: str) -> dict[str, Any]:
    """How the real command line parses `lamina launch ...`, without running it."""
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
def test_the_advised_line_is_one_that_launch_takes(arguments: str, compute: str, memory: str, priced: Path) -> None:
    arguments += f" --prices {priced}" if "--prices" not in arguments else ""
    result = json.loads(plan(f"{arguments} --json"))
    for one in (result["recommended"], *result["front"]):
        settings = parsed(one["launch"])
        assert settings["model"] == model_shapes.HUB.get(result["model"], f"PATH_TO_{result['model']}")
        assert settings["compute"] == f"{compute.split(':', maxsplit=1)[0]}:{one['compute']['workers']}"
        assert settings["memory"] == f"{memory.split(':', maxsplit=1)[0]}:{one['memory']['workers']}"
        degree, replicas = one["compute"]["tensor_parallel"], one["compute"]["replicas"]
        assert settings["tensor_parallel"] == degree
        # The runtime's own pipeline accepts these lanes in this order, and admits the whole batch.
        assert settings["lanes"] == one["lanes"]
        pipeline = Pipeline(one["lanes"], replicas, settings["pipelining"] == "rotational", shape=Shape(degree))
        names = ("max_num_seqs", "max_num_batched_tokens")
        config = EngineConfig(**{name: settings[name] for name in names})
        assert sizing.step_limits(config, pipeline, 1).max_sequences >= one["batch"]
    printed = plan(arguments)
    launched = next(line.strip() for line in printed.splitlines() if line.strip().startswith("lamina launch"))
    assert launched == result["recommended"]["launch"]
    assert "lamina launch lacks yet" not in printed


def test_the_advised_model_is_a_directory_a_name_on_the_hub_or_clearly_a_placeholder(tmp_path: Path) -> None:
    """Launch refuses single files, and plan knows no directory of them."""
    directory = tmp_path / "my model"
    directory.mkdir()
    config = (BUNDLED / "config.json").read_text()
    for file in (directory / "config.json", tmp_path / "shape.json"):
        file.write_text(config)
    for model, launched in (
        ("llama-3-8b", "meta-llama/Meta-Llama-3-8B"),
        (str(directory), str(directory)),
        (str(directory / "config.json"), str(directory)),
        (str(tmp_path / "shape.json"), "PATH_TO_shape"),
    ):
        pools = "--compute h100:1 --memory l40s:1 --context 64 --json"
        best = json.loads(plan(f"--model {shlex.quote(model)} {pools}"))["recommended"]
        assert parsed(best["launch"])["model"] == launched


def test_json_holds_the_front_with_the_units_in_its_names() -> None:
    result = json.loads(plan(f"{PAIR} --budget 44.24 --json"))
    best = result["recommended"]
    assert (best["compute"]["workers"], best["memory"]["workers"], best["lanes"]) == (2, 4, 2)
    assert best["usd_per_hour"] == pytest.approx(2 * 11.06 + 4 * 4.63)
    assert best["usd_per_million_out"] == pytest.approx(best["usd_per_hour"] / 3600 / best["tokens_s"] * 1e6)
    assert best["tokens_s"] == pytest.approx(best["batch"] / best["tbt_s"])
    assert {"launch", "bottleneck", "limit", "network_bytes_s", "ttft_s"} <= result["front"][0].keys()


def test_owned_devices_cost_what_they_cost_to_buy() -> None:
    result = json.loads(plan(f"{PAIR.replace('--prices paper', '--prices own')} --json"))["recommended"]
    h100, h20 = result["compute"]["workers"], result["memory"]["workers"]
    network = 36_000 / 64 + 675_840 / 512 + 10_908 / 8  # a switch port, cables and NICs for each worker
    owned = h100 * ((36500 + network) / 26280 + 0.084) + h20 * ((12500 + network) / 26280 + 0.048)
    assert result["usd_per_hour"] == pytest.approx(owned)


def test_a_market_of_one_s_own(priced: Path) -> None:
    result = json.loads(plan(f"{PAIR} --prices {priced} --budget 8 --json"))
    best = result["recommended"]
    assert best["usd_per_hour"] == best["compute"]["workers"] + best["memory"]["workers"] <= 8
    assert "a test; now" in result["prices"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--model Llama-3-70B", "give --compute, and --memory"),
        ("--model Llama-3-70B --compute h100 --context 9", "are about two pools; give --memory too"),
        ("--model Llama-3-70B --compute h100 --map x.svg", "are about two pools; give --memory too"),
        (f"{PAIR} --slo-tbt 50", r"--slo-tbt '50' is not a duration.*did you mean 50ms"),
        (f"{PAIR} --slo-ttft 0s", "--slo-ttft '0s' is not a duration"),
        (f"{PAIR} --slo-ttft 2minutes", "--slo-ttft '2minutes' is not a duration"),
        (f"{PAIR} --slo-tbt 1ms", "no plan meets --slo-tbt 1ms; the nearest is"),
        (PAIR.replace("4096", "0"), "the context is 0 tokens"),
        (f"{PAIR} --trace x.csv", "--context plans for decoding alone"),
        (PAIR.replace("--context 4096", "--trace /nowhere.csv"), "the trace /nowhere.csv cannot be read"),
        ("--measure /nowhere/cpu.toml", "in a folder that does not exist"),
        ("--measure cpu.sqlite", "where its profile would be written"),
        (
            "--model Llama-3-8B --compute tpu-v6e --memory h20",
            "market pods has no price for tpu-v6e.*No market.*pods has rtx3090",
        ),
        (
            "--model Llama-3-8B --compute h100 --memory h20 --prices aws",
            "aws has no price for h20.*Give --prices own or",
        ),
        ("--model Llama-3-8B --compute h100 --memory rtx3090 --prices gcp", "market gcp has no price for rtx3090"),
        ("--model Llama-3-70B --compute h100 --memory h21", "did you mean h20"),
        (
            "--model Llama-9 --compute h100 --memory h20",
            "'Llama-9' is not a model directory, a config.json or a known name",
        ),
    ],
)
def test_what_cannot_be_is_refused(line: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan(line)


def test_a_measured_machine_can_be_planned_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, priced: Path) -> None:
    monkeypatch.setattr(measure, "READ_BYTES", 2**22)
    monkeypatch.setattr(measure, "PRODUCT", (8, 64, 64))
    measured = Fit("slices", "cpu", "a test", {"rows": [1, 64], "slice_s": [1e-4] * 2, "weight_s": [1e-10] * 2}, 0, 0)
    # The measurement itself is tested in test_profile.py.
    monkeypatch.setattr(profile, "measure", lambda kind, store: store.save_fit(measured, []))
    file = tmp_path / "cpu.toml"
    printed = plan(f"--measure {file}")
    assert "GB/s" in printed
    entry = hardware.load(file)["cpu"]
    assert entry.processors == max(1, len(os.sched_getaffinity(0)) // 2)
    assert file.with_suffix(".sqlite").is_file()
    assert entry.memory_bytes_s > 1e8 and min(entry.flops.values()) > 1e6
    pools = f"--hardware {file} --compute cpu:1 --memory cpu:2 --prices {priced}"
    result = json.loads(plan(f"--model LLaMA-7B {pools} --context 512 --json"))
    best = result["recommended"]
    assert best["launch"].startswith("lamina launch --model PATH_TO_LLaMA-7B --compute cpu:1 --memory cpu:")
    # Slices cost what the profile next to the file says: 1e-10 s a weight, 1e-4 s a slice, and the output head.
    dense_s = 32 * 1e-4 + model_shapes.find("LLaMA-7B").layer_parameters * 32e-10 + 1e-4 + 32000 * 4096e-10
    assert best["compute_busy"] * best["tbt_s"] == pytest.approx(best["lanes"] * dense_s, rel=1e-6)
    with pytest.raises(UserError, match="exists; remove it, or give --measure another file"):
        plan(f"--measure {file}")
    with pytest.raises(UserError, match="give --model"):
        plan("--compute h100 --memory h20")


@pytest.mark.parametrize(
    ("model", "weights", "compute", "expected", "lacks"),
    [
        ("Llama-3-8B", "auto", "h100", "", False),
        ("Llama-3-8B", "fp8", "h100", "--quantization fp8", False),
        ("Llama-3-8B", "int4", "cpu", "--quantization int4", False),
        ("Llama-3-8B", "fp8", "cpu", "", True),
        ("float16", "int8", "h100", "--quantization int8", False),
        ("float16", "int8", "cpu", "--quantization int8 --dtype bfloat16", False),
        ("float16", "int4", "h100", "--quantization int4 --dtype bfloat16", False),
    ],
)
def test_a_launch_line_quantises_what_the_plan_does(
    model: str, weights: Any, compute: str, expected: str, lacks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = model_shapes.find("Llama-3-8B")
    own = replace(known, dtype=DType.FLOAT16) if model == "float16" else known
    monkeypatch.setattr(model_shapes, "find", lambda name: own)
    shape = own.stored_as("auto", weights)
    assert plan_commands.quantization_option(shape, model, compute).strip() == expected
    assert bool(plan_commands.unquantised(shape, model, compute)) == lacks
    assert bool(plan_commands.untried(shape, compute)) == (weights != "auto" and compute != "cpu")
    device = replace(hardware.load()["h100"], kind=compute)
    way = Way(kind=Kind.LOCAL, chunk=128, compute=device, compute_workers=1)
    (line,) = plan_commands.launching(SimpleNamespace(way=way), shape, model, 100)  # type: ignore[arg-type]
    if lacks:
        assert line == "lamina launch cannot start this yet: it lacks matrix products with fp8 weights on CPUs."
        return
    settings = parsed(line)
    assert settings["memory"] == "local" and settings["quantization"] == (weights if weights != "auto" else "none")
    names = ("max_num_seqs", "max_num_batched_tokens", "dtype", "quantization")
    EngineConfig(**{name: settings[name] for name in names})


def test_a_checkpoint_that_is_quantised_already_is_launched_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = replace(model_shapes.find("Llama-3-8B"), weight_dtype="fp8")
    monkeypatch.setattr(model_shapes, "find", lambda name: stored)
    for compute in ("cpu", "h100"):
        assert plan_commands.quantization_option(stored, "m", compute) == "" and not plan_commands.unquantised(
            stored, "m", compute
        )


def test_one_pool_is_a_question_too() -> None:
    """Neither the ways nor the words are about a second pool; the launch line is of the best way that can start."""
    line = "plan --model Llama-3-8B --compute h100:2 --prices paper --prompt 64 --output 4 --json"
    result = json.loads(CliRunner().invoke(app, line.split(), catch_exceptions=False).stdout)  # without progress
    found = [one["way"] for one in result["ways"]]
    assert found and not any("memory," in way and "local" not in way for way in found)
    assert any("h100:2 with local memory, 2 x TP1" in way for way in found) and not any("alone" in way for way in found)
    assert not any("offload" in line for line in result["recommended"])
    for one in result["ways"]:
        assert (
            one["starts_here"] == (parsed_or_none(one["launch"][0]) is not None) == (one["system"] != "disaggregated")
        )
        if one["starts_here"]:
            settings = parsed(one["launch"][0])
            pools = ("h100:2", None) if one["system"] == "local" else ("h100:1", "h100:1")
            assert (settings["compute"], settings["prefill"], settings["memory"]) == (*pools, "local")


def parsed_or_none(line: str) -> dict[str, Any] | None:
    return parsed(line) if line.startswith("lamina launch --model") else None


def test_ways_that_cannot_be_started_are_ranked_apart() -> None:
    rows = [(name, *("1.00",) * len(plan_ways.HEADINGS)) for name in ("first way", "second way", "third way")]
    table = plan_ways.table_of(rows[:1], "title", "caption", narrow=False, others=rows[1:], best="second way")
    labels = [str(cell) for cell in table.columns[0].cells]
    assert labels == ["first way", plan_ways.UNSTARTED, "second way", "third way"]
    assert [row.style for row in table.rows] == [None, "dim", "bold green", None]
    alone = plan_ways.table_of(rows, "title", "caption", narrow=False)
    assert plan_ways.UNSTARTED not in [str(cell) for cell in alone.columns[0].cells]


def test_two_kinds_of_machines_need_a_market_with_rdma() -> None:
    kinds = hardware.load()
    apart = Way(
        kind=Kind.PREFILL,
        prefill=kinds["rtx4090"],
        prefill_workers=1,
        compute=kinds["h100"],
        compute_workers=1,
        chunk=128,
    )
    alike, alone = (
        replace(apart, prefill=kinds["h100"]),
        replace(apart, kind=Kind.LOCAL, prefill=None, prefill_workers=0),
    )
    pods, paper = (SimpleNamespace(prices=prices.load(name)) for name in ("pods", "paper"))
    (warning,) = plan_ways._without_rdma(pods, apart)  # type: ignore[arg-type]
    assert "RDMA" in warning and "--prices FILE" in warning
    for server, way in ((paper, apart), (pods, alike), (pods, alone)):
        assert not plan_ways._without_rdma(server, way)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["a100-40g", "a100-80g"])
def test_both_sizes_of_an_a100_are_launched_by_their_driver_s_name(kind: str) -> None:
    way = Way(kind=Kind.LOCAL, chunk=128, compute=hardware.load()[kind], compute_workers=2)
    (line,) = plan_commands.launching(SimpleNamespace(way=way), model_shapes.find("Llama-3-8B"), "Llama-3-8B", 16)  # type: ignore[arg-type]
    assert parsed(line)["compute"] == "a100:2"


def test_a_model_that_launch_cannot_read_has_no_launch_line(tmp_path: Path) -> None:
    device = hardware.load()["h100"]
    way = Way(kind=Kind.LOCAL, chunk=128, compute=device, compute_workers=1)
    says = plan_commands.obstacle(way, model_shapes.find("gpt-oss-120b"), "gpt-oss-120b")
    assert says is not None and "mxfp4" in says
    config = json.loads((BUNDLED / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "a_family_of_my_own"}))
    says = plan_commands.obstacle(way, model_shapes.find(str(tmp_path)), str(tmp_path))
    assert says is not None and "a_family_of_my_own" in says


def test_a_model_on_the_hub_is_planned_for_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text((BUNDLED / "config.json").read_text())
    monkeypatch.setattr(hub, "download", lambda model, weights: tmp_path)
    model_shapes._downloaded.cache_clear()
    assert model_shapes.find("me/mine").parameters == model_shapes.find(str(BUNDLED)).parameters
    assert model_shapes.model_to_launch("me/mine") == "me/mine"
    assert model_shapes.find("meta-llama/Meta-Llama-3-8B") is model_shapes.KNOWN["llama-3-8b"]
    model_shapes._downloaded.cache_clear()
