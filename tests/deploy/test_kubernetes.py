"""The manifests: against Kubernetes' schemas, against our own command line, and against our defaults."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import kubernetes_validate
import pytest

from support.deployment import (
    DYNAMO_VARIABLES,
    MANIFESTS,
    OTHER_VARIABLES,
    PLANES,
    VLLM_FLAGS,
    Container,
    containers,
    manifest,
    pod_containers,
    prometheus_config,
    workloads,
)
from trio_sidecar.config import FrontendSettings, RouterMode, ServerSettings, VllmSettings, WorkerSettings
from trio_sidecar.config.worker import DisaggregationMode
from trio_sidecar.wire.methods import INFERENCE
from trio_sidecar.worker.dynamo import PREFILL_DRAIN, WATCHDOG_SECS
from trio_sidecar.worker.probes import system_port

if TYPE_CHECKING:
    from pathlib import Path

VERSIONS = ("1.29", "1.33", kubernetes_validate.latest_version())
"""The first with native sidecars, the first in which they are stable, and the newest known."""

FRONTEND_SPARE_SECS = 10

each_file = pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
each_container = pytest.mark.parametrize("container", containers(*MANIFESTS), ids=lambda one: one.where)
each_engine = pytest.mark.parametrize("engine", containers(*MANIFESTS, name="engine"), ids=lambda one: one.where)
each_worker = pytest.mark.parametrize("worker", containers(*MANIFESTS, name="worker"), ids=lambda one: one.where)
each_frontend = pytest.mark.parametrize("frontend", containers(*MANIFESTS, name="frontend"), ids=lambda one: one.where)


def validate(resource: dict[str, Any], version: str) -> None:
    """Check a resource as the API server would, unknown fields included."""
    kubernetes_validate.validate(resource, version, strict=True)


def engine_of(worker: Container) -> Container:
    """The engine in the same pod."""
    (engine,) = (one for one in containers(*MANIFESTS, name="engine") if one.template == worker.template)
    return engine


def test_there_is_a_file_for_each_way_to_serve() -> None:
    """Aggregated, prefill and decode, and KV-routed."""
    assert ["aggregated", "disaggregated", "kv-routed"] == [path.stem for path in MANIFESTS]


@pytest.mark.parametrize("version", VERSIONS)
@each_file
def test_resources_are_what_kubernetes_takes(path: Path, version: str) -> None:
    """Every resource fits its schema, in old and new versions, without a field that nobody knows."""
    for resource in manifest(path):
        validate(resource, version)


@pytest.mark.parametrize(
    ("place", "field", "value"),
    [
        ((), "terminationGracePeriodSecond", 60),
        ((), "terminationGracePeriodSeconds", "a minute"),
        (("initContainers", 0), "restartpolicy", "Always"),
        (("containers", 0, "livenessProbe"), "failureTreshold", 3),
        (("containers", 0, "livenessProbe", "httpGet"), "port", [9090]),
        (("initContainers", 0, "startupProbe", "grpc"), "path", "/health"),
        (("containers", 0, "securityContext"), "runAsNonroot", True),
    ],
)
def test_a_wrong_field_would_be_found(place: tuple[str | int, ...], field: str, value: object) -> None:
    """The schemas notice a misspelt field and a value of a wrong type where it matters."""
    workload = copy.deepcopy(workloads(MANIFESTS[0])[0])
    part = workload["spec"]["template"]["spec"]
    for step in place:
        part = part[step]
    part[field] = value
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(workload, VERSIONS[-1])


@each_container
def test_the_command_line_is_ours(container: Container) -> None:
    """Every argument is understood; what is vLLM's stands at its engine only, in the form --FLAG=VALUE."""
    line = container.command_line
    if container.name == "engine":
        assert line.command == "engine vllm"
        model, *flags = line.rest
        assert not model.startswith("-")
        assert {flag.partition("=")[0] for flag in flags} <= VLLM_FLAGS
        line.settings(ServerSettings)
        line.settings(VllmSettings)
    else:
        assert line.command == container.name
        assert () == line.rest
        line.settings(WorkerSettings if container.name == "worker" else FrontendSettings)


@each_container
def test_every_variable_is_read_by_somebody(container: Container) -> None:
    """A variable is a setting of ours, or Dynamo's or a library's; a misspelt one would be ignored in silence."""
    names = [variable["name"] for variable in container.spec["env"]]
    assert len(set(names)) == len(names)
    known = container.command_line.variables | OTHER_VARIABLES
    if container.name != "engine":
        known |= DYNAMO_VARIABLES | PLANES
    assert set(names) <= known


