"""Models that transformers computes, with our paged attention: the fallback for architectures
without a family of ours. architectures.py lists them.

The tokens of a step form one sequence [1, T] with explicit positions and without a mask.
hf_attention.py computes the attention.

No code of a model's directory is run: configs and classes are transformers' own, and weights are
read from safetensors only.

Legend: T tokens in the step, S rows that need logits, V vocabulary.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.modeling_outputs import MoeModelOutputWithPast

from worker.attention.base import Attention, AttentionBatch
from worker.checkpoint.safetensors_files import weight_files
from worker.device.postponed import TORCH_SHAPES, load_postponed
from worker.errors import FETCH_AGAIN, UnusableModel
from worker.kernels.base import Kernels
from worker.kernels.native import NativeKernels
from worker.kernels.reference import TorchKernels
from worker.kv.cache import PagedCache
from worker.lora.table import StepAdapters
from worker.models import hf_bitnet
from worker.models.hf_attention import (
    PagedFunction,
    PagedStep,
    initial_attention,
    install_attention,
    misfit,
    registered,
)
from worker.slots.states import StepStates
from worker.spec import kernel_sizes as sizes
from worker.spec.architectures import (
    BITNET,
    TransformersArchitecture,
    TransformersSpec,
    bitnet_mode,
)

OUTPUTS = {
    "output_attentions": False,
    "output_hidden_states": False,
    "output_router_logits": False,
    "return_dict": True,
}
"""Options that add outputs to those of a class. These values replace those of config.json."""


class DecoderOutput(MoeModelOutputWithPast):
    """The output of any decoder class of transformers. Fields that the class does not have are
    None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class GivenStates(nn.Module):
    """A stand-in for a model's decoder that returns `hidden`. With it, the forward pass of the
    model's class computes only the logits, with its own factors and caps.

    It takes the decoder's place when it is created. The class may read other attributes of the
    decoder, such as factors, and the embeddings, which classes of models of images use first.
    """

    def __init__(self, model: Any, decoder: Any) -> None:
        super().__init__()
        self.hidden: Tensor | None = None
        self.__dict__["decoder"] = decoder  # not as a submodule
        path = next(path for path, each in model.named_modules() if each is decoder)
        model.set_submodule(path, self)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["decoder"], name)

    def forward(self, *_: Any, **__: Any) -> DecoderOutput:
        return DecoderOutput(last_hidden_state=self.hidden)

    def logits(self, model: Any, hidden: Tensor) -> Tensor:
        """Return the logits [S, V] float32 that `model` computes of hidden [S, hidden]."""
        self.hidden = hidden[None]
        ids = torch.zeros((1, len(hidden)), dtype=torch.int64, device=hidden.device)
        logits: Tensor = model(input_ids=ids, use_cache=False).logits[0].float()
        self.hidden = None
        return logits


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
        self._decoder = decoder_of(model)
        self._given = GivenStates(model, self._decoder)
        install_attention(function, function.name, spec.architecture, model.config, self._decoder)

    @torch.inference_mode()
    def __call__(
        self,
        token_ids: Tensor,
        batch: AttentionBatch,
        cache: PagedCache,
        attention: Attention,
        adapters: StepAdapters | None = None,
        states: StepStates | None = None,
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
        logits = self._given.logits(self._model, hidden)
        if logits.shape != (len(hidden), self.spec.vocab_size):
            raise self.function.misfit(f"its logits have the shape {list(logits.shape)}")
        return logits

    @property
    def weights_bytes(self) -> int:
        """Return the bytes of all parameters and buffers. Shared ones count once."""
        return bytes_of(self._decoder, self._model)


def bytes_of(*modules: nn.Module) -> int:
    """Return the bytes of all parameters and buffers of these modules. Shared ones count once."""
    tensors = [each for module in modules for each in (*module.parameters(), *module.buffers())]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def describe(architecture: TransformersArchitecture, values: Mapping[str, Any]) -> TransformersSpec:
    """Return the facts about the model that a parsed config.json describes.

    Transformers builds the model on the device "meta", without memory for its weights, and computes
    it up to the first attention call, which shows the shapes of queries and keys. Raises
    UnusableModel if that fails, or if a value of the config is not supported.
    """
    silence()
    load_postponed(TORCH_SHAPES)
    config, name = config_of(architecture, values), architecture.name
    probe = registered(_probe)
    try:
        with torch.device("meta"), MetaValues(), torch.inference_mode():
            config._attn_implementation = initial_attention(name, probe)
            model = getattr(transformers, name)(config)
            decoder = decoder_of(model)
            install_attention(_probe, probe, name, config, decoder)
            ids = torch.zeros(2, dtype=torch.int64)
            _forward(decoder, ids, ids)
    except Probed as probed:
        query, key = probed.query, probed.key
    except Exception as error:
        raise misfit(name, f"transformers failed: {one_line(error)}") from error
    else:
        raise misfit(name, "it does not use transformers' attention interface")
    parameters = list(model.parameters())
    return TransformersSpec(
        architecture=name,
        vocab_size=positive(config, "vocab_size"),
        hidden=positive(config, "hidden_size"),
        context_tokens=context_of(config),
        num_layers=positive(config, "num_hidden_layers"),
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=key.shape[3],
        num_parameters=sum(parameter.numel() for parameter in parameters),
        largest_tensor=max(parameter.numel() for parameter in parameters),
        inner=inner_of(config, parameters),
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
    mode = bitnet_mode(values) if name == BITNET else None
    tensors, factors = None, None
    function = PagedFunction(spec)
    silence()
    try:
        if mode == "offline":
            tensors, factors = hf_bitnet.read_packed(weight_files(path), dtype)
        model, found = getattr(transformers, name).from_pretrained(
            path if tensors is None else None,
            state_dict=tensors,
            config=config_of(architecture, values),
            dtype=dtype,
            attn_implementation=initial_attention(name, function.name),
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            output_loading_info=True,
        )
    except Exception as error:
        raise UnusableModel(f"transformers cannot load {path}: {one_line(error)}") from error
    check_found(found)
    if mode is not None:
        hf_bitnet.install(model, factors)
    model = model.eval().requires_grad_(False).to(device)
    return TransformersModel(spec, model, function, _fitting(kernels, spec))


def _fitting(kernels: Kernels, spec: TransformersSpec) -> Kernels:
    """Return `kernels` if they can compute the model's attention, else torch's. Only compiled
    kernels have limits."""
    fits = sizes.fits(
        heads=spec.num_heads, kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, sizes=()
    )
    return kernels if fits or not isinstance(kernels, NativeKernels) else TorchKernels()


def check_found(found: Any) -> None:
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


def config_of(architecture: TransformersArchitecture, values: Mapping[str, Any]) -> Any:
    """Return transformers' config object for a parsed config.json. Raises UnusableModel if
    transformers rejects the values."""
    own = _with_floats(dict(values))
    if architecture.name == BITNET:
        own.pop("quantization_config", None)  # hf_bitnet.py computes the layers
    try:
        config = transformers.CONFIG_MAPPING[architecture.model_type].from_dict(own)
    except Exception as error:
        raise UnusableModel(f"transformers cannot read config.json: {one_line(error)}") from error
    for key, value in OUTPUTS.items():
        if hasattr(config, key):
            setattr(config, key, value)
    return config


def _with_floats(value: Any) -> Any:
    """Return `value` with numbers in place of what transformers writes for those that JSON does not
    have: {"__float__": "Infinity"}."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(str(value["__float__"]))
        return {key: _with_floats(each) for key, each in value.items()}
    return [_with_floats(each) for each in value] if isinstance(value, list) else value


def decoder_of(model: Any) -> Any:
    """Return the part of the model that maps token ids to hidden states."""
    decoder = model.get_decoder()
    is_one = "position_ids" in inspect.signature(decoder.forward).parameters
    return decoder if is_one else model.base_model


def _forward(decoder: Any, token_ids: Tensor, positions: Tensor) -> Any:
    return decoder(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)


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


def silence() -> None:
    """Keep transformers from writing progress bars and advice to the log."""
    logging: Any = transformers.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def context_of(config: Any) -> int:
    """Return the longest context, in tokens. With LongRoPE it ends where the second list of factors
    would apply, because the keys of a longer text would differ from those of its prefix."""
    context = positive(config, "max_position_embeddings")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        original = rope.get("original_max_position_embeddings", context)
        context = min(context, getattr(config, "original_max_position_embeddings", original))
    return context


def inner_of(config: Any, parameters: list[nn.Parameter]) -> int:
    """Return how many numbers the widest layer computes for one token. The embeddings and the head,
    which are recognised by the size of the vocabulary, do not count."""
    matrices = [each for each in parameters if each.ndim >= 2]
    widest = max(max(each.shape[-2:]) for each in matrices if len(each) != config.vocab_size)
    return int(widest) * int(getattr(config, "num_experts_per_tok", None) or 1)


def positive(config: Any, key: str) -> int:
    value = getattr(config, key, None)
    if not isinstance(value, int) or value < 1:
        raise UnusableModel(f"config.json: {key!r} is {value!r:.80}, not a positive integer")
    return value


def one_line(error: Exception) -> str:
    return f"{' '.join(str(error).split()):.300}" or type(error).__name__
