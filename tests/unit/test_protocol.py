"""Arrays, errors, sampling bounds, configs and keys of the protocol."""

from __future__ import annotations

import base64
import math
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from protocol.config.base import Config
from protocol.config.engine import EngineConfig
from protocol.config.gateway import GatewayConfig
from protocol.config.serve import ServeConfig
from protocol.config.worker import WorkerConfig
from protocol.engine.sampling import DryBreaker, SamplingParams, check_vocabulary
from protocol.process.process_state import num_oom_kills
from protocol.wire import errors, sockets
from protocol.wire.arrays import Float32, Int32, UInt8
from protocol.wire.cluster_key import ClusterKey, KeyPair, read_cluster_key, write_cluster_key


def test_an_array_keeps_values_and_shape() -> None:
    table = Int32.of([1, 2, 3, 4, 5, 6], (2, 3))
    assert (table.shape, len(table), table.tolist()) == ((2, 3), 2, [1, 2, 3, 4, 5, 6])
    assert table == Int32(bytes(table.data), (2, 3))
    assert table != Int32(bytes(table.data), (3, 2))
    assert Int32.of([]) != Float32.of([])
    assert Int32.of([]).tolist() == []
    assert UInt8.of([True, False]).tolist() == [1, 0]


@pytest.mark.parametrize("shape", [(2,), (1, 2), (-1, 1), (1, 1, 1, 1, 1)])
def test_an_array_refuses_a_shape_that_does_not_fit(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="shape"):
        Int32(b"abcd", shape)


def test_an_array_refuses_numbers_that_do_not_fit() -> None:
    with pytest.raises(OverflowError):
        Int32.of([1 << 31])
    with pytest.raises(TypeError):
        Int32.of([1.5])


INT32 = st.integers(-(1 << 31), (1 << 31) - 1)


@given(
    items=st.lists(INT32 | st.integers(0, 9), max_size=9),
    limit=st.integers(0, 1 << 31) | st.integers(0, 9),
    num_before=st.sampled_from([0, 1, 16_379, 16_384, 40_000]),
    after=st.sampled_from([[], [0], [-1]]),
)
def test_the_first_item_outside_a_range_is_found_as_by_a_loop(
    items: list[int], limit: int, num_before: int, after: list[int]
) -> None:
    before = [max(limit - 1, 0)] * num_before
    values = [*before, *items, *after]
    outside = (i for i, value in enumerate(values) if not 0 <= value < limit)
    assert Int32.of(values).find_outside(limit) == next(outside, None)


def test_every_error_survives_the_wire() -> None:
    kinds = [kind for kind in vars(errors).values() if is_leaf(kind)]
    assert len(kinds) >= 9
    for kind in kinds:
        error = kind("why", param="field", retry_after_s=1.5)
        copy = errors.error_from(error.info())
        assert type(copy) is kind
        assert (copy.message, copy.param, copy.retry_after_s) == ("why", "field", 1.5)


def is_leaf(kind: Any) -> bool:
    return (
        isinstance(kind, type)
        and issubclass(kind, errors.ServingError)
        and kind not in (errors.ServingError, errors.RequestError, errors.InvalidImage)
    )


