"""A decoder that scores pairs, as Qwen3-Reranker does, gives the scores of transformers, in every
form in which the model is published."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from gateway.api.encode.prepare import framed_pair
from gateway.text.inputs import InputTokenizer, Truncation
from protocol.config.worker import WorkerConfig
from protocol.wire.errors import InvalidRequest
from protocol.worker.steps import EncodePlan
from tests.support.checkpoints import write_directory
from tests.support.encoder_models import encode_inputs, random_encoder, write_encoder
from tests.support.family_models import random_model
from tests.support.gguf_files import write_gguf
from tests.support.rerankers import (
    CONTEXT,
    INSTRUCTION,
    NO,
    PREFIX,
    SUFFIX,
    TOKENIZER,
    YES,
    add_tokenizer,
    classifier_of,
    probabilities,
    prompt_ids,
    random_reranker,
    write_logit_score,
    write_reranker,
)
from worker.device import device
from worker.device.timing import StartupTiming
from worker.encoders.header import EncoderHeader
from worker.encoders.pair_scorer import PROMPT
from worker.errors import UnusableModel
from worker.loading.header import ModelHeader, read_any_header
from worker.startup.assembly import assemble
from worker.startup.encoding import Assembled
from worker.startup.preflight import preflight

TOLERANCE = 1e-4
PAIRS = [
    ("When is the harbour closed?", "The harbour closes in a storm."),
    ("When is the harbour closed?", "Bread rises overnight."),
    ("sea", ""),
    ("yes", "no " * 60),
]
INPUTS = [prompt_ids(*pair) for pair in PAIRS]


@pytest.fixture(autouse=True)
def one_process_assembles_several_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch allows to set the number of threads only once per process."""
    monkeypatch.setattr(device, "set_threads", lambda threads: None)


def assembled(path: Path, **options: Any) -> Assembled:
    config = WorkerConfig(
        model=str(path), dtype="float32", threads=1, kv_blocks=64, token_budget=512, **options
    )
    return assemble(config, StartupTiming())


def scores(worker: Assembled, inputs: list[list[int]] = INPUTS) -> Tensor:
    assert worker.encoder is not None
    plan = EncodePlan(step=1, inputs=encode_inputs(inputs))
    result = worker.encoder.launch(plan).result()
    assert not len(result.failed)
    return torch.tensor(result.vectors.tolist()).view(result.vectors.shape)


def header_of(path: Path, pooling: Any = "auto") -> ModelHeader:
    header = read_any_header(path, pooling)
    assert isinstance(header, ModelHeader)
    return header


def refusal(path: Path, pooling: Any = "auto") -> str:
    with pytest.raises(UnusableModel) as refused:
        read_any_header(path, pooling)
    return refused.value.message


# ---- forms


def named(path: Path, model: PreTrainedModel) -> Path:
    return write_reranker(path / "Qwen3-Reranker-0.6B", model)


def titled(path: Path, model: PreTrainedModel) -> Path:
    write_reranker(path / "mine", model)
    (path / "mine" / "README.md").write_text("---\nlicense: x\n---\n# Qwen3-Reranker-0.6B\n")
    return path / "mine"


def with_modules(path: Path, model: PreTrainedModel) -> Path:
    return write_logit_score(write_reranker(path / "mine", model))


def classifier(path: Path, model: PreTrainedModel) -> Path:
    return write_reranker(path / "mine", classifier_of(model))


def head_rows(model: PreTrainedModel) -> np.ndarray[Any, Any]:
    return model.get_output_embeddings().weight.detach()[[YES, NO]].numpy()


def ranking_gguf(path: Path, model: PreTrainedModel) -> Path:
    """As llama.cpp's converter writes it: without the head, of which it keeps two rows."""
    return write_gguf(
        path / "mine.gguf",
        model,
        metadata={"qwen3.pooling_type": 4, "qwen3.classifier.output_labels": ["yes", "no"]},
        tokenizer=add_tokenizer,
        skips="output.weight",
        more={"cls.output.weight": head_rows(model)},
    )


