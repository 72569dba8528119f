"""The files in deploy/ are correct.

The dashboard names metrics that exist. The systemd unit, the image and the manifest start a command
with options that exist.
"""

from __future__ import annotations

import configparser
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.app import operations
from gateway.auth.caller import Caller
from gateway.auth.keys import OPTION_NAME
from gateway.observe.metrics import Metrics
from protocol.config.gateway import GatewayConfig
from protocol.process.exit_codes import ExitCode
from protocol.shared.api_keys import KeyEntry
from protocol.wire import sockets
from protocol.wire.cluster_key import SAFE_MODE
from tests.support.dockerfile import entrypoint, instructions
from tests.support.fronts import nginx_config, nginx_program
from tests.unit.test_metrics_docs import SERIES, every_name, labels_of_series
from tools.__main__ import main
from tools.processes.restart_policy import PERMANENT

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "tidegate.service"
PROBES = {"startupProbe": "/startupz", "readinessProbe": "/readyz", "livenessProbe": "/livez"}
GRACE_S = 5.0
"""Seconds after `--drain-s` until a process that still runs is killed: see
docs/operate/operations.md."""
_HISTOGRAM = re.compile(r"_(bucket|sum|count)$")
_LABELS = re.compile(r"\bby \(([^)]*)\)")


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    told: dict[str, Any] = json.loads((DEPLOY / "grafana.json").read_text())
    return told


def expressions(dashboard: dict[str, Any]) -> Iterator[str]:
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]


def kinds() -> dict[str, str]:
    """Return the type of each metric of the gateway by its name."""
    return {metric.name: metric.type for metric in Metrics(list).registry.collect()}


def test_every_expression_names_series_that_exist(dashboard: dict[str, Any]) -> None:
    known, histograms = every_name(), {n for n, kind in kinds().items() if kind == "histogram"}
    asked = [name for text in expressions(dashboard) for name in SERIES.findall(text)]
    assert len(asked) > 30
    for name in asked:
        if (bare := _HISTOGRAM.sub("", name)) in histograms:
            assert bare != name, f"{name} is a histogram: it has _bucket, _sum and _count"
        else:
            assert name in known, name
    (variable,) = [v for v in dashboard["templating"]["list"] if v["name"] == "job"]
    assert set(SERIES.findall(variable["query"])) <= known


def test_every_expression_sums_over_labels_that_exist(dashboard: dict[str, Any]) -> None:
    labels = {"le"}.union(*labels_of_series().values())
    for text in expressions(dashboard):
        assert text.count("(") == text.count(")")
        assert text.count("{") == text.count("}")
        for names in _LABELS.findall(text):
            assert set(names.split(", ")) <= labels, text


def test_panels_have_ids_and_places_of_their_own(dashboard: dict[str, Any]) -> None:
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places: set[Any] = set()
    for panel in panels:
        at = panel["gridPos"]
        across, down = range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])
        cells = set(product(across, down))
        assert not cells & places, panel["title"]
        assert at["x"] + at["w"] <= 24
        places |= cells


class Unit(configparser.RawConfigParser):
    """A systemd unit, which may contain a key several times. The last value counts."""

    def __init__(self) -> None:
        super().__init__(strict=False, delimiters=("=",), comment_prefixes=("#",))

    def optionxform(self, optionstr: str) -> str:
        return optionstr


@pytest.fixture(scope="module")
def service() -> configparser.SectionProxy:
    unit = Unit()
    unit.read_string(UNIT.read_text())
    assert unit.sections() == ["Unit", "Service", "Install"]
    return unit["Service"]


def test_the_unit_starts_a_command_with_options_that_exist(
    service: configparser.SectionProxy, capsys: pytest.CaptureFixture[str]
) -> None:
    check_serve(service["ExecStart"].split(), capsys)


