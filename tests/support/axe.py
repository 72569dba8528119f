"""axe-core, which finds faults of accessibility in a page, for tests of the web page.

It is an npm package, fetched once into the user's cache. Tests that need it are skipped if it is
not there and npm cannot install it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page

PACKAGE, VERSION = "axe-core", "4.14.1"
FOLDER = Path.home() / ".cache" / "tidegate-tests" / f"{PACKAGE}-{VERSION}"
SCRIPT = FOLDER / "node_modules" / PACKAGE / "axe.min.js"
INSTALL_S = 120
_RUN = """async () => (await axe.run(document, { preload: false })).violations.flatMap(
  ({ id, nodes }) => nodes.map((node) =>
    `${id}: ${node.target.flat().join(" ")}: ${node.failureSummary.replaceAll("\\n", " ")}`))"""


def axe_script() -> str:
    """Return the program. Skip the test if it cannot be installed."""
    if not SCRIPT.exists():
        _install()
    return SCRIPT.read_text(encoding="utf-8")


def _install() -> None:
    """Install the package beside its folder, and rename it, so that no other process sees a part of
    it."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("needs axe-core, and npm to install it")
    FOLDER.parent.mkdir(parents=True, exist_ok=True)
    new = tempfile.mkdtemp(dir=FOLDER.parent)
    command = [npm, "install", "--no-fund", "--no-audit", "--ignore-scripts", "--prefix", new]
    try:
        subprocess.run(
            [*command, f"{PACKAGE}@{VERSION}"], capture_output=True, check=True, timeout=INSTALL_S
        )
        with suppress(OSError):  # another process was faster
            os.rename(new, FOLDER)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"npm cannot install axe-core: {error}")
    finally:
        shutil.rmtree(new, ignore_errors=True)


def violations(page: Page, script: str) -> list[str]:
    """Return what axe-core finds in a page as it is now: the rule, the element and the fault."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(script)
    found: list[str] = page.evaluate(_RUN)
    return found
