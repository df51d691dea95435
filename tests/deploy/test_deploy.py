"""The files under deploy/ are what their tools take, and agree with the program they start."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from lamina.config.engine_config import EngineConfig
from lamina.config.settings import read_settings
from lamina.observe.metrics import Metrics
from tests.support.scripted_engine import FakeEngine

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "lamina.json").read_text())


def documents(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text()))


def queries() -> list[str]:
    variables = {"$job": ".*", "$__rate_interval": "1m"}
    expressions = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    for name, value in variables.items():
        expressions = [expression.replace(name, value) for expression in expressions]
    return expressions


def served() -> set[str]:
    """Names of the samples that a server may serve; a histogram's and a labelled counter's without any observation."""
    metrics = Metrics(FakeEngine())  # type: ignore[arg-type]
    families = list(text_string_to_metric_families(metrics.text().decode()))
    samples = {sample.name for family in families for sample in family.samples}
    labelled = {f"{family.name}_total" for family in families if family.type == "counter"}
    buckets = {f"{family.name}_bucket" for family in families if family.type == "histogram"}
    return samples | labelled | buckets


@pytest.mark.parametrize("query", queries())
def test_dashboard_asks_for_metrics_that_are_served(query: str) -> None:
    promql_parser.parse(query)
    names = set(re.findall(r"\blamina_\w+", query))
    assert names and names <= served()


def test_dashboard_shows_every_metric() -> None:
    shown = {
        re.sub(r"_(bucket|total)$", "", name) for query in queries() for name in re.findall(r"\blamina_\w+", query)
    }
    metrics = Metrics(FakeEngine())  # type: ignore[arg-type]
    served = {family.name for family in text_string_to_metric_families(metrics.text().decode())}
    assert {name for name in served if not name.startswith("vllm:")} <= shown
    places = [tuple(panel["gridPos"].values()) for panel in DASHBOARD["panels"]]
    cells = [(x + i, y + j) for x, y, w, h in places for i in range(w) for j in range(h)]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24, "panels overlap or leave the grid"


def test_prometheus_scrapes_the_default_port() -> None:
    (configuration,) = documents(DEPLOY / "grafana" / "prometheus.yml")
    (job,) = configuration["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["127.0.0.1:8000"]}]


def test_kubernetes_objects_match_their_schemas() -> None:
    folder = DEPLOY / "kubernetes"
    (kustomization,) = documents(folder / "kustomization.yaml")
    objects = [each for file in kustomization["resources"] for each in documents(folder / file)]
    for each in objects:
        kubernetes_validate.validate(each, "1.34", strict=True)
    deployment, service = (next(each for each in objects if each["kind"] == kind) for kind in ("Deployment", "Service"))
    pod = deployment["spec"]["template"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    (container,) = pod["spec"]["containers"]
    (generated,) = kustomization["configMapGenerator"]
    assert {"name": "settings", "configMap": {"name": generated["name"]}} in pod["spec"]["volumes"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert f"{mounts['settings']}/{generated['files'][0]}" in container["args"]


@pytest.mark.parametrize("file", ["kubernetes/lamina.yaml", "systemd/lamina.yaml"])
def test_settings_are_accepted(file: str) -> None:
    config = EngineConfig(**read_settings(DEPLOY / file, EngineConfig))
    assert config.memory == "cpu:2"


def test_unit_is_valid(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze on this machine")
    program = tmp_path / "lamina"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = tmp_path / "lamina.service"
    text = (DEPLOY / "systemd" / "lamina.service").read_text()
    assert "/opt/lamina/bin/lamina" in text
    unit.write_text(text.replace("/opt/lamina/bin/lamina", str(program)))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0 and str(unit) not in done.stderr, done.stderr


def test_image_is_built_from_what_exists() -> None:
    folder = DEPLOY / "containers"
    ignored = (folder / "Dockerfile.dockerignore").read_text().splitlines()
    for line in ignored:
        if line.startswith("!"):
            assert (DEPLOY.parent / line[1:]).exists(), line
    final = (folder / "Dockerfile").read_text().rpartition("\nFROM ")[2]
    instructions = dict(line.split(" ", 1) for line in final.replace("\\\n", "").splitlines()[1:] if line[:1].isupper())
    assert instructions["USER"] == "lamina"
    check = json.loads(instructions["HEALTHCHECK"].partition("CMD ")[2])
    for arguments in (check, json.loads(instructions["ENTRYPOINT"]) + json.loads(instructions["CMD"])):
        done = subprocess.run(
            [sys.executable, "-m", *arguments[:2], "--help"], capture_output=True, text=True, timeout=60, check=True
        )
        assert all(option in done.stdout for option in arguments[2:] if option.startswith("--"))


def test_dockerfile_passes_the_builder_s_checks() -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "info"], capture_output=True, timeout=60, check=False).returncode != 0:
        pytest.skip("no Docker daemon on this machine")
    command = shlex.split("build --check -f deploy/containers/Dockerfile .")
    subprocess.run([docker, *command], cwd=DEPLOY.parent, timeout=280, check=True)
