"""Finds a downloaded model by its name, or downloads it.

The library of the Hugging Face Hub is imported only for a download.
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path

from protocol.process.exit_codes import ExitCode
from protocol.process.installation import install_command
from tools.failure import Failure
from tools.models.catalogue import CATALOGUE, HUB_MODELS, catalogue_digest
from tools.models.download import OnProgress, no_progress
from tools.models.fetch import PrintLine
from tools.models.names import HubName, UrlName, parse_hub_name, parse_url
from tools.models.preflight import check_config
from tools.models.records import PulledModel, read_record
from tools.paths import user_path


def parse_name(text: str) -> HubName | UrlName | None:
    """Return the model on the Hub or the URL that `text` names; None if it names neither. Raises
    Failure if `text` is a URL that `parse_url` rejects."""
    if entry := HUB_MODELS.get(text):
        return parse_hub_name(entry.source)
    try:
        return parse_url(text) or parse_hub_name(text)
    except ValueError as error:
        raise Failure(str(error), exit_code=ExitCode.USAGE) from None


def download_name(text: str) -> HubName | UrlName:
    """Return the parsed name of a model to download. Raises Failure if `text` is not such a
    name."""
    name = parse_name(text)
    if name is None:
        hint = nearest_names(text) or (
            "it is not OWNER/REPO, not a URL, and not in the catalogue (tidegate models)"
        )
        raise Failure(f"no model {text!r}: {hint}", exit_code=ExitCode.BAD_MODEL)
    return name


def nearest_names(text: str) -> str:
    """Return a question with the names of the catalogue that resemble `text`, such as Ollama's
    name of a model; "" if none does."""
    names = [*CATALOGUE, *HUB_MODELS]
    close = get_close_matches(text.lower(), names, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else ""


def served_name(model: str) -> str | None:
    """Return the name under which MODEL is served: its name in the catalogue or on the Hub. Return
    None if MODEL is a path or a URL."""
    if model in CATALOGUE or model in HUB_MODELS:
        return model
    if user_path(model).exists() or model.startswith(("http://", "https://")):
        return None
    name = parse_hub_name(model)
    return None if name is None else str(name)


def pulled_path(name: HubName | UrlName, home: Path, print_line: PrintLine) -> Path:
    """Return the path of a downloaded model. Download the model if it is not in the cache. Raises
    Failure if it cannot be downloaded."""
    model = read_record(home, str(name)) or pull_model(name, home, print_line)
    return Path(model.path)


def pull_model(
    name: HubName | UrlName,
    home: Path,
    print_line: PrintLine,
    on_progress: OnProgress = no_progress,
) -> PulledModel:
    """Download a model, or the newest version of one in the cache. Return its record. Raises
    Failure if it cannot be downloaded or stored.

    on_progress   called when a part of a file was received from the Hub
    """
    return _puller(name, home, print_line, on_progress)()


def _puller(
    name: HubName | UrlName, home: Path, print_line: PrintLine, on_progress: OnProgress
) -> Callable[[], PulledModel]:
    """Return a function that downloads a model. Raises Failure if the library is missing."""
    try:
        from tools.models.hub import HubDownloads
        from tools.models.url import pull_url
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in ("huggingface_hub", "httpx2"):
            raise
        raise Failure(f"huggingface_hub is not installed; try: {install_command('hub')}") from None
    if isinstance(name, UrlName):
        return lambda: pull_url(name, home, print_line, check_config)
    hub = HubDownloads(
        home,
        print_line,
        on_progress=on_progress,
        expected_sha256=catalogue_digest(str(name)),
        check_config=check_config,
    )
    return lambda: hub.pull(name)
