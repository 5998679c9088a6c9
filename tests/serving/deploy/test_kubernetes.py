"""The Kubernetes manifests: valid by Kubernetes' schemas, and consistent with the server.

The resources of the Gateway API are not part of those schemas: only what they refer to is checked.
"""

from __future__ import annotations

import inspect
from copy import deepcopy
from pathlib import Path
from typing import Any

import kubernetes_validate
import promql_parser
import pytest
import yaml

from ingot.cli.serve import serve
from tests.serving.conftest import Served

DEPLOY = Path(__file__).parents[3] / "deploy"
VERSION = "1.37"


def resources(folder: Path) -> dict[str, Any]:
    """The resources of a folder's files by their kinds."""
    documents = [d for path in folder.glob("*.yaml") for d in yaml.safe_load_all(path.read_text())]
    return {document["kind"]: document for document in documents}


CORE, GATEWAY = resources(DEPLOY / "kubernetes"), resources(DEPLOY / "kubernetes/gateway")
POD = CORE["Deployment"]["spec"]["template"]
CONTAINER = POD["spec"]["containers"][0]
OPTIONS = dict(argument[2:].split("=") for argument in CONTAINER["args"][1:])
PORTS = {port["name"]: port["containerPort"] for port in CONTAINER["ports"]}


@pytest.mark.parametrize("kind", CORE)
def test_resources_match_the_schemas_of_kubernetes(kind: str) -> None:
    kubernetes_validate.validate(CORE[kind], VERSION, strict=True)
    planted = deepcopy(CORE[kind])
    planted["spec"]["unknown"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(planted, VERSION, strict=True)


def test_probes_are_answered_by_a_server(served: Served) -> None:
    probes = [CONTAINER[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")]
    for probe in probes:
        assert probe["port"] == "http"
        assert served.call(probe["path"])[0] == 200


def test_options_are_those_of_the_command() -> None:
    names = {name.replace("_", "-") for name in inspect.signature(serve).parameters}
    assert set(OPTIONS) <= names
    image = (DEPLOY / "Dockerfile").read_text()
    assert PORTS == {"http": 8000, "admin": 9000}
    assert inspect.signature(serve).parameters["port"].default == PORTS["http"]
    assert f'"--admin-address", "0.0.0.0:{PORTS["admin"]}"' in image
    assert f"USER {POD['spec']['securityContext']['runAsUser']}" in image
    mounts = {mount["name"]: mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    assert CONTAINER["args"][0].startswith(mounts["models"])
    assert OPTIONS["api-key-file"].startswith(mounts["keys"])
    assert {volume["name"] for volume in POD["spec"]["volumes"]} == set(mounts)


def test_a_pod_has_time_to_drain() -> None:
    pause = CONTAINER["lifecycle"]["preStop"]["sleep"]["seconds"]
    drained = pause + float(OPTIONS["drain-timeout"])
    assert POD["spec"]["terminationGracePeriodSeconds"] >= drained + 10
    assert pause > CONTAINER["readinessProbe"]["periodSeconds"]


def test_references_between_resources() -> None:
    labels = POD["metadata"]["labels"]
    assert CORE["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert CORE["Service"]["spec"]["selector"] == labels
    assert CORE["Service"]["spec"]["ports"][0]["targetPort"] in PORTS
    assert CORE["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == labels
    allowed = [
        p["port"] for rule in CORE["NetworkPolicy"]["spec"]["ingress"] for p in rule["ports"]
    ]
    assert set(allowed) == set(PORTS)
    assert CORE["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    target = CORE["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == (
        "Deployment",
        CORE["Deployment"]["metadata"]["name"],
    )
    assert POD["metadata"]["annotations"]["prometheus.io/port"] == str(PORTS["admin"])


def test_the_pool_of_the_gateway_selects_the_pods() -> None:
    pool, route = GATEWAY["InferencePool"], GATEWAY["HTTPRoute"]
    assert pool["apiVersion"] == "inference.networking.k8s.io/v1"
    assert set(pool["spec"]) == {"selector", "targetPorts", "endpointPickerRef"}
    assert pool["spec"]["selector"]["matchLabels"] == POD["metadata"]["labels"]
    assert pool["spec"]["targetPorts"] == [{"number": PORTS["http"]}]
    (backend,) = route["spec"]["rules"][0]["backendRefs"]
    assert backend["name"] == pool["metadata"]["name"]
    assert backend["kind"] == "InferencePool"
    assert pool["apiVersion"] == f"{backend['group']}/v1"
    assert route["spec"]["rules"][0]["timeouts"]["request"] == "600s"
    assert inspect.signature(serve).parameters["timeout"].default == 600
    # Only the picker and monitoring may read the metrics.
    sources = CORE["NetworkPolicy"]["spec"]["ingress"][1]["from"]
    picker = pool["spec"]["endpointPickerRef"]["name"]
    assert {"podSelector": {"matchLabels": {"app": picker}}} in sources


def test_the_autoscaler_reads_metrics_that_the_server_has(served: Served) -> None:
    adapter = yaml.safe_load((DEPLOY / "prometheus-adapter.yaml").read_text())
    rules = {rule["name"]["as"]: rule for rule in adapter["rules"]["custom"]}
    metrics = CORE["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert {one["pods"]["metric"]["name"] for one in metrics} == set(rules)
    exported = served.call("/metrics")[1]["text"]
    for rule in rules.values():
        series = promql_parser.parse(rule["seriesQuery"])
        assert isinstance(series, promql_parser.VectorSelector)
        assert f"\n{series.name}{{" in exported
        query = rule["metricsQuery"].replace("<<.GroupBy>>", "pod")
        query = query.replace("<<.Series>>", str(series.name)).replace("<<.LabelMatchers>>", "")
        promql_parser.parse(query)