def named_gguf(path: Path, model: PreTrainedModel) -> Path:
    """As other programs convert it: like any decoder."""
    return write_gguf(path / "Qwen3-Reranker-0.6B-F32.gguf", model, tokenizer=add_tokenizer)


FORMS: list[Callable[[Path, PreTrainedModel], Path]] = [
    *(named, titled, with_modules, classifier),
    *(ranking_gguf, named_gguf),
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_scores_equal_those_of_transformers(
    form: Callable[[Path, PreTrainedModel], Path], is_tied: bool, kernels: Any, tmp_path: Path
) -> None:
    model = random_reranker(tie_word_embeddings=is_tied)
    worker = assembled(form(tmp_path, model), kernels=kernels)
    found, wanted = scores(worker), probabilities(model, INPUTS)
    assert float((found - wanted).abs().max()) < TOLERANCE
    assert float(wanted.max() - wanted.min()) > 0.05  # otherwise any score would be right
    assert worker.runner is None
    assert not worker.ready.model.generates
    encoding = worker.ready.model.encoding
    assert encoding is not None
    assert (encoding.task, encoding.size, encoding.pair_prompt) == ("score", 1, PROMPT)


def test_an_option_makes_a_decoder_of_any_name_a_reranker(tmp_path: Path) -> None:
    model = random_reranker()
    path = write_reranker(tmp_path / "mine", model)
    assert header_of(path).generates
    found = scores(assembled(path, pooling="rank"))
    assert float((found - probabilities(model, INPUTS)).abs().max()) < TOLERANCE


def test_a_score_does_not_depend_on_the_other_pairs_of_its_step(tmp_path: Path) -> None:
    worker = assembled(named(tmp_path, random_reranker()))
    together = scores(worker)
    alone = torch.cat([scores(worker, [ids]) for ids in INPUTS])
    assert float((together - alone).abs().max()) < 1e-5


def test_a_classifier_equals_the_class_of_transformers(tmp_path: Path) -> None:
    model = classifier_of(random_reranker())
    with torch.no_grad():
        model.score.weight.normal_(0, 0.3)
        logits = [model(torch.tensor([ids])).logits[0] for ids in INPUTS]
    path = write_reranker(tmp_path / "mine", model)
    found = scores(assembled(path))
    assert float((found - torch.stack(logits).sigmoid()).abs().max()) < TOLERANCE
    identity = {"activation_fn": "torch.nn.modules.linear.Identity"}
    config = json.loads((path / "config.json").read_text())
    older, newer = config | {"sentence_transformers": identity}, identity
    for name, content in (("config.json", older), ("config_sentence_transformers.json", newer)):
        (path / "config.json").write_text(json.dumps(config))
        (path / name).write_text(json.dumps(content))
        plain = scores(assembled(path))
        assert float((plain - torch.stack(logits)).abs().max()) < TOLERANCE, name


def test_the_head_of_all_tokens_is_not_in_memory(tmp_path: Path) -> None:
    model = random_reranker(tie_word_embeddings=False)
    path = named(tmp_path, model)
    worker = assembled(path, kernels="torch")
    head = model.get_output_embeddings().weight.numel()
    numbers = sum(parameter.numel() for parameter in model.parameters())
    assert worker.ready.model.weights_bytes == 4 * (numbers - head)
    found = preflight([WorkerConfig(model=str(path), device="cpu", dtype="float32")])
    assert not found.error
    assert (found.plans[0].kv_bytes, found.plans[0].max_len) == (0, CONTEXT)
    assert found.card is not None
    assert not found.card.generates


def test_a_named_reranker_can_still_give_text_and_vectors(tmp_path: Path) -> None:
    path = named(tmp_path, random_reranker(tie_word_embeddings=False))
    header = header_of(path, "last")
    assert header.generates
    assert header.encoding is not None
    assert header.encoding.task == "embed"
    assert not header.spec.tied_embeddings


# ---- prompts


def test_the_prompt_is_that_of_the_model_card() -> None:
    tokenizer = InputTokenizer(TOKENIZER, CONTEXT, 1 << 16)
    framed = [framed_pair(PROMPT, *pair, INSTRUCTION) for pair in PAIRS]
    texts = [*framed, framed_pair(PROMPT, "{document} a", "{query} b", "{query}")]
    found = tokenizer.encode(
        texts, ["text"] * len(texts), adds_special=False, offload=lambda work: work()
    )
    wanted = [*INPUTS, prompt_ids("{document} a", "{query} b", "{query}")]
    assert [each.ids for each in found] == wanted


def test_a_prompt_is_truncated_before_its_end() -> None:
    tokenizer = InputTokenizer(TOKENIZER, CONTEXT, 1 << 16)
    pair = ("sea", "harbour " * 50)
    (found,) = tokenizer.encode(
        [framed_pair(PROMPT, *pair, INSTRUCTION)],
        ["text"],
        truncation=Truncation(500),
        adds_special=False,
        offload=lambda work: work(),
    )
    assert found.ids == prompt_ids(*pair, limit=500)
    assert len(found.ids) == found.split == 500


def test_texts_with_the_prompt_around_them_are_only_joined() -> None:
    query = f"{PREFIX}<Instruct>: Find it.\n<Query>: sea\n"
    document = f"<Document>: harbour{SUFFIX}"
    framed = framed_pair(PROMPT, query, document, INSTRUCTION)
    assert framed.parts == framed_pair(PROMPT, "sea", "harbour", "Find it.").parts


@pytest.mark.parametrize("outside", [{"prefix": ""}, {"suffix": ""}])
def test_texts_are_not_joined_if_nothing_tells_that_they_have_the_prompt(
    outside: dict[str, str],
) -> None:
    prompt = msgspec.structs.replace(PROMPT, **outside)
    framed = framed_pair(prompt, PREFIX + "sea", "harbour" + SUFFIX, "Find it.")
    assert framed.body == (
        f"<Instruct>: Find it.\n<Query>: {PREFIX}sea\n<Document>: harbour{SUFFIX}"
    )


def test_a_truncation_that_leaves_nothing_of_the_document_is_refused() -> None:
    tokenizer = InputTokenizer(TOKENIZER, CONTEXT, 1 << 16)
    query = "sea " * 20
    room = len(prompt_ids(query, ""))
    for limit, is_refused in [(room - 5, True), (room, True), (room + 5, False)]:
        with pytest.raises(InvalidRequest) if is_refused else nullcontext():
            tokenizer.encode(
                [framed_pair(PROMPT, query, "harbour " * 50, INSTRUCTION)],
                ["text"],
                truncation=Truncation(limit),
                adds_special=False,
                offload=lambda work: work(),
            )


@pytest.mark.parametrize("form", [with_modules, classifier])
def test_the_default_prompt_of_a_directory_is_the_instruction(
    form: Callable[[Path, PreTrainedModel], Path], tmp_path: Path
) -> None:
    path = form(tmp_path, random_reranker())
    settings = {"prompts": {"law": "Find the law"}, "default_prompt_name": "law"}
    (path / "config_sentence_transformers.json").write_text(json.dumps(settings))
    (path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 900}))
    encoding = header_of(path).encoding
    assert encoding is not None
    assert encoding.pair_prompt is not None
    assert (encoding.pair_prompt.instruction, encoding.max_tokens) == ("Find the law", 900)


