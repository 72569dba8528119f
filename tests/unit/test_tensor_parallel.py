"""Share, memory and command of each rank of a tensor parallel group. No rank is started."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from engine_core.startup import build_engine
from protocol.config.engine import EngineConfig
from protocol.config.worker import JoinConfig, WorkerConfig
from protocol.tools.start_facts import ModelPlan
from protocol.wire.cluster_key import ClusterKey, write_cluster_key
from protocol.wire.sockets import next_port, with_host_of
from tests.support.family_models import HYBRIDS, MODEL_TYPES, OWN_SIZES, SIZES
from tests.support.sparse_checkpoint import write_sparse_llama
from tests.unit.test_starting import READY
from tools.__main__ import build_parser
from tools.commands import engine as engine_command
from tools.commands import worker as worker_command
from tools.commands.serve import plan as serve_plan
from tools.failure import Failure
from worker.device import machine
from worker.errors import UnusableModel
from worker.spec.families.registry import FAMILIES
from worker.spec.model_spec import ModelSpec
from worker.spec.share import Share
from worker.spec.tensors import ModelTensors
from worker.startup.preflight import preflight

# ---- shares


def tensors_of(model_type: str, **changes: Any) -> ModelTensors:
    """Return the tensors of a small model. Values that a family does not know are left out."""
    family = next(each for each in FAMILIES if each.model_type == model_type)
    config = {"architectures": [family.architecture], "model_type": model_type}
    config |= SIZES | OWN_SIZES.get(model_type, {}) | changes
    spec = family.spec(config)
    return ModelTensors(spec, family.names(spec))


def test_the_ranges_of_a_fused_matrix_are_those_of_each_of_its_sections() -> None:
    share = Share(1, 2, 100)
    assert share.ranges([4, 2, 2]) == (range(4, 8), range(10, 12), range(14, 16))


@pytest.mark.parametrize(("count", "size"), [(8, 2), (5, 2), (7, 3), (3, 3), (128, 5)])
def test_every_expert_is_on_one_rank(count: int, size: int) -> None:
    owned = [expert for rank in range(size) for expert in Share(rank, size, 1).experts(count)]
    assert owned == [*range(count)]


@pytest.mark.parametrize(("tokens", "size"), [(100, 2), (99, 2), (320, 3), (7, 7)])
def test_every_token_is_on_one_rank_and_only_the_last_has_fewer(tokens: int, size: int) -> None:
    shares = [Share(rank, size, tokens).vocabulary for rank in range(size)]
    assert [token for share in shares for token in share] == [*range(tokens)]
    assert {len(share) for share in shares[:-1]} <= {len(shares[0])}
    assert 0 < len(shares[-1]) <= len(shares[0])


@pytest.mark.parametrize("model_type", ["llama", "gpt_oss", "olmo2", "mixtral"])
def test_the_ranks_together_have_every_number_of_a_divided_tensor(model_type: str) -> None:
    whole = tensors_of(model_type)
    ranks = [whole.for_rank(rank, 2) for rank in range(2)]
    for index in range(whole.spec.num_layers):
        matrices = whole.layer(index).matrices[:2]
        parts = [rank.layer(index).matrices[:2] for rank in ranks]
        for matrix, one, other in zip(matrices, *parts, strict=True):
            sizes = [part.rows * part.columns for part in (one, other)]
            assert sum(sizes) == matrix.rows * matrix.columns
            assert one.has_bias == matrix.has_bias
        assert not parts[1][1].has_bias, "the bias after a sum is added once"
    heads = [rank.head.rows for rank in ranks]
    assert sum(heads) == whole.head.rows
    assert {name for rank in ranks for name, _ in rank.tensors()} == {
        name for name, _ in whole.tensors()
    }


def test_the_shapes_of_a_ranks_tensors_are_those_of_the_file() -> None:
    whole = tensors_of("llama")
    shapes = dict(whole.tensors())
    assert dict(whole.for_rank(1, 2).tensors()) == shapes


@pytest.mark.parametrize(
    ("changes", "size", "reason", "remedy"),
    [
        ({}, 4, "the model's 6 heads cannot be divided among 4 ranks", "use --tensor-parallel 2"),
        ({}, 3, "2 key/value heads cannot be divided among 3 ranks", "use --tensor-parallel 2"),
        ({"intermediate_size": 161}, 2, "161 columns of an MLP", "serve without --tensor-parallel"),
        (
            {"num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 9},
            8,
            "9 tokens",
            "use --tensor-parallel 2",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused(
    changes: dict[str, Any], size: int, reason: str, remedy: str
) -> None:
    with pytest.raises(UnusableModel, match=reason) as refused:
        tensors_of("llama", **changes).for_rank(0, size)
    assert refused.value.remedy == remedy


def test_more_ranks_than_experts_are_refused() -> None:
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 6}
    with pytest.raises(UnusableModel, match="the model's 5 experts") as refused:
        tensors_of("mixtral", **sizes).for_rank(0, 6)
    assert refused.value.remedy == "use --tensor-parallel 2 or 3"


def test_the_spec_of_a_rank_keeps_what_all_ranks_compute() -> None:
    whole = tensors_of("gpt_oss").spec
    rank: ModelSpec = tensors_of("gpt_oss").for_rank(0, 2).spec
    assert (rank.layer_heads[0].count, rank.attentions[0].num_heads) == (1, 3)
    assert (rank.vocab_size, rank.hidden, rank.layer_heads[0].dim) == (
        whole.vocab_size,
        whole.hidden,
        whole.layer_heads[0].dim,
    )
    assert rank.layers[0].mlp == whole.layers[0].mlp, "a rank computes whole experts"


# ---- memory


@pytest.fixture
def large(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    return write_sparse_llama(tmp_path / "model", num_hidden_layers=1, vocab_size=50_000)


def plans(path: Path, size: int, **options: Any) -> list[ModelPlan]:
    worker = WorkerConfig(model=str(path), device="cpu", dtype="float32", kv_blocks=65, **options)
    found = preflight(EngineConfig(worker=worker, tensor_parallel=size).checked_workers)
    assert not found.error, found.error
    return found.plans


def test_each_rank_needs_its_share_of_the_memory(large: Path) -> None:
    (alone,) = plans(large, 1, weights="dense", kernels="torch")
    ranks = plans(large, 4)
    norms = 3 * 8192 * 4
    for rank in ranks:
        assert rank.weights_bytes == (alone.weights_bytes - norms) / 4 + norms
        assert rank.kv_bytes == alone.kv_bytes / 4
    assert ranks[0].free_bytes < alone.free_bytes / 2, "the ranks share the memory"


def test_the_ranks_of_other_machines_need_no_memory_here(large: Path) -> None:
    worker = WorkerConfig(model=str(large), device="cpu")
    config = EngineConfig(
        worker=worker, tensor_parallel=2, workers_elsewhere=2, worker_address="tcp://a:1"
    )
    found = preflight(config.checked_workers)
    assert (found.error, found.plans) == ("", [])
    assert found.card is not None


@pytest.mark.parametrize("option", [{"weights": "packed"}, {"activations": "int8"}])
def test_packed_weights_are_refused(large: Path, option: dict[str, Any]) -> None:
    worker = WorkerConfig(model=str(large), device="cpu", world_size=2, local_size=2, **option)
    assert "the weights of a tensor parallel group are dense" in preflight([worker]).error


def test_the_ranks_of_a_machine_share_its_cores() -> None:
    assert machine.choose_threads(0, cores=8, quota=None, local_size=3) == 2
    assert machine.choose_threads(0, cores=8, quota=4.5, local_size=2) == 2
    assert machine.choose_threads(0, cores=2, quota=None, local_size=4) == 1
    assert machine.choose_threads(5, cores=2, quota=None, local_size=4) == 5


# ---- options


def test_the_engine_starts_the_lowest_ranks() -> None:
    config = EngineConfig(
        worker=WorkerConfig(model="m"),
        tensor_parallel=4,
        workers_elsewhere=1,
        worker_address="tcp://0.0.0.0:5610",
    )
    places = [(each.rank, each.local_rank) for each in config.local_workers]
    assert places == [(0, 0), (1, 1), (2, 2)]
    assert {(each.world_size, each.local_size) for each in config.local_workers} == {(4, 3)}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"workers_elsewhere": 3, "worker_address": "tcp://a:1"}, "exceeds tensor_parallel"),
        ({"workers_elsewhere": 1}, "must be set together"),
        ({"worker_address": "tcp://a:1"}, "must be set together"),
        ({"role": "decode"}, "cannot be combined"),
        ({"worker": WorkerConfig(model="m", kv_host_gib=1)}, "cannot be combined"),
        ({"worker": WorkerConfig(model="m", kv_disk="/kv")}, "cannot be combined"),
        ({"worker": WorkerConfig(model="m", device="cuda:1")}, "needs a GPU for each worker"),
    ],
)
def test_options_that_contradict_a_group_are_refused(options: dict[str, Any], reason: str) -> None:
    fields: dict[str, Any] = {"worker": WorkerConfig(model="m"), "tensor_parallel": 2}
    with pytest.raises(ValueError, match=reason):
        EngineConfig(**(fields | options))


def test_a_group_in_a_cluster_exchanges_no_kv() -> None:
    config = EngineConfig(worker=WorkerConfig(model=""), tensor_parallel=2)
    key = ClusterKey(b"k" * 32)
    assert build_engine(READY, config, epoch="e", key=key).limits.kv_lease_s == 0
    alone = replace(config, tensor_parallel=1, role="prefill")
    assert build_engine(READY, alone, epoch="e", key=key).limits.kv_lease_s > 0


def parsed(*words: str) -> dict[str, Any]:
    return vars(build_parser(words[0]).parse_args(words))


def test_serve_and_engine_start_a_group() -> None:
    (engine,) = serve_plan(parsed("serve", "--tp", "2")).engines.values()
    assert (engine.tensor_parallel, len(engine.local_workers)) == (2, 2)
    words = ("--cluster-key", "k", "--tensor-parallel", "2", "--workers-elsewhere", "1")
    _, engine, _ = engine_command.plan(
        parsed("engine", *words, "--worker-address", "tcp://0.0.0.0:5610")
    )
    assert (engine.worker.world_size, engine.worker.kv_export) == (2, False)
    assert engine.cluster_key.endswith("/k")
    assert not engine.worker.cluster_key


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--tp", "2", "--split"), "cannot be combined"),
        (("--tp", "2", "--replicas", "2"), "--replicas and --tensor-parallel"),
        (("--tp", "2", "--cluster-key", "k", "--kv-address", "tcp://a:1"), "--kv-address and"),
        (("--workers-elsewhere", "1", "--worker-address", "tcp://a:1"), "needs --cluster-key"),
        (("--tp", "2", "--kv-host-gib", "1"), "--tensor-parallel cannot be combined"),
        (("a=m", "b=n", "--tp", "2"), "cannot be combined with several models"),
    ],
)
def test_serve_refuses_what_a_group_cannot_do(words: tuple[str, ...], reason: str) -> None:
    with pytest.raises(Failure, match=reason) as refused:
        serve_plan(parsed("serve", *words))
    assert refused.value.exit_code == 2


# ---- workers of other machines

TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "29500",
}


@pytest.fixture
def key(tmp_path: Path) -> str:
    path = str(tmp_path / "cluster.key")
    write_cluster_key(path)
    return path


def joining(key: str, *words: str, **environment: str) -> JoinConfig:
    given = parsed("worker", "m", "--join", "tcp://a:5610", "--cluster-key", key, *words)
    return worker_command.plan(given, environment)


def test_a_worker_takes_any_rank_and_the_first_gpu_by_default(key: str) -> None:
    config = joining(key)
    assert (config.rank, config.local_rank, config.local_size) == (-1, 0, 1)
    assert (config.rendezvous, config.torchrun_size) == ("", 0)


def test_torchrun_gives_a_worker_its_place(key: str) -> None:
    config = joining(key, **TORCHRUN)
    assert (config.rank, config.local_rank, config.local_size) == (3, 1, 2)
    assert (config.rendezvous, config.torchrun_size) == ("env://", 4)


def test_options_prevail_over_torchrun(key: str) -> None:
    config = joining(key, "--rank", "0", "--rendezvous", "tcp://b:1", **TORCHRUN)
    assert (config.rank, config.local_rank, config.rendezvous) == (0, 1, "tcp://b:1")


def test_variables_of_another_program_are_ignored(key: str) -> None:
    assert joining(key, RANK="3").rank == -1


@pytest.mark.parametrize(
    ("words", "environment", "reason"),
    [
        (("--join", "ipc:///a"), {}, "--join ipc:///a: the engine's address is tcp://HOST:PORT"),
        (("--join", "tcp://0.0.0.0:1"), {}, "--join tcp://0.0.0.0:1: the host must be one"),
        (("--cluster-key", ""), {}, "TCP needs a cluster key"),
        ((), TORCHRUN | {"RANK": "x"}, "\\$RANK is 'x'"),
    ],
)
def test_a_wrong_place_is_refused(
    key: str, words: tuple[str, ...], environment: dict[str, str], reason: str
) -> None:
    with pytest.raises(Failure, match=reason) as refused:
        joining(key, *words, **environment)
    assert refused.value.exit_code == 2


def test_the_ranks_meet_at_the_port_after_that_of_the_workers() -> None:
    meeting = next_port("tcp://0.0.0.0:5610")
    assert meeting == "tcp://0.0.0.0:5611"
    assert with_host_of(meeting, "tcp://[fe80::1]:5610") == "tcp://[fe80::1]:5611"
    assert with_host_of("tcp://b:1", "tcp://a:2") == "tcp://b:1"


def test_every_family_can_be_divided_or_says_why_not() -> None:
    for model_type in MODEL_TYPES:
        reason = "has recurrent layers" if model_type in HYBRIDS else ""
        reason = {
            "qwen2_moe": "shared experts",
            "gemma3n_text": "several streams",
            "gemma4_text": "share keys",
        }.get(model_type, reason)
        with pytest.raises(UnusableModel, match=reason) if reason else nullcontext():
            tensors_of(model_type).for_rank(0, 2)
