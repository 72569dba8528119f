"""Models with one damaged file, and the outcome of reading them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from gguf import GGMLQuantizationType

from gateway.text.trial import run_trial
from protocol.config.worker import WorkerConfig
from tests.support.checkpoints import tiny_tokenizer
from tests.support.eager import CPU, EagerStepper
from tests.support.family_models import random_model
from tests.support.gguf_files import write_gguf
from tests.support.quantized_files import FORMATS, write_quantized
from tests.torture.damaged.damage import damaged_bytes, damaged_json
from tests.torture.damaged.gguf import GGUFParts
from worker.checkpoint.gguf_file import GGUFFile
from worker.device.cpuinfo import cpu_flags
from worker.errors import UnusableModel
from worker.kernels.select import select_kernels
from worker.loading.decoder import load_model
from worker.startup.preflight import preflight

FAMILIES = ("llama", "gemma2", "qwen3_moe", "phi3", "smollm3", "gpt2", "gpt_oss", "stablelm")
QUANTIZED = ("gptq 4 bits, desc_act", "awq", "fp8 blocks", "packed 4 bits, asymmetric", "int8")
SHARDED = "in shards"
DIRECTORIES = (*FAMILIES, *QUANTIZED, SHARDED)
GGUF_FILES = {
    "llama": GGMLQuantizationType.F32,
    "gemma3_text": GGMLQuantizationType.F32,
    "phi3": GGMLQuantizationType.F32,
    "mixtral": GGMLQuantizationType.Q4_0,
    "gpt2": GGMLQuantizationType.Q8_0,
    "gpt_oss": GGMLQuantizationType.IQ4_NL,
}
"""model_type -> type of its matrices."""
SETTINGS = {"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}
INDEX, CONFIG, TOKENIZER = "model.safetensors.index.json", "config.json", "tokenizer.json"
OTHERS = ("tokenizer_config.json", "generation_config.json")
MAX_LINE_CHARS = 1_000
SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
LOADS, REFUSED, REFUSED_BY_TRIAL = "loads", "refused", "refused by the tokenizer's trial"
REFUSED_BY_WORKER = "refused with its weights"
TOKENS = [1, 2, 3]


class WrongRefusal(Exception):
    """Raised if the refusal of a model is not one short line, or if it has no remedy."""


@dataclass(frozen=True)
class DamagedModel:
    """A model of which one file is damaged.

    kind    name of the damaged file; "gguf" for all GGUF files
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
            kind = name if name in FAMILIES else "llama"
            model = random_model(kind, **SMALL, num_attention_heads=4)
            if name in QUANTIZED:
                path.mkdir()
                write_quantized(path, model, FORMATS[name])
                for written in (path / "quantized").iterdir():
                    written.rename(path / written.name)
            else:
                model.save_pretrained(path, max_shard_size="90KB" if name == SHARDED else "50GB")
            tiny_tokenizer().save(str(path / TOKENIZER))
            (path / OTHERS[0]).write_text(json.dumps(SETTINGS | {"eos_token": "</s>"}))
            (path / OTHERS[1]).write_text(json.dumps({"eos_token_id": [0, 1], "top_p": 0.9}))
            self._bytes |= {file: file.read_bytes() for file in path.iterdir() if file.is_file()}
        for name, blocks in GGUF_FILES.items():
            model = random_model(name, **SMALL, num_attention_heads=4)
            path = write_gguf(folder / f"{name}.gguf", model, blocks)
            self._bytes[path] = path.read_bytes()
            self._parts[path] = GGUFFile(path)
        self._damaged: Path | None = None

    def damage(self, seed: int, index: int) -> DamagedModel:
        """Damage a file and return its model. The same `seed` and `index` give the same damage. The
        file that was damaged before is repaired first."""
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
        path = self._folder / random.choice(DIRECTORIES)
        name = CONFIG if random.random() < 0.8 else random.choice(OTHERS)
        if path.name == SHARDED and random.random() < 0.5:
            name = INDEX
        return self._text(path / name, random)

    def _tokenizer(self, random: Random) -> tuple[Path, bytes]:
        return self._text(self._folder / random.choice(DIRECTORIES) / TOKENIZER, random)

    def _text(self, file: Path, random: Random) -> tuple[Path, bytes]:
        damage: Callable[[bytes, Random], bytes]
        damage = damaged_json if random.random() < 0.75 else damaged_bytes
        return file, damage(self._bytes[file], random)

    def _safetensors(self, random: Random) -> tuple[Path, bytes]:
        path = self._folder / random.choice(DIRECTORIES)
        file = random.choice(sorted(path.glob("*.safetensors")))
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
        file = self._folder / f"{random.choice(list(GGUF_FILES))}.gguf"
        original = GGUFParts.from_file(self._parts[file])
        if random.random() < 0.5:
            data = self._bytes[file]
            return file, damaged_bytes(data, random, 0, len(data) - len(original.data))
        original.damage(random)
        return file, original.to_bytes()


def outcome_of(model: DamagedModel, *, tries_tokenizer: bool) -> str:
    """Read a model as `tidegate serve` does, compute tokens with it, and return the outcome.

    tries_tokenizer   also run the trial of the tokenizer, as a server does in a sandbox

    Raises WrongRefusal, or any other exception that a server would show as a traceback.
    """
    found = preflight([WorkerConfig(model=str(model.path), device="cpu")])
    if found.error:
        _check_line(f"{found.error}; {found.remedy}")
        if not found.remedy:
            raise WrongRefusal(f"no remedy: {found.error}")
        return REFUSED
    assert found.card is not None
    if tries_tokenizer:
        try:
            run_trial(found.card.tokenizer.decode())
        except ValueError:
            return REFUSED_BY_TRIAL
    kernels = select_kernels("auto", CPU, cpu_flags=cpu_flags())
    try:
        loaded = load_model(model.path, dtype=torch.float32, device=CPU, kernels=kernels)
    except UnusableModel as error:
        _check_line(error.message)
        return REFUSED_BY_WORKER
    EagerStepper(loaded, [TOKENS]).run([(2,), (1,)])
    return LOADS


def _check_line(line: str) -> None:
    """Raise WrongRefusal if a refusal is not one short line."""
    if "\n" in line or len(line) > MAX_LINE_CHARS:
        raise WrongRefusal(f"{len(line):,} characters: {line[:200]!r}")
    line.encode()  # as when it is printed
