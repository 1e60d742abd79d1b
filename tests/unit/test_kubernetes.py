"""The Kubernetes manifests: each fits the API's schema, and their commands fit this release."""

import importlib
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.commands import invoke

from turnwise.processes.engine_command import EngineSettings, build_command

ROOT = Path(__file__).resolve().parents[2]
PLACE = ROOT / "deploy" / "kubernetes"
KUSTOMIZATION = yaml.safe_load((PLACE / "kustomization.yaml").read_text(encoding="utf-8"))
RAY = ROOT / "deploy" / "ray"
RAY_JOB = {"entrypoint", "submissionMode", "backoffLimit", "rayClusterSpec"}
RAY_CLUSTER = {"rayVersion", "headGroupSpec", "workerGroupSpecs"}
RAY_GROUP = {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}
"""Fields of KubeRay's `ray.io/v1` that the job may have; all but the pods is compared with these names alone."""
KUBERNETES_VERSIONS = ("1.31", "1.37")
"""The oldest and the newest release whose schemas the manifests are checked against."""


def render() -> list[dict[str, Any]]:
    """Return what `kubectl kustomize` renders: the resources with namespace and images, and the config map."""
    images = {image["name"]: f"{image['newName']}:{image['newTag']}" for image in KUSTOMIZATION["images"]}
    found = [
        document
        for name in KUSTOMIZATION["resources"]
        for document in yaml.safe_load_all((PLACE / name).read_text(encoding="utf-8"))
    ]
    for generated in KUSTOMIZATION["configMapGenerator"]:
        data = {name: (PLACE / name).read_text(encoding="utf-8") for name in generated["files"]}
        metadata = {"name": generated["name"]}
        found.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})
    for document in found:
        if document["kind"] != "Namespace":
            document["metadata"]["namespace"] = KUSTOMIZATION["namespace"]
        for container in containers_of(document):
            container["image"] = images[container["image"]]
    return found


def pod_of(document: dict[str, Any]) -> dict[str, Any]:
    return document.get("spec", {}).get("template", {}).get("spec", {})


def containers_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    pod = pod_of(document)
    return [*pod.get("initContainers", []), *pod.get("containers", [])]


RENDERED = render()
WORKLOADS = {document["metadata"]["name"]: document for document in RENDERED if containers_of(document)}
each_workload = pytest.mark.parametrize("name", WORKLOADS)


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
@pytest.mark.parametrize("document", RENDERED, ids=lambda one: f"{one['kind']}-{one['metadata']['name']}")
def test_each_resource_fits_the_schema_of_the_api(document, version):
    kubernetes_validate = importlib.import_module("kubernetes_validate")
    kubernetes_validate.validate(document, version, strict=True)


def test_our_image_is_tagged_with_the_release_and_vllms_with_the_one_of_compose():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    images = {container["image"] for document in WORKLOADS.values() for container in containers_of(document)}
    compose = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    assert f"{project['name']}:{project['version']}" in images
    (engine,) = [image for image in images if "vllm" in image]
    assert f"{{VLLM_IMAGE:-{engine}}}" in compose


def ray_job() -> dict[str, Any]:
    job: dict[str, Any] = yaml.safe_load((RAY / "kuberay.yaml").read_text(encoding="utf-8"))
    return job


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
def test_the_pods_of_the_ray_job_fit_the_schema_of_the_api_and_the_rest_has_kuberays_fields(version):
    kubernetes_validate = importlib.import_module("kubernetes_validate")
    network = yaml.safe_load((RAY / "network.yaml").read_text(encoding="utf-8"))
    kubernetes_validate.validate(network, version, strict=True)
    job = ray_job()
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    assert job["spec"].keys() <= RAY_JOB
    assert cluster.keys() <= RAY_CLUSTER
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert group.keys() <= RAY_GROUP
        assert all(isinstance(each, str) for each in group["rayStartParams"].values())
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}} | {"spec": group["template"]["spec"]}
        kubernetes_validate.validate(pod, version, strict=True)
        (container,) = pod["spec"]["containers"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["spec"]["volumes"]}
        labels = group["template"]["metadata"]["labels"]
        assert network["spec"]["podSelector"]["matchLabels"] == labels
    made = {one["metadata"]["name"] for one in RENDERED if one["kind"] == "PersistentVolumeClaim"}
    assert made == {
        each["persistentVolumeClaim"]["claimName"] for each in pod["spec"]["volumes"] if "persistentVolumeClaim" in each
    }


