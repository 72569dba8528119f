"""Reads a model's header: everything in its files except the weights. Needs torch only for a model
that transformers computes.

Reading checks that the tensors match the spec and that every feature is supported. So an unusable
model is refused here, before a server starts.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from protocol.config.worker import PoolingOption
from protocol.engine.encoding import EncodingCard
from protocol.shared.gguf_parts import model_name
from worker.checkpoint.gguf_config import Metadata
from worker.checkpoint.gguf_file import GGMLType, GGUFFile, architecture_at_start
from worker.checkpoint.gguf_header import gguf_draft_head, gguf_names, gguf_spec, tensor_shapes
from worker.checkpoint.gguf_tokenizer import gguf_text
from worker.checkpoint.quantized_layers import QuantizedFiles
from worker.checkpoint.safetensors_files import (
    BLOCKS,
    DTYPE_BYTES,
    PICKLES,
    SCALES,
    SafetensorsFiles,
    check_kinds,
    find_packed,
    weight_files,
)
from worker.checkpoint.text import TextFacts, directory_name, directory_text
from worker.encoders.families.registry import find_encoder
from worker.encoders.gguf import ENCODERS, RANK, gguf_encoder, pooling_type
from worker.encoders.header import EncoderHeader, config_encoder, directory_encoder
from worker.encoders.modules import MODULES, VectorSpec, read_modules
from worker.encoders.pair_scorer import ARCHITECTURE as RERANKER
from worker.encoders.pair_scorer import (
    GGUF_TENSOR,
    PairScorer,
    classifier_scorer,
    gguf_scorer,
    has_logit_score,
    is_classifier,
    is_named_reranker,
    module_scorer,
    token_scorer,
)
from worker.errors import UnusableModel
from worker.loading.transformers_header import (
    TransformersHeader,
    known_to_transformers,
    transformers_header,
)
from worker.spec.architectures import (
    TransformersSpec,
    fallback,
)
from worker.spec.draft_head import DraftHeadTensors, head_tensors
from worker.spec.families.family import ModelFamily
from worker.spec.families.registry import find_family
from worker.spec.fields import Fields, read_json
from worker.spec.found_names import with_found_names
from worker.spec.matrices import Shape
from worker.spec.model_spec import ModelSpec
from worker.spec.quantization import PACKED_AS, Quantization, read_quantization
from worker.spec.tensor_names import (
    ENDINGS,
    NEVER_QUANTIZED,
    TensorNames,
    with_found_prefix,
    with_stacked_experts,
)
from worker.spec.tensors import ModelTensors
from worker.spec.wrappers import text_name, text_part

log = logging.getLogger(__name__)

MXFP4 = GGMLType.MXFP4.name
PLAIN_KINDS = frozenset({"F32", "F16", "BF16"})
"""Number types that are not quantised."""
HEAD_COUNTS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
"""Keys of a config for the number of layers of the head for drafts."""


@dataclass(frozen=True, slots=True)
class ModelHeader:
    """Everything except the weights in the files of a model of a supported family
    (models/families)."""

    name: str
    tensors: ModelTensors
    #: None: there are no weights, only a config.json.
    files: SafetensorsFiles | GGUFFile | None
    #: Name of each tensor -> its number type, as the file format calls it. A quantised weight of
    #: safetensors counts as one tensor, of type MXFP4 or a key of PACKED_AS.
    kinds: dict[str, str]
    text: TextFacts
    #: The weight files, in a fixed order. Without weights, the config.json.
    paths: list[Path]
    #: The quantised layers of a Hugging Face directory; None if it has none.
    quantized: QuantizedFiles | None = None
    #: The tensors of its head for drafts; None: it has none.
    draft_head: DraftHeadTensors | None = None
    #: How its vectors are made; None: the model has none.
    vectors: VectorSpec | None = None
    #: How it scores pairs of texts; None: it does not.
    scorer: PairScorer | None = None
    #: Whether the model generates text. Models that were made for vectors or scores do not.
    generates: bool = True

    @property
    def spec(self) -> ModelSpec:
        return self.tensors.spec

    @property
    def file_format(self) -> str:
        """Format of the weight files, for ModelCard.file_format."""
        return "gguf" if isinstance(self.files, GGUFFile) else "safetensors"

    @property
    def quantization(self) -> str:
        """The most common number type among quantised tensors, for ModelCard.quantization; "": none
        is quantised."""
        counts = Counter(kind for kind in self.kinds.values() if kind not in PLAIN_KINDS)
        return next((kind for kind, _ in counts.most_common(1)), "")

    @property
    def encoding(self) -> EncodingCard | None:
        spec = self.spec
        if self.scorer is not None:
            return self.scorer.card(spec.context_tokens)
        if self.vectors is None:
            return None
        return self.vectors.card("embed", spec.hidden, spec.context_tokens)

    @property
    def vocab_size(self) -> int:
        return self.spec.vocab_size

    @property
    def tokenizer(self) -> bytes:
        return self.text.tokenizer


AnyHeader = ModelHeader | TransformersHeader | EncoderHeader
"""The header of any model that can be served."""


def read_any_header(path: Path, pooling: PoolingOption = "auto") -> AnyHeader:
    """Read the header of a model as `read_header` does, or that of an encoder.

    pooling   the operator's choice; auto: the model's files decide
    """
    if (encoder := encoder_header(path)) is not None:
        return encoder.with_pooling(pooling)
    return with_pooling(read_header(path), pooling)


def with_pooling(
    header: ModelHeader | TransformersHeader, pooling: PoolingOption
) -> ModelHeader | TransformersHeader:
    """Return the header of a decoder as the operator wants to use it. Raises UnusableModel if the
    model cannot be used so.

    pooling   auto: the model's files and its name decide; rank: it scores; others: it has vectors
    """
    reason = _why_no_vectors(header.spec)
    if reason and (pooling != "auto" or not _generates_only(header)):
        raise UnusableModel(
            f"{header.spec.architecture} has {reason}, so it has no vectors or scores",
            remedy="serve without --pooling, or use another model",
        )
    if isinstance(header, TransformersHeader):
        if pooling == "auto":
            return header
        raise UnusableModel(
            "models that transformers computes have no vectors or scores",
            remedy="serve without --pooling",
        )
    if header.scorer is not None:
        if pooling in ("auto", "rank"):
            return header
        raise UnusableModel(
            "a model that scores pairs has no pooling to choose", remedy="serve without --pooling"
        )
    if pooling == "rank" or (pooling == "auto" and _is_named_reranker(header)):
        return _named_reranker(header)
    if pooling == "auto":
        return header
    vectors = header.vectors or VectorSpec(pooling=pooling)
    return replace(header, vectors=replace(vectors, pooling=pooling))


def _why_no_vectors(spec: ModelSpec | TransformersSpec) -> str:
    """Return what a model has because of which it cannot encode (encoders/decoder.py), as a phrase;
    "" if it can."""
    if spec.state_items:
        return "recurrent layers"
    if isinstance(spec, ModelSpec) and any(each.kv_of is not None for each in spec.attentions):
        return "layers that share keys and values"
    return "layers with different key/value heads" if len(set(spec.layer_heads)) > 1 else ""


def _generates_only(header: ModelHeader | TransformersHeader) -> bool:
    """Return whether the files of a model say that it has no vectors or scores."""
    if isinstance(header, TransformersHeader):
        return True
    return header.vectors is None and header.scorer is None


def _is_named_reranker(header: ModelHeader) -> bool:
    """Return whether the name of a model that could also generate says that it is a reranker."""
    if header.spec.architecture != RERANKER or header.vectors is not None or header.files is None:
        return False
    if isinstance(header.files, GGUFFile):
        name = Metadata(header.files).fields.text("general.name", "")
        return is_named_reranker(f"{header.name} {name}", None)
    return is_named_reranker(header.name, header.paths[0].parent)


def _named_reranker(header: ModelHeader) -> ModelHeader:
    """Return the header of a model that compares the logits of "yes" and "no". Raises UnusableModel
    if it is of another family, or has no tokenizer."""
    if header.spec.architecture != RERANKER or header.files is None:
        raise UnusableModel(
            f"{header.spec.architecture} cannot rank; only Qwen3-Reranker (a {RERANKER}) and "
            "cross-encoders can",
            remedy="serve without --pooling rank",
        )
    tokenizer, head = header.text.tokenizer, header.tensors.head.parts[0]
    if isinstance(header.files, GGUFFile):
        scorer = gguf_scorer(Metadata(header.files), tokenizer, head, header.spec.hidden)
    else:
        scorer = token_scorer(tokenizer, head)
    log.info(
        "%s is served as a reranker, so it does not generate text; --pooling last serves text and "
        "vectors instead",
        header.name,
    )
    return _scoring(header, scorer)


def _scoring(header: ModelHeader, scorer: PairScorer) -> ModelHeader:
    """Return the header of a decoder that only scores. Its output head is not loaded."""
    spec = replace(header.spec, tied_embeddings=True, head_bias=False)
    tensors = ModelTensors(spec, header.tensors.names)
    return replace(header, tensors=tensors, scorer=scorer, vectors=None, generates=False)


def encoder_header(path: Path) -> EncoderHeader | None:
    """Return the header of an encoder; None if the model is not one."""
    if path.is_dir() and (path / "config.json").is_file():
        config = read_json(path / "config.json")
        family = find_encoder(config)
        return None if family is None else directory_encoder(path, config, family)
    if path.suffix == ".json" and path.is_file():
        config = read_json(path)
        family = find_encoder(config)
        return None if family is None else config_encoder(path, config, family)
    if path.is_file() and architecture_at_start(path) in ENCODERS:
        return gguf_encoder(GGUFFile(path))
    return None


def read_header(path: Path) -> ModelHeader | TransformersHeader:
    """Read a Hugging Face directory, a GGUF file, or a config.json alone, whose model has random
    weights and no tokenizer. Raises UnusableModel with the reason."""
    if path.is_dir():
        return _directory_header(path)
    if path.suffix == ".json" and path.is_file():
        return _config_header(path)
    if path.suffix in PICKLES:
        raise UnusableModel(
            f"{path} is a pickle file, which can run code when it is read; this is not supported",
            remedy="convert it to safetensors",
        )
    if not path.is_file():
        raise UnusableModel(f"{path} does not exist")
    return _gguf_header(path)


def _directory_header(path: Path) -> ModelHeader | TransformersHeader:
    config = _directory_config(path)
    part = text_part(config)
    config = part or config
    is_scored, has_logits = is_classifier(config), has_logit_score(path)
    has_vectors = (path / MODULES).is_file() and not (is_scored or has_logits)
    if is_scored:
        config = {**config, "architectures": [RERANKER]}
    elif has_vectors:
        config = _causal(config)
    architecture = fallback(config) or known_to_transformers(config)
    if architecture is not None:
        return transformers_header(path, config, architecture)
    family = find_family(config)
    spec = family.spec(config)
    paths = weight_files(path)
    text = directory_text(path, Fields(config, "config.json"), spec.vocab_size)
    files = SafetensorsFiles(paths, str if part is None else text_name)
    names = family.names(spec)
    if part is not None:
        spec, names = _as_stored(spec, names, part, files)
    vectors = read_modules(path, spec.hidden) if has_vectors else None
    if vectors is not None:
        # sentence-transformers saves the model without its head, and so without the prefix.
        names = names if names.prefix else replace(names, prefix="model.")
    if is_scored or vectors is not None:
        spec = replace(spec, tied_embeddings=True, head_bias=False)
    names = with_found_prefix(names, list(files.tensors))
    quantization = read_quantization(config, family.quantizations)
    shapes, kinds = _contents(files, config)
    names = with_found_names(names, spec, shapes)
    names = replace(names, by_rows=frozenset(n for n, kind in kinds.items() if kind == MXFP4))
    tensors = _untied_if_heads_differ(ModelTensors(spec, names), files)
    quantized = None
    if quantization is None:
        check_kinds({n: kind for n, kind in kinds.items() if n in files.tensors}, DTYPE_BYTES)
    else:
        quantized = _quantized(quantization, tensors, files)
        shapes, kinds = quantized.shapes(), quantized.kinds()
    scorer = None
    if is_scored:
        scorer = classifier_scorer(path, config, shapes, spec.hidden)
        shapes = {name: shape for name, shape in shapes.items() if name != scorer.tensor}
    elif has_logits:
        scorer = module_scorer(path, text.tokenizer, tensors.head.parts[0])
    tensors.check(shapes)
    kinds = {name: kind for name, kind in kinds.items() if not tensors.is_left_out(name)}
    check_kinds(kinds, (*DTYPE_BYTES, *PACKED_AS, MXFP4))
    header = ModelHeader(
        directory_name(path),
        tensors,
        files,
        kinds,
        text,
        paths,
        quantized,
        draft_head=_draft_head(family, spec, files),
        vectors=vectors,
        generates=vectors is None,
    )
    return header if scorer is None else _scoring(header, scorer)


def _directory_config(path: Path) -> dict[str, Any]:
    config = read_json(path / "config.json")
    if config.get("auto_map"):
        log.warning(
            "config.json names code of the model's directory (auto_map), which is never run; the "
            "model is computed like others of its architecture"
        )
    return config


def _as_stored(
    spec: ModelSpec, names: TensorNames, config: Mapping[str, Any], files: SafetensorsFiles
) -> tuple[ModelSpec, TensorNames]:
    """Return the spec and the names of the text part of a wrapper (spec/wrappers.py).

    The defaults of its config are not those of the decoder. So if the key is missing, the files
    show whether the embeddings are also the head.
    """
    log.info(
        "the decoder is the text part of the model (%d tensors of other parts are skipped)",
        files.num_left_out,
    )
    shapes = {name: tensor.shape for name, tensor in files.tensors.items()}
    if "tie_word_embeddings" not in config:
        head = names.roles["head"] + names.endings.get("head", ENDINGS)[0]
        spec = replace(spec, tied_embeddings=head not in shapes)
    return spec, with_stacked_experts(names, shapes, spec.hidden)


def _causal(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a decoder without its head as that of the whole decoder: the model_type
    decides."""
    names = config.get("architectures")
    if isinstance(names, list) and len(names) == 1 and str(names[0]).endswith("Model"):
        return {**config, "architectures": None}
    return config


