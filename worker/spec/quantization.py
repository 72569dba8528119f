"""Reads the `quantization_config` of a config.json: how a checkpoint stores quantised weights.

A known key is read, or skipped if it does not change the stored numbers. An unknown key raises
UnusableModel with its name. The worker never quantises activations. If a checkpoint was made for
quantised inputs of its layers, `Quantization.quantizes_activations` is set, and header.py logs
this. Needs no numpy.

Sources of the formats: the config classes of transformers (utils/quantization_config.py), the
documentation of GPTQModel, AutoAWQ and compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from worker.errors import UnusableModel
from worker.spec.fields import Fields

SOURCE = "quantization_config"
Layout = Literal["gptq", "awq", "packed", "plain"]
INT4, INT4_REORDERED, INT8, FP8 = "INT4", "INT4 in any order", "INT8", "FP8"
PACKED_AS = {INT4: "Q4_1", INT4_REORDERED: "Q8_0", INT8: "Q8_0", FP8: "Q8_0"}
"""Number types of quantised safetensors -> the block type that stays packed on a CPU."""


@dataclass(frozen=True, slots=True)
class QuantScheme:
    """How the weights of some layers are stored: weight = scale * (integer - zero point).

    `block` is the size (rows, columns) of the part of a matrix that shares a scale. 0 means all
    rows, or all columns.
    """

    #: "gptq" [in / n, out], "awq" [in, out / n] and "packed" [out, in / n] hold n integers in each
    #: int32. "plain" [out, in] has a number in each byte.
    layout: Layout
    bits: int
    block: tuple[int, int]
    is_float: bool = False
    has_zeros: bool = True
    #: Added to stored zero points.
    zero_offset: int = 0
    #: Possible ends of the name of the scales. A layer has one of them.
    scales: tuple[str, ...] = ("scales",)
    #: Ends of names of tensors that are not needed.
    unused: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a checkpoint's quantised layers are stored. Each layer uses one of `schemes`; its tensors
    show which."""

    method: str
    schemes: tuple[QuantScheme, ...]
    #: Whether the checkpoint was made for quantised activations too.
    quantizes_activations: bool = False


def read_quantization(config: Mapping[str, Any], own: Collection[str] = ()) -> Quantization | None:
    """Return the quantisation that a parsed config.json describes; None if there is none.

    own   values of `quant_method` that the model's family handles itself: None is returned for them

    Raises UnusableModel, naming the field, if a field is wrong or not supported.
    """
    values = config.get("quantization_config")
    if values is None:
        return None
    fields = Fields(values, SOURCE)
    method = fields.get("quant_method")
    if isinstance(method, str) and method in own:
        return None
    if not isinstance(method, str) or method not in METHODS:
        raise UnusableModel(
            f"safetensors quantised with {method!r:.80} are not supported; supported: "
            + ", ".join(METHODS)
        )
    return METHODS[method](fields, values)


def _gptq(fields: Fields, values: Mapping[str, Any]) -> Quantization:
    _check_keys(values, GPTQ_KEYS, GPTQ_IGNORED)
    _check_constants(
        fields, {"is_marlin_format": (False,), "pack_dtype": ("int32",), "method": ("gptq",)}
    )
    for name in ("dynamic", "adapter"):
        if fields.get(name):
            raise UnusableModel(f"{SOURCE}: {name!r} is not supported for gptq")
    fields.flag("sym", True)
    fields.flag("desc_act", False)
    fields.flag("lm_head", False)
    form = fields.text("checkpoint_format", fields.text("format", "gptq"))
    if form not in ("gptq", "gptq_v2"):
        raise UnusableModel(f"{SOURCE}: checkpoint_format {form!r:.80} is not supported for gptq")
    scheme = QuantScheme(
        layout="gptq",
        bits=_bits(fields, "bits", (4, 8)),
        block=(1, _group_size(fields, "group_size")),
        zero_offset=1 if form == "gptq" else 0,
    )
    return Quantization("gptq", (scheme,))


def _awq(fields: Fields, values: Mapping[str, Any]) -> Quantization:
    _check_keys(values, AWQ_KEYS, AWQ_IGNORED)
    version = fields.text("version", fields.text("format", "gemm"))
    if version.lower() != "gemm":
        raise UnusableModel(f"{SOURCE}: version {version!r:.80} is not supported for awq")
    _check_constants(
        fields,
        {"checkpoint_format": ("gemm",), "pack_dtype": ("int32",), "method": ("awq",)},
    )
    for name in ("dynamic", "adapter"):
        if fields.get(name):
            raise UnusableModel(f"{SOURCE}: {name!r} is not supported for awq")
    fields.flag("zero_point", True)  # zero points are stored in either case
    _check_names(fields, "modules_to_not_convert")
    bits = _bits(fields, "bits" if "bits" in fields else "w_bit", (4,), 4)
    group = _group_size(fields, "group_size" if "group_size" in fields else "q_group_size", 128)
    return Quantization("awq", (QuantScheme(layout="awq", bits=bits, block=(1, group)),))


