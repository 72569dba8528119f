"""The names of models to download, and the files of a repository that make up a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.failure import Failure
from tools.models.hub_files import RepoFile, choose_files, encoders_of, quantisations
from tools.models.names import HubName, UrlName, parse_hub_name, parse_url
from tools.models.pulling import served_name
from worker.errors import UnusableModel
from worker.vision.support import mmproj_beside

DIGEST = "ab" * 32
TEXT = ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]


def repo(*paths: str) -> list[RepoFile]:
    return [RepoFile(path=path, size=number) for number, path in enumerate(paths, 1)]


def chosen(name: str, *paths: str) -> list[str]:
    parsed = parse_hub_name(name)
    assert parsed is not None
    return [file.path for file in choose_files(parsed, repo(*paths))[1]]


# ---- names
@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen3-0.6B", HubName(repo="Qwen/Qwen3-0.6B")),
        ("a/b:Q4_K_M", HubName(repo="a/b", choice="Q4_K_M")),
        ("a/b@v1.0:Q4_K_M", HubName(repo="a/b", revision="v1.0", choice="Q4_K_M")),
        ("a/b@refs/pr/3", HubName(repo="a/b", revision="refs/pr/3")),
        ("a/b:sub/model-Q8_0.gguf", HubName(repo="a/b", choice="sub/model-Q8_0.gguf")),
        ("hf.co/a/b:Q4_0", HubName(repo="a/b", choice="Q4_0")),
        ("https://huggingface.co/a/b/", HubName(repo="a/b")),
    ],
)
def test_a_name_on_the_hub_has_a_repository_a_revision_and_a_choice(
    text: str, name: HubName
) -> None:
    assert parse_hub_name(text) == name
    assert parse_hub_name(str(name)) == name


@pytest.mark.parametrize(
    "text",
    [
        *("plain", "a/b/c", "/a/b", "./a", "../b", "a/..", "a/b..c", "a/b:../c", "a/b@../c"),
        *("a/b:", "a/b@", "a b/c", "a/b\n", "a--b/c", "-a/b", "a/m.gguf", "~/a"),
        "a/" + "b" * 97,
    ],
)
def test_other_text_is_not_a_name_on_the_hub(text: str) -> None:
    assert parse_hub_name(text) is None


def test_a_url_needs_a_digest_and_a_gguf_file_with_a_plain_name() -> None:
    url = "https://host/some/m%20x.gguf"
    assert parse_url("a/b") is None
    assert parse_url(f"https://host/m.gguf?a=1#sha256={DIGEST.upper()}") == UrlName(
        url="https://host/m.gguf?a=1", sha256=DIGEST
    )
    for text, words in (
        ("https://host/m.gguf", "needs the file's digest"),
        ("https://host/m.gguf#sha256=12", "needs the file's digest"),
        (f"https://host/m.bin#sha256={DIGEST}", r"only \.gguf files"),
        (f"{url}#sha256={DIGEST}", "cannot be used as a file name"),
        (f"https://host/..%2F..%2Fm.bin#sha256={DIGEST}", r"only \.gguf files"),
    ):
        with pytest.raises(ValueError, match=words):
            parse_url(text)


def test_a_model_is_served_under_the_name_that_was_typed(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert served_name("smollm2-135m") == "smollm2-135m"
    assert served_name("qwen3-0.6b") == "qwen3-0.6b"
    assert served_name("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    assert served_name("./Qwen/Qwen3-0.6B") is None
    assert served_name(f"https://host/m.gguf#sha256={DIGEST}") is None
    assert served_name(str(tmp_path)) is None


# ---- files
def test_pickles_and_python_files_are_never_chosen() -> None:
    rest = ["pytorch_model.bin", "modeling_pool.py", "model.pt", "README.md", "onnx/model.onnx"]
    assert chosen("a/b", *TEXT, *rest, "model.safetensors") == [*TEXT, "model.safetensors"]


def test_small_files_come_first() -> None:
    assert chosen("a/b", "model.safetensors", *TEXT) == ["model.safetensors", *TEXT]
    files = [RepoFile(path="model.safetensors", size=900), *repo(*TEXT)]
    assert choose_files(HubName(repo="a/b"), files)[1][-1].path == "model.safetensors"


def test_the_shards_of_an_index_are_chosen_without_copies_for_other_programs() -> None:
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    copies = ["consolidated.safetensors", "original/model.safetensors", "adapter_model.safetensors"]
    found = chosen("a/b", *TEXT, "model.safetensors.index.json", *shards, *copies)
    assert found == [*TEXT, "model.safetensors.index.json", *shards]


def test_chat_templates_are_chosen() -> None:
    templates = ["chat_template.jinja", "additional_chat_templates/tool_use.jinja"]
    found = chosen("a/b", *TEXT, *templates, "other/x.jinja", "model.safetensors")
    assert found == [*TEXT, *templates, "model.safetensors"]


def test_the_files_that_say_how_vectors_are_made_are_chosen() -> None:
    modules = [
        *("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"),
        "sentence_xlm-roberta_config.json",
        *("1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"),
    ]
    rest = ["2_Dense/pytorch_model.bin", "onnx/config.json", "openvino/model.safetensors"]
    found = chosen("a/b", *TEXT, *modules, *rest, "model.safetensors")
    assert found == [*TEXT, *modules, "model.safetensors"]


@pytest.mark.parametrize(
    "path",
    ["../m.gguf", "/m.gguf", "a/../m.gguf", "a\\m.gguf", ".m.gguf", "a/b/c/m.gguf", "m\n.gguf"],
)
def test_a_path_that_could_leave_the_cache_is_never_chosen(path: str) -> None:
    with pytest.raises(Failure, match="neither"):
        chosen("a/b", path)


@pytest.mark.parametrize("needed", ["config.json", "tokenizer.json"])
def test_a_repository_without_a_file_that_is_needed_is_refused_before_the_download(
    needed: str,
) -> None:
    text = [path for path in TEXT if path != needed]
    with pytest.raises(Failure, match=f"a/b cannot be served: it has no {needed}"):
        chosen("a/b", *text, "model.safetensors")


GGUFS = [
    *("pool-Q4_K_M.gguf", "pool-UD-Q4_K_M.gguf", "pool-Q4_K_S.gguf", "pool.q8_0.gguf"),
    *("pool-IQ4_XS.gguf", "BF16/pool-BF16.gguf", "mmproj-F16.gguf", "imatrix_Q4_0.gguf"),
    *("Q6_K/pool-Q6_K-00001-of-00002.gguf", "Q6_K/pool-Q6_K-00002-of-00002.gguf"),
]


@pytest.mark.parametrize(
    ("choice", "path"),
    [
        ("Q4_K_M", "pool-Q4_K_M.gguf"),
        ("q4_k_s", "pool-Q4_K_S.gguf"),
        ("UD-Q4_K_M", "pool-UD-Q4_K_M.gguf"),
        ("Q8_0", "pool.q8_0.gguf"),
        ("IQ4_XS", "pool-IQ4_XS.gguf"),
        ("BF16", "BF16/pool-BF16.gguf"),
        ("pool.q8_0.gguf", "pool.q8_0.gguf"),
    ],
)
def test_a_quantisation_selects_one_gguf_file(choice: str, path: str) -> None:
    assert chosen(f"a/b:{choice}", *GGUFS) == [path]


@pytest.mark.parametrize("choice", ["Q4_K", "Q4", "K_M", "F16", "Q4_0", "gguf.gguf"])
def test_a_missing_quantisation_is_refused_with_a_list_of_those_that_exist(choice: str) -> None:
    with pytest.raises(Failure, match=r"choose one of a/b:\{BF16,IQ4_XS,Q4_K_M,Q4_K_S,Q6_K,Q8_0,"):
        chosen(f"a/b:{choice}", *GGUFS)


@pytest.mark.parametrize(
    ("encoders", "chosen"),
    [
        (["mmproj-F32.gguf", "mmproj-BF16.gguf", "mmproj-F16.gguf"], ["mmproj-F16.gguf"]),
        (["mmproj-pool-f32.gguf", "mmproj-pool-q8_0.gguf"], ["mmproj-pool-q8_0.gguf"]),
        (["mmproj-F16.gguf", "mmproj-other-F16.gguf"], []),
        (["mmproj-model.gguf"], ["mmproj-model.gguf"]),
        (["BF16/mmproj-F16.gguf", "mmproj-F16.txt"], []),
        (["X.mmproj-Q8_0.gguf", "X.mmproj-fp16.gguf"], ["X.mmproj-fp16.gguf"]),
        (["mmproj-FP32.gguf", "mmproj-F16.gguf"], ["mmproj-F16.gguf"]),
        (["mmproj-Q4_K_M.gguf", "mmproj-UD-Q6_K.gguf", "mmproj-FP32.gguf"], ["mmproj-FP32.gguf"]),
        (["mmproj-Q4_K_M.gguf", "mmproj-Q6_K.gguf"], ["mmproj-Q6_K.gguf"]),
        (["mmproj.gguf", "mmproj-bf16.gguf"], ["mmproj-bf16.gguf"]),
        (["X-Q4_K_M.mmproj-f32.gguf", "X-Q4_K_M.mmproj-f16.gguf"], ["X-Q4_K_M.mmproj-f16.gguf"]),
    ],
)
@pytest.mark.parametrize("folder", ["", "UD-Q4_K_XL/"])
def test_the_best_image_encoder_in_the_folder_of_a_gguf_file_or_above_is_chosen(
    encoders: list[str], chosen: list[str], folder: str, tmp_path: Path
) -> None:
    """So does the worker choose in the Hub's cache (`mmproj_beside`)."""
    files = repo(f"{folder}pool-Q4_K_M.gguf", *encoders)
    found = [each.path for each in encoders_of(files[0], files)]
    assert (found if len(found) == 1 else []) == chosen
    snapshot = tmp_path / "models--a--b" / "snapshots" / "c"
    for each in files:
        (snapshot / each.path).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / each.path).touch()
    if len(found) > 1:
        with pytest.raises(UnusableModel, match="differ in more than the number type"):
            mmproj_beside(snapshot / files[0].path)
    else:
        beside = mmproj_beside(snapshot / files[0].path)
        assert beside == (snapshot / chosen[0] if chosen else None)
    if folder:  # a folder that is no snapshot may belong to many models
        assert mmproj_beside(snapshot.rename(tmp_path / "c") / files[0].path) is None


