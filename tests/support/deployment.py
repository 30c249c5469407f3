"""The files of ``deploy/``, read."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import yaml

from trio_sidecar.cli.flags import FLAGS
from trio_sidecar.cli.layers import layered
from trio_sidecar.cli.main import build_parser
from trio_sidecar.config import resolve

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trio_sidecar.cli.layers import Layered

S = TypeVar("S", bound=attrs.AttrsInstance)

DEPLOY = Path(__file__).parents[2] / "deploy"
ALERTS = DEPLOY / "prometheus" / "alerts.yaml"
PROMETHEUS_CONFIG = DEPLOY / "prometheus" / "prometheus.yaml"
DASHBOARD = DEPLOY / "grafana" / "dashboard.json"
MANIFESTS = tuple(sorted((DEPLOY / "kubernetes").glob("*.yaml")))
POD_ADDRESS = "10.1.2.3"

DYNAMO_VARIABLES = frozenset(
    {
        "DYN_EVENT_PLANE_HOST",
        "DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS",
        "DYN_SYSTEM_PORT",
        "DYN_TCP_RPC_HOST",
        "ETCD_ENDPOINTS",
    }
)
"""What Dynamo's runtime reads itself; a test looks for each in its binary."""

PLANES = frozenset({"DYN_EVENT_PLANE", "DYN_REQUEST_PLANE"})
"""Dynamo's too, in front ends; in workers they are settings of ours."""

OTHER_VARIABLES = frozenset({"HF_HOME", "HF_TOKEN", "VLLM_NIXL_SIDE_CHANNEL_HOST"})
"""Those of huggingface_hub, which fetches models, and of vLLM's NIXL connector."""

VLLM_FLAGS = frozenset({"--kv-events-config", "--kv-transfer-config", "--max-model-len"})
"""vLLM's own flags; a test of the session ``vllm`` has its parser read them."""

THRESHOLD = re.compile(r"\s*(?:==|!=|>=|<=|>|<)\s*[\d.]+\s*(?:#.*)?$")


@attrs.frozen(slots=True, kw_only=True)
class Query:
    """One expression of PromQL that is shipped.

    Attributes:
        name: Where it stands.
        expression: The whole of it.
        rule: The alert around it; empty for one of the dashboard.
    """

    name: str
    expression: str
    rule: dict[str, Any] = attrs.field(factory=dict, repr=False)

    @property
    def measured(self) -> str:
        """The expression without the threshold at its end; has a value whether or not that is crossed."""
        text, cut = THRESHOLD.subn("", self.expression)
        assert cut == 1, f"{self.name} does not end in a threshold"
        return text


def alerts() -> list[Query]:
    """The alerts, in order."""
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [
        Query(name=rule["alert"], expression=rule["expr"], rule=rule) for group in groups for rule in group["rules"]
    ]


def prometheus_config() -> Any:
    """The example configuration of Prometheus."""
    return yaml.safe_load(PROMETHEUS_CONFIG.read_text())


def dashboard() -> Any:
    """The dashboard."""
    return json.loads(DASHBOARD.read_text())


def dashboard_queries() -> list[Query]:
    """The queries of the dashboard's panels, as they are written there."""
    return [
        Query(name=f"{panel['title']} {target['refId']}", expression=target["expr"])
        for panel in dashboard()["panels"]
        for target in panel.get("targets", [])
    ]


def dashboard_variables() -> dict[str, Any]:
    """The variables at the dashboard's top, by name."""
    return {variable["name"]: variable for variable in dashboard()["templating"]["list"]}


@attrs.frozen(slots=True, kw_only=True)
class Understood:
    """A command line that our own parser has read.

    Attributes:
        command: Such as ``engine vllm``.
        layers: Flags and variables.
        variables: The variables that are settings of the command.
        rest: What is not ours but vLLM's.
    """

    command: str
    layers: Layered = attrs.field(repr=False)
    variables: frozenset[str]
    rest: tuple[str, ...]

    def settings(self, cls: type[S]) -> S:
        """The settings that the command would run with."""
        model: dict[str, object] = {"model": self.rest[0], "arguments": self.rest[1:]} if self.rest else {}
        return resolve(cls, flags=self.layers.flags, environ=self.layers.environ, fallback=model)


def understood(arguments: Sequence[str], environ: Mapping[str, str]) -> Understood:
    """Read a command line as our own program does.

    Raises:
        UsageError: It is not understood.
        InvalidConfig: Its configuration file is wrong.
    """
    parser = build_parser()
    found, rest = parser.parse_known_args(list(arguments))
    command = found.parser
    if not hasattr(found, "run_rest"):
        command.refuse_rest(rest)
    sources = [source for source in command.offered.values() if source] + command.variables
    return Understood(
        command=command.prog.removeprefix(f"{parser.prog} "),
        layers=layered(parser, command, getattr(found, FLAGS, None) or {}, environ),
        variables=frozenset(source.option.env for source in sources if source.option.env),
        rest=tuple(rest),
    )


@attrs.frozen(slots=True, kw_only=True)
class Container:
    """A container of a workload.

    Attributes:
        where: File, workload and container.
        spec: As it is written.
        template: The pod around it.
    """

    where: str
    spec: dict[str, Any] = attrs.field(repr=False)
    template: dict[str, Any] = attrs.field(repr=False)

    @property
    def name(self) -> str:
        """Its name in the pod."""
        return str(self.spec["name"])

    @property
    def pod(self) -> dict[str, Any]:
        """The pod's spec."""
        spec: dict[str, Any] = self.template["spec"]
        return spec

    @property
    def environment(self) -> dict[str, str]:
        """Its variables; where Kubernetes fills one in, the pod's address, and no secrets."""
        found = {}
        for variable in self.spec["env"]:
            if "value" in variable:
                found[variable["name"]] = variable["value"]
            elif variable["valueFrom"].get("fieldRef") == {"fieldPath": "status.podIP"}:
                found[variable["name"]] = POD_ADDRESS
            else:
                assert variable["valueFrom"]["secretKeyRef"]["optional"], variable
        return found

    @property
    def command_line(self) -> Understood:
        """Its arguments and variables, as our program reads them."""
        return understood(self.spec["args"], self.environment)

    def port(self, reference: int | str) -> int:
        """A port of it by name or number."""
        ports = {port["name"]: port["containerPort"] for port in self.spec["ports"]}
        return reference if isinstance(reference, int) else int(ports[reference])


@functools.cache
def manifest(path: Path) -> list[dict[str, Any]]:
    """The resources of a file; all that ask share them."""
    return list(yaml.safe_load_all(path.read_text()))


def workloads(path: Path) -> list[dict[str, Any]]:
    """The deployments of a file."""
    return [resource for resource in manifest(path) if resource["kind"] == "Deployment"]


def containers(*paths: Path, name: str | None = None) -> list[Container]:
    """All containers of some files, or those of one name."""
    return [
        Container(
            where=f"{path.stem}/{workload['metadata']['name']}/{spec['name']}",
            spec=spec,
            template=workload["spec"]["template"],
        )
        for path in paths
        for workload in workloads(path)
        for spec in pod_containers(workload)
        if name in {None, spec["name"]}
    ]


def pod_containers(workload: dict[str, Any]) -> list[dict[str, Any]]:
    """The containers of a workload, native sidecars first."""
    pod = workload["spec"]["template"]["spec"]
    return [*pod.get("initContainers", []), *pod["containers"]]
