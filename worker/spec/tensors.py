"""The tensors of a model: their names and shapes in its files (those of a layer: layer_tensors.py).

The names and the cuts of single parts are made in tensor_parts.py. The loader, the header check and
the memory plan use this list. For a rank of a tensor parallel group it holds the rank's parts of
the tensors (`ModelTensors.for_rank`). Needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from worker.errors import FETCH_AGAIN, UnusableModel
from worker.spec.altup_spec import AltUpSpec
from worker.spec.latent_tensors import LatentParts
from worker.spec.layer_tensors import (
    NORMS,
    OF_MLP,
    AltUpTensors,
    AttentionTensors,
    BesideTensors,
    InputTableTensors,
    LatentTensors,
    LaurelTensors,
    LayerInputTensors,
    LayerTensors,
    MixerTensors,
    MlpTensors,
    SharedTensors,
    StreamTensors,
)
from worker.spec.matrices import FusedMatrix, MatrixPart, NormTensor, Shape, VectorTensor, squeezed
from worker.spec.model_spec import (
    AttentionSpec,
    LayerInputsSpec,
    LayerSpec,
    MlpSpec,
)
from worker.spec.recurrent_parts import RecurrentParts
from worker.spec.share import Share, divided
from worker.spec.tensor_names import XIELU_ROLES


class ModelTensors(LatentParts, RecurrentParts):
    """All tensors of a model in its files, or a rank's parts of them.

    spec    what is computed with the tensors: by the whole model, or by the rank
    share   the rank's share; None: the whole model
    """

    def for_rank(self, rank: int, size: int) -> ModelTensors:
        """Return the parts of the tensors that a rank of a group of `size` ranks holds. Raises
        UnusableModel if the model cannot be divided among them."""
        share = Share(rank, size, self.spec.vocab_size)
        return ModelTensors(divided(self.spec, size), self.names, share)

    @property
    def embedding(self) -> str:
        return f"{self.names.roles['embedding']}.weight"

    @property
    def embedding_matrix(self) -> FusedMatrix:
        return FusedMatrix((self._by_token("embedding"),), self.spec.hidden)

    @property
    def positions(self) -> str | None:
        """Return the tensor name of the learned position embeddings; None if the model has none."""
        if not self.spec.learned_positions:
            return None
        return f"{self.names.roles['positions']}.weight"

    @property
    def norm(self) -> NormTensor:
        spec = self.spec
        return NormTensor(self.names.roles["norm"], spec.hidden, spec.norm.bias)

    @property
    def head(self) -> FusedMatrix:
        """Return the matrix of the output head. If it is tied to the embeddings, this is their
        tensor."""
        role = "embedding" if self.spec.tied_embeddings else "head"
        return FusedMatrix((self._by_token(role),), self.spec.hidden, self.spec.head_bias)

    @property
    def head_name(self) -> str:
        """Return the name that the weight of the output head has if it is not tied to the
        embeddings."""
        return f"{self.names.roles['head']}.weight"

    def layer(self, index: int) -> LayerTensors:
        layer, spec, altup = self.spec.layers[index], self.spec.layer_inputs, self.spec.altup
        norms = {
            role: self._norm(role, index)
            for role in NORMS[layer.order]
            if (layer.mlp is not None if role in OF_MLP else layer.has_mixer)
        }
        mlp = layer.mlp
        return LayerTensors(
            attention_norm=norms.get("attention_norm"),
            mixer=self._mixer(layer, index) if layer.has_mixer else None,
            recurrence=self._recurrence(layer, index) if layer.has_two_mixers else None,
            post_attention_norm=norms.get("post_attention_norm"),
            mlp_norm=norms.get("mlp_norm"),
            router=None if mlp is None else self._router(mlp, index),
            choice_bias=self._choice_bias(mlp, index) if mlp and mlp.choice_bias else None,
            mlps=() if mlp is None else self._mlps(mlp, index),
            shared=self._shared(mlp, index) if mlp and mlp.shared else None,
            post_mlp_norm=norms.get("post_mlp_norm"),
            beside=None if layer.beside is None else self._beside(layer.beside, index),
            inputs=None if spec is None else self._layer_inputs(spec, index),
            factor=VectorTensor(self._name("factor", index), 1) if layer.scaled else None,
            latent=self._latent(mlp, index) if mlp and mlp.latent else None,
            laurel=None if layer.laurel is None else self._laurel(layer.laurel, index),
            altup=None if altup is None else self._altup(altup, index),
            xielu=self._xielu(mlp, index),
        )

    def _laurel(self, rank: int, index: int) -> LaurelTensors:
        hidden = self.spec.hidden
        return LaurelTensors(
            inputs=FusedMatrix((self._part("laurel_in", rank, index),), hidden),
            outputs=FusedMatrix((self._part("laurel_out", hidden, index),), rank),
            norm=self._norm("laurel_norm", index),
        )

    def _altup(self, altup: AltUpSpec, index: int) -> AltUpTensors:
        hidden, count = self.spec.hidden, altup.streams
        predictions = self._part("altup_predictions", count * count, index)
        corrections = self._part("altup_corrections", count, index)
        return AltUpTensors(
            router=FusedMatrix((self._part("altup_router", count, index),), hidden),
            router_norm=VectorTensor(self._name("altup_router_norm", index), hidden),
            predictions=FusedMatrix((predictions,), count),
            corrections=FusedMatrix((corrections,), count),
            scale=VectorTensor(self._name("altup_scale", index), hidden) if altup.scaled else None,
        )

    @property
    def streams(self) -> StreamTensors | None:
        """Return what makes the streams of hidden states, and what merges them; None if the model
        has one stream."""
        if self.spec.altup is None:
            return None
        hidden, count = self.spec.hidden, self.spec.altup.streams - 1

        def parts(role: str) -> tuple[MatrixPart, ...]:
            """Return the matrix of each further stream. Some files have one tensor for all."""
            if "{i}" in self.names.roles[role]:
                return tuple(self._part(role, hidden, each) for each in range(count))
            return tuple(self._part(role, hidden, 0, each, count) for each in range(count))

        return StreamTensors(
            spread=FusedMatrix(parts("stream_spread"), hidden),
            merge=tuple(FusedMatrix((part,), hidden) for part in parts("stream_merge")),
        )

    @property
    def projections(self) -> list[FusedMatrix]:
        """Return the matrices besides those of the layers, the embedding and the output head."""
        return [] if self.streams is None else list(self.streams.matrices)

    @property
    def num_input_norms(self) -> int:
        """Return the number of norms that are neither a layer's nor the final one."""
        return 0

    def _latent(self, mlp: MlpSpec, index: int) -> LatentTensors:
        hidden = self.spec.hidden
        return LatentTensors(
            inputs=FusedMatrix((self._part("latent_in", mlp.latent, index),), hidden),
            outputs=FusedMatrix((self._part("latent_out", hidden, index),), mlp.latent),
        )

    def _beside(self, experts: MlpSpec, index: int) -> BesideTensors:
        router = FusedMatrix((self._part("router", experts.num_experts, index),), self.spec.hidden)
        return BesideTensors(
            mlp_norm=self._norm("beside_mlp_norm", index),
            norm=self._norm("beside_norm", index),
            router=router,
            router_norm=VectorTensor(self._name("router_norm", index), self.spec.hidden),
            factors=VectorTensor(self._name("expert_factors", index), experts.num_experts),
            experts=self._mlps(experts, index),
            result_norm=self._norm("beside_post_norm", index),
        )

    def _layer_inputs(self, spec: LayerInputsSpec, index: int) -> LayerInputTensors:
        hidden, width = self.spec.hidden, spec.width
        return LayerInputTensors(
            gate=FusedMatrix((self._part("input_gate", width, index),), hidden),
            project=FusedMatrix((self._part("input_projection", hidden, index),), width),
            norm=self._norm("input_norm", index),
        )

    @property
    def layer_inputs(self) -> InputTableTensors | None:
        """Return what makes the per-layer inputs of all layers; None if the model has none."""
        spec, roles = self.spec.layer_inputs, self.names.roles
        if spec is None:
            return None
        width = spec.width * self.spec.num_layers
        table = MatrixPart(roles["inputs_table"], spec.table_rows)
        project = MatrixPart(roles["inputs_projection"], width)
        return InputTableTensors(
            table=FusedMatrix((table,), width),
            project=FusedMatrix((project,), self.spec.hidden),
            norm=NormTensor(roles["inputs_norm"], spec.width),
        )

    def _mixer(self, layer: LayerSpec, index: int) -> MixerTensors:
        """Return the tensors of a layer's token mixer; if it has two, those of its attention."""
        if layer.attention is None:
            return self._recurrence(layer, index)
        if layer.attention.latent is not None:
            return self._latent_attention(layer.attention, index)
        return self._attention(layer.attention, index)

    def _attention(self, attention: AttentionSpec, index: int) -> AttentionTensors:
        hidden, q_norm, k_norm = self.spec.hidden, None, None
        if attention.qk_norm in ("head", "projection"):
            by_head = attention.qk_norm == "head"
            dim, kv_heads = attention.head_dim, attention.num_kv_heads
            q_norm = self._qk_norm("q_norm", index, attention.num_heads, dim, by_head)
            if attention.kv_of is None:
                k_norm = self._qk_norm("k_norm", index, kv_heads, dim, by_head)
        q, kv = attention.q_width, attention.kv_width
        if "qkv" in self.names:
            qkv = self._parts(index, {"qkv": (q, kv, kv)}, hidden)
        else:
            sections = {"q": (q, q) if attention.gated else (q,)}
            if attention.kv_of is None:
                sections |= {"k": (kv,)} if attention.keys_as_values else {"k": (kv,), "v": (kv,)}
            qkv = self._parts(index, sections, hidden)
        return AttentionTensors(
            qkv=FusedMatrix(qkv, hidden, attention.qkv_bias),
            q_norm=q_norm,
            k_norm=k_norm,
            sinks=self._sinks(index, attention.num_heads) if attention.sinks else None,
            output=self._summed(index, "output", q, attention.output_bias),
            v_norm_size=attention.head_dim if attention.value_norm else 0,
            plain_norm_size=attention.head_dim if attention.qk_norm == "plain" else 0,
        )

    def _shared(self, mlp: MlpSpec, index: int) -> SharedTensors:
        hidden, inner, score = self.spec.hidden, mlp.shared, None
        if not mlp.is_gated:
            gate_up = self._parts(index, {"shared_up": (inner,)}, hidden)
        elif "shared_gate_up" in self.names:
            gate_up = self._parts(index, {"shared_gate_up": (inner, inner)}, hidden)
        else:
            gate_up = self._parts(index, {"shared_gate": (inner,), "shared_up": (inner,)}, hidden)
        down = (self._part("shared_down", hidden, index),)
        if mlp.scores_shared:
            score = FusedMatrix((self._part("shared_score", 1, index),), hidden)
        expert = MlpTensors(FusedMatrix(gate_up, hidden), FusedMatrix(down, inner))
        return SharedTensors(expert, score)

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        """Yield name and shape of every tensor of the model."""
        spec = self.spec
        yield self.embedding, (spec.vocab_size, spec.hidden)
        if self.positions is not None:
            yield self.positions, (spec.learned_positions, spec.hidden)
        if self.layer_inputs is not None:
            yield from self.layer_inputs.tensors()
        for matrix in () if self.streams is None else self.streams.matrices:
            yield from matrix.tensors()
        for index in range(spec.num_layers):
            yield from self.layer(index).tensors()
        yield from self.norm.tensors()
        yield from self.head.tensors()

    @property
    def num_parameters(self) -> int:
        """Return the number of parameters of the whole model. A tied head is not counted twice."""
        return sum(math.prod(shape) for shape in dict(self.tensors()).values())

    def check(self, found: Mapping[str, Shape]) -> None:
        """Raise UnusableModel, naming a tensor, unless the files hold exactly the model's tensors.

        found   name -> shape of each tensor in the files; a copy of tied embeddings is allowed, and
                so are tensors that can be computed or are not used
        """
        known = {self.head_name} if self.spec.tied_embeddings else set()  # a copy of the embeddings
        roles = self.names.roles
        vectors = ("choice_bias", "delta_decay", *XIELU_ROLES)
        ends = [roles.get(role, "").partition("{i}")[2] for role in vectors]
        padded = tuple(end for end in ends if end)
        for name, shape in self.tensors():
            if name not in found:
                raise UnusableModel(
                    f"tensor {name!r} is missing from the files", remedy=FETCH_AGAIN
                )
            # Some vectors are stored with further axes of one item, and numbers with none.
            is_padded = name.endswith(padded) and squeezed(found[name]) == squeezed(shape)
            if found[name] != shape and not is_padded:
                raise UnusableModel(f"{name} has shape {found[name]}; the config requires {shape}")
            known.add(name)
        if others := sorted(n for n in found.keys() - known if not self.is_left_out(n)):
            some = ", ".join(others[:3])
            raise UnusableModel(f"the files have {len(others)} unexpected tensors: {some}")

    def is_left_out(self, name: str) -> bool:
        """Return whether the model does not use a tensor of its files: it can be computed, or it
        belongs to a head for drafts."""
        return name.endswith(self.names.computed) or name.startswith(self.names.unused)

    def _router(self, mlp: MlpSpec, index: int) -> FusedMatrix | None:
        experts = mlp.num_experts
        if experts == 1:
            return None
        part = self._part("router", experts, index)
        return FusedMatrix((part,), self.spec.hidden, mlp.bias)

    def _choice_bias(self, mlp: MlpSpec, index: int) -> VectorTensor:
        return VectorTensor(self._name("choice_bias", index), mlp.num_experts)

    def _mlps(self, mlp: MlpSpec, index: int) -> tuple[MlpTensors, ...]:
        if mlp.num_experts == 1:
            return (self._mlp(mlp, index),)
        return tuple(self._expert(mlp, index, expert) for expert in self.experts(mlp))

    def experts(self, mlp: MlpSpec) -> range:
        """Return the experts of a mixture whose tensors are held."""
        count = mlp.num_experts
        return range(count) if self.share is None else self.share.experts(count)

    def _mlp(self, mlp: MlpSpec, index: int) -> MlpTensors:
        hidden = self.spec.hidden
        gate_up = self._parts(index, self._gate_up(mlp, ""), hidden)
        down = self._summed(index, "down", mlp.intermediate, mlp.bias)
        return MlpTensors(FusedMatrix(gate_up, hidden, mlp.bias), down)

    def _expert(self, mlp: MlpSpec, index: int, expert: int) -> MlpTensors:
        """Return the tensors of an expert. They are never cut, because a rank computes whole
        experts."""
        width = mlp.latent or self.spec.hidden

        def part(role: str, rows: int) -> MatrixPart:
            return self._part(role, rows, index, expert, mlp.num_experts)

        widths = self._gate_up(mlp, "expert_")
        gate_up = tuple(part(role, sum(sections)) for role, sections in widths.items())
        down = (part("expert_down", width),)
        return MlpTensors(
            FusedMatrix(gate_up, width, mlp.bias), FusedMatrix(down, mlp.intermediate, mlp.bias)
        )

    def _gate_up(self, mlp: MlpSpec, prefix: str) -> Mapping[str, Sequence[int]]:
        """Return role -> rows of each section, for the tensors of the first matrix of an MLP."""
        inner = mlp.intermediate
        if not mlp.is_gated:
            return {f"{prefix}up": (inner,)}
        if f"{prefix}gate_up" in self.names:
            return {f"{prefix}gate_up": (inner, inner)}
        return {f"{prefix}gate": (inner,), f"{prefix}up": (inner,)}