def test_all_parts_of_a_split_gguf_file_are_chosen_in_their_order() -> None:
    parts = [each for each in GGUFS if "Q6_K" in each]
    for choice in ("Q6_K", *parts):
        assert chosen(f"a/b:{choice}", *reversed(GGUFS)) == parts
    assert chosen("a/b", *parts) == parts
    assert chosen("a/b", "m-Q2_K.gguf", *(each.replace("Q6_K", "Q8_0") for each in parts)) == [
        each.replace("Q6_K", "Q8_0") for each in parts
    ]
    assert chosen("a/b", parts[1], "m-Q2_K.gguf") == ["m-Q2_K.gguf"]
    with pytest.raises(Failure, match=r"a/b lacks .*-00001-of-00002\.gguf, one of 2 parts"):
        chosen("a/b:Q6_K", *GGUFS[:-2], GGUFS[-1])


def test_without_a_quantisation_safetensors_files_win_over_gguf_files() -> None:
    assert chosen("a/b", *TEXT, "model.safetensors", *GGUFS)[-1] == "model.safetensors"
    assert chosen("a/b", *GGUFS) == ["pool-Q4_K_M.gguf"]
    assert chosen("a/b", "any.gguf") == ["any.gguf"]
    with pytest.raises(Failure, match=r"several GGUF files; choose one of a/b:\{Q2_K,Q3_K_L\}"):
        chosen("a/b", "m-Q2_K.gguf", "m-Q3_K_L.gguf")


def test_the_quantisations_of_file_names_are_recognised() -> None:
    names = ["m-q4_k_m.gguf", "m.F16.gguf", "m-MXFP4.gguf", "m-IQ2_XXS.gguf", "m-7B.gguf"]
    assert quantisations([*names, "m-fp16.gguf"]) == ["F16", "FP16", "IQ2_XXS", "MXFP4", "Q4_K_M"]
