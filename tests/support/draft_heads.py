"""Tiny checkpoints with heads for multi-token prediction, and the heads in plain torch.

The files of a head are those of published checkpoints. The head itself is built from a layer of
transformers and follows the form that worker/spec/draft_head.py describes; nothing of the worker
computes it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from protocol.worker.steps import StepPlan, StepResult
from tests.support.checkpoints import write_directory
from tests.support.family_models import random_model
from tests.support.wrapper_models import random_wrapper
from worker.slots.table import SlotTable
from worker.spec.wrappers import TEXT_TYPES

AFTER_LAYERS = ("glm4_moe", "glm4_moe_lite", "deepseek_v3", "deepseek_v32")
"""Model types whose head is a layer after the others."""
MODEL_TYPES = (*AFTER_LAYERS, "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "nemotron_h")
LAYERS = {"nemotron_h": (2, 3)}
"""Model type -> the layers of the tiny model that look like those of its head; otherwise the last.
"""
ATOL = 1e-4
"""Largest difference of two logits."""
LAYER = re.compile(r"(.*?layers)\.(\d+)\.(.*)")


@dataclass
class ReferenceHead:
    """A head that computes all entries of a text at once, without a cache.

    theirs   the model of transformers
    layers   the head's layers, of the model's classes
    offset   what norms add to their weights
    """

    theirs: Any
    layers: list[nn.Module]
    embedding_norm: Tensor
    hidden_norm: Tensor
    projection: Tensor
    norm: Tensor
    offset: float
    #: The arguments of transformers' model for the images of a text; they may be set later.
    images: dict[str, Tensor] = field(default_factory=dict)

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> Tensor:
        """Return the logits of each entry of a text, [len(tokens) - 1, V]. Entry i predicts token
        i + 2."""
        entries = self._entries(tokens, self.model_hidden(tokens)[:-1])
        return self.theirs.lm_head(self._normed(entries, self.norm))

    @torch.inference_mode()
    def proposals(self, tokens: list[int], count: int) -> Tensor:
        """Return the logits [count, V] from which the head proposes the tokens after `tokens`, if
        each proposal is the likeliest token and follows the others."""
        hidden, found = self.model_hidden(tokens)[:-1], []
        for _ in range(count):
            normed = self._normed(self._entries(tokens, hidden)[-1:], self.norm)
            found.append(self.theirs.lm_head(normed)[0])
            hidden = torch.cat([hidden, normed])
            tokens = [*tokens, int(found[-1].argmax())]
        return torch.stack(found)

    @torch.inference_mode()
    def model_hidden(self, tokens: list[int]) -> Tensor:
        """Return the model's hidden states after its final norm, [len(tokens), hidden]."""
        base = self.theirs.model if self.images else self.theirs.get_decoder()
        inputs = self._image_inputs(tokens)
        found = base(input_ids=torch.tensor([tokens]), use_cache=False, **inputs)
        return found.last_hidden_state[0]

    def _image_inputs(self, tokens: list[int]) -> dict[str, Tensor]:
        if not self.images:
            return {}
        is_image = torch.tensor([tokens]) == self.theirs.config.image_token_id
        return {**self.images, "mm_token_type_ids": is_image.long()}

    def _positions(self, tokens: list[int]) -> Tensor:
        """Return the rotary positions of tokens, [1, n], or [axes, 1, n] with images."""
        if not self.images:
            return torch.arange(len(tokens))[None]
        inputs = self._image_inputs(tokens)
        del inputs["pixel_values"]
        return self.theirs.model.get_rope_index(torch.tensor([tokens]), **inputs)[0]

    def _entries(self, tokens: list[int], hidden: Tensor) -> Tensor:
        """Return the hidden states, before the head's norm, of the entries of all tokens but the
        last."""
        embedded = self.theirs.get_input_embeddings()(torch.tensor(tokens[1:]))
        parts = self._normed(embedded, self.embedding_norm), self._normed(hidden, self.hidden_norm)
        x, count = (torch.cat(parts, 1) @ self.projection.T)[None], len(tokens) - 1
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        positions = self._positions(tokens[:-1])
        more: dict[str, Any] = {"position_ids": positions}
        if (rotary := getattr(self.theirs.get_decoder(), "rotary_emb", None)) is not None:
            more["position_embeddings"] = rotary(x, positions)
        for layer in self.layers:
            x = layer(x, attention_mask=mask, **more)
        return x[0]

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        config = self.theirs.config.get_text_config()
        eps = getattr(config, "rms_norm_eps", None) or config.layer_norm_epsilon
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (weight + self.offset)