def test_the_ray_job_starts_the_file_beside_it_with_an_engine_of_this_release():
    kustomization = yaml.safe_load((RAY / "kustomization.yaml").read_text(encoding="utf-8"))
    words = shlex.split(ray_job()["spec"]["entrypoint"])
    (generated,) = kustomization["configMapGenerator"]
    assert generated["files"] == [Path(words[1]).name]
    assert (RAY / words[1].rpartition("/")[2]).is_file()
    assert all((RAY / name).is_file() for name in kustomization["resources"])
    engine = [word.format(host="127.0.0.1", port=8000) for word in words[words.index("--") + 2 :]]
    result = invoke(*engine, "--dry-run")
    assert result.exit_code == 0, result.output


@each_workload
def test_every_container_is_locked_down_and_gets_no_service_links(name):
    """Service links would set variables such as TURNWISE_PROXY_PORT, which the proxy would read as its settings."""
    pod = pod_of(WORKLOADS[name])
    assert pod["enableServiceLinks"] is False
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == 10001
    for container in containers_of(WORKLOADS[name]):
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"] is True
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["requests"]
        assert container["resources"]["limits"]["memory"], "a leak must end one container, not its node"


def test_a_drained_node_never_takes_the_last_proxy():
    (budget,) = [document for document in RENDERED if document["kind"] == "PodDisruptionBudget"]
    labels = WORKLOADS["turnwise-proxy"]["spec"]["template"]["metadata"]["labels"]
    assert budget["spec"] == {"minAvailable": 1, "selector": {"matchLabels": labels}}
    assert WORKLOADS["turnwise-proxy"]["spec"]["replicas"] > 1


@each_workload
def test_every_volume_is_declared_and_only_the_trainer_writes_policies(name):
    pod = pod_of(WORKLOADS[name])
    declared = {volume["name"]: volume for volume in pod["volumes"]}
    for container in containers_of(WORKLOADS[name]):
        assert {mount["name"] for mount in container["volumeMounts"]} <= declared.keys()
    claims = {
        volume["persistentVolumeClaim"]["claimName"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume
    }
    assert claims <= {one["metadata"]["name"] for one in RENDERED if one["kind"] == "PersistentVolumeClaim"}
    policies = declared["policies"]["persistentVolumeClaim"].get("readOnly", False)
    assert policies == (name != "turnwise-trainer")


def test_the_engines_flags_are_those_of_turnwise_engine():
    (engine,) = containers_of(WORKLOADS["turnwise-engine"])
    settings = EngineSettings(
        model="/models/policy",
        served_model_name="policy",
        host="0.0.0.0",
        allow_remote=True,
        device="gpu",
        weight_transfer=False,
    )
    wanted = build_command(settings)
    assert engine["args"] == list(wanted.argv[wanted.argv.index("/models/policy") :])
    environment = {variable["name"]: variable["value"] for variable in engine["env"]}
    assert wanted.environment.items() <= environment.items()


@pytest.mark.parametrize("name", ["turnwise-proxy", "turnwise-trainer"])
def test_the_commands_are_commands_of_this_release(name, monkeypatch):
    for container in containers_of(WORKLOADS[name]):
        for variable in container["env"]:
            assert variable["valueFrom"]["secretKeyRef"]["name"] == "turnwise-database"
            monkeypatch.setenv(variable["name"], "postgresql+psycopg://turnwise@postgres:5432/turnwise")
        arguments = [str(PLACE / "train.toml") if word.endswith(".toml") else word for word in container["args"]]
        rehearsal = "--help" if container["name"] == "migrate" else "--dry-run"
        result = invoke(*arguments, rehearsal)
        assert result.exit_code == 0, result.output


def test_the_probes_request_routes_that_check_no_key():
    (_, proxy) = containers_of(WORKLOADS["turnwise-proxy"])
    asked = {kind: proxy[kind]["httpGet"]["path"] for kind in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert asked == {"startupProbe": "/healthz", "readinessProbe": "/healthz", "livenessProbe": "/healthz"}
    assert proxy["ports"][0]["containerPort"] == int(proxy["args"][proxy["args"].index("--port") + 1])
