"""The files under deploy/ for several machines are what their tools take, and agree with the program they start."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from typer.testing import CliRunner

from lamina.cli import app
from lamina.cluster.pool import own_kinds, parse, ray_bundle
from lamina.config.engine_config import EngineConfig
from lamina.config.settings import read_settings

DEPLOY = Path(__file__).parents[2] / "deploy"


def documents(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text()))


def assert_options_exist(arguments: list[str]) -> None:
    shown = CliRunner().invoke(app, [arguments[0], "--help"], env={"COLUMNS": "80"}).output
    options = [argument.partition("=")[0] for argument in arguments if argument.startswith("--")]
    assert options and [option for option in options if option not in shown] == []


@pytest.mark.parametrize("file", ["on-premise.yaml", "aws.yaml"])
def test_cluster_files_match_ray_s_schema(file: str) -> None:
    ray = pytest.importorskip("ray")
    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
    (content,) = documents(DEPLOY / "ray" / file)
    jsonschema.validate(content, schema)


def test_kinds_of_the_examples_are_resources_of_their_nodes() -> None:
    (aws,) = documents(DEPLOY / "ray" / "aws.yaml")
    command = re.search(r"lamina launch (.*)", (DEPLOY / "ray" / "aws.yaml").read_text())
    assert command is not None
    words = command[1].split()
    options = dict(zip(words[::2], words[1::2], strict=True))
    assert_options_exist(["launch", *words])
    own = own_kinds(options["--kind"])
    (memory,) = parse(options["--memory"], list(own))
    node = aws["available_node_types"]["memory"]["resources"]
    assert all(node.get(name, 0) >= amount for name, amount in ray_bundle(memory.kind, own, None).items())


def ray_cluster(file: str) -> Any:
    """What a file of KubeRay says of its cluster."""
    (content,) = documents(DEPLOY / "ray" / file)
    return content["spec"] if content["kind"] == "RayCluster" else content["spec"]["rayClusterConfig"]


@pytest.mark.parametrize(("file", "count"), [("kuberay.yaml", 3), ("kuberay-service.yaml", 2)])
def test_kuberay_pods_match_their_schema(file: str, count: int) -> None:
    cluster = ray_cluster(file)
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    assert len(groups) == count
    for group in groups:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "checked"}, **group["template"]}
        kubernetes_validate.validate(pod, "1.34", strict=True)
        if "resources" in group["rayStartParams"]:  # a string in a string, as KubeRay passes it to a shell
            assert json.loads(json.loads(group["rayStartParams"]["resources"]))


def test_kuberay_s_service_runs_engines_that_fit_its_pods() -> None:
    (service,) = documents(DEPLOY / "ray" / "kuberay-service.yaml")
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    module, _, name = application["import_path"].partition(":")
    assert f"def {name}(" in (DEPLOY / "ray" / f"{module}.py").read_text()
    arguments = dict(application["args"])
    engines, cpus = arguments.pop("engines"), arguments.pop("cpus")
    EngineConfig(**arguments)
    (group,) = ray_cluster("kuberay-service.yaml")["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    assert cpus <= int(container["resources"]["limits"]["cpu"]) and engines <= group["maxReplicas"]
    assert arguments["model"].startswith(container["volumeMounts"][0]["mountPath"])


@pytest.mark.slow
def test_ray_serve_accepts_the_application_s_configuration() -> None:
    schema = pytest.importorskip("ray.serve.schema", reason='Ray Serve is not installed: pip install "ray[serve]"')
    (service,) = documents(DEPLOY / "ray" / "kuberay-service.yaml")
    schema.ServeDeploySchema(**yaml.safe_load(service["spec"]["serveConfigV2"]))


@pytest.mark.parametrize(("name", "pool", "local"), [("workers", "memory", False), ("prefill", "prefill", True)])
def test_workers_in_pods_of_their_own_find_the_engine(name: str, pool: str, local: bool) -> None:
    folder = DEPLOY / "kubernetes" / name
    (kustomization,) = documents(folder / "kustomization.yaml")
    assert all((folder / name).exists() for name in kustomization["resources"])
    workers, service = documents(folder / f"{pool}.yaml")
    for each in (workers, service):
        kubernetes_validate.validate(each, "1.34", strict=True)
    (worker,) = workers["spec"]["template"]["spec"]["containers"]
    assert_options_exist(worker["args"])
    (port,) = service["spec"]["ports"]
    assert f"--engine={service['metadata']['name']}:{port['port']}" in worker["args"]

    (patch,) = documents(folder / kustomization["patches"][0]["path"])
    servers = documents(DEPLOY / "kubernetes" / "server.yaml")
    server = next(each for each in servers if each["kind"] == patch["kind"])
    (engine,) = patch["spec"]["template"]["spec"]["containers"]
    (base,) = server["spec"]["template"]["spec"]["containers"]
    assert (patch["metadata"]["name"], engine["name"]) == (server["metadata"]["name"], base["name"])
    assert_options_exist(engine["args"])
    assert f"--listen=$(POD_IP):{port['port']}" in engine["args"]
    assert f"--role={pool}" in worker["args"]
    assert f"--{pool}=remote:{workers['spec']['replicas']}" in engine["args"]
    EngineConfig(
        **read_settings(DEPLOY / "kubernetes" / "lamina.yaml", EngineConfig)
        | dict(argument[2:].split("=") for argument in engine["args"] if argument.startswith((f"--{pool}", "--memory")))
    )
    assert ("--memory=local" in engine["args"]) == local
    assert service["spec"]["selector"].items() <= server["spec"]["template"]["metadata"]["labels"].items()
    secrets = {one["name"] for one in engine["env"]} & {one["name"] for one in worker["env"]}
    assert secrets == {"LAMINA_SECRET"}
    merged = {**base, **engine}
    pod = {**server["spec"]["template"]["spec"], "containers": [merged]}
    checked = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "checked"}, "spec": pod}
    kubernetes_validate.validate(checked, "1.34", strict=True)


def test_the_worker_s_unit_is_valid_and_its_command_exists(tmp_path: Path) -> None:
    text = (DEPLOY / "systemd" / "lamina-worker.service").read_text()
    (command,) = re.findall(r"^ExecStart=\S+ (.*)$", text, re.MULTILINE)
    assert_options_exist(command.split())
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze on this machine")
    program = tmp_path / "lamina"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = tmp_path / "lamina-worker.service"
    unit.write_text(text.replace("/opt/lamina/bin/lamina", str(program)))
    verify = ["systemd-analyze", "verify", "--man=no", str(unit)]
    done = subprocess.run(verify, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and str(unit) not in done.stderr, done.stderr
