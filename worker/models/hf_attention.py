"""Our paged attention as an attention function of transformers.

Transformers calls an attention function that it finds by name. Each model registers its own
function, which writes the layer's keys and values to the paged cache and reads them through the
worker's attention. So chunks, batches, cached prefixes and drafts work as in other models.

A model must call this function once per layer, in order, with plain keys and values, and without
anything that our attention does not compute. Every step checks this, so the warm-up step refuses a
model that does not fit.

Legend: T tokens in the step, H query heads, H_kv key/value heads, D head dim.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import transformers
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from worker.attention.base import Attention, AttentionBatch
from worker.errors import UnusableModel
from worker.kv.cache import PagedCache
from worker.spec.architectures import (
    INLINE_ATTENTION,
    OWN_ATTENTION,
    TransformersSpec,
)

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
NUMBERS = itertools.count()
"""Numbers for the names under which attention functions are registered."""


@dataclass(slots=True)
class PagedStep:
    """The input of the step in progress, and how many of the model's layers have been computed."""

    batch: AttentionBatch
    cache: PagedCache
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
        self.name = registered(self)
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
        if sliding_window is not None and sliding_window < 1:
            raise self.misfit(f"a window of {sliding_window} tokens is not possible")
        self._check_shapes(query, key, value, s_aux)
        dtype = value.dtype if step.cache.is_rounded else step.cache.dtype
        q, k, v = (part[0].transpose(0, 1).to(dtype) for part in (query, key, value))
        step.cache.write(step.num_done, k, v, step.batch.slot_mapping)
        caches = step.cache.layer(step.num_done)
        plan = step.plan(sliding_window)
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
        return misfit(self._spec.architecture, reason)

    def _check_call(self, module: Any, step: PagedStep) -> None:
        index = getattr(module, "layer_idx", None)
        if index not in (None, step.num_done) or step.num_done == self._spec.num_layers:
            raise self.misfit("its layers do not compute attention once each, in order")

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


def registered(function: AttentionFunction) -> str:
    """Register an attention function in transformers. Return its name."""
    name = f"tidegate-{next(NUMBERS)}"
    transformers.AttentionInterface.register(name, function)
    return name


def initial_attention(architecture: str, name: str) -> str:
    """Return the name of the attention with which a model has to be built, so that
    `install_attention` can install the one that is registered as `name`. Classes that do not look
    their attention up by name accept only transformers' own names."""
    if architecture in INLINE_ATTENTION:
        return "sdpa"
    return "eager" if architecture in OWN_ATTENTION else name


def install_attention(
    function: AttentionFunction, name: str, architecture: str, config: Any, decoder: Any
) -> None:
    """Make the attention of every layer of `decoder` call `function`, which is registered as
    `name`."""
    if architecture not in INLINE_ATTENTION:
        config._attn_implementation = name
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


def misfit(architecture: str, reason: str) -> UnusableModel:
    return UnusableModel(f"{architecture} does not fit our paged attention: {reason}")
