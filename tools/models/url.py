"""Downloads a GGUF file from a URL, verified by the digest that the user gives.

    $TIDEGATE_HOME/models/url/SHA256/FILE.gguf

This module imports huggingface_hub, for its HTTP client. Import it only before a download.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

from protocol.process.exit_codes import ExitCode
from tools.failure import Failure
from tools.models.download import Checksum, ConnectionLost, check_start, download, partial_bytes
from tools.models.fetch import OTHER_DISK, PrintLine, check_space, locked, progress_bar
from tools.models.http_file import HttpFile
from tools.models.names import UrlName
from tools.models.records import PulledFile, PulledModel, write_record


def pull_url(
    name: UrlName,
    home: Path,
    print_line: PrintLine,
    check_config: Callable[[Path], object] | None = None,
) -> PulledModel:
    """Download the file of a URL unless it is in `home`, and return its record.

    print_line     prints a line of progress
    check_config   called with the path of the file's start before the rest is downloaded. It raises
                   Failure if the model cannot be served

    Raises Failure, in one line with a remedy, if the file cannot be downloaded or stored.
    """
    file = home / "models" / "url" / name.sha256 / name.file
    checksum = Checksum(name.sha256)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with locked(file.parent / ".lock", name.file, print_line):
            if not (file.is_file() and checksum.matches(file)):
                _download(name, file, checksum, print_line, check_config)
        pulled = PulledModel(
            name=str(name),
            kind="GGUF",
            path=str(file),
            files=[PulledFile(str(file), file.stat().st_size, str(checksum))],
        )
        write_record(home, pulled)
    except OfflineModeIsEnabled:
        raise _failure(f"{name.url} is not in the cache", "unset $HF_HUB_OFFLINE") from None
    except HfHubHTTPError as error:
        reason = f"the server answers {error.response.status_code} for {name.url}"
        raise _failure(reason, "check the URL") from None
    except ConnectionLost as error:
        reason = f"the download of {name.url} was interrupted ({error})"
        raise _failure(reason, "run the command again to continue it") from None
    except OSError as error:
        raise _failure(f"cannot store {name.file} in {home}: {error}", OTHER_DISK) from None
    return pulled


def _download(
    name: UrlName,
    file: Path,
    checksum: Checksum,
    print_line: PrintLine,
    check_config: Callable[[Path], object] | None,
) -> None:
    source = HttpFile(name.url, {})
    size = source.size()
    if size is None:
        raise _failure(f"the server of {name.url} does not report its size", "use another server")
    check_space(size - partial_bytes(file), file.parent, OTHER_DISK)
    if check_config is not None:
        check_start(source, file, check_config)
    with progress_bar(size, f"downloading {name.file}", print_line) as bar:
        download(source, file, size=size, checksum=checksum, on_bytes=bar.update)


def _failure(reason: str, remedy: str) -> Failure:
    return Failure(f"{reason}; {remedy}", exit_code=ExitCode.NO_DOWNLOAD)
