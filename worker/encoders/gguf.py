"""Reads the header of an encoder's GGUF file. Needs no torch.

The file's metadata keys are translated to those of config.json. The model family's reader of
config.json then reads the result. Tensors are named, and tokens are spelt, as by llama.cpp's
converter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from protocol.engine.encoding import Pooling
from protocol.shared.gguf_parts import model_name
from worker.checkpoint.gguf_config import Metadata, rope_parameters
from worker.checkpoint.gguf_file import GGUFFile
from worker.checkpoint.gguf_tokenizer import gguf_text
from worker.encoders.families.registry import find_encoder
from worker.encoders.header import EncoderHeader
from worker.encoders.modules import VectorSpec
from worker.encoders.spec import EncoderSpec
from worker.encoders.tensors import EncoderTensors
from worker.errors import UnusableModel
from worker.spec.fields import Fields
from worker.spec.tensor_names import TensorNames

LAYER = "blk.{i}."
ROLES = {
    "embedding": "token_embd",
    "positions": "position_embd",
    "token_types": "token_types",
    "embedding_norm": "token_embd_norm",
    "q": LAYER + "attn_q",
    "k": LAYER + "attn_k",
    "v": LAYER + "attn_v",
    "q_norm": LAYER + "attn_q_norm",
    "k_norm": LAYER + "attn_k_norm",
    "output": LAYER + "attn_output",
    "attention_norm": LAYER + "attn_output_norm",
    "gate": LAYER + "ffn_gate",
    "up": LAYER + "ffn_up",
    "down": LAYER + "ffn_down",
    "mlp_norm": LAYER + "layer_output_norm",
}
FUSED_QKV, FUSED_GATE_UP = LAYER + "attn_qkv", LAYER + "ffn_up"
POOLINGS: dict[int, Pooling | None] = {0: None, 1: "mean", 2: "cls", 3: "last"}
"""Value of `pooling_type` -> the pooling; None: the model is for the vectors of single tokens."""
RANK = 4
"""Value of `pooling_type` for models that score."""


@dataclass(frozen=True, slots=True)
class GGUFEncoder:
    """How the GGUF files of one `general.architecture` are read."""

    #: Families to which the files may belong, by their name in `architectures` of config.json.
    families: tuple[str, ...]
    #: Keys of config.json that have the same value in all files.
    config: dict[str, Any] = field(default_factory=dict)
    #: Whether positions are rotary embeddings.
    has_rope: bool = False
    #: Returns the one of `families` to which a file belongs; None: the first one.
    choose: Callable[[Metadata], str] | None = None

    def family(self, metadata: Metadata) -> str:
        return self.choose(metadata) if self.choose else self.families[0]


def _bert_family(metadata: Metadata) -> str:
    """Return the family of a "bert" file. BERT and XLM-RoBERTa files differ only in their
    tokenizers, because llama.cpp's converter drops the position embeddings that XLM-RoBERTa does
    not use."""
    is_unigram = metadata.fields.text("tokenizer.ggml.model", "") == "t5"
    return "XLMRobertaModel" if is_unigram else "BertModel"


ENCODERS = {
    "bert": GGUFEncoder(
        ("BertModel", "XLMRobertaModel"), {"pad_token_id": -1}, choose=_bert_family
    ),
    "jina-bert-v2": GGUFEncoder(
        ("JinaBertModel",), {"position_embedding_type": "alibi", "feed_forward_type": "geglu"}
    ),
    "nomic-bert": GGUFEncoder(("NomicBertModel",), has_rope=True),
}
"""`general.architecture` -> how its files are read. Positions are counted from the row after that
of `pad_token_id`, which is the first one in these files."""


def pooling_type(metadata: Metadata) -> Pooling | None:
    """Return the pooling that a file's metadata names; None if there is none. Raises UnusableModel
    if it is not supported."""
    value = metadata.integer("pooling_type", 0)
    if value == RANK:
        raise UnusableModel(
            f"{metadata.key('pooling_type')} is {value}: models that score are not supported in "
            "GGUF files",
            remedy="use the model's safetensors",
        )
    if value not in POOLINGS:
        raise UnusableModel(f"{metadata.key('pooling_type')} {value} is not supported")
    return POOLINGS[value]


def gguf_encoder(file: GGUFFile) -> EncoderHeader:
    """Return the header of an encoder's file. Raises UnusableModel, naming the key or the tensor,
    if something is missing, wrong or not supported."""
    metadata, path = Metadata(file), file.path
    if metadata.flag("attention.causal", False):
        raise UnusableModel(f"{metadata.key('attention.causal')} true is not supported")
    if "token_embd.weight" not in file.tensors:
        raise UnusableModel(f"{path} holds no tensor 'token_embd.weight'")
    family = find_encoder(_config(metadata))
    assert family is not None
    spec = family.spec(_config(metadata), source=str(path))
    tensors = EncoderTensors(spec, _names(file, spec))
    tensors.check({name: info.shape for name, info in file.tensors.items()})
    for name, info in file.tensors.items():
        if not info.kind.is_readable:
            raise UnusableModel(
                f"{path}: type {info.kind.name} (of tensor {name}) is not supported"
            )
    text = gguf_text(Fields(file.metadata, str(path)), spec.vocab_size)
    kinds = {name: info.kind.name for name, info in file.tensors.items()}
    vectors = VectorSpec(pooling=pooling_type(metadata) or "mean")
    return EncoderHeader(model_name(path), tensors, file, kinds, text, file.paths, vectors)


def _config(metadata: Metadata) -> dict[str, Any]:
    """Return the metadata of a GGUF file as the fields that config.json would have for the
    model."""
    tensors, encoder = metadata.file.tensors, ENCODERS[metadata.architecture]
    types = tensors.get("token_types.weight")
    rope = {"rope_parameters": rope_parameters(metadata)} if encoder.has_rope else {}
    return {
        "architectures": [encoder.family(metadata)],
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": metadata.integer("embedding_length"),
        "intermediate_size": metadata.shared("feed_forward_length"),
        "num_hidden_layers": metadata.num_layers,
        "num_attention_heads": metadata.num_heads,
        "max_position_embeddings": metadata.integer("context_length"),
        "layer_norm_eps": metadata.number("attention.layer_norm_epsilon"),
        "type_vocab_size": 0 if types is None else types.shape[0],
        **rope,
        **encoder.config,
    }


def _names(file: GGUFFile, spec: EncoderSpec) -> TensorNames:
    """Return the names of the model's tensors in the file. In some files, the projections of
    queries, keys and values, or those of the gated MLP, are one tensor."""
    roles = dict(ROLES)
    if FUSED_QKV.format(i=0) + ".weight" in file.tensors:
        roles["qkv"] = FUSED_QKV
    up = file.tensors.get(FUSED_GATE_UP.format(i=0) + ".weight")
    is_gated = spec.layers[0].is_gated
    if is_gated and up is not None and up.shape[0] == 2 * spec.layers[0].intermediate:
        roles["gate_up"] = FUSED_GATE_UP
    return TensorNames(roles)