@each_engine
def test_the_engine_is_a_native_sidecar(engine: Container) -> None:
    """It is up before the worker and ends after it, because it is an init container that is always restarted."""
    assert [engine.spec] == engine.pod["initContainers"]
    assert engine.spec["restartPolicy"] == "Always"


@each_engine
def test_the_engine_is_probed_where_it_listens(engine: Container) -> None:
    """Kubelet asks the health service of gRPC, for the name of the contract, at the port of --listen."""
    listen = engine.command_line.settings(ServerSettings).listen
    assert f"0.0.0.0:{engine.port('grpc')}" == str(listen)
    for probe in ("startupProbe", "livenessProbe"):
        assert {"port": engine.port("grpc"), "service": INFERENCE} == engine.spec[probe]["grpc"]


@each_worker
def test_the_engine_may_take_as_long_to_start_as_a_worker_would_wait(worker: Container) -> None:
    """The start-up probe gives up when --grpc-startup-deadline-secs would."""
    probe = engine_of(worker).spec["startupProbe"]
    settings = worker.command_line.settings(WorkerSettings)
    assert settings.transport.grpc_startup_deadline_secs == probe["periodSeconds"] * probe["failureThreshold"]


@each_worker
def test_the_worker_talks_to_the_engine_in_its_pod(worker: Container) -> None:
    """--grpc-endpoint is the loopback address with the engine's port."""
    endpoint = worker.command_line.settings(WorkerSettings).transport.grpc_endpoint
    assert f"127.0.0.1:{engine_of(worker).port('grpc')}" in str(endpoint)


@each_worker
def test_the_worker_is_probed_at_its_system_server(worker: Container) -> None:
    """Liveness is /live and readiness is /health, which answer from the first moment, at DYN_SYSTEM_PORT."""
    for probe, path in (("livenessProbe", "/live"), ("readinessProbe", "/health")):
        asked = worker.spec[probe]["httpGet"]
        assert path == asked["path"]
        assert system_port(worker.environment) == worker.port(asked["port"])


@each_worker
def test_a_worker_has_time_to_drain(worker: Container) -> None:
    """The pod has what our settings allow: withdrawal, drain, Dynamo's watchdog, for prefill its peers, the engine."""
    settings = worker.command_line.settings(WorkerSettings)
    seconds = settings.withdraw_grace_secs + settings.drain_secs + WATCHDOG_SECS
    if settings.disaggregation_mode is DisaggregationMode.PREFILL:
        seconds += float(worker.environment.get(*PREFILL_DRAIN))
    seconds += engine_of(worker).command_line.settings(VllmSettings).shutdown_secs
    assert seconds == worker.pod["terminationGracePeriodSeconds"]


@each_frontend
def test_a_frontend_has_time_to_drain(frontend: Container) -> None:
    """The pod has what the hook takes, what HTTP requests may take, and some seconds to spare."""
    hook = frontend.spec["lifecycle"]["preStop"]["exec"]["command"]
    assert hook[0] == "sleep"
    requests = int(frontend.environment["DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS"])
    assert int(hook[1]) + requests + FRONTEND_SPARE_SECS == frontend.pod["terminationGracePeriodSeconds"]


@each_frontend
def test_a_frontend_is_probed_where_it_listens(frontend: Container) -> None:
    """Its probes go to the port of --http-port, and it listens on all addresses, so that they arrive."""
    settings = frontend.command_line.settings(FrontendSettings)
    assert ("0.0.0.0", frontend.port("http")) == (settings.http_host, settings.http_port)
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert "http" == frontend.spec[probe]["httpGet"]["port"]


@each_file
def test_all_find_each_other(path: Path) -> None:
    """Front end and workers name the same etcd and the same planes."""
    names = ("ETCD_ENDPOINTS", *PLANES)
    found = {tuple(one.environment[name] for name in names) for one in containers(path) if one.name != "engine"}
    assert 1 == len(found)


