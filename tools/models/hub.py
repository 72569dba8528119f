"""Downloads models from the Hugging Face Hub into the Hub's own cache.

transformers, vLLM and `hf download` use the same cache ($HF_HOME, $HF_HUB_CACHE), so a model is
stored once for all of them. huggingface_hub resolves names, applies the token ($HF_TOKEN, or
`hf auth login`), the mirror ($HF_ENDPOINT) and the offline mode ($HF_HUB_OFFLINE), and creates the
entries of the cache. `tools.models.download` transfers the content, because huggingface_hub starts
a file from its beginning if a download was interrupted.

    models--OWNER--REPO/blobs/DIGEST            content of a file
                        snapshots/COMMIT/PATH   link to the content
                        refs/REVISION           commit

This module imports huggingface_hub. Import it only before a download.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import httpx2
from huggingface_hub import (
    HfApi,
    hf_hub_download,
    hf_hub_url,
    is_offline_mode,
    snapshot_download,
)
from huggingface_hub.constants import (
    ENDPOINT,
    HF_HUB_CACHE,
    HF_HUB_ETAG_TIMEOUT,
    MAX_HTTP_DOWNLOAD_SIZE,
)
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import ModelInfo
from huggingface_hub.utils import build_hf_headers, disable_progress_bars

from protocol.process.exit_codes import ExitCode
from protocol.shared.mmproj import START_BYTES, has_usable_encoder, unusable_kind
from tools.failure import Failure
from tools.models.download import (
    Checksum,
    ConnectionLost,
    DownloadProblem,
    FileProgress,
    NoDownload,
    OnProgress,
    check_start,
    download,
    no_progress,
    partial_bytes,
)
from tools.models.fetch import PrintLine, check_space, format_size, locked, progress_bar
from tools.models.http_file import HttpFile
from tools.models.hub_cache import cached_model, repository_folder, repository_lock, start_of
from tools.models.hub_files import CONFIG, Kind, RepoFile, choose_files, encoders_of
from tools.models.names import HubName
from tools.models.records import PulledFile, PulledModel, read_records, write_record

OTHER_DISK = "set $HF_HOME to a directory on another disk"
LOCAL = (
    "to serve a model on this machine: tidegate serve PATH, a .gguf file or a Hugging Face "
    "directory"
)
MIRROR = "to use a mirror: set $HF_ENDPOINT"
_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_SHA256, _SHA1 = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubModel:
    """Facts about a model on the Hub, and the files of it that Tidegate needs."""

    name: HubName
    commit: str
    #: "" if the repository names no licence.
    licence: str
    kind: Kind
    files: list[RepoFile]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


class HubDownloads:
    """Downloads models from one server into one cache.

    home          Tidegate's directory, for the records of complete models
    print_line    prints a line of progress
    endpoint      URL of the server
    cache         directory of the Hub's cache
    on_progress   called when a part of a file was received
    expected_sha256  digest that the only file of the model must have; "": any
    check_config  called before weights are downloaded, with the path of a config.json or of the
                  start of a GGUF file. It raises Failure if the model cannot be served
    """

    def __init__(
        self,
        home: Path,
        print_line: PrintLine,
        *,
        on_progress: OnProgress = no_progress,
        expected_sha256: str = "",
        endpoint: str = ENDPOINT,
        cache: Path | None = None,
        check_config: Callable[[Path], object] | None = None,
    ) -> None:
        self._home, self._print_line = home, print_line
        self._on_progress = on_progress
        self._expected_sha256 = expected_sha256
        self._endpoint = endpoint.rstrip("/")
        self._cache = cache or Path(HF_HUB_CACHE)
        self._check_config = check_config
        disable_progress_bars()  # ours counts all files of a model

    def pull(self, name: HubName) -> PulledModel:
        """Download the newest files of a model, verify them, and return its new record.

        Files that are in the cache are not downloaded again. Without a network, or in offline mode,
        return the model as it is in the cache.

        Raises Failure, in one line with a remedy, if the model cannot be downloaded or stored.
        """
        with self._failures(name):
            if is_offline_mode():
                reason = "$HF_HUB_OFFLINE forbids a download"
                return self._from_cache(name, reason, f"unset it, or {LOCAL}")
            try:
                found = self._find(name)
            except (httpx2.TransportError, ConnectionLost) as error:
                reason = f"{self._endpoint} cannot be reached ({_one_line(error)})"
                return self._from_cache(name, reason, f"{LOCAL}; {MIRROR}")
            return self._download(found)

    def _find(self, name: HubName) -> HubModel:
        """Return the facts about a model from the Hub."""
        api = HfApi(endpoint=self._endpoint)
        info = api.model_info(
            name.repo, revision=name.revision, files_metadata=True, timeout=HF_HUB_ETAG_TIMEOUT
        )
        if info.sha is None or not _COMMIT.fullmatch(info.sha):
            raise _no_download(f"{self._endpoint} reports no commit of {name.repo}", MIRROR)
        stored = list(_repo_files(info))
        kind, files = choose_files(name, stored)
        self._check_expected(name, files)
        model = HubModel(name=name, commit=info.sha, licence=_licence(info), kind=kind, files=files)
        # A model of the catalogue is one file: its size and memory are known, and its digest.
        if kind != "GGUF" or self._expected_sha256 or not has_usable_encoder(_architecture(info)):
            return model
        return replace(model, files=[*files, *self._encoder(model, encoders_of(files[0], stored))])

    def _encoder(self, model: HubModel, found: Sequence[RepoFile]) -> Sequence[RepoFile]:
        """Return the image encoder to download with a GGUF model; [] if none can be used, or if it
        is not clear which one.

        found   those that may be the model's
        """
        if len(found) > 1:
            self._print_line(
                f"{model.name}: without an image encoder, because the repository has several: "
                f"{', '.join(file.path for file in found)}; for images, download one of them with "
                "`hf download` and give it to --mmproj"
            )
            return []
        for file in found:
            if (kind := unusable_kind(self._start(model, file))) is not None:
                self._print_line(
                    f"{model.name}: without its image encoder, whose kind {kind!r:.80} is not "
                    "supported"
                )
                return []
        return found

    def _start(self, model: HubModel, file: RepoFile) -> bytes:
        """Return the first bytes of a GGUF file (`mmproj.START_BYTES`), fewer if the connection is
        lost."""
        if (content := self._content(model, file)).is_file():
            return start_of(content)
        start = b""
        with contextlib.suppress(ConnectionLost), self._source(model, file).open(0) as body:
            while len(start) < START_BYTES and (piece := next(body.pieces, b"")):
                start += piece
        return start

    def _check_expected(self, name: HubName, files: Sequence[RepoFile]) -> None:
        """Raise Failure if the files on the Hub are not the one whose digest is expected."""
        expected = self._expected_sha256
        if expected and [file.sha256 for file in files] != [expected]:
            raise _no_download(
                f"{name} has changed on the Hub since its digest was written into the catalogue: "
                f"sha256 {files[0].sha256} instead of {expected}",
                f"to download it unchecked: tidegate pull {name.repo}",
            )

    def _download(self, model: HubModel) -> PulledModel:
        count = "1 file" if len(model.files) == 1 else f"{len(model.files)} files"
        licence = f"licence {model.licence}" if model.licence else "no licence given"
        page = f"{self._endpoint}/{model.name.repo}"
        self._print_line(f"{model.name}: {licence}; {format_size(model.size)} in {count} ({page})")
        lock = repository_lock(self._home, model.name.repo)
        lock.parent.mkdir(parents=True, exist_ok=True)
        with locked(lock, str(model.name), self._print_line):
            self._download_files(model)
            paths = [self._link(model, file) for file in model.files]
        folder = self._snapshot(model)
        pulled = PulledModel(
            name=str(model.name),
            kind=model.kind,
            path=str(folder if model.kind == "safetensors" else paths[0]),
            files=[
                PulledFile(str(path), file.size, str(_checksum(file)))
                for path, file in zip(paths, model.files, strict=True)
            ],
            licence=model.licence,
            commit=model.commit,
        )
        write_record(self._home, pulled)
        return pulled

    def _download_files(self, model: HubModel) -> None:
        """Download and verify the content of every file of a model that the cache lacks."""
        verified = {file for record in read_records(self._home) for file in record.files}
        needed = [file for file in model.files if not self._is_present(model, file, verified)]
        if not needed:
            return
        blobs = {file: self._blob(model, file) for file in needed}
        space = sum(file.size - partial_bytes(blob) for file, blob in blobs.items())
        folder = self._repository(model) / "blobs"
        folder.mkdir(parents=True, exist_ok=True)
        check_space(space, folder, OTHER_DISK)
        total = sum(file.size for file in needed)
        config = next((file for file in model.files if file.path == CONFIG), None)
        check = self._check_config or (lambda file: None)
        if config is not None and config not in blobs:  # left by an earlier download
            check(self._content(model, config))
        if model.kind == "GGUF" and self._check_config:
            first = model.files[0]  # only it has the metadata, if the model has several parts
            if first in blobs:  # else it was checked when its download began
                check_start(self._source(model, first), blobs[first], check)
        with progress_bar(total, f"downloading {model.name}", self._print_line) as bar:
            for file, blob in blobs.items():
                self._transfer(model, file, blob, self._counter(file, bar.update))
                if file == config:  # small files come first
                    check(blob)

    def _counter(self, file: RepoFile, on_bytes: Callable[[int], object]) -> Callable[[int], None]:
        """Return a function that counts the bytes of a file, and reports the sum. It also calls
        `on_bytes` with its argument."""
        completed = 0

        def count(size: int) -> None:
            nonlocal completed
            completed += size
            on_bytes(size)
            self._on_progress(FileProgress(_checksum(file).tagged, file.size, completed))

        return count

    def _transfer(
        self, model: HubModel, file: RepoFile, blob: Path, on_bytes: Callable[[int], object]
    ) -> None:
        """Download one file to `blob`. `on_bytes` is called with the number of bytes received."""
        if file.size > MAX_HTTP_DOWNLOAD_SIZE:
            self._transfer_huge(model, file)
            on_bytes(file.size)
            return
        download(
            self._source(model, file),
            blob,
            size=file.size,
            checksum=_checksum(file),
            on_bytes=on_bytes,
        )

    def _source(self, model: HubModel, file: RepoFile) -> HttpFile:
        url = hf_hub_url(model.name.repo, file.path, revision=model.commit, endpoint=self._endpoint)
        return HttpFile(url, build_hf_headers())

    def _transfer_huge(self, model: HubModel, file: RepoFile) -> None:
        """Download a file that the Hub serves only through its own storage protocol (Xet). Raises
        Failure if the digest is wrong."""
        self._check_digest(file, Path(self._link(model, file)))

    def _check_digest(self, file: RepoFile, path: Path) -> None:
        """Raise Failure, and remove the file at `path` and its content, if its digest is wrong."""
        if _checksum(file).matches(path):
            return
        _remove(path.resolve(), path)
        message = f"{file.path} is not the expected file: its digest is not {_checksum(file)}"
        raise Failure(message, exit_code=ExitCode.NO_DOWNLOAD)

    def _is_present(self, model: HubModel, file: RepoFile, verified: Container[PulledFile]) -> bool:
        """Return whether the content of a file is in the cache with the right digest.

        verified   files of other downloads, which are not hashed again

        A file whose size or digest is wrong is removed.
        """
        blob, path = self._blob(model, file), self._snapshot(model) / file.path
        present = self._content(model, file)
        if not present.is_file() or present.stat().st_size != file.size:
            _remove(blob, path)
            return False
        if PulledFile(str(path), file.size, str(_checksum(file))) in verified:
            return True
        if _checksum(file).matches(present):
            return True
        self._print_line(f"{present} has the wrong digest; downloading it again")
        _remove(blob, path)
        return False

    def _link(self, model: HubModel, file: RepoFile) -> str:
        """Link a file of the snapshot to its content in the cache, and return the path of the link.
        huggingface_hub does this. It first downloads content that the cache lacks, which includes
        content whose ETag on the server is not the digest.

        Raises Failure if the repository has a new commit since its files were listed, or if the
        digest of content that huggingface_hub downloaded is wrong.
        """
        path = hf_hub_download(
            model.name.repo,
            file.path,
            revision=model.name.revision,
            endpoint=self._endpoint,
            cache_dir=self._cache,
        )
        if Path(path) != self._snapshot(model) / file.path:
            raise _no_download(f"{model.name.repo} has changed meanwhile", "run the command again")
        blob = self._blob(model, file)
        if not (blob.is_file() and blob.samefile(path)):  # downloaded again by the library
            self._check_digest(file, Path(path))
        return path

    def _from_cache(self, name: HubName, reason: str, remedy: str) -> PulledModel:
        """Return a model that is in the cache, and print why it is used. Raises Failure with
        `reason` and `remedy` if the model is not in the cache."""
        try:
            folder = Path(
                snapshot_download(
                    name.repo,
                    revision=name.revision,
                    cache_dir=self._cache,
                    local_files_only=True,
                )
            )
            model = cached_model(name, folder)
        except (LocalEntryNotFoundError, Failure):
            message = f"{name} is not in the cache, and {reason}"
            raise _no_download(message, remedy, "network") from None
        self._print_line(f"{reason}; using the files in {folder}")
        return model

    def _repository(self, model: HubModel) -> Path:
        return repository_folder(self._cache, model.name.repo)

    def _snapshot(self, model: HubModel) -> Path:
        return self._repository(model) / "snapshots" / model.commit

    def _content(self, model: HubModel, file: RepoFile) -> Path:
        """Return the path of a file's content: its blob, or its path in the snapshot if
        huggingface_hub has stored the file there instead of a link."""
        blob = self._blob(model, file)
        return blob if blob.is_file() else self._snapshot(model) / file.path

    def _blob(self, model: HubModel, file: RepoFile) -> Path:
        return self._repository(model) / "blobs" / _checksum(file).value

    @contextlib.contextmanager
    def _failures(self, name: HubName) -> Iterator[None]:
        """Turn the exceptions of huggingface_hub into a Failure of one line with a remedy."""
        page = f"{self._endpoint}/{name.repo}"
        try:
            yield
        except GatedRepoError:
            raise _no_download(
                f"{name.repo} is only for users who accepted its terms",
                f"accept them at {page}, then set $HF_TOKEN or run: hf auth login",
                "terms",
            ) from None
        except RepositoryNotFoundError:
            raise _no_download(
                f"no model {name.repo} at {self._endpoint}, and no such file or directory",
                "check the name; for a private model set $HF_TOKEN or run: hf auth login",
                "unknown",
            ) from None
        except RevisionNotFoundError:
            raise _no_download(
                f"{name.repo} has no revision {name.revision!r}", f"see {page}", "unknown"
            ) from None
        except RemoteEntryNotFoundError:
            raise _no_download(
                f"a file of {name.repo} was removed meanwhile", "run the command again"
            ) from None
        except HfHubHTTPError as error:
            status = error.response.status_code
            remedy = "try again later"
            if status in (401, 403):
                remedy = "check the token in $HF_TOKEN, or run: hf auth login"
            reason = f"{self._endpoint} answers {status} for {name}"
            raise _no_download(reason, remedy, "network") from None
        except (
            ConnectionLost,
            httpx2.TransportError,
            LocalEntryNotFoundError,
            OfflineModeIsEnabled,
        ) as error:
            raise _no_download(
                f"the download of {name} was interrupted ({_one_line(error)})",
                "run the command again to continue it",
                "network",
            ) from None
        except OSError as error:
            raise _no_download(f"cannot store {name} in {self._cache}: {error}", OTHER_DISK) from (
                None
            )


def _repo_files(info: ModelInfo) -> Iterator[RepoFile]:
    """Yield the files of a repository whose size and digest the Hub reports."""
    for each in info.siblings or ():
        sha256 = each.lfs.sha256 if each.lfs is not None else None
        if sha256 is not None and not _SHA256.fullmatch(sha256):
            continue
        git_sha1 = each.blob_id if each.blob_id and _SHA1.fullmatch(each.blob_id) else None
        if each.size is not None and (sha256 or git_sha1):
            yield RepoFile(path=each.rfilename, size=each.size, sha256=sha256, git_sha1=git_sha1)


def _architecture(info: ModelInfo) -> str | None:
    """Return the architecture of a repository's GGUF files; None if the Hub reports none."""
    facts = getattr(info, "gguf", None)
    return facts.get("architecture") if isinstance(facts, dict) else None


def _checksum(file: RepoFile) -> Checksum:
    if file.sha256 is not None:
        return Checksum(file.sha256)
    assert file.git_sha1 is not None
    return Checksum(file.git_sha1, is_git=True)


def _licence(info: ModelInfo) -> str:
    """Return the licence that the model's page names; "" if there is none."""
    card = info.card_data
    if card is not None and card.license:
        name = card.get("license_name") if card.license == "other" else None
        return str(name or card.license)
    tags = (tag.removeprefix("license:") for tag in info.tags or () if tag.startswith("license:"))
    return next(tags, "")


def _remove(*files: Path) -> None:
    for file in files:
        file.unlink(missing_ok=True)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _no_download(reason: str, remedy: str, cause: DownloadProblem = "other") -> NoDownload:
    return NoDownload(f"{reason}; {remedy}", cause)