def _fp8(fields: Fields, values: Mapping[str, Any]) -> Quantization:
    _check_keys(values, FP8_KEYS, FP8_IGNORED)
    _check_constants(
        fields,
        {
            "activation_scheme": ("dynamic", "static"),
            "fmt": ("e4m3", "float8_e4m3fn"),
            "scale_fmt": ("float", "ue8m0"),
            "expert_dtype": ("fp8",),
            "modules_to_convert": ([],),
        },
    )
    for name in ("modules_to_not_convert", "ignored_layers"):
        _check_names(fields, name)
    size = fields.get("weight_block_size")
    scheme = QuantScheme(
        layout="plain",
        bits=8,
        is_float=True,
        block=(0, 0) if size is None else _block(size, "weight_block_size"),
        has_zeros=False,
        scales=("weight_scale_inv", "weight_scale"),
        unused=("activation_scale", "input_scale"),
    )
    return Quantization("fp8", (scheme,), quantizes_activations=True)


def _compressed_tensors(fields: Fields, values: Mapping[str, Any]) -> Quantization:
    _check_keys(values, COMPRESSED_KEYS, COMPRESSED_IGNORED)
    for name in ("kv_cache_scheme", "transform_config", "moe_sparsity_config"):
        if fields.get(name):
            raise UnusableModel(f"{SOURCE}: {name!r} is not supported for compressed-tensors")
    sparsity = Fields(fields.get("sparsity_config", {}), f"{SOURCE}.sparsity_config")
    if (form := sparsity.get("format", "dense")) != "dense":
        raise UnusableModel(f"{SOURCE}: sparsity_config.format {form!r:.80} is not supported")
    _check_constants(fields, {"quantization_status": ("compressed", "frozen")})
    _check_names(fields, "ignore")
    form = fields.text("format", "")
    groups = fields.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise UnusableModel(f"{SOURCE}: 'config_groups' is not an object with groups")
    schemes, activations = [], False
    for name, group in groups.items():
        part = f"{SOURCE}.config_groups.{name:.40}"
        found = Fields(group, part)
        _check_keys(group, GROUP_KEYS, (), part)
        _check_names(found, "targets", part)
        if found.get("output_activations"):
            raise UnusableModel(f"{part}: 'output_activations' is not supported")
        activations |= bool(found.get("input_activations"))
        schemes.append(_compressed_scheme(found, found.text("format", form), part))
    return Quantization("compressed-tensors", tuple(schemes), quantizes_activations=activations)


def _compressed_scheme(group: Fields, form: str, part: str) -> QuantScheme:
    part = f"{part}.weights"
    weights = Fields(group.get("weights"), part)
    _check_keys(group.get("weights"), WEIGHTS_KEYS, WEIGHTS_IGNORED, part)
    kind = weights.text("type", "int")
    if form not in COMPRESSED_TYPES or kind not in COMPRESSED_TYPES[form]:
        raise UnusableModel(f"{SOURCE}: format {form!r:.80} of type {kind!r:.80} is not supported")
    if weights.get("dynamic", False):
        raise UnusableModel(f"{part}: 'dynamic' is not supported for weights")
    is_packed, is_float = form == "pack-quantized", kind == "float"
    block = _strategy(weights, part)
    if is_packed and block[0] != 1:
        strategy = weights.get("strategy")
        raise UnusableModel(f"{part}: strategy {strategy!r:.80} is not supported for {form}")
    return QuantScheme(
        layout="packed" if is_packed else "plain",
        bits=_bits(weights, "num_bits", (8,) if is_float else (4, 8), part=part),
        block=block,
        is_float=is_float,
        has_zeros=not weights.flag("symmetric", True),
        scales=("weight_scale",),
        unused=("weight_shape", "input_scale", "input_zero_point"),
    )


def _strategy(weights: Fields, part: str) -> tuple[int, int]:
    """Return the numbers of rows and of columns that share a scale (`QuantScheme.block`)."""
    group = weights.get("group_size")
    default = "tensor" if group is None else "channel" if group == -1 else "group"
    match weights.text("strategy", default):
        case "tensor":
            return 0, 0
        case "channel":
            return 1, 0
        case "group":
            return 1, _group_size(weights, "group_size", part=part)
        case "block":
            return _block(weights.get("block_structure"), "block_structure")
        case other:
            raise UnusableModel(f"{part}: strategy {other!r:.80} is not supported")