def _config_header(path: Path) -> ModelHeader:
    """Return the header of a model without weight files, from its config.json at `path`."""
    config = read_json(path)
    if config.get("quantization_config"):
        raise UnusableModel(
            f"{path} describes quantised weights; random weights are never quantised",
            remedy="remove quantization_config from a copy of it",
        )
    config = text_part(config) or config
    family = find_family(config)
    spec = family.spec(config)
    tensors = ModelTensors(spec, family.names(spec))
    head = _draft_head(family, spec, None) if any(map(config.get, HEAD_COUNTS)) else None
    every = [tensors] if head is None else [tensors, head]
    kinds = {name: "BF16" for each in every for name, _ in each.tensors()}
    text = TextFacts(b"", [])
    return ModelHeader(path.stem, tensors, None, kinds, text, [path], draft_head=head)


def _draft_head(
    family: ModelFamily, spec: ModelSpec, files: SafetensorsFiles | None
) -> DraftHeadTensors | None:
    """Return the tensors of the model's head for drafts; None if it has none.

    files   None: the model has random weights
    """
    form = family.draft_head(spec)
    if form is None:
        return None
    found = None if files is None else {name: each.shape for name, each in files.tensors.items()}
    return head_tensors(spec, family.names(spec), form, found)


def _quantized(
    quantization: Quantization, tensors: ModelTensors, files: SafetensorsFiles
) -> QuantizedFiles:
    if tensors.names.transposed - NEVER_QUANTIZED:
        raise UnusableModel(
            f"quantised safetensors of {tensors.spec.architecture} are not supported"
        )
    if quantization.quantizes_activations:
        log.info(
            "the model was made for quantised activations; here only its weights are quantised"
        )
    return QuantizedFiles(quantization, tensors, files)


