"""The names under which models are downloaded: a repository of the Hugging Face Hub, or a URL.

    OWNER/REPO                   the safetensors files of a repository, or else a GGUF file
    OWNER/REPO:Q4_K_M            its GGUF file of this quantisation
    OWNER/REPO:FILE.gguf         its GGUF file of this name
    OWNER/REPO@REVISION...       the same at a branch, tag or commit
    https://HOST/FILE.gguf#sha256=HEX

`hf.co/` or `huggingface.co/` may precede the name of a repository, with or without `https://`.
Nothing here reads files or uses the network.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from protocol.shared.gguf_parts import part_of

MAIN = "main"
"""The revision of a repository if the name gives none."""

_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_HUB_NAME = re.compile(
    r"(?:(?:https://)?(?:hf\.co|huggingface\.co)/)?"
    rf"(?P<repo>{_PART}/{_PART})/?"
    r"(?:@(?P<revision>[A-Za-z0-9][A-Za-z0-9._/-]{0,127}))?"
    r"(?::(?P<choice>[A-Za-z0-9][A-Za-z0-9._/-]{0,199}))?"
)
_SHA256 = re.compile(r"sha256[=:]([0-9a-fA-F]{64})")
_SAFE_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,199}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubName:
    """A model in a repository of the Hugging Face Hub."""

    #: "owner/name".
    repo: str
    #: Branch, tag or commit.
    revision: str = MAIN
    #: Quantisation ("Q4_K_M") or name of a GGUF file. "": the safetensors files, if there are any.
    choice: str = ""

    def __str__(self) -> str:
        revision = "" if self.revision == MAIN else f"@{self.revision}"
        return self.repo + revision + (f":{self.choice}" if self.choice else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class UrlName:
    """A GGUF file on a web server, with its digest."""

    #: Without the fragment that gives the digest.
    url: str
    #: Digest of the file, in lower-case hex.
    sha256: str

    def __str__(self) -> str:
        return self.url

    @property
    def file(self) -> str:
        """The name under which the file is stored: the last part of the URL's path."""
        return unquote(urlsplit(self.url).path).rpartition("/")[2]


def parse_hub_name(text: str) -> HubName | None:
    """Return the name of a model on the Hub; None if `text` is not of that form."""
    found = _HUB_NAME.fullmatch(text)
    if found is None or ".." in text or "--" in found["repo"]:
        return None
    if found["repo"].endswith(".gguf"):  # a path
        return None
    return HubName(
        repo=found["repo"], revision=found["revision"] or MAIN, choice=found["choice"] or ""
    )


def parse_url(text: str) -> UrlName | None:
    """Return the URL of a model with its digest; None if `text` is not an http or https URL.

    Raises ValueError if the URL has no digest, does not name a .gguf file with a safe name, or
    names one part of a split model.
    """
    if not text.startswith(("http://", "https://")):
        return None
    url, _, fragment = text.partition("#")
    digest = _SHA256.fullmatch(fragment)
    if digest is None:
        raise ValueError(
            f"{url}: a download by URL needs the file's digest; add it to the URL: #sha256=HEX"
        )
    name = UrlName(url=url, sha256=digest[1].lower())
    if not urlsplit(url).hostname or not name.file.endswith(".gguf"):
        raise ValueError(f"{url}: only .gguf files are downloaded by URL")
    if part_of(name.file) is not None:
        raise ValueError(
            f"{url}: the parts of a split model are not downloaded by URL; give OWNER/REPO:FILE"
        )
    if not _SAFE_FILE.fullmatch(name.file):
        raise ValueError(f"{url}: {name.file!r} cannot be used as a file name")
    return name