# ---- checks of fields


def _check_keys(
    values: Mapping[str, Any], read: Collection[str], ignored: Collection[str], part: str = SOURCE
) -> None:
    for name in values:
        if name not in read and name not in ignored:
            raise UnusableModel(f"{part}: {name!r:.80} is not supported")


def _check_constants(fields: Fields, supported: Mapping[str, tuple[Any, ...]]) -> None:
    for name, values in supported.items():
        if (value := fields.get(name)) is not None and value not in values:
            raise UnusableModel(f"{SOURCE}: {name} {value!r:.80} is not supported")


def _check_names(fields: Fields, name: str, part: str = SOURCE) -> None:
    names = fields.get(name, [])
    if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
        raise UnusableModel(f"{part}: {name!r} is not a list of names")


def _bits(
    fields: Fields, name: str, supported: tuple[int, ...], *default: int, part: str = SOURCE
) -> int:
    bits = fields.integer(name, *default)
    if bits not in supported:
        known = " and ".join(map(str, supported))
        raise UnusableModel(f"{part}: {name} {bits} is not supported; supported: {known}")
    return bits


def _group_size(fields: Fields, name: str, *default: int, part: str = SOURCE) -> int:
    """Return the number of columns that share a scale; 0 if all do."""
    size = fields.integer(name, *default)
    if size != -1 and size < 1:
        raise UnusableModel(f"{part}: {name} is {size}, neither -1 nor above zero")
    return max(size, 0)


def _block(size: Any, name: str) -> tuple[int, int]:
    if not isinstance(size, list) or [type(each) for each in size] != [int, int] or min(size) < 1:
        raise UnusableModel(f"{SOURCE}: {name!r} is {size!r:.80}, not two numbers above zero")
    return size[0], size[1]


METHODS: dict[str, Callable[[Fields, Mapping[str, Any]], Quantization]] = {
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
}
COMPRESSED_TYPES = {
    "pack-quantized": ("int",),
    "int-quantized": ("int",),
    "float-quantized": ("float",),
    "naive-quantized": ("int", "float"),
}
"""Format of compressed-tensors -> the types of its weights."""

GPTQ_KEYS = frozenset(
    {"quant_method", "bits", "group_size", "sym", "desc_act", "lm_head", "checkpoint_format"}
    | {"format", "is_marlin_format", "method", "pack_dtype", "dynamic", "adapter"}
)
GPTQ_IGNORED = frozenset(
    {"act_group_aware", "backend", "batch_size", "block_name_to_quantize", "cache_block_outputs"}
    | {"damp_auto_increment", "damp_percent", "dataset", "disable_exllama", "exllama_config"}
    | {"max_input_length", "meta", "model_file_base_name", "model_name_or_path", "model_seqlen"}
    | {"module_name_preceding_first_block", "modules_in_block_to_quantize", "pad_token_id"}
    | {"quantizer", "static_groups", "tokenizer", "true_sequential", "use_cuda_fp16"}
    | {"use_exllama", "version"}
)
"""Keys about how the numbers were found, or how a program should compute with them."""
AWQ_KEYS = frozenset(
    {"quant_method", "bits", "w_bit", "group_size", "q_group_size", "zero_point", "version"}
    | {"format", "checkpoint_format", "method", "pack_dtype", "dynamic", "adapter"}
    | {"modules_to_not_convert"}
)
AWQ_IGNORED = GPTQ_IGNORED | {"desc_act", "do_fuse", "fuse_max_seq_len", "lm_head", "sym"}
AWQ_IGNORED |= {"modules_to_fuse"}
"""transformers and GPTQModel write keys of GPTQ to configs of AWQ, too."""
FP8_KEYS = frozenset(
    {"quant_method", "activation_scheme", "fmt", "scale_fmt", "expert_dtype", "weight_block_size"}
    | {"modules_to_convert", "modules_to_not_convert", "ignored_layers"}
)
FP8_IGNORED = frozenset({"dequantize"})
COMPRESSED_KEYS = frozenset(
    {"quant_method", "config_groups", "format", "ignore", "kv_cache_scheme", "quantization_status"}
    | {"sparsity_config", "transform_config", "moe_sparsity_config"}
)
COMPRESSED_IGNORED = frozenset({"global_compression_ratio", "run_compressed", "version"})
GROUP_KEYS = frozenset({"targets", "weights", "input_activations", "output_activations", "format"})
WEIGHTS_KEYS = frozenset(
    {"num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic"}
)
WEIGHTS_IGNORED = frozenset({"actorder", "observer", "observer_kwargs", "scale_dtype", "zp_dtype"})
"""`actorder` is not needed: the tensor `weight_g_idx` has the group of each column."""
