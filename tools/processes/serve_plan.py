"""`ServePlan`: the server that `tidegate serve` starts, and the banner that describes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from protocol.config.cluster import ClusterConfig
from protocol.config.engine import EngineConfig
from protocol.config.gateway import GatewayConfig
from protocol.config.serve import ServeConfig
from tools.http.web import KEY_VARIABLE, local_url
from tools.processes.saved_models import ManagedPlan
from tools.processes.server_log import LOG_FILE
from tools.processes.several_models import PlannedModels
from tools.processes.topology import Engines, engines_of


@dataclass(frozen=True, slots=True)
class ServePlan:
    """The server to start: the configs of its processes, and its run directory."""

    #: One engine as the options describe it. `engines` are the ones to start.
    engine: EngineConfig
    gateway: GatewayConfig
    serve: ServeConfig
    directory: Path
    #: The supervisor's own API key for readiness checks; "" if the server has no keys.
    key: str = ""
    num_gpus: int = 0
    #: The engines of models that are loaded and unloaded while the server runs, by the models'
    #: names; empty if there is one model that is always loaded.
    models: Mapping[str, EngineConfig] = field(default_factory=dict)
    #: The same models after their files were checked.
    planned: PlannedModels | None = None
    #: The launcher of --cluster; None: there is none.
    cluster: ClusterConfig | None = None
    #: The models of a server whose clients manage them; None: they do not.
    managed: ManagedPlan | None = None

    @property
    def engines(self) -> Engines:
        if self.models:
            return {f"engine {name}": engine for name, engine in self.models.items()}
        return engines_of(self.serve, self.engine, self.directory, self.num_gpus)

    @property
    def url(self) -> str:
        return local_url(self.gateway.host, self.gateway.port)


FOREGROUND = "Press Ctrl-C to stop."


def in_background(plan: ServePlan) -> str:
    """Return the end of the banner of a server in the background."""
    port, has_log = plan.gateway.port, plan.serve.log_file_mib > 0
    log = f"tidegate logs {port}" if has_log else "none, because of --log-file-mib 0"
    file = f"  ({plan.directory / LOG_FILE})" * has_log
    return f"It runs in the background.\n  log:   {log}{file}\n  stop:  tidegate stop {port}"


def banner(plan: ServePlan, model: str | None, seconds: float, ending: str = FOREGROUND) -> str:
    """Return the text that a server shows when it is ready.

    ending   how to stop the server
    """
    if plan.serve.render_only:
        return f"""
Tidegate renders for {model} at {plan.url}, without an engine  (ready in {seconds:.1f} s)

{ending}
"""
    header = f""" -H "Authorization: Bearer ${KEY_VARIABLE}" \\\n   """ if plan.key else ""
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    return f"""
Tidegate serves {", ".join(plan.models) or model} at {plan.url}  (ready in {seconds:.1f} s)

  curl {plan.url}/v1/chat/completions{header} -H 'Content-Type: application/json' \\
    -d '{body}'

  tidegate chat --url {plan.url}{_page(plan)}
{_addresses(plan)}

{ending}
"""


def _page(plan: ServePlan) -> str:
    """Return the banner's line about the web page; "" if it is switched off."""
    return f"\n  in a browser: {plan.url}/" if plan.gateway.web else ""


def _addresses(plan: ServePlan) -> str:
    """Return the banner's lines with the addresses of the engines."""
    if plan.models:
        return "\n".join(f"  ZeroMQ: {e.address}  {name}" for name, e in plan.models.items())
    if plan.cluster:
        return f"  engines: placed by Ray; their addresses are in {plan.gateway.engines_file}"
    if plan.gateway.engines_file:
        return f"  engines: those in {plan.gateway.engines_file}"
    if plan.gateway.engines:
        return "\n".join(f"  ZeroMQ: {address}" for address in plan.gateway.engines)
    if not plan.gateway.decode:
        return f"  ZeroMQ: {plan.gateway.engine}"
    threads = {}
    if plan.serve.split:
        threads = {c.address: f" ({c.worker.threads} threads)" for c in plan.engines.values()}
    lines = [f"  prompts computed by {a}{threads.get(a, '')}" for a in plan.gateway.prefill]
    lines += [f"  answers computed by {a}{threads.get(a, '')}" for a in plan.gateway.decode]
    if plan.serve.split:
        lines.append(f"  ZeroMQ: {plan.engine.address}")
    return "\n".join(lines)
