"""`lamina simulate` on the command line."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.support import commands
from tests.support.commands import run_here


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    file = tmp_path / "trace.jsonl"
    lines = ({"timestamp": 50 * i, "input_length": 200 + 10 * i, "output_length": 5 + i % 7} for i in range(60))
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run_here("simulate", *map(str, arguments))


POOLS = ("--model", "Llama-2-7B", "--compute", "a100:2", "--memory", "rtx3090:2")


def test_a_summary_requests_and_a_timeline(trace: Path, tmp_path: Path) -> None:
    written = ("--requests", str(tmp_path / "r.csv"), "--trace-out", str(tmp_path / "t.json"))
    done = commands.run("simulate", *POOLS, "--trace", str(trace), *written)
    assert done.returncode == 0, done.stderr
    for part in (
        "60 finished",
        "TTFT",
        "TBT",
        "per million output tokens",
        "per 1,000 requests",
        "compute a100-80g:2",
        "memory rtx3090:2",
    ):
        assert part in done.stdout
    assert len((tmp_path / "r.csv").read_text().splitlines()) == 61
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    workers = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert workers == {"compute0", "compute1", "memory0", "memory1"}
    assert {event["name"] for event in events if event["ph"] == "X"} == {"slice", "attention", "chunk attention"}


def test_requests_of_one_length_need_no_trace(trace: Path) -> None:
    lengths = ("--prompt", 300, "--output", 5)
    done = run(*POOLS, *lengths, "--rate-scale", 3)
    assert done.returncode == 0 and "400 finished" in done.stdout, done.stderr
    assert "prompts of 300 tokens, outputs of 5" in done.stdout
    found = json.loads(run(*POOLS, *lengths, "--rate-scale", 3, "--draw", 50, "--json").stdout)
    assert found["requests"]["finished"] == 50 and found["tokens"] == 250
    assert found["offered_requests_s"] == pytest.approx(3, rel=0.5)
    for wrong, says in (((*lengths, "--trace", trace), "give one of them"), ((*lengths, "--first", 3), "give --trace")):
        done = run(*POOLS, *wrong)
        assert done.returncode == 2 and says in done.stderr


def test_requests_longer_than_the_model_allows_are_counted(trace: Path) -> None:
    long = run(*POOLS, "--prompt", 4090, "--output", 7, "--draw", 5)
    assert "5 requests have more than the 4096 tokens that Llama-2-7B supports" in long.stdout
    assert "supports" not in run(*POOLS, "--trace", trace).stdout


def test_requests_that_come_too_fast_are_named_as_the_cause(trace: Path) -> None:
    for scale, overloaded in ((0.2, False), (100, True)):
        done = run(*POOLS, "--trace", trace, "--draw", 1000, "--rate-scale", scale)
        assert done.returncode == 0, done.stderr
        assert ("arrived faster than they ended" in done.stdout) is overloaded


def test_requests_that_arrive_at_once_are_sustained_at_the_rate_of_the_run(trace: Path) -> None:
    """No other requests arrive while they are served, so their waits do not tell a rate."""
    done = run(*POOLS, "--trace", trace, "--rate-scale", 1_000_000)
    assert done.returncode == 0, done.stderr
    (sustained,) = re.findall(r"sustained +([\d.]+) requests/s, which arrived at once", done.stdout)
    (whole,) = re.findall(r"tokens/s, ([\d.]+) requests/s, its start", done.stdout)
    assert sustained == whole


def test_a_lost_worker_is_named_as_the_cause_of_what_it_ends(trace: Path) -> None:
    done = run(*POOLS, "--trace", trace, "--fail", "memory:1@1s")
    assert done.returncode == 0, done.stderr
    assert "refused" in done.stdout and "a lost worker stops its engine" in done.stdout
    assert "a lost worker" not in run(*POOLS, "--trace", trace).stdout


def test_requests_that_never_fit_are_refused_with_the_cause(trace: Path) -> None:
    done = run(*POOLS, "--trace", trace, "--max-tokens", 100_000)
    assert done.returncode == 0, done.stderr
    assert "60 refused" in done.stdout and "more KV than 2 rtx3090 hold (88472 tokens)" in done.stdout
    assert "nan" not in done.stdout and "inf" not in done.stdout


def test_json_is_the_same_for_the_same_seed(trace: Path) -> None:
    drawn = ("--trace", trace, "--draw", 40, "--json", "--seed")
    first, second, other = (run(*POOLS, *drawn, seed) for seed in (1, 1, 2))
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout != other.stdout
    assert json.loads(first.stdout)["requests"] == {"finished": 40, "error": 0, "refused": 0}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--fail", "memory:2@1s"), "the pool has 2, counted from 0"),
        (("--slow", "memory:1"), "such as compute:0@60s:2x"),
        (("--requests", "r.txt"), "ends in .csv or .parquet"),
        (("--requests", "/nowhere/r.csv"), "in a folder that does not exist"),
        (("--trace-out", "/"), "cannot be written"),
        (("--system", "chunked-prefill"), "one pool"),
        (("--rate-scale", "0"), "above 0"),
        (("--autoscale", "memory=1:2"), "only roles are simulated"),
        (("--compute", "a100:1,h100:1"), "names 2 kinds"),
        (("--memory", "a100:2/tp2"), "'a100:2/tp2' has degrees"),
        (("--model", "Llama-2-13B", "--compute", "rtx4080:2"), "give --tensor-parallel 2 with a multiple of 2 workers"),
        (("--model", "Llama-3-70B", "--compute", "rtx4080:8"), "; give other hardware"),
        (("--system", "disaggregated", "--trace-out", "t.json"), "records Lamina's workers"),
    ],
)
def test_what_cannot_be_is_one_clear_error(trace: Path, arguments: tuple[str, ...], says: str) -> None:
    done = run(*POOLS, "--trace", trace, *arguments)
    assert done.returncode == 2
    assert says in " ".join(done.stderr.split())


def test_pools_as_launch_takes_them(trace: Path) -> None:
    """Workers for prompts alone, and KV in the memory of several copies of the weights."""
    apart = run(*POOLS, "--prefill", "h100:2", "--tensor-parallel", 2, "--trace", trace, "--json")
    assert [(one["name"], one["kind"], one["workers"]) for one in json.loads(apart.stdout)["pools"]] == [
        ("prefill", "h100", 2),
        ("compute", "a100-80g", 2),
        ("memory", "rtx3090", 2),
    ]
    local = run("--model", "Llama-2-7B", "--compute", "a100:4", "--memory", "local", "--trace", trace, "--json")
    result = json.loads(local.stdout)
    assert [one["workers"] for one in result["pools"]] == [4] and result["requests"]["finished"] == 60
    small = ("--model", "Llama-2-7B", "--memory", "local", "--trace", trace)
    result = json.loads(run(*small, "--compute", "a100:1", "--prefill", "h100:1", "--json").stdout)
    assert [one["name"] for one in result["pools"]] == ["prefill", "compute"] and result["requests"]["finished"] == 60
    ranks = run(*small, "--compute", "a100:4", "--prefill", "h100:2", "--tensor-parallel", 2, "--json")
    result = json.loads(ranks.stdout)
    assert [one["workers"] for one in result["pools"]] == [2, 4] and result["requests"]["finished"] == 60
    refused = run(*POOLS, "--prefill", "h100:1", "--system", "disaggregated", "--trace", trace)
    commands.assert_refused(refused, "--prefill is for pools of Lamina")