def test_a_gguf_file_has_a_prompt_of_its_own(tmp_path: Path) -> None:
    template = "Judge.\nQ: {query}\nD: {document}\nA:"
    path = write_gguf(
        tmp_path / "mine.gguf",
        random_reranker(),
        metadata={
            "qwen3.pooling_type": 4,
            "tokenizer.chat_template.rerank": template,
        },
        tokenizer=add_tokenizer,
    )
    encoding = header_of(path).encoding
    assert encoding is not None
    assert encoding.pair_prompt is not None
    prompt = encoding.pair_prompt
    assert (prompt.prefix, prompt.body) == ("Judge.\n", "Q: {query}\nD: {document}")
    assert (prompt.suffix, prompt.instruction) == ("\nA:", "")


def test_the_usual_prompt_of_a_gguf_file_takes_an_instruction(tmp_path: Path) -> None:
    body = f"<Instruct>: {INSTRUCTION}\n<Query>: {{query}}\n<Document>: {{document}}"
    path = write_gguf(
        tmp_path / "mine.gguf",
        random_reranker(),
        metadata={
            "qwen3.pooling_type": 4,
            "tokenizer.chat_template.rerank": PREFIX + body + SUFFIX,
        },
        tokenizer=add_tokenizer,
    )
    encoding = header_of(path).encoding
    assert encoding is not None
    assert encoding.pair_prompt == PROMPT


