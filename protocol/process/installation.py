"""The command that installs more of Tidegate into this environment: the only home of such remedies.

Tidegate is not on a package index. It is installed from a clone, or from a wheel that was built
there. So the command names the directory from which this installation came, if that is known.
"""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

from protocol.process.packages import HOME


def install_command(extra: str, home: Path = HOME) -> str:
    """Return the command that installs an extra, such as "hub", with what it requires.

    home   the directory that contains the packages
    """
    return f"{_installer()} {_requirement(extra, *_source(home))}"


def reinstall_command() -> str:
    """Return the command that installs this version of Tidegate once more, with all its files."""
    return f"{_installer()} --force-reinstall --no-deps {_requirement('all', *_source(HOME))}"


def own_environment_remedy() -> str:
    """Return how to install Tidegate where no other package can hide or replace its files."""
    words = _requirement("all", _source(HOME)[0], is_editable=False)
    return (
        f"reinstall Tidegate in an environment of its own: pipx install {words}, or "
        f"uv tool install {words}"
    )


def _installer() -> str:
    python = shlex.quote(sys.executable)
    if importlib.util.find_spec("pip") is None:  # an environment of uv
        return f"uv pip install --python {python}"
    return f"{python} -m pip install"


def _requirement(extra: str, source: Path | None, is_editable: bool) -> str:
    if source is None:
        return f"-e '.[{extra}]' in a clone of Tidegate"
    words = shlex.quote(f"{source}[{extra}]")
    return f"-e {words}" if is_editable else words


def _source(home: Path) -> tuple[Path | None, bool]:
    """Return the directory from which Tidegate was installed, None if it is not known or not there
    any more, and whether the installation uses the files there."""
    if (home / "setup.cfg").is_file():
        return home, True
    try:
        record = metadata.distribution("tidegate").read_text("direct_url.json")
        url = urlsplit(json.loads(record or "{}").get("url", ""))
    except (metadata.PackageNotFoundError, ValueError):
        return None, False
    path = Path(unquote(url.path))
    return (path, False) if url.scheme == "file" and path.is_dir() else (None, False)
