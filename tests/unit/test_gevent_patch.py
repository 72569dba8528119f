"""The gateway patches what gevent patches, and calls the plugins that gevent calls."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ROOT

PATCHES = {
    "gevent": "from gevent import monkey; monkey.patch_all()",
    "ours": "from gateway.gevent_patch import patch_standard_library as patch; patch()",
    "ours, then gunicorn's": "from gateway.gevent_patch import patch_standard_library as patch; "
    "patch(); from gevent import monkey; monkey.patch_all()",
}
PRINT = """
import json
from gevent import events, monkey
import calls
saved = {name: sorted(names) for name, names in monkey.saved.items()}
search = events.notify_and_call_entry_points.__module__
print(json.dumps({"saved": saved, "called": calls.CALLED, "search": search}))
"""
PLUGIN = """
CALLED = []
def call(event):
    CALLED.append([type(event).__name__, getattr(event, "module_name", "")])
"""
GROUPS = ("will_patch_all", "will_patch_module", "did_patch_module", "did_patch_all")


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    """A folder with an installed plugin of gevent."""
    (tmp_path / "calls.py").write_text(PLUGIN)
    info = tmp_path / "plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    lines = [f"[gevent.plugins.monkey.{group}]\nplugin = calls:call\n" for group in GROUPS]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return tmp_path


def patched(code: str, folder: Path) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{folder}"}
    command = [sys.executable, "-P", "-c", code + PRINT]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)  # type: ignore[no-any-return]


def test_the_gateway_patches_as_gevent_does_and_calls_the_same_plugins(plugin: Path) -> None:
    expected = patched(PATCHES["gevent"], plugin)
    assert {"socket", "ssl", "threading", "subprocess"} <= expected["saved"].keys()
    names = [name for name, _ in expected["called"]]
    assert names[0] == "GeventWillPatchAllEvent"
    assert names[-1] == "GeventDidPatchAllEvent"
    assert ["GeventWillPatchModuleEvent", "socket"] in expected["called"]
    for name, code in PATCHES.items():
        assert patched(code, plugin) == expected, name