@pytest.mark.parametrize(
    "breakers",
    [
        [DryBreaker([7] * 16_385)],
        [DryBreaker([7], [7] * 32)],
        [DryBreaker([-1])],
        [DryBreaker([1])] * 129,
        [DryBreaker([7] * 8_193)] * 2,
        [DryBreaker([7], [7] * 31)] * 34,
    ],
)
def test_breakers_have_bounds(breakers: list[DryBreaker]) -> None:
    good = SamplingParams(dry_breakers=[DryBreaker([7] * 8_192), DryBreaker([7] * 8_192, [5] * 31)])
    assert msgspec.convert(msgspec.to_builtins(good), SamplingParams) == good
    with pytest.raises(msgspec.ValidationError, match="dry_breakers"):
        msgspec.convert({"dry_breakers": msgspec.to_builtins(breakers)}, SamplingParams)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("logit_bias", dict.fromkeys(range(1_025), 1.0)),
        ("bad_words", [[1]] * 257),
        ("bad_words", [[1]] * 2 + [[]]),
        ("stop_token_ids", [1] * 129),
        ("logprob_token_ids", [1] * 129),
        ("allowed_token_ids", [1] * 1_025),
        ("allowed_token_ids", []),
        ("samplers", ["dry"] * 17),
        ("dry_breakers", [DryBreaker([1])] * 129),
        ("dry_breakers", [DryBreaker([1], [1] * 32)]),
    ],
)
def test_a_list_that_the_engine_cannot_read_is_not_sent(field: str, values: Any) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        SamplingParams(**{field: values})
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({field: msgspec.to_builtins(values)}, SamplingParams, str_keys=True)


