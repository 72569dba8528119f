"""docs/api-ollama.md and docs/api-infill.md agree with the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from gateway.api.infill.requests import InfillBody
from gateway.api.infill.responses import InfillAnswer, StopType
from gateway.api.ollama.requests import (
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaGenerateBody,
    OllamaOptions,
)
from gateway.api.ollama.responses import AnswerLine, DoneReason
from gateway.app import operations
from gateway.prompt.infill import INFILL_MARKERS
from worker.checkpoint.gguf_roles import INFILL_KEYS

DOCS = Path(__file__).parents[2] / "docs"
OLLAMA, INFILL = (DOCS / name for name in ("api-ollama.md", "api-infill.md"))


def words(text: str) -> set[str]:
    return set(re.findall(r"`([\w ./-]+)`", text))


def rows(page: Path, title: str) -> dict[str, set[str]]:
    """Return the words of the first column of each table below a heading, by the column's name."""
    section = page.read_text().split(f"## {title}\n")[1].split("\n## ")[0]
    found: dict[str, set[str]] = {}
    for table in re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE):
        head, _, *cells = [re.split(r"(?<!\\)\|", line)[1].strip() for line in table.splitlines()]
        found[head] = words(" ".join(cells))
    return found


def test_the_page_names_every_route_of_ollama() -> None:
    routes = {f"{op.method.upper()} {op.rule}" for op in operations() if op.tag == "Ollama"}
    assert rows(OLLAMA, "Routes")["route"] == routes


def test_the_page_names_every_field_of_ollama() -> None:
    found = rows(OLLAMA, "Requests")
    fields = {*OllamaChatBody.__struct_fields__, *OllamaGenerateBody.__struct_fields__}
    assert found["field"] == fields - {"options"}
    assert found["option"] == set(OllamaOptions.__struct_fields__)


def test_the_page_names_every_member_of_embed() -> None:
    members = set(OllamaEmbedBody.__struct_fields__) - {"model", "keep_alive", "options"}
    assert rows(OLLAMA, "Requests")["member"] == members


def test_the_page_names_the_members_of_the_last_line() -> None:
    members = set(AnswerLine.__struct_fields__) - {"model", "created_at", "done", "logprobs"}
    assert rows(OLLAMA, "Answers")["member"] == members | {"context"}
    assert set(get_args(DoneReason)) <= words(OLLAMA.read_text())


def test_the_page_names_every_field_of_infill() -> None:
    found = rows(INFILL, "llama.cpp's /infill")
    assert found["field"] == set(InfillBody.__struct_fields__)
    members = set(InfillAnswer.__struct_fields__) - {"ignored_params"}
    assert found["member"] == members
    assert set(get_args(StopType)) <= words(INFILL.read_text())


def test_the_page_has_the_tokens_of_every_family() -> None:
    section = INFILL.read_text().split("## Models\n")[1].split("\n## ")[0]
    table = re.findall(r"^\| (.*?`.*?) \| (\w+ first) \|", section, re.MULTILINE)
    listed = [(re.findall(r"`(.*?)`", cell.replace("\\|", "|")), order) for cell, order in table]
    expected = [
        ([each for each in (m.prefix, m.suffix, m.middle) if each], m.order) for m in INFILL_MARKERS
    ]
    assert listed == expected
    newest = {names[0] for names in INFILL_KEYS.values()}
    assert newest <= set(re.findall(r"fim_\w{3}", section))
