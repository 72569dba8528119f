"""Models are downloaded with the real huggingface_hub from a server with the Hub's API: whole,
resumed and verified, or refused in one line that names the remedy."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.fake_hub import TOKEN, FakeHub, FakeRepo, gguf_start
from tests.support.ports import free_port
from tools.failure import Failure
from tools.models.download import download
from tools.models.hub import HubDownloads
from tools.models.names import UrlName, parse_hub_name
from tools.models.preflight import check_config
from tools.models.records import PulledModel, read_record, write_record
from tools.models.stored import find_stored, remove_leftovers, remove_stored, stored_models
from tools.models.url import pull_url

WEIGHTS = bytes(range(256)) * 400
SAFETENSORS = {
    "config.json": b"{}",
    "generation_config.json": b'{"top_k": 20}',
    "tokenizer.json": b"[1]" * 100,
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"a pickle",
    "modeling_pool.py": b"raise SystemExit",
    "README.md": b"# pool",
}
GGUFS = {"pool-Q4_0.gguf": b"GGUF" + WEIGHTS, "pool-Q8_0.gguf": b"GGUF" + WEIGHTS[::-1]}
PULLED = {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors"}


class Desk:
    """Downloads from a fake hub into directories of its own, and collects the printed lines."""

    def __init__(self, hub: FakeHub, folder: Path) -> None:
        self.hub, self.folder = hub, folder
        self.home, self.cache = folder / "home", folder / "hub"
        self.lines: list[str] = []
        self.check_config: Callable[[Path], object] | None = None
        self.expected_sha256 = ""

    def pull(self, name: str, endpoint: str = "") -> PulledModel:
        parsed = parse_hub_name(name)
        assert parsed is not None
        url = endpoint or self.hub.url
        downloads = HubDownloads(
            self.home,
            self.lines.append,
            expected_sha256=self.expected_sha256,
            endpoint=url,
            cache=self.cache,
            check_config=self.check_config,
        )
        return downloads.pull(parsed)

    def refusal(self, name: str, endpoint: str = "") -> str:
        with pytest.raises(Failure) as caught:
            self.pull(name, endpoint)
        text = str(caught.value)
        assert "\n" not in text
        return text

    def blobs(self) -> list[Path]:
        return sorted(self.cache.glob("models--*/blobs/*"))

    def partials(self) -> list[Path]:
        return [blob for blob in self.blobs() if blob.suffix == ".partial"]


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub() as hub:
        hub.repos["tide/pool"] = FakeRepo(dict(SAFETENSORS))
        hub.repos["tide/pool-gguf"] = FakeRepo(dict(GGUFS))
        yield hub


@pytest.fixture
def desk(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.setattr("tools.models.download.RETRY_S", 0.0)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return Desk(hub, tmp_path)


def content_of(model: PulledModel) -> dict[str, bytes]:
    folder = Path(model.path)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# ---- whole downloads
def test_a_download_brings_the_model_and_nothing_that_could_run(desk: Desk) -> None:
    model = desk.pull("tide/pool")
    assert content_of(model) == {path: SAFETENSORS[path] for path in PULLED}
    assert (model.kind, model.licence, model.size) == ("safetensors", "apache-2.0", 102_715)
    assert read_record(desk.home, "tide/pool") == model


def test_licence_size_and_page_are_shown_before_the_download(desk: Desk) -> None:
    desk.pull("tide/pool")
    page = f"{desk.hub.url}/tide/pool"
    assert desk.lines[0] == f"tide/pool: licence apache-2.0; 0.1 MB in 4 files ({page})"


def test_a_quantisation_brings_one_file(desk: Desk) -> None:
    model = desk.pull("tide/pool-gguf:q8_0")
    assert Path(model.path).name == "pool-Q8_0.gguf"
    assert Path(model.path).read_bytes() == GGUFS["pool-Q8_0.gguf"]
    assert desk.hub.downloads() == [
        f"/tide/pool-gguf/resolve/{model.commit}/pool-Q8_0.gguf",
        f"/cdn/tide/pool-gguf/resolve/{model.commit}/pool-Q8_0.gguf",
    ]


@pytest.mark.parametrize(
    ("architecture", "kind", "is_usable"),
    [
        ("gemma3", "gemma3", True),
        ("gemma3", "", True),
        ("", "gemma3", True),
        ("clip", "gemma3", True),
        ("llama", "mlp", False),
        ("glm4", "gemma3", False),
    ],
)
def test_a_gguf_file_brings_its_image_encoder_if_that_can_be_used(
    desk: Desk, architecture: str, kind: str, is_usable: bool
) -> None:
    encoder = gguf_start(kind, key="clip.projector_type") if kind else b"GGUF encoder"
    files = {**GGUFS, "mmproj-F16.gguf": encoder, "mmproj-F32.gguf": b"GGUF wide"}
    desk.hub.repos["tide/pool-gguf"] = FakeRepo(files, architecture=architecture)
    model = desk.pull("tide/pool-gguf:Q8_0")
    assert Path(model.path).name == "pool-Q8_0.gguf"
    beside = [path.name for path in Path(model.path).parent.glob("mmproj*")]
    assert beside == ["mmproj-F16.gguf"] * is_usable
    assert any("whose kind 'mlp' is not supported" in line for line in desk.lines) == (
        kind == "mlp"
    )
    shutil.rmtree(desk.home)
    stored = stored_models(desk.home, desk.cache)
    assert [len(each.files) for each in stored] == [1 + len(beside)]
    remove_stored(desk.home, stored, desk.cache)
    assert not desk.blobs()


def test_a_file_with_another_digest_than_the_catalogues_is_refused_before_the_download(
    desk: Desk,
) -> None:
    content = GGUFS["pool-Q8_0.gguf"]
    desk.expected_sha256 = hashlib.sha256(content).hexdigest()
    encoder = {"mmproj-F16.gguf": gguf_start("gemma3", key="clip.projector_type")}
    desk.hub.repos["tide/pool-gguf"] = FakeRepo({**GGUFS, **encoder}, architecture="gemma3")
    model = desk.pull("tide/pool-gguf:Q8_0")
    assert Path(model.path).read_bytes() == content
    assert len(model.files) == 1
    desk.hub.requests.clear()
    for other in ("tide/pool-gguf:Q4_0", "tide/pool"):
        assert f"instead of {desk.expected_sha256}" in desk.refusal(other)
    assert desk.hub.downloads() == []


def test_all_parts_of_a_split_file_are_one_model(desk: Desk) -> None:
    files = desk.hub.repos["tide/pool-gguf"].files
    parts = [f"big/pool-Q6_K-0000{part}-of-00003.gguf" for part in (1, 2, 3)]
    files.update({path: f"GGUF{path}".encode() for path in parts})
    model = desk.pull("tide/pool-gguf:Q6_K")
    assert model.path.endswith(parts[0])
    assert [Path(file.path).read_bytes() for file in model.files] == [files[each] for each in parts]
    shutil.rmtree(desk.home)  # as if another program had downloaded them
    (stored,) = stored_models(desk.home, desk.cache)
    assert (stored.name, stored.path) == (f"tide/pool-gguf:{parts[0]}", model.path)
    assert stored.size == model.size
    assert remove_stored(desk.home, [stored], desk.cache) == model.size
    assert desk.blobs() == []


def test_the_first_part_is_checked_before_the_others_are_downloaded(desk: Desk) -> None:
    files, content = desk.hub.repos["tide/pool-gguf"].files, gguf_start("rwkv7") + bytes(3_000_000)
    files.update({f"pool-Q6_K-0000{part}-of-00002.gguf": content for part in (1, 2)})
    desk.check_config = check_config
    assert "'rwkv7' is not supported" in desk.refusal("tide/pool-gguf:Q6_K")
    assert not any("00002-of" in path for path in desk.hub.downloads())


def test_a_split_file_is_continued_with_the_part_that_is_missing(desk: Desk) -> None:
    files, content = desk.hub.repos["tide/pool-gguf"].files, gguf_start("llama") + bytes(3_000_000)
    parts = [f"pool-Q6_K-0000{part}-of-00002.gguf" for part in (1, 2)]
    files.update({path: content + path.encode() for path in parts})
    desk.check_config = check_config
    desk.hub.cuts = [len(content) + 100, *[0] * 20]
    desk.refusal("tide/pool-gguf:Q6_K")
    desk.hub.cuts = []
    model = desk.pull("tide/pool-gguf:Q6_K")
    assert [Path(file.path).read_bytes() for file in model.files] == [files[each] for each in parts]


def test_a_second_pull_downloads_only_what_has_changed(desk: Desk) -> None:
    first = desk.pull("tide/pool")
    desk.hub.requests.clear()
    assert desk.pull("tide/pool") == first
    assert desk.hub.downloads() == []
    desk.hub.repos["tide/pool"].files["generation_config.json"] = b'{"top_k": 7}'
    second = desk.pull("tide/pool")
    assert second.commit != first.commit
    assert (Path(second.path) / "generation_config.json").read_bytes() == b'{"top_k": 7}'
    assert [Path(path).name for path in desk.hub.downloads()] == ["generation_config.json"]


def test_a_commit_can_be_pulled_by_its_hash(desk: Desk) -> None:
    commit = desk.hub.repos["tide/pool"].commit
    model = desk.pull(f"tide/pool@{commit}")
    assert (model.commit, model.name) == (commit, f"tide/pool@{commit}")
    assert set(content_of(model)) == PULLED


def test_the_token_is_sent_to_the_hub_only(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.hub.repos["tide/pool"].is_gated = True
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with FakeHub() as storage:
        storage.repos = desk.hub.repos
        desk.hub.cdn = storage.url.replace("127.0.0.1", "localhost")
        assert set(content_of(desk.pull("tide/pool"))) == PULLED
    assert f"Bearer {TOKEN}" in desk.hub.authorizations.values()
    assert set(storage.authorizations.values()) == {""}


# ---- interrupted downloads
def test_a_cut_connection_is_resumed_where_it_broke_off(desk: Desk) -> None:
    desk.hub.cuts = [40_000, 0, 50_000]
    model = desk.pull("tide/pool-gguf:Q4_0")
    assert Path(model.path).read_bytes() == GGUFS["pool-Q4_0.gguf"]
    assert desk.hub.ranges(".gguf") == ["", "bytes=40000-", "bytes=40000-", "bytes=90000-"]


def test_a_download_that_fails_is_continued_by_the_next_one(desk: Desk) -> None:
    desk.hub.cuts = [1000] + [0] * 20
    del desk.hub.repos["tide/pool-gguf"].files["pool-Q8_0.gguf"]
    text = desk.refusal("tide/pool-gguf")
    assert "tide/pool-gguf was interrupted" in text
    assert text.endswith("run the command again to continue it")
    (partial,) = desk.partials()
    assert partial.stat().st_size == 1000
    desk.hub.cuts, desk.hub.requests = [], []
    assert Path(desk.pull("tide/pool-gguf").path).read_bytes() == GGUFS["pool-Q4_0.gguf"]
    assert desk.hub.ranges(".gguf") == ["bytes=1000-"]
    assert desk.partials() == []


def test_a_server_that_ignores_ranges_sends_the_file_anew(desk: Desk) -> None:
    desk.hub.cuts, desk.hub.ignores_ranges = [5000], True
    model = desk.pull("tide/pool-gguf:Q4_0")
    assert Path(model.path).read_bytes() == GGUFS["pool-Q4_0.gguf"]


def test_a_request_to_a_busy_server_is_repeated(desk: Desk) -> None:
    desk.hub.busy = 2
    assert set(content_of(desk.pull("tide/pool"))) == PULLED


# ---- refusals
@pytest.mark.parametrize("path", ["model.safetensors", "config.json"])
def test_a_file_with_another_digest_is_refused_and_removed(desk: Desk, path: str) -> None:
    digest = "0" * (64 if path == "model.safetensors" else 40)
    desk.hub.repos["tide/pool"].forged[path] = digest
    text = desk.refusal("tide/pool")
    assert "is not the expected file" in text
    assert digest in text
    assert not any(digest in blob.name for blob in desk.blobs())
    assert read_record(desk.home, "tide/pool") is None


def test_a_file_that_is_longer_than_announced_is_refused(desk: Desk) -> None:
    desk.hub.repos["tide/pool"].sizes["model.safetensors"] = 5000
    assert "bytes instead of 5000 bytes" in desk.refusal("tide/pool")
    assert desk.partials() == []


def test_too_little_disk_is_found_before_anything_is_downloaded(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=60_000))
    text = desk.refusal("tide/pool")
    assert text.startswith(f"not enough space in {desk.cache}/models--tide--pool/blobs: ")
    assert "0.1 MB needed, 0.1 MB free; free some space, or set $HF_HOME" in text
    assert desk.hub.downloads() == []


def test_a_missing_repository_is_refused_in_one_line(desk: Desk) -> None:
    text = desk.refusal("tide/none")
    assert text.startswith(f"no model tide/none at {desk.hub.url}, and no such file or directory;")
    assert "HF_TOKEN" in text


def test_a_missing_revision_is_refused_in_one_line(desk: Desk) -> None:
    assert desk.refusal("tide/pool@v9").startswith("tide/pool has no revision 'v9'; see http")


def test_a_repository_with_terms_is_refused_with_what_to_do(desk: Desk) -> None:
    desk.hub.repos["tide/pool"].is_gated = True
    assert desk.refusal("tide/pool") == (
        "tide/pool is only for users who accepted its terms; accept them at "
        f"{desk.hub.url}/tide/pool, then set $HF_TOKEN or run: hf auth login"
    )


def test_a_wrong_token_is_refused_with_what_to_do(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    desk.hub.refuses_tokens = True
    assert desk.refusal("tide/pool") == (
        f"{desk.hub.url} answers 401 for tide/pool; check the token in $HF_TOKEN, or run: "
        "hf auth login"
    )


def test_without_a_network_one_line_names_the_remedies(desk: Desk) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    text = desk.refusal("tide/pool", nowhere)
    assert text.startswith(f"tide/pool is not in the cache, and {nowhere} cannot be reached (")
    assert "tidegate serve PATH" in text
    assert "$HF_ENDPOINT" in text


def test_a_model_that_cannot_be_served_is_refused_before_its_weights_are_downloaded(
    desk: Desk,
) -> None:
    desk.hub.repos["tide/pool"].files["config.json"] = b'{"model_type": "t5"}'
    desk.check_config = check_config
    for _ in range(2):  # the second time, config.json is in the cache
        assert "t5" in desk.refusal("tide/pool")
        assert desk.hub.downloads("model.safetensors") == []


@pytest.mark.parametrize("is_url", [False, True])
@pytest.mark.parametrize(
    ("start", "message"),
    [
        (gguf_start("rwkv7"), "'rwkv7' is not supported in GGUF files"),
        (b"<!doctype html>", "the file that the server sends is not a GGUF file"),
    ],
    ids=["rwkv7", "page"],
)
def test_a_gguf_file_that_cannot_be_served_is_refused_after_its_first_bytes(
    desk: Desk, is_url: bool, start: bytes, message: str
) -> None:
    content = start + bytes(3_000_000)
    desk.hub.repos["tide/pool-gguf"].files["pool-Q4_0.gguf"] = content
    desk.check_config = check_config
    url = gguf_url(desk.hub, hashlib.sha256(content).hexdigest())

    def pull() -> None:
        if is_url:
            pull_url(url, desk.home, desk.lines.append, check_config)
        else:
            desk.pull("tide/pool-gguf:Q4_0")

    with pytest.raises(Failure, match=message):
        pull()
    assert not any(file.stat().st_size for file in desk.folder.rglob("*") if file.is_file())


def test_a_gguf_file_whose_start_can_be_served_is_downloaded(desk: Desk) -> None:
    content = gguf_start("llama") + bytes(3_000_000)
    desk.hub.repos["tide/pool-gguf"].files["pool-Q4_0.gguf"] = content
    desk.check_config = check_config
    assert Path(desk.pull("tide/pool-gguf:Q4_0").path).read_bytes() == content


@pytest.mark.parametrize("is_forged", [False, True])
def test_a_file_too_large_for_plain_http_is_downloaded_by_the_library_and_verified(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, is_forged: bool
) -> None:
    monkeypatch.setattr("tools.models.hub.MAX_HTTP_DOWNLOAD_SIZE", 50_000)
    if not is_forged:
        assert set(content_of(desk.pull("tide/pool"))) == PULLED
        return
    desk.hub.repos["tide/pool"].forged["model.safetensors"] = "0" * 64
    assert f"its digest is not sha256 {'0' * 64}" in desk.refusal("tide/pool")
    assert not any("0" * 64 in blob.name for blob in desk.blobs())


def test_a_file_that_the_server_names_by_another_etag_is_verified(desk: Desk) -> None:
    desk.hub.etags["model.safetensors"] = "another-etag"
    assert set(content_of(desk.pull("tide/pool"))) == PULLED
    desk.hub.repos["tide/pool-gguf"].forged["pool-Q4_0.gguf"] = "0" * 64
    desk.hub.etags["pool-Q4_0.gguf"] = "another-etag"
    assert "is not the expected file" in desk.refusal("tide/pool-gguf:Q4_0")


# ---- the cache
def test_without_a_network_a_model_in_the_cache_is_used(desk: Desk) -> None:
    model = desk.pull("tide/pool")
    again = desk.pull("tide/pool", f"http://127.0.0.1:{free_port()}")
    assert again.path == model.path
    assert "using the files in" in desk.lines[-1]


def test_in_offline_mode_the_cache_is_used_and_nothing_is_requested(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = desk.pull("tide/pool-gguf:Q4_0")
    desk.hub.requests.clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert desk.pull("tide/pool-gguf:Q4_0").path == model.path
    text = desk.refusal("tide/pool")
    assert text.startswith("tide/pool is not in the cache, and $HF_HUB_OFFLINE forbids")
    assert "pool-Q8_0" not in desk.refusal("tide/pool-gguf:Q8_0")
    assert desk.hub.requests == []


def test_a_spoilt_file_without_a_record_is_downloaded_again(desk: Desk) -> None:
    model = desk.pull("tide/pool")
    shutil.rmtree(desk.home)
    weights = Path(model.path) / "model.safetensors"
    weights.resolve().write_bytes(WEIGHTS[::-1])
    desk.hub.requests.clear()
    assert content_of(desk.pull("tide/pool"))["model.safetensors"] == WEIGHTS
    assert {Path(path).name for path in desk.hub.downloads()} == {"model.safetensors"}


def test_a_repository_that_changes_during_the_download_is_reported(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = desk.hub.repos["tide/pool"].files

    def changing(*arguments: object, **keywords: object) -> None:
        files["README.md"] = b"# new"
        download(*arguments, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr("tools.models.hub.download", changing)
    assert "has changed meanwhile; run the command again" in desk.refusal("tide/pool")
    assert set(content_of(desk.pull("tide/pool"))) == PULLED


def test_models_of_other_programs_are_listed_and_removed(desk: Desk) -> None:
    desk.pull("tide/pool")
    desk.pull("tide/pool-gguf:Q4_0")
    shutil.rmtree(desk.home)  # as if another program had downloaded them
    models = stored_models(desk.home, desk.cache)
    assert [(model.name, model.kind) for model in models] == [
        ("tide/pool", "safetensors"),
        ("tide/pool-gguf:pool-Q4_0.gguf", "GGUF"),
    ]
    remove_stored(desk.home, find_stored("tide/pool", models), desk.cache)
    assert [model.name for model in stored_models(desk.home, desk.cache)] == [models[1].name]
    assert not (desk.cache / "models--tide--pool").exists()


def test_removing_one_quantisation_keeps_the_other(desk: Desk) -> None:
    small, large = desk.pull("tide/pool-gguf:Q4_0"), desk.pull("tide/pool-gguf:Q8_0")
    models = stored_models(desk.home, desk.cache)
    assert [model.name for model in models] == [small.name, large.name]
    freed = remove_stored(desk.home, find_stored("tide/pool-gguf:Q8_0", models), desk.cache)
    assert freed == len(GGUFS["pool-Q8_0.gguf"])
    assert [model.name for model in stored_models(desk.home, desk.cache)] == [small.name]
    assert Path(small.path).read_bytes() == GGUFS["pool-Q4_0.gguf"]
    assert len(desk.blobs()) == 1


def test_removing_a_model_removes_its_older_revisions(desk: Desk) -> None:
    desk.pull("tide/pool")
    desk.hub.repos["tide/pool"].files["config.json"] = b'{"a": 1}'
    desk.pull("tide/pool")
    models = stored_models(desk.home, desk.cache)
    assert len(models) == 2
    remove_stored(desk.home, find_stored("tide/pool", models), desk.cache)
    assert stored_models(desk.home, desk.cache) == []
    assert not (desk.cache / "models--tide--pool").exists()


def test_what_an_interrupted_download_left_can_be_removed(desk: Desk) -> None:
    desk.hub.cuts = [1000] + [0] * 20
    desk.refusal("tide/pool-gguf:Q4_0")
    assert remove_leftovers("tide/pool-gguf:Q4_0", desk.home, desk.cache)
    assert not (desk.cache / "models--tide--pool-gguf").exists()
    assert not remove_leftovers("tide/pool-gguf:Q4_0", desk.home, desk.cache)


def test_partial_files_can_be_removed_beside_a_complete_model(desk: Desk) -> None:
    model = desk.pull("tide/pool-gguf:Q4_0")
    desk.hub.cuts = [1000] + [0] * 20
    desk.refusal("tide/pool-gguf:Q8_0")
    assert remove_leftovers("tide/pool-gguf:Q8_0", desk.home, desk.cache)
    assert desk.partials() == []
    assert model.is_complete()


def test_a_model_that_is_not_in_the_cache_cannot_be_removed(desk: Desk) -> None:
    desk.pull("tide/pool")
    models = stored_models(desk.home, desk.cache)
    with pytest.raises(Failure, match=r"tide/pol is not in the cache; did you mean tide/pool\?"):
        find_stored("tide/pol", models)


def test_a_record_without_its_files_is_ignored(desk: Desk) -> None:
    model = desk.pull("tide/pool")
    (Path(model.path) / "config.json").unlink()
    assert read_record(desk.home, "tide/pool") is None
    write_record(desk.home, model)
    assert stored_models(desk.home, desk.cache) == []


# ---- URLs
def gguf_url(hub: FakeHub, sha256: str = "") -> UrlName:
    digest = sha256 or hashlib.sha256(GGUFS["pool-Q4_0.gguf"]).hexdigest()
    return UrlName(url=f"{hub.url}/cdn/tide/pool-gguf/resolve/main/pool-Q4_0.gguf", sha256=digest)


def test_a_url_is_downloaded_resumed_and_verified(desk: Desk) -> None:
    desk.hub.cuts = [1, 3000]  # the first response gives the size
    model = pull_url(gguf_url(desk.hub), desk.home, desk.lines.append)
    assert Path(model.path).read_bytes() == GGUFS["pool-Q4_0.gguf"]
    assert desk.hub.ranges(".gguf") == ["bytes=0-0", "", "bytes=3000-"]
    desk.hub.requests.clear()
    assert pull_url(gguf_url(desk.hub), desk.home, desk.lines.append) == model
    assert desk.hub.requests == []
    models = stored_models(desk.home, desk.cache)
    assert find_stored(f"{model.name}#sha256={'0' * 64}", models) == [model]
    remove_stored(desk.home, find_stored("pool-Q4_0.gguf", models), desk.cache)
    assert not Path(model.path).exists()


def test_a_url_with_another_digest_is_refused(desk: Desk) -> None:
    with pytest.raises(Failure, match="is not the expected file"):
        pull_url(gguf_url(desk.hub, "0" * 64), desk.home, desk.lines.append)
    assert [path for path in desk.home.rglob("*.gguf*") if path.is_file()] == []


def test_a_url_that_is_not_there_is_refused_in_one_line(desk: Desk) -> None:
    name = UrlName(url=f"{desk.hub.url}/none.gguf", sha256="0" * 64)
    with pytest.raises(Failure, match=r"the server answers 404 for .*none\.gguf; check the URL"):
        pull_url(name, desk.home, desk.lines.append)