def test_an_unknown_code_is_the_engines_fault() -> None:
    error = errors.error_from(errors.ErrorInfo(code="from_the_future", message="?"))
    assert isinstance(error, errors.EngineError)


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("max_tokens", [0, 1, None], [-1, 1 << 25]),
        ("min_tokens", [0, 1], [-1]),
        ("temperature", [0, 0.5, 2], [-0.1, 2.1, math.nan, math.inf]),
        ("top_p", [0.001, 1], [0, 1.1, math.nan]),
        ("top_k", [-1, 0, 1, 1 << 20], [-2, 1 << 30]),
        ("min_p", [0, 1], [-0.1, 1.1]),
        ("frequency_penalty", [-2, 2], [-2.1, 2.1]),
        ("presence_penalty", [-2, 2], [-2.1, 2.1]),
        ("repetition_penalty", [0.01, 10], [0, 5e-324, -1, 10.1]),
        ("seed", [-(1 << 63), (1 << 63) - 1, None], [1 << 63]),
        ("stop_token_ids", [[], [0] * 128], [[-1], [0] * 129, [1 << 31]]),
        ("logit_bias", [{}, {5: 100}, {5: -100}], [{5: 101}, {-1: 1}, {5: math.nan}]),
        ("logprobs", [0, 20, None], [-1, 21]),
        ("prompt_logprobs", [0, 20, None], [-1, 21]),
        (
            "bad_words",
            [[], [[5, 6]], [[1]] * 256, [[1] * 1024]],
            [[[]], [[-1]], [[1]] * 257, [[1] * 1000, [2] * 25]],
        ),
        ("allowed_token_ids", [None, [0], [3] * 1024], [[], [-1], [3] * 1025]),
        ("logprob_token_ids", [[], [7] * 128], [[-1], [7] * 129]),
        ("typical_p", [0.001, 1], [0, 1.1, math.nan]),
        ("top_n_sigma", [-1, 0, 100], [-1.1, 101, math.nan]),
        ("dynatemp_range", [0, 2], [-0.1, 2.1, math.nan]),
        ("dynatemp_exponent", [0, 10], [-0.1, 10.1, math.nan]),
        ("xtc_probability", [0, 1], [-0.1, 1.1, math.nan]),
        ("xtc_threshold", [0, 1], [-0.1, 1.1, math.nan]),
        ("dry_multiplier", [0, 100], [-0.1, 101, math.nan]),
        ("dry_base", [1, 100], [0.9, 101, math.nan]),
        ("dry_allowed_length", [0, 1024], [-1, 1025]),
        ("dry_penalty_last_n", [-1, 0, 1 << 24], [-2, 1 << 25]),
        (
            "samplers",
            [None, [], ["xtc", "temperature"], ["dry", "penalties", "min_p"]],
            [["best"], ["top_k", "top_k"], ["top_k", "dry"], ["xtc"] * 17],
        ),
    ],
)
def test_every_number_has_its_bounds(field: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        assert getattr(msgspec.convert({field: value}, SamplingParams), field) == value
    for value in bad:
        with pytest.raises(msgspec.ValidationError, match=field):
            msgspec.convert({field: value}, SamplingParams)


def test_min_tokens_may_not_exceed_max_tokens() -> None:
    with pytest.raises(msgspec.ValidationError, match="min_tokens"):
        msgspec.convert({"min_tokens": 3, "max_tokens": 2}, SamplingParams)


def test_a_token_id_beyond_the_vocabulary_is_refused_by_its_place() -> None:
    check_vocabulary(SamplingParams(stop_token_ids=[96], logit_bias={96: 1.0}), 97)
    for place, params in (
        ("stop_token_ids[1]", SamplingParams(stop_token_ids=[5, 97, 97])),
        ("logit_bias.97", SamplingParams(logit_bias={5: 1.0, 97: 1.0})),
        ("bad_words[1][1]", SamplingParams(bad_words=[[5], [6, 97]])),
        ("allowed_token_ids[0]", SamplingParams(allowed_token_ids=[97])),
        ("logprob_token_ids[2]", SamplingParams(logprob_token_ids=[5, 6, 97])),
    ):
        with pytest.raises(errors.InvalidRequest) as caught:
            check_vocabulary(params, 97)
        assert caught.value.param == place
        said = f"{place}: token id 97 is not in the vocabulary of 97 tokens"
        assert caught.value.message == said


def test_an_infinite_bias_is_refused_by_its_key() -> None:
    with pytest.raises(ValueError, match=r"logit_bias\.5: must be a finite number"):
        SamplingParams(logit_bias={4: 1.0, 5: math.inf})


@pytest.mark.parametrize("config", [WorkerConfig, EngineConfig, GatewayConfig, ServeConfig])
def test_every_config_field_is_described(config: type[Config]) -> None:
    properties = msgspec.json.schema(config)["$defs"][config.__name__]["properties"]
    undescribed = [name for name, schema in properties.items() if not described(schema)]
    assert undescribed == []


def described(schema: dict[str, Any]) -> bool:
    return "description" in schema


def test_configs_name_the_field_that_is_wrong() -> None:
    with pytest.raises(msgspec.ValidationError, match="block_tokens"):
        msgspec.convert({"model": "m", "block_tokens": 12}, WorkerConfig)
    with pytest.raises(msgspec.ValidationError, match="max_slotz"):
        msgspec.convert({"model": "m", "max_slotz": 12}, WorkerConfig)


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("ipc://", "only ipc"),
        ("/tmp/x", "only ipc"),
        ("inproc://x", "only ipc"),
        ("ipc://" + "x" * 108, "longer"),
        ("tcp://127.0.0.1", "tcp://HOST:PORT"),
        ("tcp://127.0.0.1:0", "tcp://HOST:PORT"),
        ("tcp://127.0.0.1:65536", "tcp://HOST:PORT"),
        ("tcp://a b:5600", "tcp://HOST:PORT"),
        ("tcp://eth0;127.0.0.1:1:5600", "tcp://HOST:PORT"),
    ],
)
def test_other_addresses_are_refused(address: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        sockets.check_address(address, ClusterKey(b"k" * 32))


@pytest.mark.parametrize(
    "address", ["tcp://0.0.0.0:5600", "tcp://*:5600", "tcp://host-1.lan:80", "tcp://[::1]:65535"]
)
def test_tcp_requires_a_key(address: str) -> None:
    assert sockets.check_address(address, ClusterKey(b"k" * 32)) is None
    with pytest.raises(ValueError, match="needs a cluster key"):
        sockets.check_address(address)


def test_a_directory_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    private = tmp_path / "private" / "run"
    sockets.make_private(private)
    assert private.stat().st_mode & 0o777 == 0o700
    private.chmod(0o755)
    with pytest.raises(PermissionError, match="0700"):
        sockets.make_private(private)


# ---- the cluster key
def file_with(folder: Path, content: bytes, mode: int = 0o600) -> str:
    path = folder / "key"
    path.write_bytes(content)
    path.chmod(mode)
    return str(path)


def secret_in(path: str) -> bytes:
    key = read_cluster_key(path)
    return key.derive("test")


def test_no_path_is_no_key() -> None:
    assert read_cluster_key("") is None


def test_a_written_key_can_be_read_by_its_owner_alone_and_is_never_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "key")
    write_cluster_key(path)
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert secret_in(path) == secret_in(path)
    with pytest.raises(FileExistsError):
        write_cluster_key(path)
    write_cluster_key(str(tmp_path / "other"))
    assert secret_in(path) != secret_in(str(tmp_path / "other"))


