"""Loads a model from a path, ready to compute, and makes the model card that describes it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from protocol.config.worker import Activations, KVDtype, PoolingOption, WeightForm
from protocol.engine.model_card import ModelCard
from worker.checkpoint.digest import digest
from worker.checkpoint.gguf_file import GGUFFile
from worker.checkpoint.gguf_weights import GGUFWeights
from worker.checkpoint.huggingface import SafetensorsWeights
from worker.checkpoint.pinned_ring import Copy, copy_tensor, copying_to
from worker.checkpoint.random_weights import RandomWeights
from worker.encoders.pooling import InputHead
from worker.errors import UnusableModel
from worker.kernels.base import Kernels
from worker.kernels.fingerprint import fingerprint, source_of
from worker.kernels.native import DTYPE_CODES, NativeKernels
from worker.kernels.reference import TorchKernels
from worker.kv.rounding import ROUNDED, choose_kv_dtype
from worker.layers.group import Group
from worker.loading.encoder import pair_score_head, vector_head
from worker.loading.header import ModelHeader, read_header, with_pooling
from worker.loading.layouts import DenseLayout, WeightLayout, WeightSource
from worker.loading.transformers_header import TransformersHeader
from worker.loading.weight_layout import fitting, layout, rounds_inputs, settle
from worker.loading.weights import load_weights
from worker.models.decoder import DecoderModel
from worker.spec.architectures import TransformersSpec
from worker.spec.model_spec import ModelSpec
from worker.spec.share import NOT_DIVIDED, check_dense

if TYPE_CHECKING:
    from worker.models.hf import TransformersModel
    from worker.models.hf_own_cache import OwnCacheModel

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to compute, its card and its spec.

    kv_dtype   dtype of its K/V cache
    rounded    the numbers that are rounded to eight bits: "inputs" (of quantised weights in the
               layers), "kv", both or none
    """

    model: DecoderModel | TransformersModel | OwnCacheModel
    card: ModelCard
    spec: ModelSpec | TransformersSpec
    kv_dtype: torch.dtype
    rounded: Sequence[str]
    step_costs: list[tuple[int, float]] = field(default_factory=list)
    #: Makes its vectors or scores; None: it has none.
    vectors: InputHead | None = None


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Kernels | None = None,
    weights: WeightForm = "auto",
    activations: Activations = "auto",
    rounds_floats: bool = False,
    kv_dtype: KVDtype = "auto",
    measurements: Path | None = None,
    on_header: Callable[[ModelHeader | TransformersHeader], object] = lambda header: None,
    group: Group | None = None,
    pooling: PoolingOption = "auto",
) -> LoadedModel:
    """Load a Hugging Face directory or a .gguf file, or make random weights for a config.json. With
    a group, load only this rank's share; the spec is that of the share, and weights are dense.
    Raises UnusableModel if the files are missing, damaged, or need an unsupported feature.

    kernels        used if they support the model; otherwise, or if None, torch's are used
    weights        form of the weights (weight_layout.py)
    activations    whether the inputs of quantised weights are rounded (weight_layout.py)
    rounds_floats  whether activations "auto" rounds inputs in float32, too
    kv_dtype       whether keys and values are rounded (kv/rounding.py)
    measurements   directory that caches measured times between starts; None disables the cache
    on_header      called with the model's header, before the weights are loaded
    group          the tensor parallel group of this rank; None: this worker computes everything
    pooling        the operator's choice of vectors; auto: the model's files decide
    """
    header = with_pooling(read_header(Path(path)), pooling)
    on_header(header)
    if isinstance(header, TransformersHeader):
        if activations == "int8":
            raise UnusableModel("activations in int8 need packed weights")
        if group is not None:
            raise UnusableModel(NOT_DIVIDED)
        kernels = kernels or TorchKernels()
        return _load_transformers(header, dtype, device, kernels, weights, kv_dtype)
    tensors = header.tensors
    if group is not None:
        check_dense(weights, activations)
        tensors = tensors.for_rank(group.rank, group.size)
    spec = tensors.spec
    kernels = fitting(kernels or TorchKernels(), spec)
    form: WeightLayout = DenseLayout()
    if group is None:
        form = layout(kernels, weights, dtype, activations, rounds_floats=rounds_floats)
    with copying_to(device) as copy:
        source = open_weights(header, copy)
        loaded = load_weights(tensors, source, dtype=dtype, device=device, layout=form, group=group)
        vectors: InputHead | None = None
        if header.vectors is not None:
            vectors = vector_head(header.vectors, device)
        elif header.scorer is not None:
            vectors = pair_score_head(header.scorer, tensors, source, loaded.embedding, device)
    # Ranks do not measure: they would have to call every layer equally often.
    costs = settle(spec, loaded, dtype, kernels, measurements) if group is None else []
    model = DecoderModel(spec, loaded, kernels)
    cache_dtype = choose_kv_dtype(kv_dtype, dtype)
    rounded = [*(["inputs"] if rounds_inputs(loaded) else []), *_rounded_kv(cache_dtype, dtype)]
    memory = {tensor.data_ptr(): tensor.nbytes for tensor in model.tensors()}
    card = _card(
        header,
        dtype,
        num_parameters=header.tensors.num_parameters,
        weights_bytes=sum(memory.values()),
        numerics=_numerics(model, dtype, rounded),
    )
    return LoadedModel(model, card, spec, cache_dtype, rounded, costs, vectors)