@each_file
def test_selectors_select(path: Path) -> None:
    """Deployments have pods that they select, services have pods, and their ports are there."""
    for workload in workloads(path):
        wanted = workload["spec"]["selector"]["matchLabels"].items()
        matching = [one for one in workloads(path) if wanted <= one["spec"]["template"]["metadata"]["labels"].items()]
        assert [workload] == matching
    for service in (resource for resource in manifest(path) if resource["kind"] == "Service"):
        wanted = service["spec"]["selector"].items()
        selected = [one for one in containers(path) if wanted <= one.template["metadata"]["labels"].items()]
        for port in service["spec"]["ports"]:
            assert any(port["targetPort"] in {exposed["name"] for exposed in one.spec["ports"]} for one in selected), (
                service["metadata"]["name"]
            )


@each_file
def test_volumes_are_there_and_used(path: Path) -> None:
    """Each mount names a volume of its pod, and no volume is left over; what is read-only has a place to write."""
    for workload in workloads(path):
        volumes = {volume["name"] for volume in workload["spec"]["template"]["spec"]["volumes"]}
        mounts = {mount["name"] for one in pod_containers(workload) for mount in one["volumeMounts"]}
        assert volumes == mounts
        for one in pod_containers(workload):
            places = {mount["mountPath"] for mount in one["volumeMounts"]}
            assert "/models" in places
            assert "/tmp" in places or not one["securityContext"].get("readOnlyRootFilesystem")


@each_container
def test_containers_may_do_no_more_than_they_need(container: Container) -> None:
    """Nobody is root, gains privileges, or talks to the API server."""
    assert container.pod["securityContext"]["runAsNonRoot"]
    assert container.pod["securityContext"]["runAsUser"] > 10_000
    assert container.pod["automountServiceAccountToken"] is False
    assert container.spec["securityContext"]["allowPrivilegeEscalation"] is False
    assert ["ALL"] == container.spec["securityContext"]["capabilities"]["drop"]


@each_file
def test_the_engine_is_closed_to_others(path: Path) -> None:
    """The network policy lets other pods of the service reach every port but the engine's, and others the probes'."""
    (policy,) = (resource for resource in manifest(path) if resource["kind"] == "NetworkPolicy")
    peers, everybody = policy["spec"]["ingress"]
    assert "from" not in everybody
    assert [{"port": "system"}] == everybody["ports"]
    opened = [(port["port"], port["endPort"]) for port in peers["ports"]]
    for engine in containers(path, name="engine"):
        for port in (exposed["containerPort"] for exposed in engine.spec["ports"]):
            assert not any(first <= port <= last for first, last in opened)
    assert all(any(first <= port <= last for first, last in opened) for port in (9090, 32768, 60999))


@each_file
def test_prometheus_finds_the_workers(path: Path) -> None:
    """The example configuration of Prometheus names a headless service of the manifest, with the workers' port."""
    ((names, port),) = (
        (found["names"], found["port"])
        for job in prometheus_config()["scrape_configs"]
        for found in job["dns_sd_configs"]
    )
    headless = {
        (f"{resource['metadata']['name']}.default.svc", one["port"])
        for resource in manifest(path)
        if resource["kind"] == "Service" and resource["spec"].get("clusterIP") == "None"
        for one in resource["spec"]["ports"]
    }
    assert {(name, port) for name in names} == headless
    assert {port} == {worker.port("system") for worker in containers(path, name="worker")}


def test_roles() -> None:
    """Each file has the roles that its name promises."""
    found = {
        path.stem: sorted(
            worker.command_line.settings(WorkerSettings).disaggregation_mode.value
            for worker in containers(path, name="worker")
        )
        for path in MANIFESTS
    }
    assert {"aggregated": ["agg"], "disaggregated": ["decode", "prefill"], "kv-routed": ["agg"]} == found


@each_worker
def test_pods_are_labelled_with_their_role(worker: Container) -> None:
    """The label by which deployments tell their pods apart is the worker's role."""
    role = worker.command_line.settings(WorkerSettings).disaggregation_mode.value
    assert role == worker.template["metadata"]["labels"]["trio-sidecar/role"]


def test_kv_routing_has_a_router_and_events() -> None:
    """Where prompts are routed by KV the front end does so and every engine publishes; elsewhere neither."""
    for path in MANIFESTS:
        expected = path.stem == "kv-routed"
        for frontend in containers(path, name="frontend"):
            assert expected == (frontend.command_line.settings(FrontendSettings).router_mode is RouterMode.KV)
        for engine in containers(path, name="engine"):
            published = [flag for flag in engine.command_line.rest if flag.startswith("--kv-events-config=")]
            assert expected == bool(published)
            assert all(f"tcp://*:{engine.port('kv-events')}" in flag for flag in published)
