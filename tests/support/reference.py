"""Greedy answers of `transformers`, with the distance between the two best logits at each token.

`python -m tests.support.reference` writes tests/data/greedy_smollm2.json again, in two minutes. A
test compares some of its rows with a live run.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.prompts import NUM_TOKENS, PROMPTS

GOLDEN = Path(__file__).parents[1] / "data" / "greedy_smollm2.json"


def load_reference(gguf: Path) -> tuple[Any, Any]:
    """Return (model in float32, tokenizer), both loaded by transformers from the GGUF file.

    transformers reads the file's header for the config, the weights and the tokenizer, and builds
    the same table of names for each module. This function does each only once, which halves the
    time. It also reads the file into memory, because the elements of a memory map, of which the
    header has hundreds of thousands, are objects that are slow to make.
    """
    import gguf as library
    import numpy as np
    import pytest
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(library, name, cache(getattr(library, name)))
        patch.setattr(np, "memmap", lambda path, **_: np.fromfile(path, np.uint8))
        model = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
        return model.eval(), AutoTokenizer.from_pretrained(**place)


def greedy(model: Any, prompt: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
    """Return (token ids, distance between the two best logits at each). End tokens are ignored."""
    import torch

    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        repetition_penalty=1.0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best = [logits[0].topk(2).values.tolist() for logits in out.logits]
    return out.sequences[0, len(prompt) :].tolist(), [first - second for first, second in best]


def main() -> None:
    from tqdm import tqdm

    from tests.support.model import smollm2_gguf

    model, tokenizer = load_reference(smollm2_gguf())
    rows = []
    for text in tqdm(PROMPTS, desc="transformers, greedy"):
        prompt = tokenizer(text, add_special_tokens=False).input_ids
        tokens, gaps = greedy(model, prompt, NUM_TOKENS)
        rows.append({"prompt": prompt, "tokens": tokens, "gaps": [round(gap, 6) for gap in gaps]})
    GOLDEN.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")


if __name__ == "__main__":
    main()