def _load_transformers(
    header: TransformersHeader,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Kernels,
    weights: WeightForm,
    kv_dtype: KVDtype,
) -> LoadedModel:
    if weights == "packed":
        raise UnusableModel("packed weights are not possible for models that transformers computes")
    from worker.models import hf, hf_own_cache  # they import transformers, which takes seconds

    spec = header.spec
    if spec.own_cache is not None:
        if device.type != "cpu":
            raise UnusableModel(
                f"{spec.architecture} keeps a cache of its own, which is supported on CPUs only",
                remedy="serve with --device cpu",
            )
        own = hf_own_cache.load(spec, header.folder, dtype=dtype, device=device)
        card = _card(
            header, dtype, num_parameters=spec.num_parameters, weights_bytes=own.weights_bytes
        )
        return LoadedModel(own, card, own.spec, dtype, ())
    model = hf.load(spec, header.folder, dtype=dtype, device=device, kernels=kernels)
    card = _card(
        header, dtype, num_parameters=spec.num_parameters, weights_bytes=model.weights_bytes
    )
    log.info("%s is computed by transformers, with our attention", spec.architecture)
    cache_dtype = choose_kv_dtype(kv_dtype, dtype)
    return LoadedModel(model, card, spec, cache_dtype, _rounded_kv(cache_dtype, dtype))


def _rounded_kv(kv_dtype: torch.dtype, dtype: torch.dtype) -> list[str]:
    """Return the name of keys and values as rounded data, if the cache rounds them."""
    if kv_dtype == dtype:
        return []
    return ["kv" if kv_dtype == ROUNDED else "kv in bfloat16"]


def open_weights(header: ModelHeader, copy: Copy = copy_tensor) -> WeightSource:
    """Return the source of a model's weights: its files, or random numbers if it has none.

    copy   copies what was read to the targets
    """
    if header.files is None:
        return RandomWeights()
    if isinstance(header.files, GGUFFile):
        return GGUFWeights(header.files, copy)
    quantized = header.quantized
    return SafetensorsWeights(header.files, quantized.layers if quantized else None, copy)


def _card(
    header: ModelHeader | TransformersHeader,
    dtype: torch.dtype,
    *,
    num_parameters: int,
    weights_bytes: int,
    numerics: str = "",
) -> ModelCard:
    text, facts = header.text, repr(header.spec)
    generates, encoding, paths = True, None, header.paths
    file_format, quantization = "safetensors", ""
    if isinstance(header, ModelHeader):
        file_format, quantization = header.file_format, header.quantization
        if header.quantized is not None:
            facts += repr(header.quantized.quantization)
        generates, encoding = header.generates, header.encoding
        if header.vectors is not None:
            facts, paths = facts + repr(header.encoding), [*paths, *header.vectors.paths]
        elif header.scorer is not None:
            facts += repr(header.scorer)
    return ModelCard(
        name=header.name,
        architecture=header.spec.architecture,
        digest=digest(paths, text.tokenizer, facts.encode()),
        vocab_size=header.spec.vocab_size,
        context_tokens=header.spec.context_tokens,
        tokenizer=text.tokenizer,
        eos_token_ids=text.eos_token_ids,
        bos_token_id=text.bos_token_id,
        pad_token_id=text.pad_token_id,
        special_tokens=text.special_tokens,
        chat_template=text.chat_template,
        tool_use_template=text.tool_use_template,
        response_template=text.response_template,
        defaults=text.defaults,
        dtype=str(dtype).removeprefix("torch."),
        file_format=file_format,
        quantization=quantization,
        num_parameters=num_parameters,
        weights_bytes=weights_bytes,
        license=text.license,
        infill_tokens=text.infill_tokens,
        numerics=numerics,
        generates=generates,
        encoding=encoding,
    )


def _numerics(model: DecoderModel, dtype: torch.dtype, rounded: Collection[str]) -> str:
    """Return the fingerprint of all that affects the bits of results (ModelCard.numerics); "" if
    the bits may vary."""
    kernels = model.kernels
    if not isinstance(kernels, NativeKernels):
        return ""
    if not model.keeps_bits:
        log.info(
            "an answer can depend on how its prompt is cut into chunks and on other requests: some "
            "weights are not packed, or have sizes that the compiled kernels do not support"
        )
        return ""
    library = kernels.library
    of_torch = f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()}"
    return fingerprint(
        source_of(library.source_digest(), kernels.file),
        library.bits_of_set(DTYPE_CODES[dtype], "inputs" in rounded),
        str(dtype),
        rounded=rounded,
        torch="" if model.whole is not None else of_torch,
    )
