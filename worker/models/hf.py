"""Models that transformers computes, with our paged attention: the fallback for architectures
without a family of ours. architectures.py lists them.

The tokens of a step form one sequence [1, T] with explicit positions and without a mask.
Transformers calls an attention function that it finds by name. Each model registers its own
function, which writes the layer's keys and values to the paged cache and reads them through the
worker's attention. So chunks, batches, cached prefixes and drafts work as in other models.

A model must call this function once per layer, in order, with plain keys and values, and without
anything that our attention does not compute. Every step checks this, so the warm-up step refuses a
model that does not fit.

No code of a model's directory is run: configs and classes are transformers' own, and weights are
read from safetensors only.

Legend: T tokens in the step, S rows that need logits, H query heads, H_kv key/value heads, D head
dim, V vocabulary.
"""

from __future__ import annotations

import inspect
import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from transformers.modeling_outputs import MoeModelOutputWithPast

from worker.attention.base import Attention, AttentionBatch
from worker.kernels import sizes
from worker.kernels.base import Kernels
from worker.kernels.native import NativeKernels
from worker.kernels.reference import TorchKernels
from worker.kv.cache import KVCache
from worker.loading.errors import FETCH_AGAIN, UnusableModel
from worker.lora.table import StepAdapters
from worker.models.architectures import (
    INLINE_ATTENTION,
    MASKED_WINDOWS,
    OWN_ATTENTION,
    TransformersArchitecture,
    TransformersSpec,
)
from worker.startup.postponed import TORCH_SHAPES, load_postponed

AttentionFunction = Callable[..., tuple[Tensor, None]]

