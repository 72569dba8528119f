"""The files of the web page over HTTP: their headers, caching and compression, and --no-web."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest
import requests
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution

from gateway.web.files import COMPRESSED, CONTENT_TYPES, PAGE, STATIC
from gateway.web.vendor import VENDOR
from tests.support.gateway_process import GatewayProcess
from tests.support.http import connect, error_of, read_head
from tests.support.processes import ROOT

PACKED = sorted(path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*") if path.is_file())
FILES = [name for name in PACKED if not name.endswith("/LICENSE")]
ENCODINGS = {"Accept-Encoding": "identity"}


def get(gateway: GatewayProcess, path: str, **headers: str) -> requests.Response:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return requests.get(gateway.url + path, headers=ENCODINGS | names, timeout=20)


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_sent_with_strict_headers(gateway: GatewayProcess, name: str) -> None:
    response = get(gateway, f"/web/{name}")
    assert response.status_code == 200
    assert response.content == (STATIC / name).read_bytes()
    assert response.headers["Content-Type"] == CONTENT_TYPES[Path(name).suffix]
    policy = response.headers["Content-Security-Policy"].split("; ")
    assert "default-src 'none'" in policy
    assert not [rule for rule in policy if "unsafe" in rule or "http" in rule or "*" in rule]
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert response.headers["Referrer-Policy"] == "no-referrer"


@pytest.mark.parametrize("path", ["/", "/reference", "/reference?x=1"])
def test_the_page_is_one_file(gateway: GatewayProcess, path: str) -> None:
    response = get(gateway, path)
    assert response.content == (STATIC / PAGE).read_bytes()
    assert response.headers["Content-Type"] == "text/html; charset=utf-8"


def test_a_browser_asks_whether_a_file_has_changed(gateway: GatewayProcess) -> None:
    first = get(gateway, "/web/app.js")
    assert first.headers["Cache-Control"] == "no-cache"
    again = get(gateway, "/web/app.js", If_None_Match=first.headers["ETag"])
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["ETag"] == first.headers["ETag"]
    assert get(gateway, "/web/app.js", If_None_Match='"other"').status_code == 200


def test_a_file_is_compressed_for_those_who_accept_it(gateway: GatewayProcess) -> None:
    plain = get(gateway, "/web/app.js")
    with requests.get(
        gateway.url + "/web/app.js", headers={"Accept-Encoding": "gzip"}, stream=True, timeout=20
    ) as packed:
        assert packed.headers["Content-Encoding"] == "gzip"
        assert gzip.decompress(packed.raw.read()) == plain.content
    assert packed.headers["ETag"] != plain.headers["ETag"]
    assert packed.headers["Vary"] == plain.headers["Vary"] == "Accept-Encoding"


def test_head_has_the_headers_of_get(gateway: GatewayProcess) -> None:
    with connect(gateway.port) as client, client.makefile("rb") as file:
        client.sendall(b"HEAD / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        status, headers = read_head(file)
        assert (status, file.read()) == (200, b"")
    assert int(headers["content-length"]) == (STATIC / PAGE).stat().st_size
    assert "content-security-policy" in headers


def test_a_font_is_not_compressed_again(gateway: GatewayProcess) -> None:
    name = next(name for name in FILES if Path(name).suffix in COMPRESSED)
    response = requests.get(
        f"{gateway.url}/web/{name}", headers={"Accept-Encoding": "gzip"}, timeout=20
    )
    assert "Content-Encoding" not in response.headers
    assert response.content == (STATIC / name).read_bytes()


@pytest.mark.parametrize(
    "name",
    [
        "nothing.js",
        "..%2ffiles.py",
        "%2e%2e",
        "__init__.py",
        "app.js%00",
        ".",
        "app.js/",
        "vendor",
        "vendor/katex/LICENSE",
    ],
)
def test_only_the_files_of_the_page_are_sent(gateway: GatewayProcess, name: str) -> None:
    response = get(gateway, f"/web/{name}")
    assert response.status_code in (400, 404)
    assert "error" in response.json()


def test_no_file_names_another_host_or_has_inline_code() -> None:
    """A link to a site is text; the page would load nothing from it. What the files of others load
    is seen in a browser (`tests/integration/page/test_page_text.py`)."""
    for path in (path for path in STATIC.iterdir() if path != VENDOR):
        text = path.read_text()
        addresses = set(re.findall(r"https?://[\w.]+", text))
        assert addresses <= {"http://www.w3.org"}, path.name  # the namespace of SVG
        assert not re.search(
            r"\b(innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval)\b", text
        )
        if path.suffix == ".html":
            assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", text)


def test_an_error_links_to_the_reference_of_its_route(gateway: GatewayProcess) -> None:
    refused = gateway.post("/v1/chat/completions", {"messages": []})
    assert refused.status_code == 400
    assert refused.headers["Link"] == '</reference#post_v1_chat_completions>; rel="help"'
    assert (
        get(gateway, "/v1/models/x").headers["Link"]
        == '</reference#get_v1_models_name>; rel="help"'
    )
    assert get(gateway, "/nothing").headers["Link"] == '</reference>; rel="help"'
    assert "Link" not in get(gateway, "/v1/models").headers


def test_the_page_can_be_switched_off(engine) -> None:
    with GatewayProcess(engine=engine.address, web=False) as gateway:
        gateway.await_ready()
        for path in ("/", "/reference", "/web/app.js"):
            response = get(gateway, path)
            assert "--no-web" in error_of(response, 404)["message"]
            assert "Link" not in response.headers
        assert get(gateway, "/openapi.json").status_code == 200


def test_the_distribution_contains_all_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    distribution = Distribution()
    distribution.parse_config_files(["setup.cfg"])
    command = build_py(distribution)
    command.ensure_finalized()
    packed = {name: files for name, _, _, files in command.data_files}
    assert sorted(packed["gateway.web"]) == [f"static/{name}" for name in PACKED]
