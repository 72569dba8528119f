"""GGUF files: every type of weight is read, and damaged headers are refused."""

from __future__ import annotations

import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFWriter, quants
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protocol.engine.model_card import InfillTokens, SamplingDefaults
from tests.support.checkpoints import TEMPLATE, VOCAB, random_llama
from tests.support.gguf_files import write_gguf
from worker.checkpoint import gguf_weights
from worker.checkpoint.gguf_file import GGMLType, GGUFFile, architecture_at_start
from worker.checkpoint.gguf_weights import read_tensor
from worker.errors import UnusableModel
from worker.loading.decoder import load_model
from worker.loading.header import read_header
from worker.startup.card import text_card

Kind = GGMLQuantizationType
PLAIN = [Kind.F32, Kind.F16, Kind.BF16]
BLOCKS = [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0]
K_QUANTS = [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", random_llama(), Kind.Q8_0)


def raw_tensor(kind: Kind, rows: int, columns: int) -> Any:
    """Return a tensor of random numbers as a file stores it. All scales are finite."""
    generator = np.random.default_rng(1)
    if kind not in K_QUANTS:
        values = generator.standard_normal((rows, columns)).astype(np.float32)
        return quants.quantize(values, kind)
    block_items, block_bytes = GGMLType(kind).block
    blocks = generator.integers(0, 256, (rows * columns // block_items, block_bytes), np.uint8)
    scales = np.frombuffer(np.array([0.5, 0.25], np.float16).tobytes(), np.uint8)
    at_end = kind in (Kind.Q3_K, Kind.Q6_K)
    at = block_bytes - 2 if at_end else 16 * 5 if kind is Kind.Q2_K else 0
    blocks[:, at : at + 4] = scales[: 2 if at_end else 4]
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize(("num_bytes", "found"), [(20, None), (60, None), (4096, "llama")])
def test_the_architecture_is_read_from_an_incomplete_file(
    tiny: Path, tmp_path: Path, num_bytes: int, found: str | None
) -> None:
    start = tmp_path / "start"
    start.write_bytes(tiny.read_bytes()[:num_bytes])
    assert architecture_at_start(start) == found


@pytest.mark.parametrize("kind", [*PLAIN, *BLOCKS, *K_QUANTS], ids=lambda kind: kind.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_kind_of_weight_is_read_as_the_gguf_package_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(gguf_weights, "PIECE_ITEMS", 1024)  # several pieces, the last one shorter
    raw = raw_tensor(kind, 5, 512)
    writer = GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_tensor("w", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    target = torch.full((5, 512), torch.nan, dtype=dtype)
    read_tensor(GGUFFile(tmp_path / "one.gguf"), "w", target)
    expected = torch.from_numpy(quants.dequantize(raw, kind).copy()).to(dtype)
    assert expected.isfinite().all()
    assert torch.equal(target, expected)


def test_the_types_are_those_of_the_gguf_package() -> None:
    ours = {each.name: (each.value, each.block) for each in GGMLType}
    assert ours == {each.name: (each.value, GGML_QUANT_SIZES[each]) for each in Kind}


def test_metadata_and_tensors_are_those_that_the_gguf_package_reads(tiny: Path) -> None:
    ours, theirs = GGUFFile(tiny), GGUFReader(tiny)
    fields = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert ours.metadata == fields
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert (int(info.kind), info.offset) == (int(tensor.tensor_type), tensor.data_offset)
        assert info.shape == tuple(reversed(tensor.shape.tolist()))
        assert ours.raw(tensor.name).tobytes() == tensor.data.tobytes()


def test_the_card_holds_all_fields_of_the_gguf_file(tiny: Path) -> None:
    card = load_model(tiny, dtype=torch.float32, device=torch.device("cpu")).card
    assert (card.name, card.architecture) == ("tiny", "LlamaForCausalLM")
    assert (card.vocab_size, card.context_tokens) == (VOCAB, 512)
    assert card.eos_token_ids == [0, 2]  # end of text, end of turn
    assert card.special_tokens == {"bos_token": "<|start|>", "eos_token": "<|end|>"}
    assert card.chat_template == TEMPLATE
    assert card.defaults == SamplingDefaults()
    assert (card.file_format, card.quantization, card.dtype) == ("gguf", "Q8_0", "float32")


def test_a_template_for_conversations_with_tools_has_a_key_of_its_own(tmp_path: Path) -> None:
    metadata = {"tokenizer.chat_template.tool_use": "T"}
    path = write_gguf(tmp_path / "a.gguf", random_llama(), metadata=metadata)
    card = load_model(path, dtype=torch.float32, device=torch.device("cpu")).card
    assert (card.chat_template, card.tool_use_template) == (TEMPLATE, "T")


def test_tokens_for_filling_in_the_middle_may_be_named_by_old_and_new_keys(tmp_path: Path) -> None:
    names = {"fim_pre": 3, "prefix": 9, "suffix": 4, "fim_mid": 5, "fim_pad": 6, "fim_rep": 7}
    metadata = {f"tokenizer.ggml.{name}_token_id": token for name, token in names.items()}
    path = write_gguf(tmp_path / "a.gguf", random_llama(), metadata=metadata)
    card = load_model(path, dtype=torch.float32, device=torch.device("cpu")).card
    expected = InfillTokens(prefix=3, suffix=4, middle=5, pad=6, repository=7)
    assert card.infill_tokens == text_card(path).infill_tokens == expected
    beyond = {"tokenizer.ggml.fim_sep_token_id": VOCAB}
    path = write_gguf(tmp_path / "b.gguf", random_llama(), metadata=beyond)
    assert "tokenizer.ggml.fim_sep_token_id is" in refusal(path)


def refusal(path: Path) -> str:
    with pytest.raises(UnusableModel) as refused:
        load_model(path, dtype=torch.float32, device=torch.device("cpu"))
    return refused.value.message


def damaged(tiny: Path, path: Path, at: int, data: bytes) -> Path:
    content = bytearray(tiny.read_bytes())
    content[at : at + len(data)] = data
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("at", "data", "message"),
    [
        (0, b"GGML", "is not a GGUF file"),
        (4, struct.pack("<I", 1), "version 1 is not one of"),
        (4, struct.pack(">I", 3), "version"),
        (8, struct.pack("<Q", 1 << 60), "tensors do not fit"),
        (16, struct.pack("<Q", 1 << 40), "metadata entries do not fit"),
        (24, struct.pack("<Q", (1 << 64) - 1), "truncated"),
        (32, b"\xff", "not UTF-8"),
    ],
)
def test_a_header_that_contradicts_the_file_is_refused(
    tiny: Path, tmp_path: Path, at: int, data: bytes, message: str
) -> None:
    assert message in refusal(damaged(tiny, tmp_path / "bad.gguf", at, data))


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.5, 0.999])
def test_a_truncated_file_is_refused(tiny: Path, tmp_path: Path, share: float) -> None:
    content = tiny.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(content[: int(len(content) * share)])
    message = refusal(cut)
    assert str(cut) in message
    assert any(word in message for word in ("truncated", "empty", "do not fit"))


def header_bytes(path: Path) -> int:
    return min(info.offset for info in GGUFFile(path).tensors.values())


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_a_damaged_header_raises_nothing_but_unusable_model(
    tiny: Path, tmp_path: Path, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, header_bytes(tiny) - 1))
    path = damaged(tiny, tmp_path / "bad.gguf", at, data.draw(st.binary(min_size=1, max_size=9)))
    with suppress(UnusableModel):
        load_model(path, dtype=torch.bfloat16, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.rope.scaling.type": "longrope"}, "no tensor 'rope_factors_short.weight'"),
        ({"llama.rope.scaling.type": "dynamic"}, "rope scaling 'dynamic' is not supported"),
        ({"llama.rope.scaling.type": "yarn"}, "no 'llama.rope.scaling.factor'"),
        ({"llama.rope.scaling.attn_factor": 1.2}, "attn_factor is not supported"),
        ({"llama.rope.scaling.factor": -2.0}, "not above zero"),
        ({"llama.expert_count": 8}, "no 'llama.expert_used_count'"),
        ({"llama.attention.head_count_kv": [2, 2, 1]}, "same number for each of the 3 layers"),
    ],
    ids=str,
)
def test_unsupported_metadata_that_changes_the_answers_is_refused(
    tmp_path: Path, metadata: dict[str, Any], message: str
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", random_llama(), metadata=metadata)
    assert message in refusal(path)


def test_a_window_is_read_from_the_metadata(tmp_path: Path) -> None:
    window = {"llama.attention.sliding_window": 100}
    path = write_gguf(tmp_path / "tiny.gguf", random_llama(), metadata=window)
    assert read_header(path).spec.windows == {100}


def test_readable_kinds_are_those_that_the_gguf_package_dequantises(tmp_path: Path) -> None:
    for kind in Kind:
        one = np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8)
        try:
            quants.dequantize(one, kind)
            is_read = True
        except NotImplementedError:
            is_read = kind in PLAIN
        assert GGMLType(kind).is_readable == is_read, kind.name


def test_a_file_of_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "other.gguf", "rwkv7")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "architecture 'rwkv7'" in refusal(tmp_path / "other.gguf")
