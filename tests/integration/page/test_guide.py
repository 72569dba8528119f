"""The guide at `/docs`: its files over HTTP, and its pages in a browser."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import requests

from gateway.web import guide_files
from tests.support.browser import Visit
from tests.support.docs_blocks import PAGES
from tests.support.gateway_process import GatewayProcess
from tests.support.http import error_of
from tests.support.processes import ROOT

BUILD = runpy.run_path(str(ROOT / "docs" / "site" / "build.py"))


@pytest.fixture(scope="module")
def guide() -> Path:
    """The guide, built where the gateways of these tests read it. A warning fails the build."""
    pytest.importorskip("furo", reason="needs Sphinx, MyST and Furo, from the extra docs")
    command = [sys.executable, "docs/site/build.py"]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return guide_files.GUIDE


def test_each_page_of_the_documentation_is_in_the_guide(guide: Path) -> None:
    for page in PAGES:
        place = BUILD["place_in_site"](page.relative_to(ROOT).as_posix())
        assert (guide / place).with_suffix(".html").is_file(), page


def test_each_page_is_in_the_contents(guide: Path) -> None:
    """The contents are made from docs/README.md, so this fails if a page is missing there."""
    start = (guide / "index.html").read_text()
    menu = start.partition('class="sidebar-tree"')[2].partition("sidebar-scroll")[0]
    linked = set(re.findall(r'href="([^"#]+\.html)"', menu or start))
    pages = {path.relative_to(guide).as_posix() for path in guide.rglob("*.html")}
    assert pages - linked <= {"index.html", "search.html"}


def test_pages_load_nothing_from_other_hosts_and_have_no_styles_in_attributes(guide: Path) -> None:
    for path in guide.rglob("*.html"):
        text = path.read_text()
        assert not re.search(r'(?:src|<link[^>]*href)="(?:https?:)?//', text), path
        assert not re.search(r'<[^>]*\s(?:style|on[a-z]+)="[^>]*>', text), path


def test_links_show_titles_instead_of_names_of_files(guide: Path) -> None:
    for path in guide.rglob("*.html"):
        assert not re.search(r">[\w/-]+\.md</span></a>", path.read_text()), path


def test_files_of_the_guide_are_sent_with_strict_headers(
    guide: Path, gateway: GatewayProcess
) -> None:
    digests = json.loads((guide / guide_files.POLICY).read_text())
    for name in ("", "use/page.html", "searchindex.js", "_static/styles/furo.css"):
        response = requests.get(f"{gateway.url}/docs/{name}", timeout=20)
        assert response.status_code == 200
        assert response.content == (guide / (name or "index.html")).read_bytes()
        policy = response.headers["Content-Security-Policy"].split("; ")
        assert "default-src 'none'" in policy
        assert " ".join(["script-src 'self'", *digests["script"]]) in policy
        assert not [rule for rule in policy if "unsafe" in rule or "http" in rule or "*" in rule]
        assert response.headers["X-Content-Type-Options"] == "nosniff"


def test_docs_leads_to_the_guide(guide: Path, gateway: GatewayProcess) -> None:
    response = requests.get(f"{gateway.url}/docs", allow_redirects=False, timeout=20)
    assert (response.status_code, response.headers["Location"]) == (308, "docs/")
    assert requests.get(f"{gateway.url}/docs", timeout=20).url == f"{gateway.url}/docs/"


@pytest.mark.parametrize("name", ["nothing.html", "policy.json", "use/", "__init__.py"])
def test_only_the_pages_of_the_guide_are_sent(
    guide: Path, gateway: GatewayProcess, name: str
) -> None:
    response = requests.get(f"{gateway.url}/docs/{name}", timeout=20)
    assert "first page is /docs/" in error_of(response, 404)["message"]


def test_no_file_outside_the_guide_is_sent(guide: Path, gateway: GatewayProcess) -> None:
    response = requests.get(f"{gateway.url}/docs/..%2fguide_files.py", timeout=20)
    assert "dot segments" in error_of(response, 400)["message"]


def test_a_reader_finds_a_word_and_follows_a_link_to_the_page(
    guide: Path, visit: Callable[..., Visit], gateway: GatewayProcess
) -> None:
    page = visit().open("/")
    page.get_by_role("link", name="Guide").click()
    page.wait_for_url("**/docs/")
    page.get_by_placeholder("Search").fill("drafts")
    page.keyboard.press("Enter")
    results = page.locator("ul.search li a")
    results.nth(2).wait_for()  # the page adds one after the other
    assert results.count() > 2
    results.first.click()
    page.wait_for_url("**/docs/*/*.html*")
    page.get_by_role("link", name="Reference", exact=True).click()
    page.wait_for_url("**/reference")


def test_an_old_address_of_a_route_leads_to_the_reference(
    guide: Path, visit: Callable[..., Visit]
) -> None:
    visitor = visit()
    visitor.page.goto(visitor.url + "/docs#post_v1_chat_completions")
    visitor.page.wait_for_url("**/reference#post_v1_chat_completions")
