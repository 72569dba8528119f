"""Reads how a model's directory describes its vectors: the files of sentence-transformers.

    modules.json                        the modules: Transformer, Pooling, Dense, Normalize
    1_Pooling/config.json               the pooling
    2_Dense/config.json, .safetensors   a dense layer, if there is one
    config_sentence_transformers.json   prompts, how vectors are compared, the function of a score
    sentence_bert_config.json           the most tokens of an input, before version 5.4
    tokenizer_config.json               the most tokens of an input, since then

Needs no torch. Other modules are refused by name, because they would change the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from protocol.engine.encoding import EncodeTask, EncodingCard, Pooling, Similarity
from worker.checkpoint.safetensors_files import SINGLE, SafetensorsFiles
from worker.errors import FETCH_AGAIN, UnusableModel
from worker.spec.fields import Fields, parsed_json, read_json

MODULES, SETTINGS = "modules.json", "config_sentence_transformers.json"
TRANSFORMER_FILES = tuple(
    f"sentence_{family}_config.json"
    for family in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""Names of the file that describes the module Transformer; the first one that is there is read. The
name depends on the family in directories of older versions."""
ONLY_TEXT = ("query_length", "document_length", "query_expansion")
"""Keys of that file that belong to models with a vector for each token."""
POOLINGS: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
OTHER_POOLINGS = (
    "pooling_mode_max_tokens",
    "pooling_mode_mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens",
)
ACTIVATIONS = {
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.modules.activation.GELU": "gelu",
    "torch.nn.modules.activation.ReLU": "relu",
}
"""Class of an activation in the config of a dense layer -> its name in pooling.py."""
VECTOR = "sentence_embedding"
"""The name of a text's vector in the configs of modules."""
SIMILARITIES: dict[str, Similarity] = {"cosine": "cosine", "dot": "dot", "dot_product": "dot"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSpec:
    """A dense layer after pooling. Its tensors are `linear.weight` and `linear.bias` of `file`."""

    file: Path
    inputs: int
    outputs: int
    has_bias: bool
    #: A key of DENSE_ACTIVATIONS of pooling.py.
    activation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorSpec:
    """How a model's hidden states become vectors, and what clients need for it."""

    pooling: Pooling
    dense: tuple[DenseSpec, ...] = ()
    normalizes: bool = True
    #: Most tokens of an input; None: as many as the model takes.
    max_tokens: int | None = None
    prompts: tuple[tuple[str, str], ...] = ()
    default_prompt: str | None = None
    similarity: Similarity = "cosine"

    @property
    def paths(self) -> list[Path]:
        """Return the files with weights."""
        return [dense.file for dense in self.dense]

    def card(self, task: EncodeTask, size: int, context_tokens: int) -> EncodingCard:
        """Return the description of the task for the model card. `size` is that of the model's
        hidden states."""
        return EncodingCard(
            task=task,
            max_tokens=min(self.max_tokens or context_tokens, context_tokens),
            size=self.dense[-1].outputs if self.dense else size,
            pooling=self.pooling,
            normalizes=self.normalizes,
            similarity=self.similarity,
            prompts=dict(self.prompts),
            default_prompt=self.default_prompt,
        )


def read_modules(folder: Path, hidden: int) -> VectorSpec | None:
    """Return how a sentence-transformers model makes its vectors, as the files in its directory
    describe; None if there is no modules.json.

    hidden   size of the model's hidden states

    Raises UnusableModel if a file is missing or damaged, or names something that is not supported.
    """
    if not (folder / MODULES).is_file():
        return None
    pooling: Pooling | None = None
    dense: list[DenseSpec] = []
    normalizes = False
    for number, module in enumerate(_modules(folder)):
        kind = _kind(module)
        place = folder / _inside(module.text("path", ""))
        if normalizes:
            raise UnusableModel(f"{MODULES}: a module after Normalize is not supported")
        match kind:
            case "Transformer" if number == 0:
                if place != folder:
                    raise UnusableModel(f"{MODULES}: the model is not in {folder} itself")
            case "Pooling":
                pooling = _pooling(place / "config.json", hidden)
            case "Dense" if pooling is not None:
                dense.append(_dense(place, dense[-1].outputs if dense else hidden))
            case "Normalize":
                normalizes = True
            case _:
                raise UnusableModel(f"{MODULES}: a module of type {kind!r} is not supported")
    if pooling is None:
        raise UnusableModel(f"{MODULES} has no module of type Pooling")
    spec = VectorSpec(pooling=pooling, dense=tuple(dense), normalizes=normalizes)
    return _with_settings(spec, folder)


def module_kinds(folder: Path) -> list[str]:
    """Return the types of the modules in a directory with a modules.json, without their packages.
    Raises UnusableModel if the file is damaged."""
    return [_kind(module) for module in _modules(folder)]


def _kind(module: Fields) -> str:
    return module.text("type").rpartition(".")[2]


def _modules(folder: Path) -> list[Fields]:
    path = folder / MODULES
    try:
        found = parsed_json(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UnusableModel(f"cannot read {path}: {error}", remedy=FETCH_AGAIN) from error
    if not isinstance(found, list) or not found:
        raise UnusableModel(f"{path} is not a list of modules")
    return [Fields(module, MODULES) for module in found]


def _inside(path: str) -> str:
    """Return the path of a module in the directory. Raises UnusableModel if it leads outside."""
    parts = Path(path).parts
    if Path(path).is_absolute() or ".." in parts:
        raise UnusableModel(f"{MODULES}: the path {path!r:.80} leads outside of the directory")
    return path


def _pooling(file: Path, hidden: int) -> Pooling:
    config = Fields(read_json(file), str(file))
    for key in ("embedding_dimension", "word_embedding_dimension"):  # the newer name comes first
        if (width := config.integer(key, hidden)) != hidden:
            raise UnusableModel(f"{file}: {key} is {width}; the model has {hidden}")
    if not config.flag("include_prompt", True):
        raise UnusableModel(f"{file}: include_prompt false is not supported")
    named = config.get("pooling_mode")
    names = named.split("+") if isinstance(named, str) else []
    chosen: list[Any] = [name for name in names if name in get_args(Pooling)]
    chosen += [name for key, name in POOLINGS.items() if config.flag(key, False)]
    others = [name for name in names if name not in get_args(Pooling)]
    others += [key for key in OTHER_POOLINGS if config.flag(key, False)]
    if others or len(set(chosen)) != 1:
        wanted = ", ".join(others) or f"{len(set(chosen))} poolings"
        raise UnusableModel(
            f"{file}: {wanted} is not supported; supported is one of {', '.join(POOLINGS)}"
        )
    only: Pooling = chosen[0]
    return only


def _dense(folder: Path, inputs: int) -> DenseSpec:
    file = folder / "config.json"
    config = Fields(read_json(file), str(file))
    activation = config.text("activation_function", "torch.nn.modules.activation.Tanh")
    if activation not in ACTIVATIONS:
        raise UnusableModel(f"{file}: activation_function {activation!r} is not supported")
    for key in ("module_input_name", "module_output_name"):
        if (name := config.text(key, VECTOR)) != VECTOR:
            raise UnusableModel(f"{file}: {key} {name!r:.80} is not supported")
    spec = DenseSpec(
        file=folder / SINGLE,
        inputs=config.integer("in_features"),
        outputs=config.integer("out_features"),
        has_bias=config.flag("bias", True),
        activation=ACTIVATIONS[activation],
    )
    if spec.inputs != inputs:
        raise UnusableModel(f"{file}: in_features is {spec.inputs}; its input has {inputs}")
    if not spec.file.is_file():
        raise UnusableModel(
            f"{spec.file} is missing; pickle files are not read", remedy="convert it to safetensors"
        )
    shapes = {"linear.weight": (spec.outputs, inputs)}
    if spec.has_bias:
        shapes["linear.bias"] = (spec.outputs,)  # type: ignore[assignment]
    found = {name: each.shape for name, each in SafetensorsFiles([spec.file]).tensors.items()}
    if found != shapes:
        raise UnusableModel(f"{spec.file} has tensors {found}; {file} requires {shapes}")
    return spec


def _lowers(folder: Path) -> bool:
    """Return whether the tokenizer maps texts to lower case itself."""
    found = read_json(folder / "tokenizer.json").get("normalizer")
    steps = found.get("normalizers", [found]) if isinstance(found, dict) else []
    return any(
        isinstance(step, dict)
        and (step.get("type") == "Lowercase" or step.get("lowercase") is True)
        for step in steps
    )


def max_input_tokens(folder: Path) -> int | None:
    """Return the most tokens of an input that a model's directory allows, as sentence-transformers
    reads it; None if it does not say. Raises UnusableModel if the module Transformer is described
    in a way that is not supported."""
    config = _transformer(folder)
    processor = config.get("processor_kwargs", config.get("tokenizer_args", {}))
    tokenizer = folder / "tokenizer_config.json"
    for values, source, key in (
        (_text_options(config), "processing_kwargs", "max_length"),
        (processor, "processor_kwargs", "model_max_length"),
        (config, "", "max_seq_length"),
        (read_json(tokenizer) if tokenizer.is_file() else {}, tokenizer.name, "model_max_length"),
    ):
        fields = values if isinstance(values, Fields) else Fields(values, source)
        if fields.get(key) is not None:
            return max(int(fields.number(key)), 1)
    return None


def _transformer(folder: Path) -> Fields:
    """Return the fields of the file that describes the module Transformer; they are empty if there
    is none, or if no modules.json names the module. Raises UnusableModel for values that would
    change the result and are not supported."""
    found = (folder / name for name in TRANSFORMER_FILES if (folder / name).is_file())
    file = next(found, None) if (folder / MODULES).is_file() else None
    if file is None:
        return Fields({}, MODULES)
    config = Fields(read_json(file), file.name)
    if config.flag("do_lower_case", False) and not _lowers(folder):
        raise UnusableModel(
            f"{file.name}: do_lower_case is only supported if the tokenizer lowers texts itself"
        )
    for key in ONLY_TEXT:
        if config.get(key) is not None:
            raise UnusableModel(f"{file.name}: {key} is not supported")
    if "text" not in Fields(config.get("modality_config", {"text": {}}), file.name):
        raise UnusableModel(f"{file.name}: modality_config has no 'text'")
    return config


def _text_options(config: Fields) -> Any:
    """Return the options with which texts are tokenized."""
    options = config.get("processing_kwargs", {})
    return Fields(options, "processing_kwargs").get("text", {})


def with_activation(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the config of a model that scores, with the function of its scores that the file
    SETTINGS names. It takes precedence over that of config.json, where versions before 5.4 of
    sentence-transformers stored it. Raises UnusableModel if the file is damaged."""
    settings = read_json(folder / SETTINGS) if (folder / SETTINGS).is_file() else {}
    if (name := settings.get("activation_fn")) is None:
        return dict(config)
    return {**config, "sentence_transformers": {"activation_fn": name}}


def read_prompts(folder: Path) -> tuple[dict[str, str], str | None]:
    """Return the prompts of a model by name, and the name of the default one; None: there is none.
    Raises UnusableModel if they are not texts, or if the default one is missing."""
    if not (folder / SETTINGS).is_file():
        return {}, None
    config = Fields(read_json(folder / SETTINGS), SETTINGS)
    prompts = config.get("prompts", {})
    if not isinstance(prompts, dict) or not all(isinstance(p, str) for p in prompts.values()):
        raise UnusableModel(f"{SETTINGS}: 'prompts' is not an object of strings")
    default = config.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise UnusableModel(f"{SETTINGS}: there is no prompt {default!r:.80}")
    return prompts, default


def _with_settings(spec: VectorSpec, folder: Path) -> VectorSpec:
    spec = replace(spec, max_tokens=max_input_tokens(folder))
    if not (folder / SETTINGS).is_file():
        return spec
    prompts, default = read_prompts(folder)
    config = Fields(read_json(folder / SETTINGS), SETTINGS)
    similarity = config.text("similarity_fn_name", "cosine")
    if similarity not in SIMILARITIES:
        raise UnusableModel(f"{SETTINGS}: similarity_fn_name {similarity!r:.80} is not supported")
    return replace(
        spec,
        prompts=tuple(prompts.items()),
        default_prompt=default,
        similarity=SIMILARITIES[similarity],
    )
