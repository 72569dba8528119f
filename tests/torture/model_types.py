"""Computes a tiny random model of every model type that transformers lists as a causal decoder, and
compares its logits with transformers: whole, and in chunks.

    python -m tests.torture.model_types [--types llama mamba]

A type is computed natively, by its class in transformers with our attention, or by its class with a
cache of its own. Or it is refused, with a reason, before or while it is loaded. A type whose logits
differ is a complaint. So is one that fails in another way, or of which no tiny model can be made,
except those in NOT_BUILT.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tqdm import tqdm
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.support import family_models, own_cache_models, transformers_models
from tests.support.checkpoints import write_directory
from tests.support.eager import EagerStepper, expected, load, some_tokens
from tests.torture.table import print_table
from worker.batch.batch import BatchRows
from worker.errors import UnusableModel
from worker.models.base import RowModel
from worker.models.decoder import DecoderModel
from worker.spec.architectures import BORROWED, REFUSED
from worker.spec.families.registry import FAMILIES
from worker.spec.wrappers import TEXT_TYPES, WRAPPERS

COLUMNS = {"model type": 26, "computed": 32, "largest difference": 18}
NUM_TOKENS, CHUNK = 40, 17
MOST = 1e-3
"""Largest difference of logits, relative to a tenth of the largest one if that is above 10."""
NOT_BUILT = {
    **dict.fromkeys(("dots3_note", "dots3_note_text"), "its parts for images and sound are large"),
    **dict.fromkeys(("qwen4_exp", "qwen4_exp_text"), "its config has no sizes of its indexer"),
    "gemma4_assistant": "it reads the keys and values of another model",
    "reformer": "it is a decoder only with axial positions of one length",
    "zamba": "transformers cannot tie the layers of a tiny model",
    "zamba2": "transformers accepts only its own pattern of layers",
}
"""Model types of which no tiny model is made -> why."""
CONFIG_ONLY = "transformers has a config class of this type, and no class of models"


@dataclass(frozen=True, slots=True)
class TypeResult:
    """The result for one model type.

    computed     by which code, or why not at all
    difference   the largest one of the logits; None: nothing was computed
    wrong        what is wrong; "" if nothing is
    """

    model_type: str
    computed: str
    difference: float | None = None
    wrong: str = ""

    def cells(self) -> tuple[str, ...]:
        difference = "" if self.difference is None else f"{self.difference:.1e}"
        return self.model_type, self.computed, difference

    def complaints(self, slack: float) -> list[str]:
        return [self.wrong] if self.wrong else []


def class_names() -> dict[str, str]:
    """Return the class of each model type."""
    return {
        model_type: names if isinstance(names, str) else names[0]
        for model_type, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
    }


def random_model(model_type: str, name: str) -> Any:
    """Return a tiny random model of a type, whose class is `name`. Of a model of images that
    contains a family of ours, it is the text part."""
    if model_type in family_models.MODEL_TYPES:
        return family_models.random_model(model_type)
    if name in WRAPPERS:
        kind = min(WRAPPERS[name])
        return family_models.random_model(TEXT_TYPES.get(kind, {}).get("model_type", kind))
    if model_type in transformers_models.COMPUTED:
        return transformers_models.random_model(model_type)
    borrowed = model_type if model_type in BORROWED else ""
    return own_cache_models.random_own_cache(name, borrowed)


def tried(model_type: str, name: str) -> TypeResult:
    """Compute a model of a type, and compare it with transformers."""
    if (reason := REFUSED.get(name) or NOT_BUILT.get(model_type)) is not None:
        return TypeResult(model_type, f"{'refused' if name in REFUSED else 'not tried'}: {reason}")
    try:
        theirs = random_model(model_type, name)
    except Exception as error:  # any class may refuse the tiny sizes in its own way
        return TypeResult(model_type, "not built", wrong=f"{type(error).__name__}: {error}"[:300])
    try:
        return _compared(model_type, theirs)
    except UnusableModel as error:
        return TypeResult(model_type, f"refused: {error.message}")
    except Exception as error:
        return TypeResult(model_type, "failed", wrong=f"{type(error).__name__}: {error}"[:300])


def _compared(model_type: str, theirs: Any) -> TypeResult:
    """Load a model, and compare its logits with those of transformers."""
    with tempfile.TemporaryDirectory() as folder:
        loaded = load(write_directory(Path(folder), theirs))
        tokens = some_tokens(NUM_TOKENS)
        right = expected(theirs, tokens)
        steps = [NUM_TOKENS], [CHUNK, 1, NUM_TOKENS - CHUNK - 1]
        found = [logits_of(loaded, tokens, counts) for counts in steps]
    difference = float(torch.stack([(each - right).abs().max() for each in found]).max())
    most = MOST * max(1.0, float(right.abs().max()) / 10)
    # Not a number is not at most anything.
    wrong = "" if difference <= most else f"logits differ by {difference:.3g}, at most {most:.3g}"
    return TypeResult(model_type, _computed_by(loaded.model), difference, wrong)


def _computed_by(model: Any) -> str:
    if isinstance(model, DecoderModel):
        return "natively"
    return "by its class, own cache" if isinstance(model, RowModel) else "by its class"


def logits_of(loaded: Any, tokens: list[int], counts: Sequence[int]) -> torch.Tensor:
    """Return the logits of a text that is computed in steps of these numbers of tokens."""
    if not isinstance(loaded.model, RowModel):
        return EagerStepper(loaded, [tokens]).run([(count,) for count in counts])[0]
    states: dict[int, object] = {}
    parts, done = [], 0
    for count in counts:
        hidden = loaded.model.compute_rows(
            torch.tensor(tokens[done : done + count]), _one_row(done, count), states
        )
        parts.append(loaded.model.logits(hidden))
        done += count
    return torch.cat(parts)


def _one_row(start: int, count: int) -> BatchRows:
    slot, starts, counts = (np.array([value], np.int64) for value in (0, start, count))
    none = np.empty(0, np.int64)
    return BatchRows(slot, starts, counts, starts + counts, counts.cumsum(), none, none, none)


def results(chosen: dict[str, str]) -> Iterator[TypeResult]:
    for model_type, name in tqdm(chosen.items(), unit="type", leave=False):
        if not hasattr(transformers, name):
            yield TypeResult(model_type, f"refused: {CONFIG_ONLY}")
        else:
            yield tried(model_type, name)


def main(arguments: Sequence[str] | None = None) -> int:
    known = class_names() | {
        family.model_type: family.architecture
        for family in FAMILIES
        if hasattr(transformers, family.architecture)
    }
    parser = argparse.ArgumentParser(
        prog="python -m tests.torture.model_types",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--types", nargs="+", choices=known, metavar="TYPE", default=[*known])
    options = parser.parse_args(arguments)
    return print_table(COLUMNS, results({each: known[each] for each in options.types}), 1.0)


if __name__ == "__main__":
    sys.exit(main())
