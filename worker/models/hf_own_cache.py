"""Models that transformers computes with its own cache, one request at a time: the plain path, for
architectures whose attention is not ours to compute (spec/architectures.py).

A request's cache is an object that the model's class makes. It is the request's state in its slot
(`SlotTable.states`): bound slots have none, the first step of a request makes it, and a released
slot drops it. No two requests share one, so there is no prefix cache, and tokens cannot be taken
back, so there are no drafts.

Classes differ in what they can continue. So a model computes the same tokens in several ways when
it is loaded, and is refused if the results differ.

Legend: T tokens in the step, S rows that need logits, V vocabulary.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Iterable, Iterator, MutableMapping
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from worker.batch.batch import BatchRows
from worker.device.postponed import TORCH_SHAPES, load_postponed
from worker.errors import UnusableModel
from worker.kernels.reference import TorchKernels
from worker.models.hf import (
    GivenStates,
    MetaValues,
    bytes_of,
    check_found,
    config_of,
    context_of,
    decoder_of,
    inner_of,
    one_line,
    positive,
    silence,
)
from worker.spec.architectures import OwnCache, TransformersArchitecture, TransformersSpec
from worker.spec.families.family import UNLIMITED_CONTEXT

log = logging.getLogger(__name__)

CACHES = ("cache", "past_key_values", "cache_params", "state")
"""Names of fields of outputs, and of arguments, by which classes pass caches. The two differ in
some classes, whose outputs also have the older names."""
FIRST, NEXT = 16, 17
"""Tokens of the trial's first and second part."""
SAME = 0.99
"""Smallest cosine of two hidden states that count as the same. Those of bfloat16 differ by less. A
class that forgets its state gives others."""


@dataclass(frozen=True, slots=True)
class TokenCache:
    """The cache of a request's tokens so far: how many they are, and the argument that passes it to
    the model's class, by name."""

    num_tokens: int
    argument: dict[str, Any]


EMPTY = TokenCache(0, {})
"""The cache of a request that has not been computed yet: the class makes one."""


@dataclass(frozen=True, slots=True)
class Continued:
    """Tokens that were computed after others.

    hidden   hidden states [tokens, hidden], after the final norm
    cache    the cache of all tokens so far
    """

    hidden: Tensor
    cache: TokenCache


class OwnCacheDecoder:
    """Calls the decoder of a model with a cache of its own."""

    def __init__(self, decoder: Any, architecture: str) -> None:
        self.module = decoder
        self._architecture = architecture
        self._parameters = inspect.signature(decoder.forward).parameters.keys()

    def run(self, token_ids: Tensor, cache: TokenCache = EMPTY) -> Continued:
        """Compute token_ids [tokens] int64 after the tokens of `cache`, which the class changes."""
        end = cache.num_tokens + len(token_ids)
        positions = torch.arange(cache.num_tokens, end, device=token_ids.device)
        arguments: dict[str, Any] = {"input_ids": token_ids[None], "use_cache": True}
        for name, value in (("position_ids", positions[None]), ("cache_position", positions)):
            if name in self._parameters:
                arguments[name] = value
        output = self.module(**arguments, **cache.argument)
        found = ((name, getattr(output, name, None)) for name in CACHES)
        field, made = next(((name, each) for name, each in found if each is not None), ("", None))
        if made is None:
            raise self.refusal("it has no cache")
        argument = next((name for name in CACHES if name in self._parameters), field)
        return Continued(output[0][0], TokenCache(end, {argument: made}))

    def refusal(self, reason: str) -> UnusableModel:
        return UnusableModel(f"{self._architecture} cannot be served: {reason}")