# ---- refusals


def test_modules_that_compare_other_tokens_are_refused(tmp_path: Path) -> None:
    path = write_reranker(tmp_path / "mine", random_reranker())
    write_logit_score(path, true=7, false=None)
    assert "the tokens (7, None) are not" in refusal(path)


def test_a_model_without_the_tokens_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "Qwen3-Reranker-0.6B"
    write_directory(path, random_model("qwen3"))
    assert "the model has no token 'yes'" in refusal(path)


def test_a_decoder_of_another_family_does_not_rank(tmp_path: Path) -> None:
    write_directory(tmp_path, random_model("llama"))
    assert "LlamaForCausalLM cannot rank" in refusal(tmp_path, "rank")


def test_an_encoder_without_a_head_does_not_rank(tmp_path: Path) -> None:
    write_encoder(tmp_path, random_encoder("bert"))
    assert "without a head cannot rank" in refusal(tmp_path, "rank")
    scorer = write_encoder(tmp_path / "scorer", random_encoder("bert", scores=True, num_labels=1))
    header = read_any_header(scorer, "rank")
    assert isinstance(header, EncoderHeader)
    assert header.encoding.task == "score"


@pytest.mark.parametrize("form", [with_modules, classifier, ranking_gguf])
def test_a_model_that_scores_has_no_pooling(
    form: Callable[[Path, PreTrainedModel], Path], tmp_path: Path
) -> None:
    path = form(tmp_path, random_reranker())
    assert "has no pooling to choose" in refusal(path, "mean")


def test_a_classifier_with_several_labels_is_refused(tmp_path: Path) -> None:
    path = classifier(tmp_path, random_reranker())
    config = json.loads((path / "config.json").read_text())
    config["id2label"] = {"0": "no", "1": "yes"}
    (path / "config.json").write_text(json.dumps(config))
    assert "a model with 2 labels classifies" in refusal(path)


BAD_FILES: dict[str, tuple[dict[str, Any], str]] = {
    "other labels": (
        {"qwen3.classifier.output_labels": ["good", "bad"]},
        "qwen3.classifier.output_labels is ['good', 'bad']",
    ),
    "no place for the query": (
        {
            "qwen3.classifier.output_labels": ["yes", "no"],
            "tokenizer.chat_template.rerank": "{document}",
        },
        "has no {query} before a {document}",
    ),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_gguf_file_that_scores_otherwise_is_refused_by_key(name: str, tmp_path: Path) -> None:
    metadata, words = BAD_FILES[name]
    model = random_reranker()
    path = write_gguf(
        tmp_path / "mine.gguf",
        model,
        metadata={"qwen3.pooling_type": 4, **metadata},
        tokenizer=add_tokenizer,
        more={"cls.output.weight": head_rows(model)},
    )
    assert words in refusal(path)


def test_a_head_of_another_shape_is_refused(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "mine.gguf",
        random_reranker(),
        metadata={"qwen3.pooling_type": 4, "qwen3.classifier.output_labels": ["yes", "no"]},
        tokenizer=add_tokenizer,
        more={"cls.output.weight": np.zeros((2, 32), np.float32)},
    )
    assert "cls.output.weight has shape (2, 32)" in refusal(path)
