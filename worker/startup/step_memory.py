"""The working memory of a step by arithmetic alone, without torch: that of the model, and that of
its draft model or head, which runs after it (memory_plan.py)."""

from __future__ import annotations

from protocol.engine.sampling import MAX_LIST_ITEMS
from protocol.worker.steps import MAX_HEAD_LAG
from worker.spec.architectures import TransformersSpec
from worker.spec.model_spec import MlpSpec, ModelSpec
from worker.spec.step_limits import StepLimits
from worker.startup.selection_memory import selection_bytes

LOGITS_COPIES = 3
"""Float32 copies of a step's logits: raw, processed, and as probabilities."""
GATHERED_COPIES = 2
"""Further copies in a tensor parallel group, whose ranks gather their parts of the logits."""
SLOT_NUMBERS = MAX_LIST_ITEMS
"""Four-byte numbers per slot, besides its tokens and block table."""
HEAD_INPUTS = 4
"""Hidden states of each entry that a head holds while its layers run, in float32: the model's after
the norm, the embedding of the next token, and the norms of both."""


def step_bytes(
    spec: ModelSpec | TransformersSpec, item: int, limits: StepLimits, *, is_shared: bool = False
) -> int:
    """Return the memory of a model's largest step, in bytes.

    item        bytes of a number of the model's dtype
    is_shared   whether the model is the share of a rank
    """
    num_tokens = limits.planned_tokens
    widths = 4 * spec.hidden + _inner_widths(spec)
    copies = LOGITS_COPIES + GATHERED_COPIES * is_shared
    logits = copies * limits.max_slots * spec.vocab_size
    step = 4 * (num_tokens * widths + logits)
    step += num_tokens * (_expert_bytes(spec, item) + _rounded_bytes(spec))
    return step + selection_bytes(spec, item)


def proposing_bytes(
    spec: ModelSpec | TransformersSpec,
    item: int,
    limits: StepLimits,
    model_hidden: int,
    *,
    is_head: bool,
) -> int:
    """Return the memory of the part of a step in which a draft model or head proposes tokens, in
    bytes. The model's hidden states of the step, `model_hidden` numbers each, still exist then."""
    widths = model_hidden + HEAD_INPUTS * spec.hidden * is_head
    return 4 * limits.planned_tokens * widths + step_bytes(spec, item, limits)


def kept_hidden_bytes(hidden: int, max_slots: int) -> int:
    """Return the bytes of the hidden states that slots keep for the model's own head.

    hidden   numbers of a hidden state; 0: no head is used
    """
    return 4 * MAX_HEAD_LAG * hidden * max_slots


def _inner_widths(spec: ModelSpec | TransformersSpec) -> int:
    """Return how many intermediate values a layer's attention and MLP hold for one token."""
    if isinstance(spec, TransformersSpec):
        heads = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        return heads + 3 * spec.inner
    heads = max((each.work_width for each in spec.attentions), default=0)
    widest = max((each.work_width for each in spec.recurrents), default=0)
    inner = (sum(map(_mlp_width, layer.mlps)) for layer in spec.layers)
    table = spec.layer_inputs.width * spec.num_layers if spec.layer_inputs else 0
    streams = spec.altup.work_streams * spec.hidden if spec.altup else 0
    return max(heads, widest) + 3 * max(inner) + 3 * table + streams


def _mlp_width(mlp: MlpSpec) -> int:
    """Return how many intermediate values an MLP has for one token."""
    return mlp.intermediate * mlp.top_k + mlp.shared + 2 * mlp.latent


def _expert_bytes(spec: ModelSpec | TransformersSpec, item: int) -> int:
    """Return the bytes that a mixture of experts needs for one token, in addition to
    `_inner_widths`: scores, gathered inputs, and results in float32 (models/whole_step.py)."""
    if isinstance(spec, TransformersSpec):
        return 0
    mlps = [mlp for mlp in spec.mlps if mlp.num_experts > 1]
    assigned = max((mlp.top_k * (mlp.latent or spec.hidden) for mlp in mlps), default=0)
    scores = max((mlp.num_experts for mlp in mlps), default=0)
    return scores * item + assigned * (item + 4)


def _rounded_bytes(spec: ModelSpec | TransformersSpec) -> int:
    """Return the bytes that the input of a linear needs for one token once it is rounded to eight
    bits: the integers, the scales and sums of the groups, and the remainders of some groups."""
    if isinstance(spec, TransformersSpec):
        return 0
    heads = (each.q_width for each in spec.attentions)
    mixed = (each.output_width for each in spec.recurrents)
    inner = (max(mlp.intermediate, mlp.shared, mlp.latent) for mlp in spec.mlps)
    return 2 * max(spec.hidden, *heads, *mixed, *inner)