class OwnCacheModel:
    """A model that transformers computes with caches of its own. It implements RowModel.

    in_chunks   whether the class continues with several tokens at a time
    """

    def __init__(
        self, spec: TransformersSpec, model: Any, decoder: OwnCacheDecoder, *, in_chunks: bool
    ) -> None:
        self.spec = spec
        self.kernels = TorchKernels()
        self._model = model
        self._decoder = decoder
        self._in_chunks = in_chunks
        self._given = GivenStates(model, decoder.module)

    @torch.inference_mode()
    def compute_rows(
        self, token_ids: Tensor, rows: BatchRows, states: MutableMapping[int, object]
    ) -> Tensor:
        """Compute a step, one row after another. Return the hidden states [T, hidden] of token_ids
        [T] int64. `states` has the cache of each slot; this step's rows get new ones.

        Raises ValueError if a row does not continue where its slot's last step ended.
        """
        hidden, first = [], 0
        spans = zip(rows.slots.tolist(), rows.starts.tolist(), rows.counts.tolist(), strict=True)
        for slot, start, count in spans:
            cache = states.get(slot, EMPTY)
            assert isinstance(cache, TokenCache)
            if cache.num_tokens != start:
                raise ValueError(f"slot {slot} does not continue at position {start}")
            size = count if start == 0 or self._in_chunks else 1
            for ids in torch.split(token_ids[first : first + count], size):
                done = self._decoder.run(ids, cache)
                hidden.append(done.hidden)
                cache = done.cache
            states[slot] = cache
            first += count
        return torch.cat(hidden)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [S, V] float32 of hidden [S, hidden]. Raises UnusableModel if the
        model's class returns another shape."""
        logits = self._given.logits(self._model, hidden)
        if logits.shape != (len(hidden), self.spec.vocab_size):
            raise self._decoder.refusal(f"its logits have the shape {list(logits.shape)}")
        return logits

    @property
    def weights_bytes(self) -> int:
        return bytes_of(self._decoder.module, self._model)


def is_known(name: str) -> bool:
    """Return whether the installed transformers has a decoder of this name."""
    auto = transformers.models.auto.modeling_auto
    known: Iterable[Any] = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    names = {each for found in known for each in ((found,) if isinstance(found, str) else found)}
    return name in names | set(auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values())


def describe(architecture: TransformersArchitecture, values: dict[str, Any]) -> TransformersSpec:
    """Return the facts about the model that a parsed config.json describes.

    Transformers builds the model on the device "meta", without memory for its weights, and computes
    a few tokens, which shows the size of their cache. If a class cannot do that, the size is
    estimated, and measured when the model is loaded. Raises UnusableModel if a value of the config
    is not supported.
    """
    silence()
    load_postponed(TORCH_SHAPES)
    name, config = architecture.name, config_of(architecture, values)
    text = config.get_text_config(decoder=True)
    try:
        with torch.device("meta"), MetaValues(), torch.inference_mode():
            model = _class(name)(config)
            parameters = list(model.parameters())
            decoder = OwnCacheDecoder(_decoder(model), name)
            try:
                cache = _measured(decoder, torch.zeros(FIRST + NEXT, dtype=torch.int64))
            except Exception:
                cache = _estimated(text)
    except Exception as error:
        raise UnusableModel(f"transformers failed with {name}: {one_line(error)}") from error
    return TransformersSpec(
        architecture=name,
        vocab_size=positive(text, "vocab_size"),
        hidden=positive(text, "hidden_size"),
        context_tokens=_context(text),
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=cache.half_width,
        num_parameters=sum(parameter.numel() for parameter in parameters),
        largest_tensor=max(parameter.numel() for parameter in parameters),
        inner=inner_of(text, parameters),
        config=json.dumps(values, sort_keys=True),
        own_cache=cache,
    )


def load(
    spec: TransformersSpec, path: Path, *, dtype: torch.dtype, device: torch.device
) -> OwnCacheModel:
    """Load the weights of a Hugging Face directory. Raises UnusableModel if transformers cannot
    load the files, if they do not hold exactly the model's tensors, or if the class cannot continue
    from its own cache."""
    name, values = spec.architecture, json.loads(spec.config)
    silence()
    try:
        model, found = _class(name).from_pretrained(
            path,
            config=config_of(TransformersArchitecture(name, values["model_type"]), values),
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            output_loading_info=True,
        )
    except Exception as error:
        raise UnusableModel(f"transformers cannot load {path}: {one_line(error)}") from error
    check_found(found)
    model = model.eval().requires_grad_(False).to(device)
    ids = (torch.arange(FIRST + NEXT, device=device) * 7 + 3) % spec.vocab_size
    try:
        own = tried_model(spec, model, ids)
    except UnusableModel:
        raise
    except Exception as error:
        raise UnusableModel(f"transformers failed with {name}: {one_line(error)}") from error
    log.info(
        "%s is computed by its class in transformers, one request at a time and without packed "
        "weights: slower than other models, and without prefix cache and drafts",
        name,
    )
    return own