def check_proposals(
    reference: ReferenceHead, slots: SlotTable, plan: StepPlan, result: StepResult
) -> int:
    """Check that each token that a step proposed is the likeliest one of the reference, which
    computes the whole text anew. Return their number."""
    assert plan.wanted is not None
    assert result.proposed is not None
    proposed, count = iter(result.proposed.tolist()), 0
    for slot, wanted in zip(plan.row_slots.tolist(), plan.wanted.tolist(), strict=True):
        if not wanted:
            continue
        known = slots["token_ids"][slot, : int(slots["len"][slot])].tolist()
        logits = reference.proposals(known, wanted)
        found = torch.tensor([next(proposed) for _ in range(wanted)])
        assert (logits.amax(1) - logits.gather(1, found[:, None])[:, 0]).max() <= ATOL
        count += wanted
    return count


def write_with_head(
    path: Path, model_type: str, *, is_right: bool = False, wrapper: str = "", **changes: Any
) -> ReferenceHead:
    """Write a tiny random model and its head to the directory `path` as published checkpoints have
    them. Return the head in plain torch.

    is_right   Each token of the model depends on the one before only, and the head computes the
               same function. Otherwise both are random
    wrapper    architecture of the model of images whose text part it is; "": it is a decoder alone
    changes    fields of the model's config
    """
    make = partial(random_wrapper, wrapper) if wrapper else random_model
    theirs, donor = (make(model_type, **changes) for _ in range(2))
    model_type = TEXT_TYPES.get(model_type, {}).get("model_type", model_type)
    offset = 1.0 if model_type.startswith("qwen") else 0.0
    layers = LAYERS.get(model_type, (len(donor.get_decoder().layers) - 1,))
    with torch.no_grad():
        _shuffle(donor)
        if is_right:
            for model in (theirs, donor):
                _make_function(model, offset)
    write_directory(path, theirs)
    donor.save_pretrained(path / "donor")
    stored = load_file(path / "donor" / "model.safetensors")
    hidden = theirs.config.get_text_config().hidden_size
    generator = torch.Generator().manual_seed(11)
    weights = [torch.rand(hidden, generator=generator) + 0.5 - offset for _ in range(3)]
    projection = torch.randn(hidden, 2 * hidden, generator=generator) * (2 * hidden) ** -0.5
    if is_right:
        weights = [torch.full((hidden,), 1 - offset)] * 3
        projection = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], 1)
    own = dict(zip(_names(model_type, theirs), (*weights, projection), strict=True))
    for name, tensor in stored.items():
        if (found := LAYER.fullmatch(name)) and int(found[2]) in layers:
            own[_layer(model_type, theirs, layers.index(int(found[2]))) + found[3]] = tensor
    rmtree(path / "donor")
    file = path / "model.safetensors"
    save_file(load_file(file) | {n: t.contiguous().clone() for n, t in own.items()}, file)
    embedding_norm, hidden_norm, norm = weights
    return ReferenceHead(
        theirs,
        [donor.get_decoder().layers[index] for index in layers],
        embedding_norm=embedding_norm,
        hidden_norm=hidden_norm,
        projection=projection,
        norm=norm,
        offset=offset,
    )


def _names(model_type: str, theirs: Any) -> list[str]:
    """Return the names of the norm of the embedding, of that of the hidden states, of the final
    norm and of the projection."""
    if model_type.startswith("qwen"):
        ends = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "fc")
        return [f"mtp.{end}.weight" for end in ends]
    first = _layer(model_type, theirs, 0)
    names = [f"{first}enorm.weight", f"{first}hnorm.weight"]
    norm = f"{first}shared_head.norm.weight"
    if model_type == "nemotron_h":
        norm = "mtp.layers.1.final_layernorm.weight"
    return [*names, norm, f"{first}eh_proj.weight"]


def _layer(model_type: str, theirs: Any, index: int) -> str:
    if model_type in AFTER_LAYERS:
        text = theirs.config.get_text_config()
        prefix = "model." if text is theirs.config else "model.language_model."
        return f"{prefix}layers.{text.num_hidden_layers + index}."
    return f"mtp.layers.{index}."


def _shuffle(model: Any) -> None:
    """Make the weights of a random model others."""
    for parameter in model.parameters():
        parameter.copy_(parameter.roll(7, -1))


def _make_function(model: Any, offset: float) -> None:
    """Make each token that follows a fixed function of the last token: the layers add nothing, and
    the row of the output head for the next token is the embedding of the last one."""
    for name, parameter in model.named_parameters():
        if re.search(r"(o_proj|out_proj|down_proj)", name):
            parameter.zero_()
    embedding = model.get_input_embeddings().weight
    embedding.copy_(torch.nn.functional.normalize(embedding, dim=1))
    base = model.get_decoder()
    (base.norm_f if hasattr(base, "norm_f") else base.norm).weight.fill_(1 - offset)
    model.lm_head.weight.copy_(embedding.roll(3, 0))