def _contents(
    files: SafetensorsFiles, config: Mapping[str, Any]
) -> tuple[dict[str, Shape], dict[str, str]]:
    """Return the shape and the number type of each tensor.

    If the config says that there are matrices in MXFP4, the two tensors of such a matrix are
    returned as one tensor of type MXFP4. The files show which matrices these are.
    """
    found = dict(files.tensors)
    packed: dict[str, Shape] = {}
    if (config.get("quantization_config") or {}).get("quant_method") == "mxfp4":
        packed = find_packed(found)
    for name in packed:
        if name in found:
            raise UnusableModel(f"the files hold tensor {name!r} in two forms")
        del found[name + BLOCKS], found[name + SCALES]
    kinds = {name: tensor.dtype for name, tensor in found.items()}
    shapes = {name: tensor.shape for name, tensor in found.items()}
    return shapes | packed, kinds | dict.fromkeys(packed, MXFP4)


def _gguf_header(path: Path) -> ModelHeader:
    file = GGUFFile(path)
    spec = gguf_spec(file)
    tensors = ModelTensors(spec, gguf_names(file, spec))
    metadata = Metadata(file)
    ranks = spec.architecture == RERANKER and metadata.integer("pooling_type", 0) == RANK
    shapes = tensor_shapes(file)
    if ranks:
        shapes.pop(GGUF_TENSOR, None)
    tensors.check(shapes)
    for name, info in file.tensors.items():
        if not info.kind.is_readable:
            raise UnusableModel(
                f"{path}: type {info.kind.name} (of tensor {name}) is not supported"
            )
    text = gguf_text(Fields(file.metadata, str(path)), spec.vocab_size)
    kinds = {name: info.kind.name for name, info in file.tensors.items()}
    draft = gguf_draft_head(file, tensors, shapes)
    header = ModelHeader(model_name(path), tensors, file, kinds, text, file.paths, draft_head=draft)
    if ranks:
        head = tensors.head.parts[0]
        return _scoring(header, gguf_scorer(metadata, text.tokenizer, head, spec.hidden))
    pooling = pooling_type(metadata)
    if pooling is None:
        return header
    return replace(header, vectors=VectorSpec(pooling=pooling), generates=False)


def _untied_if_heads_differ(tensors: ModelTensors, files: SafetensorsFiles) -> ModelTensors:
    """Return `tensors`, untied if the files have a head that differs from the embeddings.

    transformers does the same.
    """
    embedding, head = tensors.embedding, tensors.head_name
    both = embedding in files.tensors and head in files.tensors
    if not (tensors.spec.tied_embeddings and both) or files.are_equal(embedding, head):
        return tensors
    log.warning(
        "tie_word_embeddings is true, but %s differs from the embeddings and is used instead", head
    )
    return ModelTensors(replace(tensors.spec, tied_embeddings=False), tensors.names)