def check_serve(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Raise AssertionError unless `words` is `tidegate serve` with options that exist."""
    program, command, *options = words
    assert (Path(program).name, command) == ("tidegate", "serve")
    with pytest.raises(SystemExit):
        main(["serve", "--help", "all"])
    text = capsys.readouterr().out
    for option in options:
        if option.startswith("--"):
            assert re.search(rf"^  {option}\b", text, re.MULTILINE), option


def test_the_unit_waits_for_a_drain_and_does_not_restart_after_permanent_errors(
    service: configparser.SectionProxy,
) -> None:
    assert float(service["TimeoutStopSec"]) > GatewayConfig().drain_s + GRACE_S
    hopeless = {ExitCode.USAGE, ExitCode.BAD_MODEL, ExitCode.IN_USE}
    assert set(map(int, service["RestartPreventExitStatus"].split())) == hopeless == PERMANENT


def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    verifier = shutil.which("systemd-analyze")
    if verifier is None:
        pytest.skip("systemd-analyze is not here")
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/tidegate/.venv/bin/tidegate", sys.executable))
    ran = subprocess.run([verifier, "verify", "--man=no", copy], capture_output=True, text=True)
    about_it = [line for line in ran.stderr.splitlines() if UNIT.name in line]
    assert about_it == []


# ---- nginx
def directives(name: str) -> list[str]:
    """Return the values of all directives with this name in deploy/nginx.conf."""
    text = (DEPLOY / "nginx.conf").read_text()
    return re.findall(rf"^ *{name} ([^;]+);$", text, re.MULTILINE)


def test_nginx_allows_what_a_server_allows_and_closes_connections_first() -> None:
    assert directives("client_max_body_size") == [f"{GatewayConfig().max_body_mib}m"]
    (idle,) = directives("keepalive_timeout")
    assert int(idle.removesuffix("s")) < GatewayConfig().idle_timeout_s
    (read,) = directives("proxy_read_timeout")
    assert int(read.removesuffix("h")) * 3600 > GatewayConfig().keep_alive_s


def test_nginx_accepts_the_configuration(tmp_path: Path) -> None:
    text = nginx_config(tmp_path, (DEPLOY / "nginx.conf").read_text(), 80, [8000, 8001])
    config = tmp_path / "nginx.conf"
    config.write_text(text)
    files = ["-p", str(tmp_path), "-c", str(config), "-e", str(tmp_path / "errors.log")]
    command = [nginx_program(), "-t", *files]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


# ---- the image
def test_the_image_starts_a_server_with_options_that_exist_and_not_as_root(
    capsys: pytest.CaptureFixture[str],
) -> None:
    check_serve(entrypoint(), capsys)
    assert instructions("USER") == ["10001"]
    assert instructions("STOPSIGNAL") == ["SIGTERM"]
    assert instructions("VOLUME") == ["/var/lib/tidegate"]


# ---- Kubernetes
MANIFESTS = sorted(DEPLOY.glob("kubernetes*.yaml"))
Manifest = dict[str, Any]
IN_KUBERNETES = {"v1", "apps/v1", "policy/v1", "networking.k8s.io/v1"}
"""Groups of kinds that Kubernetes itself defines. The others are extensions."""


def manifests(path: Path, kind: str = "") -> list[Manifest]:
    """Return the objects in a file, or those of one kind."""
    found: list[Manifest] = list(yaml.safe_load_all(path.read_text()))
    return [each for each in found if each is not None and kind in ("", each["kind"])]


def pods() -> list[tuple[str, Manifest]]:
    """Return (name, object) of each Deployment and StatefulSet."""
    return [
        (f"{path.stem} {each['kind']}", each)
        for path in MANIFESTS
        for each in manifests(path)
        if each["kind"] in ("Deployment", "StatefulSet")
    ]


PODS = [pytest.param(each, id=name) for name, each in pods()]
SERVERS = [pytest.param(each, id=name) for name, each in pods() if each["kind"] == "Deployment"]


def container_of(deployment: Manifest) -> Manifest:
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return dict(container)


def option(container: Manifest, name: str) -> str:
    arguments: list[str] = container["args"]
    return arguments[arguments.index(name) + 1]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_kubernetes_accepts_the_manifests(path: Path) -> None:
    validator = pytest.importorskip("kubernetes_validate")
    ours = [each for each in manifests(path) if each["apiVersion"] in IN_KUBERNETES]
    assert ours
    for each in ours:
        validator.validate(each, validator.latest_version(), strict=True)


@pytest.mark.parametrize("deployment", SERVERS)
def test_a_manifest_probes_routes_that_exist_and_lets_a_drain_end(
    deployment: Manifest, capsys: pytest.CaptureFixture[str]
) -> None:
    container = container_of(deployment)
    check_serve([*entrypoint(), *container["args"]], capsys)
    paths = {name: container[name]["httpGet"]["path"] for name in PROBES}
    assert paths == PROBES
    assert set(PROBES.values()) <= {each.rule for each in operations() if each.scope == "public"}
    assert {"name": "http", "containerPort": GatewayConfig().port} in container["ports"]
    pause_s = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    drain_s = float(option(container, "--drain-s"))
    grace_s = deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace_s >= pause_s + drain_s + GRACE_S


@pytest.mark.parametrize("deployment", PODS)
def test_a_pod_runs_as_the_user_of_the_image_and_writes_only_to_volumes(
    deployment: Manifest,
) -> None:
    pod = deployment["spec"]["template"]["spec"]
    assert str(pod["securityContext"]["runAsUser"]) == instructions("USER")[0]
    container = container_of(deployment)
    assert container["securityContext"]["readOnlyRootFilesystem"]
    written = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert written - {"/var/lib/downloads"} == {"/var/lib/tidegate", "/run/tidegate", "/tmp"}
    volumes = {each["name"] for each in pod["volumes"]}
    volumes |= {
        each["metadata"]["name"] for each in deployment["spec"].get("volumeClaimTemplates", ())
    }
    for each in (*pod.get("initContainers", ()), container):
        assert {mount["name"] for mount in each["volumeMounts"]} <= volumes
    assert (
        deployment["spec"]["selector"]["matchLabels"].items()
        <= deployment["spec"]["template"]["metadata"]["labels"].items()
    )


def test_gateways_know_the_engines_of_the_set(capsys: pytest.CaptureFixture[str]) -> None:
    path = DEPLOY / "kubernetes-engines.yaml"
    (engines,) = manifests(path, "StatefulSet")
    (gateways,) = manifests(path, "Deployment")
    headless = next(each for each in manifests(path, "Service") if "clusterIP" in each["spec"])
    assert headless["spec"]["clusterIP"] == "None"
    assert headless["metadata"]["name"] == engines["spec"]["serviceName"]
    assert headless["spec"]["selector"] == engines["spec"]["selector"]["matchLabels"]
    container = container_of(engines)
    _, _, port = option(container, "--address").rpartition(":")
    names = [
        f"tcp://{engines['metadata']['name']}-{number}.{engines['spec']['serviceName']}:{port}"
        for number in range(engines["spec"]["replicas"])
    ]
    arguments = container_of(gateways)["args"]
    assert [b for a, b in pairwise(arguments) if a == "--engines"] == names
    for name in names:
        assert sockets.is_connectable(name)
    assert container["command"] == ["tini", "--", "tidegate", "engine"]
    with pytest.raises(SystemExit):
        main(["engine", "--help", "all"])
    text = capsys.readouterr().out
    for word in container["args"]:
        if word.startswith("--"):
            assert re.search(rf"^  {word}\b", text, re.MULTILINE), word
    grace_s = engines["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace_s >= float(option(container, "--drain-s")) + GRACE_S
    key = option(container, "--cluster-key")
    (copying,) = engines["spec"]["template"]["spec"]["initContainers"]
    assert copying["command"][-1] == key
    assert f"0{SAFE_MODE:o}" in copying["command"]


def test_scaling_reads_a_metric_that_exists_and_selects_the_pods() -> None:
    path = DEPLOY / "kubernetes-scaling.yaml"
    (scaler,) = manifests(path, "ScaledObject")
    (trigger,) = scaler["spec"]["triggers"]
    asked = SERIES.findall(trigger["metadata"]["query"])
    assert asked == ["vllm:num_requests_waiting"]
    assert set(asked) <= every_name()
    (pool,) = manifests(path, "InferencePool")
    (policy,) = manifests(path, "NetworkPolicy")
    (budget,) = manifests(path, "PodDisruptionBudget")
    for name in ("kubernetes", "kubernetes-gpu"):
        (deployment,) = manifests(DEPLOY / f"{name}.yaml", "Deployment")
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        for selector in (pool["spec"]["selector"], budget["spec"]["selector"]):
            assert selector["matchLabels"] == labels
        assert policy["spec"]["podSelector"]["matchLabels"] == labels
        assert scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
        ports = {each["containerPort"] for each in container_of(deployment)["ports"]}
        assert pool["spec"]["targetPorts"] == [{"number": GatewayConfig().port}]
        assert {GatewayConfig().port} <= ports


def test_kv_events_of_pods_are_for_the_picker_only() -> None:
    (deployment,) = manifests(DEPLOY / "kubernetes-gpu.yaml", "Deployment")
    container = container_of(deployment)
    addresses = [option(container, name) for name in ("--kv-events", "--kv-events-replay")]
    for address in addresses:
        assert sockets.check_plain_address(address, plain_tcp=True) is None
    assert "--kv-events-plain-tcp" in container["args"]
    published = {int(address.rpartition(":")[2]) for address in addresses}
    ports = {each["containerPort"] for each in container["ports"]}
    assert ports == {GatewayConfig().port, *published}
    caller = Caller.from_key(OPTION_NAME, KeyEntry(digest="00"))
    assert option(container, "--kv-events-namespace") == caller.namespace("")
    (policy,) = manifests(DEPLOY / "kubernetes-scaling.yaml", "NetworkPolicy")
    http, events = policy["spec"]["ingress"]
    assert "from" not in http
    assert [each["port"] for each in http["ports"]] == [GatewayConfig().port]
    assert "from" in events
    assert {each["port"] for each in events["ports"]} == published
