"""Models with one damaged file, and what reading such a model leads to."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from gateway.text.trial import run_trial
from protocol.config.worker import WorkerConfig
from tests.support.checkpoints import tiny_tokenizer
from tests.support.family_models import random_model
from tests.support.gguf_files import write_gguf
from tests.torture.damaged.damage import damaged_bytes, damaged_json
from tests.torture.damaged.gguf import GGUFParts
from worker.loading.gguf_file import GGUFFile
from worker.startup.preflight import preflight

DIRECTORIES = ("llama", "gemma2", "qwen3_moe", "phi3", "smollm3")
GGUF_FILES = ("llama", "gemma3_text", "phi3")
SETTINGS = {"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}
WEIGHTS, CONFIG, TOKENIZER = "model.safetensors", "config.json", "tokenizer.json"
OTHERS = ("tokenizer_config.json", "generation_config.json")
MAX_LINE_CHARS = 1_000
SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
LOADS, REFUSED, REFUSED_BY_TRIAL = "loads", "refused", "refused by the tokenizer's trial"


class WrongRefusal(Exception):
    """Raised if the refusal of a model is not one short line."""


@dataclass(frozen=True)
class DamagedModel:
    """A model of which one file is damaged.

    kind    the file's kind: config.json, safetensors, gguf, ...
    path    the directory or GGUF file to serve
    """

    kind: str
    path: Path


class Originals:
    """Models in a directory. `damage` damages one of their files at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._bytes: dict[Path, bytes] = {}
        self._parts = {}
        for name in DIRECTORIES:
            path = folder / name
            random_model(name, **SMALL, num_attention_heads=4).save_pretrained(path)
            tiny_tokenizer().save(str(path / TOKENIZER))
            (path / OTHERS[0]).write_text(json.dumps(SETTINGS | {"eos_token": "</s>"}))
            (path / OTHERS[1]).write_text(json.dumps({"eos_token_id": [0, 1], "top_p": 0.9}))
            for file in (WEIGHTS, CONFIG, TOKENIZER, *OTHERS):
                self._bytes[path / file] = (path / file).read_bytes()
        for name in GGUF_FILES:
            model = random_model(name, **SMALL, num_attention_heads=4)
            path = write_gguf(folder / f"{name}.gguf", model)
            self._bytes[path] = path.read_bytes()
            self._parts[path] = GGUFFile(path)
        self._damaged: Path | None = None

    def damage(self, seed: int, index: int) -> DamagedModel:
        """Damage a file and return its model. Equal numbers give equal damage. The file that was
        damaged before is repaired first."""
        if self._damaged is not None:
            self._damaged.write_bytes(self._bytes[self._damaged])
        random = Random(f"{seed}/{index}")
        make = (self._json, self._safetensors, self._gguf, self._tokenizer)[index % 4]
        file, content = make(random)
        self._damaged = file
        file.write_bytes(content)
        is_gguf = file.suffix == ".gguf"
        return DamagedModel("gguf" if is_gguf else file.name, file if is_gguf else file.parent)

    def _json(self, random: Random) -> tuple[Path, bytes]:
        name = CONFIG if random.random() < 0.8 else random.choice(OTHERS)
        return self._text(self._folder / random.choice(DIRECTORIES) / name, random)

    def _tokenizer(self, random: Random) -> tuple[Path, bytes]:
        return self._text(self._folder / random.choice(DIRECTORIES) / TOKENIZER, random)

    def _text(self, file: Path, random: Random) -> tuple[Path, bytes]:
        damage: Callable[[bytes, Random], bytes]
        damage = damaged_json if random.random() < 0.75 else damaged_bytes
        return file, damage(self._bytes[file], random)

    def _safetensors(self, random: Random) -> tuple[Path, bytes]:
        file = self._folder / random.choice(DIRECTORIES) / WEIGHTS
        data = self._bytes[file]
        end = 8 + int.from_bytes(data[:8], "little")
        if random.random() < 0.4:
            return file, damaged_bytes(data, random, 0, end)
        header = json.loads(data[8:end])
        first, second = random.sample([name for name in header if name != "__metadata__"], 2)
        if random.random() < 0.3:  # two tensors overlap, or are exchanged
            offsets = header[first]["data_offsets"]
            if random.random() < 0.5:
                header[first]["data_offsets"] = header[second]["data_offsets"]
            moved = random.choice((-4, 4, 1 << 62))
            header[second]["data_offsets"] = [offset + moved for offset in offsets]
            text = json.dumps(header).encode()
        else:
            text = damaged_json(json.dumps(header).encode(), random)
        return file, len(text).to_bytes(8, "little") + text + data[end:]

    def _gguf(self, random: Random) -> tuple[Path, bytes]:
        file = self._folder / f"{random.choice(GGUF_FILES)}.gguf"
        original = GGUFParts.from_file(self._parts[file])
        if random.random() < 0.5:
            data = self._bytes[file]
            return file, damaged_bytes(data, random, 0, len(data) - len(original.data))
        original.damage(random)
        return file, original.to_bytes()


def outcome_of(model: DamagedModel, *, tries_tokenizer: bool) -> str:
    """Read a model as `tidegate serve` does, and return the outcome.

    tries_tokenizer   also run the trial of the tokenizer, as a server does in a sandbox

    Raises WrongRefusal, or any other exception that a server would show as a traceback.
    """
    found = preflight([WorkerConfig(model=str(model.path), device="cpu")])
    if found.error:
        line = f"{found.error}; {found.remedy}"
        if "\n" in line or len(line) > MAX_LINE_CHARS or not found.remedy:
            raise WrongRefusal(f"{len(line):,} characters: {line[:200]!r}")
        line.encode()  # as when it is printed
        return REFUSED
    assert found.card is not None
    if tries_tokenizer:
        try:
            run_trial(found.card.tokenizer.decode())
        except ValueError:
            return REFUSED_BY_TRIAL
    return LOADS
