"""Routers and proxies of others in front of Tidegate servers: vllm-router and nginx.

They are not installed with the tests. `python -m tests.torture.fronts` installs vllm-router in an
environment of its own, because its dependencies would change versions of ours.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import pytest
import requests

from tests.support.ports import free_port
from tests.support.processes import ROOT, Program
from tests.support.waiting import eventually

ROUTER_VERSION = "0.1.17"
ROUTER_ENVIRONMENT = Path(sys.prefix) / "vllm-router"
"""The virtual environment of vllm-router."""
NGINX_CONFIG = ROOT / "deploy" / "nginx.conf"


def router_program() -> str:
    """Return the path of vllm-router, or skip the test."""
    own = ROUTER_ENVIRONMENT / "bin" / "vllm-router"
    found = str(own) if own.exists() else shutil.which("vllm-router")
    if found is None:
        pytest.skip("vllm-router is not installed: python -m tests.torture.fronts installs it")
    return found


def nginx_program() -> str:
    """Return the path of nginx, or skip the test."""
    found = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if found is None:
        pytest.skip("nginx is not installed: apt install nginx-light")
    return found


class Front(Program):
    """A program that passes requests on to servers. It is ready inside its `with` block.

    url   its HTTP address
    """

    def __init__(self, program: str, arguments: Sequence[str], port: int) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        super().__init__(arguments, program=program)

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            assert eventually(self._is_ready), self.output
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _is_ready(self) -> bool:
        try:
            return requests.get(self.url + "/v1/models", timeout=5).status_code == 200
        except (requests.ConnectionError, requests.Timeout):
            return False


class VllmRouter(Front):
    """vllm-router. `options` say which servers it uses, and how it chooses one."""

    def __init__(self, *options: str) -> None:
        port = free_port()
        where = ["--host", "127.0.0.1", "--port", str(port)]
        metrics = ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
        checks = ["--worker-startup-check-interval", "1", "--health-check-interval-secs", "1"]
        super().__init__(router_program(), [*where, *metrics, *checks, *options], port)


class Nginx(Front):
    """nginx with the configuration in deploy/, in front of the servers on `ports`.

    folder   where nginx keeps its files
    """

    def __init__(self, folder: Path, ports: Sequence[int]) -> None:
        port = free_port()
        config = folder / "nginx.conf"
        config.write_text(nginx_config(folder, NGINX_CONFIG.read_text(), port, ports))
        arguments = ["-p", str(folder), "-c", str(config), "-e", str(folder / "errors.log")]
        super().__init__(nginx_program(), arguments, port)


def nginx_config(folder: Path, text: str, port: int, ports: Sequence[int]) -> str:
    """Return a whole configuration of nginx that includes deploy/nginx.conf with other servers.

    text   the content of deploy/nginx.conf
    port   port on which nginx listens
    """
    lines = text.splitlines()
    (listening,) = [line for line in lines if line.strip().startswith("listen ")]
    servers = [line for line in lines if line.strip().startswith("server ") and "{" not in line]
    assert len(servers) == 2
    replaced = dict(zip(servers, ports, strict=True))
    included = [
        line.replace(line.split()[1], f"127.0.0.1:{replaced[line]}") if line in replaced else line
        for line in lines
    ]
    included[included.index(listening)] = f"    listen 127.0.0.1:{port};"
    places = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = [f"{place}_temp_path {folder}/{place};" for place in places]
    # One process, so that no worker process is left if it is killed.
    head = [
        "daemon off;",
        "master_process off;",
        f"pid {folder}/pid;",
        "events {}",
        "http {",
        "access_log off;",
    ]
    return "\n".join([*head, *temporary, *included, "}"])