def test_bytes_and_their_base64_are_the_same_key(tmp_path: Path) -> None:
    raw = bytes(range(200, 232))
    keys = {secret_in(file_with(tmp_path, raw))}
    text = base64.urlsafe_b64encode(raw)
    for spelling in (text, text + b"\n", text.rstrip(b"=") + b"\r\n"):
        keys.add(secret_in(file_with(tmp_path, spelling)))
    assert len(keys) == 1


@pytest.mark.parametrize(
    ("content", "mode", "why"),
    [
        (b"", 0o600, "0 bytes"),
        (b"\xff" * 31, 0o600, "31 bytes"),
        (b"0123456789abcdef" * 2, 0o600, "24 bytes"),  # hex digits are letters of base64, too
        (b"a" * 45, 0o600, "not valid base64"),
        (b"\xff" * 5000, 0o600, "not a key"),
        (b"\xff" * 32, 0o640, "0600"),
        (b"\xff" * 32, 0o604, "0600"),
        (b"\xff" * 32, 0o700, "0600"),
    ],
)
def test_a_weak_or_open_file_is_refused_in_a_line_that_names_it(
    tmp_path: Path, content: bytes, mode: int, why: str
) -> None:
    path = file_with(tmp_path, content, mode)
    with pytest.raises(ValueError, match=why) as caught:
        read_cluster_key(path)
    assert path in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere: No such file"):
        read_cluster_key(str(tmp_path / "nowhere"))


def test_each_purpose_has_a_secret_of_its_own() -> None:
    key = ClusterKey(b"k" * 32)
    assert key.derive("a") == ClusterKey(b"k" * 32).derive("a")
    assert len({key.derive("a"), key.derive("b"), ClusterKey(b"l" * 32).derive("a")}) == 3
    assert key.server != key.client
    for pair in (key.server, key.client):
        assert pair.public == zmq.curve_public(pair.secret)


def test_a_key_pair_does_not_show_its_secret() -> None:
    pair = ClusterKey(b"k" * 32).server
    assert repr(pair) == f"KeyPair({pair.public.decode()})"
    assert str(KeyPair(b"public", b"secret")) == "KeyPair(public)"


# ---- memory kills
EVENTS = "low 0\nhigh 0\nmax 7\noom 2\noom_kill {}\noom_group_kill 0\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"


@pytest.mark.parametrize(
    ("membership", "file", "text"),
    [
        ("0::/user.slice/a.scope", "user.slice/a.scope/memory.events", EVENTS),
        ("0::/", "memory.events", EVENTS),
        ("0::/not/seen/from/here", "memory.events", EVENTS),
        ("9:cpu:/x\n4:memory:/docker/7\n0::/", "memory/docker/7/memory.oom_control", CONTROL),
        ("4:memory:/docker/7", "memory/memory.oom_control", CONTROL),
    ],
)
def test_the_oom_kills_of_this_control_group_are_counted(
    tmp_path: Path, membership: str, file: str, text: str
) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(membership + "\n")
    assert num_oom_kills(proc, cgroups) is None
    (cgroups / file).parent.mkdir(parents=True)
    (cgroups / file).write_text(text.format(3))
    assert num_oom_kills(proc, cgroups) == 3


def test_without_control_groups_no_oom_kills_are_reported(tmp_path: Path) -> None:
    assert num_oom_kills(tmp_path, tmp_path) is None