@torch.inference_mode()
def tried_model(spec: TransformersSpec, model: Any, ids: Tensor) -> OwnCacheModel:
    """Return the model, after it has computed ids [FIRST + NEXT] in several ways. Raises
    UnusableModel if the results differ."""
    decoder = OwnCacheDecoder(_decoder(model), spec.architecture)
    in_chunks = continues_in_chunks(decoder, ids)
    cache = _measured(decoder, ids)
    hidden = decoder.run(ids).hidden
    whole = model(input_ids=ids[None], use_cache=False).logits[0]
    spec = replace(spec, own_cache=cache, head_dim=cache.half_width)
    own = OwnCacheModel(spec, model, decoder, in_chunks=in_chunks)
    if not _same(own.logits(hidden), whole):
        raise decoder.refusal("its class computes other logits of its own hidden states")
    return own


def _decoder(model: Any) -> Any:
    """Return the part of the model that maps token ids to hidden states; of a model of images, that
    of its text part."""
    decoder = decoder_of(model)
    if decoder is model:
        decoder = model.model
    while hasattr(decoder, "language_model"):
        decoder = decoder.language_model
    return decoder


def continues_in_chunks(decoder: OwnCacheDecoder, ids: Tensor) -> bool:
    """Return whether the class continues with several tokens at a time. Raises UnusableModel if it
    cannot even continue with single ones.

    ids   [FIRST + NEXT] int64
    """
    whole = decoder.run(ids).hidden
    first = decoder.run(ids[:FIRST])
    token = decoder.run(ids[FIRST : FIRST + 1], first.cache)
    try:
        rest = decoder.run(ids[FIRST + 1 :], token.cache)
        if _same(whole, torch.cat([first.hidden, token.hidden, rest.hidden])):
            return True
    except (RuntimeError, ValueError, IndexError, AttributeError):
        pass  # classes that cannot continue so fail in many ways
    done = decoder.run(ids[:FIRST])
    hidden = [done.hidden]
    for single in torch.split(ids[FIRST:], 1):
        done = decoder.run(single, done.cache)
        hidden.append(done.hidden)
    if not _same(whole, torch.cat(hidden)):
        raise decoder.refusal("its class gives other results if it continues from its cache")
    return False


def _same(one: Tensor, other: Tensor) -> bool:
    cosines = nn.functional.cosine_similarity(one.float(), other.float(), dim=-1)
    return bool((cosines > SAME).all())


def _measured(decoder: OwnCacheDecoder, ids: Tensor) -> OwnCache:
    """Return the size of the cache, from those after FIRST and after all of ids [FIRST + NEXT]."""
    small = _num_items(decoder.run(ids[:FIRST]).cache.argument)
    large = _num_items(decoder.run(ids).cache.argument)
    per_token = max(large - small, 0) / NEXT
    return OwnCache(ceil(per_token), max(small - int(per_token * FIRST), 0))


def _estimated(config: Any) -> OwnCache:
    """Return the size of the cache if every layer has plain keys and values."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return OwnCache(2 * config.num_hidden_layers * heads * width, 0)


def _num_items(cache: object) -> int:
    """Return the number of items of all tensors that `cache` holds. Shared ones count once."""
    found = {id(tensor): tensor.numel() for tensor in _tensors(cache, set())}
    return sum(found.values())


def _tensors(value: object, seen: set[int]) -> Iterator[Tensor]:
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each, seen)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each, seen)
    elif hasattr(value, "__dict__") and not isinstance(value, type | nn.Module):
        yield from _tensors(vars(value), seen)


def _class(name: str) -> Any:
    return getattr(transformers, name)


def _context(config: Any) -> int:
    """Return the longest context, in tokens. A model without positions has no limit of its own."""
    if getattr(config, "max_position_embeddings", None) is None:
        return UNLIMITED_CONTEXT
    return context_of(config)
