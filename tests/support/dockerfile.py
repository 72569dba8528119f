"""The instructions of deploy/Dockerfile."""

from __future__ import annotations

import json
from pathlib import Path

from dockerfile_parse import DockerfileParser

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"


def instructions(kind: str) -> list[str]:
    """Return the values of all instructions of a kind, such as RUN, in order."""
    parsed = DockerfileParser(str(DOCKERFILE)).structure
    return [each["value"] for each in parsed if each["instruction"] == kind]


def entrypoint() -> list[str]:
    """Return the command of the image, which tini runs."""
    words: list[str] = json.loads(instructions("ENTRYPOINT")[0])
    assert words[:2] == ["tini", "--"]
    return words[2:]


def health_check() -> list[str]:
    """Return the command that checks whether a container is healthy."""
    (value,) = instructions("HEALTHCHECK")
    words: list[str] = json.loads(value.partition("CMD ")[2])
    return words


def copied() -> list[tuple[list[str], str]]:
    """Return the sources and the destination of each COPY from the source tree."""
    found = [value.split() for value in instructions("COPY") if not value.startswith("--from")]
    return [(words[:-1], words[-1]) for words in found]
