"""The head with which some checkpoints predict several tokens (multi-token prediction): what it
computes, and the names and shapes of its tensors. Needs no torch.

A head has one entry for each position of a request. The entry is made of the model's hidden state
of the position, after the final norm, and of the embedding of the next token:

    x = projection(concat(embedding_norm(embedding), hidden_norm(hidden)))

Layers of a usual form and a norm follow. The model's output head then gives the logits of the token
after the next one. Published heads have one such step. To propose more tokens, the step is computed
again with its own result in place of the model's hidden state.

Sources: MtpModel of transformers 5.24; the classes of vLLM for Qwen3-Next, Qwen3.5, GLM-4.5 and
Nemotron-H.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from worker.spec.matrices import FusedMatrix, MatrixPart, NormTensor, Shape
from worker.spec.model_spec import LayerSpec, ModelSpec
from worker.spec.tensor_names import TensorNames, with_stacked_experts
from worker.spec.tensors import ModelTensors

OF_LAYER = "{i}."
"""End of the part of a tensor's name that says its layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadForm:
    """How the heads of a family look, and the names of their tensors.

    layers           the head's layers
    layer            begin of the names of a layer's tensors, in place of the model's
    embedding_norm, hidden_norm, projection, norm
                     names of the other tensors, without endings
    roles            roles of a layer's tensors whose names are not the model's -> their names
                     after `layer`
    """

    layers: tuple[LayerSpec, ...]
    layer: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    norm: str
    roles: Mapping[str, str] = field(default_factory=dict)


def of_qwen(spec: ModelSpec) -> HeadForm | None:
    """Return the form of the heads of hybrids of Qwen: a layer with attention."""
    attending = [layer for layer in spec.layers if layer.attention is not None]
    if not attending:
        return None
    return HeadForm(
        layers=(attending[-1],),
        layer="mtp.layers.{i}.",
        embedding_norm="mtp.pre_fc_norm_embedding",
        hidden_norm="mtp.pre_fc_norm_hidden",
        projection="mtp.fc",
        norm="mtp.norm",
    )


def after_layers(spec: ModelSpec) -> HeadForm:
    """Return the form of heads that are stored like one more layer of the model, after the last one
    (GLM-4.5 to 4.7, and DeepSeek V3, whose form it was first)."""
    layer = f"model.layers.{spec.num_layers}."
    return HeadForm(
        layers=(spec.layers[-1],),
        layer=layer,
        embedding_norm=f"{layer}enorm",
        hidden_norm=f"{layer}hnorm",
        projection=f"{layer}eh_proj",
        norm=f"{layer}shared_head.norm",
    )


def of_nemotron_h(spec: ModelSpec) -> HeadForm | None:
    """Return the form of the heads of Nemotron 3: an attention, and then experts."""
    attention = next((layer for layer in spec.layers if layer.attention is not None), None)
    experts = [layer for layer in spec.layers if layer.mlp and layer.mlp.num_experts > 1]
    if attention is None or not experts:
        return None
    return HeadForm(
        layers=(attention, experts[0]),
        layer="mtp.layers.{i}.",
        embedding_norm="mtp.layers.0.enorm",
        hidden_norm="mtp.layers.0.hnorm",
        projection="mtp.layers.0.eh_proj",
        norm="mtp.layers.1.final_layernorm",
    )


class DraftHeadTensors(ModelTensors):
    """The tensors of a head in the files. Its spec has the head's layers and is otherwise that of
    the model. The embedding and the output head are the model's, and so have no parts here."""

    def __init__(self, spec: ModelSpec, names: TensorNames, form: HeadForm) -> None:
        super().__init__(spec, names)
        self._form = form

    @property
    def embedding_norm(self) -> NormTensor:
        return NormTensor(self._form.embedding_norm, self.spec.hidden, self.spec.norm.bias)

    @property
    def hidden_norm(self) -> NormTensor:
        return NormTensor(self._form.hidden_norm, self.spec.hidden, self.spec.norm.bias)

    @property
    def projection(self) -> FusedMatrix:
        hidden = self.spec.hidden
        return FusedMatrix((MatrixPart(self._form.projection, hidden),), 2 * hidden)

    @property
    def projections(self) -> list[FusedMatrix]:
        return [self.projection]

    @property
    def num_input_norms(self) -> int:
        return 2

    @property
    def embedding_matrix(self) -> FusedMatrix:
        return FusedMatrix((), self.spec.hidden)

    @property
    def head(self) -> FusedMatrix:
        return FusedMatrix((), self.spec.hidden)

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        for norm in (self.embedding_norm, self.hidden_norm, self.norm):
            yield from norm.tensors()
        yield from self.projection.tensors()
        for index in range(self.spec.num_layers):
            yield from self.layer(index).tensors()

    def check(self, found: Mapping[str, Shape]) -> None:
        """Raise UnusableModel, naming a tensor, unless the files hold the head's tensors. Others
        are allowed: those of the model, and those of further steps, which are not used."""
        known = {name for name, _ in self.tensors()}
        super().check({name: shape for name, shape in found.items() if name in known})


def head_tensors(
    spec: ModelSpec, names: TensorNames, form: HeadForm, found: Mapping[str, Shape] | None
) -> DraftHeadTensors | None:
    """Return the tensors of the head of a model with `spec` and `names`; None if the files have no
    head.

    found   name -> shape of each tensor in the files; None: there are no files
    """
    roles = {
        role: form.layer + name.partition(OF_LAYER)[2] if OF_LAYER in name else name
        for role, name in names.roles.items()
    } | {role: form.layer + name for role, name in form.roles.items()}
    spec = replace(spec, layers=form.layers)
    own = replace(names, roles={**roles, "norm": form.norm}, others={})
    tensors = DraftHeadTensors(spec, own, form)
    if found is None:
        return tensors
    # A quantised projection has other tensors than its weight.
    if not any(name.startswith(f"{form.projection}.") for name in found):
        return None
    return DraftHeadTensors(spec, with_stacked_experts(own, found, spec.hidden), form)