IGNORED_ARGUMENTS = frozenset(
    {
        *("cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "dropout", "max_length_k"),
        *("max_length_q", "output_attentions", "output_hidden_states", "output_router_logits"),
        *("past_key_values", "position_embeddings", "position_ids", "return_dict", "use_cache"),
    }
)
"""Arguments of an attention function that do not change its result. Other arguments that
PagedFunction does not support must be None."""
OUTPUTS = {
    "output_attentions": False,
    "output_hidden_states": False,
    "output_router_logits": False,
    "return_dict": True,
}
"""Options that add outputs to those of a class. These values replace those of config.json."""
NUMBERS = itertools.count()
"""Numbers for the names under which attention functions are registered."""


@dataclass(slots=True)
class PagedStep:
    """The input of the step in progress, and how many of the model's layers have been computed."""

    batch: AttentionBatch
    cache: KVCache
    attention: Attention
    #: Window -> the attention's plan.
    plans: dict[int | None, Any] = field(default_factory=dict)
    #: Layers that have computed their attention.
    num_done: int = 0

    def plan(self, window: int | None) -> Any:
        if window not in self.plans:
            self.plans[window] = self.attention.plan(self.batch, window)
        return self.plans[window]


class PagedFunction:
    """The attention function of one model. Transformers finds it by `name` and calls it once per
    layer."""

    def __init__(self, spec: TransformersSpec) -> None:
        #: The name under which transformers finds it.
        self.name = _registered(self)
        #: None between steps.
        self.step: PagedStep | None = None
        self._spec = spec

    def __call__(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        scaling: float | None = None,
        softcap: float | None = None,
        sliding_window: int | None = None,
        is_causal: bool | None = None,
        s_aux: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Return the attention [1, T, H, D] of one layer, and None in place of its weights.

        query        [1, H, T, D]
        key, value   [1, H_kv, T, D]
        s_aux        [H]: sinks (attention/base.py)

        Writes the keys and values to the cache. Raises UnusableModel for an argument that our
        attention does not compute.
        """
        step = self.step
        if step is None:
            raise RuntimeError("attention was called outside a step")
        self._check_call(module, step)
        if attention_mask is not None:
            raise self.misfit("it passes a mask to attention")
        if is_causal is False or getattr(module, "is_causal", True) is False:
            raise self.misfit("its attention sees later tokens")
        for name, argument in others.items():
            if argument is not None and name not in IGNORED_ARGUMENTS:
                raise self.misfit(f"it passes {name!r} to attention")
        self._check_shapes(query, key, value, s_aux)
        dtype = value.dtype if step.cache.is_rounded else step.cache.k.dtype
        q, k, v = (part[0].transpose(0, 1).to(dtype) for part in (query, key, value))
        step.cache.write(step.num_done, k, v, step.batch.slot_mapping)
        caches = step.cache.layer(step.num_done)
        plan = step.plan(self._window(module, sliding_window))
        sinks = None if s_aux is None else s_aux.float().contiguous()
        out = step.attention.run(
            q.contiguous(), *caches, plan, scale=scaling, soft_cap=softcap, sinks=sinks
        )
        step.num_done += 1
        return out[None].to(value.dtype), None

    def check_complete(self, step: PagedStep) -> None:
        """Raise UnusableModel unless every layer has computed its attention."""
        if step.num_done != self._spec.num_layers:
            raise self.misfit(f"{step.num_done} of {self._spec.num_layers} layers use attention")

    def misfit(self, reason: str) -> UnusableModel:
        return _misfit(self._spec.architecture, reason)

    def _check_call(self, module: Any, step: PagedStep) -> None:
        index = getattr(module, "layer_idx", None)
        if index not in (None, step.num_done) or step.num_done == self._spec.num_layers:
            raise self.misfit("its layers do not compute attention once each, in order")

    def _window(self, module: Any, argument: int | None) -> int | None:
        """Return the layer's window. `argument` is the one that the module passes."""
        window, place = argument, MASKED_WINDOWS.get(self._spec.architecture)
        if window is None and place is not None:
            owner = module.config if place == "config" else module
            window = getattr(owner, "sliding_window", None)
        if window is not None and window < 1:
            raise self.misfit(f"a window of {window} tokens is not possible")
        return window

    def _check_shapes(
        self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
    ) -> None:
        spec, tokens = self._spec, query.shape[2]
        if query.shape != (1, spec.num_heads, tokens, spec.head_dim):
            raise self.misfit(f"its layers have queries of different shapes: {list(query.shape)}")
        if not key.shape == value.shape == (1, spec.num_kv_heads, tokens, spec.head_dim):
            raise self.misfit(
                f"keys have the shape {list(key.shape)} and values {list(value.shape)}; "
                f"{spec.num_kv_heads} heads of {spec.head_dim} are expected"
            )
        if sinks is not None and sinks.shape != (spec.num_heads,):
            raise self.misfit(f"it has {list(sinks.shape)} sinks for {spec.num_heads} heads")


class DecoderOutput(MoeModelOutputWithPast):
    """The output of any decoder class of transformers. Fields that the class does not have are
    None."""

    cross_attentions = None


class GivenStates(nn.Module):
    """A stand-in for a model's decoder that returns `hidden`. With it, the forward pass of the
    model's class computes only the logits, with its own factors and caps."""

    hidden: Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> DecoderOutput:
        return DecoderOutput(last_hidden_state=self.hidden)


class TransformersModel:
    """A model whose forward pass runs in a class of the `transformers` library. It implements
    StepModel.

    kernels   the worker's kernels if they can compute the model's attention, else torch's
    """

    def __init__(
        self, spec: TransformersSpec, model: Any, function: PagedFunction, kernels: Kernels
    ) -> None:
        self.spec = spec
        self.kernels = kernels
        self._model = model
        self.function = function
        self._decoder = _decoder(model)
        self._given = GivenStates()
        path = next(path for path, each in model.named_modules() if each is self._decoder)
        model.set_submodule(path, self._given)
        _install(function, function.name, spec.architecture, model.config, self._decoder)

    @torch.inference_mode()
    def __call__(
        self,
        token_ids: Tensor,
        batch: AttentionBatch,
        cache: KVCache,
        attention: Attention,
        adapters: StepAdapters | None = None,
    ) -> Tensor:
        """Return the hidden states [T, hidden] of token_ids [T] int64, after the final norm. Writes
        this step's keys and values to the cache."""
        assert adapters is None, "these models cannot have adapters (lora/targets.py)"
        self.function.step = step = PagedStep(batch, cache, attention)
        try:
            hidden: Tensor = _forward(self._decoder, token_ids, batch.positions)[0][0]
        finally:
            self.function.step = None
        self.function.check_complete(step)
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [S, V] float32 of hidden [S, hidden]. Raises UnusableModel if the
        model's class returns another shape."""
        self._given.hidden = hidden[None]
        ids = torch.zeros((1, len(hidden)), dtype=torch.int64, device=hidden.device)
        logits: Tensor = self._model(input_ids=ids, use_cache=False).logits[0].float()
        self._given.hidden = None
        if logits.shape != (len(hidden), self.spec.vocab_size):
            raise self.function.misfit(f"its logits have the shape {list(logits.shape)}")
        return logits

    @property
    def weights_bytes(self) -> int:
        """Return the bytes of all parameters and buffers. Shared ones count once."""
        tensors = [*self._decoder.parameters(), *self._decoder.buffers()]
        tensors += [*self._model.parameters(), *self._model.buffers()]
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def describe(architecture: TransformersArchitecture, values: Mapping[str, Any]) -> TransformersSpec:
    """Return the facts about the model that a parsed config.json describes.

    Transformers builds the model on the device "meta", without memory for its weights, and computes
    it up to the first attention call, which shows the shapes of queries and keys. Raises
    UnusableModel if that fails, or if a value of the config is not supported.
    """
    _silence()
    load_postponed(TORCH_SHAPES)
    config, name = _config(architecture, values), architecture.name
    probe = _registered(_probe)
    try:
        with torch.device("meta"), MetaValues(), torch.inference_mode():
            config._attn_implementation = _initial(name, probe)
            model = getattr(transformers, name)(config)
            decoder = _decoder(model)
            _install(_probe, probe, name, config, decoder)
            ids = torch.zeros(2, dtype=torch.int64)
            _forward(decoder, ids, ids)
    except Probed as probed:
        query, key = probed.query, probed.key
    except Exception as error:
        raise _misfit(name, f"transformers failed: {_one_line(error)}") from error
    else:
        raise _misfit(name, "it does not use transformers' attention interface")
    parameters = list(model.parameters())
    return TransformersSpec(
        architecture=name,
        vocab_size=_positive(config, "vocab_size"),
        hidden=_positive(config, "hidden_size"),
        context_tokens=_context(config),
        num_layers=_positive(config, "num_hidden_layers"),
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=key.shape[3],
        num_parameters=sum(parameter.numel() for parameter in parameters),
        largest_tensor=max(parameter.numel() for parameter in parameters),
        inner=_inner(config, parameters),
        config=json.dumps(dict(values), sort_keys=True),
    )


def load(
    spec: TransformersSpec,
    path: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Kernels,
) -> TransformersModel:
    """Load the weights of a Hugging Face directory. Raises UnusableModel if transformers cannot
    load the files, or if they do not hold exactly the model's tensors."""
    name, values = spec.architecture, json.loads(spec.config)
    architecture = TransformersArchitecture(name, values["model_type"])
    function = PagedFunction(spec)
    _silence()
    try:
        model, found = getattr(transformers, name).from_pretrained(
            path,
            config=_config(architecture, values),
            dtype=dtype,
            attn_implementation=_initial(name, function.name),
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            output_loading_info=True,
        )
    except Exception as error:
        raise UnusableModel(f"transformers cannot load {path}: {_one_line(error)}") from error
    _check_found(found)
    model = model.eval().requires_grad_(False).to(device)
    return TransformersModel(spec, model, function, _fitting(kernels, spec))


def _fitting(kernels: Kernels, spec: TransformersSpec) -> Kernels:
    """Return `kernels` if they can compute the model's attention, else torch's. Only compiled
    kernels have limits."""
    fits = sizes.fits(
        heads=spec.num_heads, kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, sizes=()
    )
    return kernels if fits or not isinstance(kernels, NativeKernels) else TorchKernels()


def _check_found(found: Any) -> None:
    """Raise UnusableModel if transformers reports a tensor that is missing, unexpected, or of
    another shape."""
    for key, problem, remedy in (
        ("missing_keys", "is missing from the files", FETCH_AGAIN),
        ("unexpected_keys", "is not a tensor of the model", ""),
        ("mismatched_keys", "has another shape than the config requires", ""),
    ):
        names = [each if isinstance(each, str) else each[0] for each in found[key]]
        for name in sorted(names):
            raise UnusableModel(f"tensor {name!r} {problem}", remedy=remedy)


def _config(architecture: TransformersArchitecture, values: Mapping[str, Any]) -> Any:
    """Return transformers' config object for a parsed config.json. Raises UnusableModel if
    transformers rejects the values."""
    try:
        config = transformers.CONFIG_MAPPING[architecture.model_type].from_dict(dict(values))
    except Exception as error:
        raise UnusableModel(f"transformers cannot read config.json: {_one_line(error)}") from error
    for key, value in OUTPUTS.items():
        if hasattr(config, key):
            setattr(config, key, value)
    return config


def _decoder(model: Any) -> Any:
    """Return the part of the model that maps token ids to hidden states."""
    decoder = model.get_decoder()
    is_one = "position_ids" in inspect.signature(decoder.forward).parameters
    return decoder if is_one else model.base_model


def _forward(decoder: Any, token_ids: Tensor, positions: Tensor) -> Any:
    return decoder(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)


def _initial(architecture: str, registered: str) -> str:
    """Return the name of the attention with which a model has to be built. Classes that do not look
    their attention up by name accept only transformers' own names."""
    if architecture in INLINE_ATTENTION:
        return "sdpa"
    return "eager" if architecture in OWN_ATTENTION else registered


def _install(
    function: AttentionFunction, registered: str, architecture: str, config: Any, decoder: Any
) -> None:
    """Make the attention of every layer of `decoder` call `function`, whose registered name is
    `registered`."""
    if architecture not in INLINE_ATTENTION:
        config._attn_implementation = registered
    for module in decoder.modules():
        if architecture in OWN_ATTENTION and hasattr(module, "_attn"):
            divisor = OWN_ATTENTION[architecture]
            scale = 1.0 / float(getattr(module, divisor)) if divisor else 1.0
            module._attn = partial(_own_attention, function, module, scale)
        if type(module).__name__ == INLINE_ATTENTION.get(architecture):
            module.forward = partial(_inline_attention, function, module, module.forward)


def _inline_attention(
    function: AttentionFunction, module: Any, forward: Any, *positional: Any, **named: Any
) -> Any:
    """Return the output of an attention module of INLINE_ATTENTION, computed with our attention."""
    with InlineAttention(function, module):
        return forward(*positional, **named)


class InlineAttention(TorchFunctionMode):
    """While active, passes calls of torch's scaled_dot_product_attention on to `function`. The
    causal mask in a call is dropped, because `function` masks by itself."""

    def __init__(self, function: AttentionFunction, module: Any) -> None:
        super().__init__()
        self._function = function
        self._module = module

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        query, key, value = args
        scale = (kwargs or {}).get("scale")
        out, _weights = self._function(self._module, query, key, value, scaling=scale)
        return out.transpose(1, 2)


def _own_attention(
    function: AttentionFunction,
    module: Any,
    scale: float,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *_: Any,
) -> tuple[Tensor, None]:
    """Return the attention [1, H, T, D] as the method `_attn` of OWN_ATTENTION does. The mask that
    `_attn` receives is not needed. The local layers of GPT-Neo have windows."""
    is_local = getattr(module, "attention_type", "") == "local"
    out, _weights = function(
        module,
        query,
        key,
        value,
        scaling=scale,
        sliding_window=module.config.window_size if is_local else None,
    )
    return out.transpose(1, 2), None


class Probed(Exception):
    """Raised at a model's first attention call, to end the probe. It has the call's query and
    key."""

    def __init__(self, query: Tensor, key: Tensor) -> None:
        super().__init__()
        self.query = query
        self.key = key


class MetaValues(TorchFunctionMode):
    """While active, reading a number from a tensor on the device "meta", which has no content,
    returns 0. Some model classes read one, such as the largest position."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.item, Tensor.__bool__, Tensor.__int__) and args[0].is_meta:
            return {Tensor.__bool__: False}.get(func, 0)
        return func(*args, **(kwargs or {}))


def _probe(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    raise Probed(query, key)


def _silence() -> None:
    """Keep transformers from writing progress bars and advice to the log."""
    logging: Any = transformers.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _registered(function: AttentionFunction) -> str:
    """Register an attention function in transformers. Return its name."""
    name = f"tidegate-{next(NUMBERS)}"
    transformers.AttentionInterface.register(name, function)
    return name


def _context(config: Any) -> int:
    """Return the longest context, in tokens. With LongRoPE it ends where the second list of factors
    would apply, because the keys of a longer text would differ from those of its prefix."""
    context = _positive(config, "max_position_embeddings")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        original = rope.get("original_max_position_embeddings", context)
        context = min(context, getattr(config, "original_max_position_embeddings", original))
    return context


def _inner(config: Any, parameters: list[nn.Parameter]) -> int:
    """Return how many numbers the widest layer computes for one token. The embeddings and the head,
    which are recognised by the size of the vocabulary, do not count."""
    matrices = [each for each in parameters if each.ndim >= 2]
    widest = max(max(each.shape[-2:]) for each in matrices if len(each) != config.vocab_size)
    return int(widest) * int(getattr(config, "num_experts_per_tok", None) or 1)


def _positive(config: Any, key: str) -> int:
    value = getattr(config, key, None)
    if not isinstance(value, int) or value < 1:
        raise UnusableModel(f"config.json: {key!r} is {value!r:.80}, not a positive integer")
    return value


def _misfit(architecture: str, reason: str) -> UnusableModel:
    return UnusableModel(f"{architecture} does not fit our paged attention: {reason}")


def _one_line(error: Exception) -> str:
    return f"{' '.join(str(error).split()):.300}" or type(error).__name__
