"""The names, engines and memory of several models in one server. The tests start no server."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from protocol.tools.start_facts import GIB
from protocol.wire.sockets import engine_address
from tests.support.checkpoints import write_directory
from tests.support.family_models import random_model
from tests.support.tiny_checkpoint import write_tiny_llama
from tools.__main__ import build_parser
from tools.commands.serve import commands, plan
from tools.failure import Failure
from tools.models.preflight import log_slots
from tools.models.records import PulledFile, PulledModel, write_record
from tools.processes.saved_models import SavedModel, saved_models_file, write_saved
from tools.processes.serve_plan import ServePlan
from tools.processes.several_models import (
    PlannedModels,
    hosting,
    named_models,
    plan_models,
    planned_bytes,
)
from tools.terminal import Terminal


def serve(*words: str) -> ServePlan:
    return plan(vars(build_parser("serve").parse_args(["serve", *words])))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the paths of two small models, a and b."""
    folder = tmp_path_factory.mktemp("models")
    paths = [folder / name for name in "ab"]
    for seed, path in enumerate(paths):
        path.mkdir()
        write_tiny_llama(path, seed)
    return [str(path) for path in paths]


def planned(made: ServePlan) -> PlannedModels:
    return plan_models(made.models, made.gateway.models, made.serve)


def test_a_model_has_the_name_that_the_user_gives_or_its_own() -> None:
    words = ["smollm2-135m", "Qwen/Qwen3-0.6B", "/models/phi", "./x/y.gguf", "big=/models/z"]
    assert [tuple(each)[:2] for each in named_models(words)] == [
        ("smollm2-135m", "smollm2-135m"),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("phi", "/models/phi"),
        ("y", "./x/y.gguf"),
        ("big", "/models/z"),
    ]


def test_a_path_with_an_equals_sign_is_a_path(tmp_path: Path) -> None:
    (tmp_path / "a=b").mkdir()
    (only,) = named_models([str(tmp_path / "a=b")])
    assert only.name == "a=b"


def test_two_models_with_one_name_are_refused() -> None:
    with pytest.raises(Failure, match="two models are named phi; give them names: NAME=MODEL"):
        serve("/models/phi", "/other/phi")


def test_a_single_model_can_have_a_name_too() -> None:
    made = serve("big=/models/phi")
    assert made.models == {}
    assert made.engine.worker.model == "/models/phi"
    assert made.gateway.served_name == ["big"]


def test_a_single_model_can_be_loaded_on_demand(tiny: list[str], tmp_path: Path) -> None:
    made = serve(tiny[0], "--idle-unload-s", "60", "--served-name", "x", "--served-name", "y")
    found = planned(made)
    assert (list(made.models), found.loaded) == (["x"], ["x"])
    (only,) = hosting(made.gateway, found, {"x": tmp_path / "card"}, tmp_path).models
    assert only.served_name == ["x", "y"]


def test_each_model_has_an_engine_and_a_group_of_its_own() -> None:
    made = serve("/models/a", "/models/b", "--port", "8001", "--journal", "/tmp/journal")
    gateway, a, b = commands(made, lock=0)
    assert (gateway.group, a.group, b.group) == ("", "a", "b")
    assert [a.name, b.name] == ["engine a", "engine b"]
    assert a.address == engine_address(8001)
    engines = list(made.models.values())
    for field in ("address", "journal"):
        assert len({getattr(engine, field) for engine in engines}) == 2
    assert len({engine.worker.address for engine in engines}) == 2
    assert all(engine.worker.share_device for engine in engines)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("/a", "--load", "first-use", "--split"), "split cannot be combined with several models"),
        (("/a", "--idle-unload-s", "9", "--replicas", "2"), "replicas cannot be combined with"),
        (("/a", "/b", "--replicas", "2"), "replicas cannot be combined with several models"),
        (("/a", "/b", "--split"), "split cannot be combined with several models"),
        (("/a", "/b", "--cluster-key", "k"), "cluster_key cannot be combined with several models"),
        (("/a", "/b", "--served-name", "x"), "served_name cannot be combined with several models"),
        (("/a", "/b", "--mmproj", "/m"), "mmproj cannot be combined with several models; set it"),
        (
            ("/a", "/b", "--draft-model", "/c", "--speculation", "model"),
            "draft_model cannot be combined with models that are loaded on demand",
        ),
    ],
)
def test_options_that_models_loaded_on_demand_cannot_share_are_refused(
    words: tuple[str, ...], message: str
) -> None:
    with pytest.raises(Failure, match=message) as refused:
        serve(*words)
    assert refused.value.exit_code == 2


@pytest.mark.parametrize(("given", "kept"), [("/enc.gguf", ""), ("none", "none")])
def test_a_model_that_clients_added_has_no_file_of_the_models_of_the_command_line(
    given: str, kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDEGATE_HOME", str(tmp_path))
    weights = tmp_path / "b.gguf"
    weights.touch()
    write_record(
        tmp_path,
        PulledModel(
            name="o/b", kind="GGUF", path=str(weights), files=[PulledFile(str(weights), 0)]
        ),
    )
    file = saved_models_file(tmp_path, 8000)
    write_saved(file, msgspec.json.encode([SavedModel(names=["b"], source="o/b")]))
    made = serve("/a.gguf", "--manage-models", "--mmproj", given, "--lora", "x=/x")
    own, added = (engine.worker for engine in made.models.values())
    assert (own.mmproj, own.lora) == (given, ["x=/x"])
    assert (added.mmproj, added.lora) == (kept, [])


def test_each_model_with_recurrent_layers_keeps_its_planned_number_of_slots(
    tiny: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Otherwise a model that is loaded later, when less memory is free, would have fewer."""
    hybrid = write_directory(tmp_path, random_model("lfm2"))
    found = planned(serve(f"plain={tiny[0]}", f"hybrid={hybrid}"))
    slots = {name: engine.worker.max_slots for name, engine in found.engines.items()}
    assert slots == {"plain": 0, "hybrid": found.plans["hybrid"].max_slots}
    fewer = {name: replace(plan, max_slots=3) for name, plan in found.plans.items()}
    workers = {name: engine.worker for name, engine in serve(tiny[0], tiny[1]).models.items()}
    log_slots({"plain": workers["a"], "hybrid": workers["b"]}, fewer, Terminal())
    (line,) = capfd.readouterr().out.splitlines()
    assert "model hybrid: recurrent states of 0.0 MiB for each of 3 requests at a time" in line


def test_models_are_loaded_at_the_start_as_far_as_the_options_allow(tiny: list[str]) -> None:
    made = serve(*tiny)
    assert planned(made).loaded == ["a", "b"]
    one = replace(made.serve, max_loaded=1)
    assert plan_models(made.models, made.gateway.models, one).loaded == ["a"]
    made = serve(*tiny, "--load", "first-use", "--max-loaded", "1", "--idle-unload-s", "9")
    later = made.serve
    found = planned(made)
    assert found.loaded == []
    fleet = found.fleet(later, 0.0)
    assert (fleet.limits.max_loaded, fleet.limits.idle_unload_s) == (1, 9.0)
    states = fleet.states()
    assert [each.planned_bytes for each in states.models] == [
        planned_bytes(each) for each in found.plans.values()
    ]
    assert states.limit_bytes == max(each.free_bytes for each in found.plans.values())


def test_the_kv_cache_of_a_model_has_the_planned_size_whatever_is_free_later(
    tiny: list[str],
) -> None:
    found = planned(serve(*tiny, "--load", "first-use"))
    for name, engine in found.engines.items():
        assert int(engine.worker.kv_memory_gib * GIB) >= found.plans[name].kv_bytes
        assert int(engine.worker.kv_memory_gib * GIB) <= found.plans[name].kv_bytes + 2
    kept = planned(serve(*tiny, "--kv-blocks", "20"))
    assert [engine.worker.kv_blocks for engine in kept.engines.values()] == [20, 20]
    assert [engine.worker.kv_memory_gib for engine in kept.engines.values()] == [0.0, 0.0]


def test_models_that_fit_alone_but_not_together_are_refused_with_a_remedy(tiny: list[str]) -> None:
    """Other programs may use or free memory meanwhile, so there is room for one model even if the
    free memory shrinks to half, and none for six even if it doubles."""
    six = [f"model{number}={tiny[0]}" for number in range(6)]
    alone = planned(serve(*tiny, "--load", "first-use"))
    share = max(each.free_bytes for each in alone.plans.values()) / GIB * 0.4
    options = ("--kv-memory-gib", f"{share:.2f}")
    with pytest.raises(Failure, match=r"do not fit together: .* or --load first-use"):
        planned(serve(*six, *options))
    assert planned(serve(*six, *options, "--load", "first-use")).loaded == []


def test_a_model_that_cannot_be_served_is_named(tiny: list[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(Failure, match=r"^model broken: "):
        planned(serve(tiny[0], f"broken={tmp_path}"))


def test_the_gateway_serves_all_models_with_the_shared_options(
    tiny: list[str], tmp_path: Path
) -> None:
    first, second = tiny
    made = serve(f"x={first}", second, "--max-loaded", "1", "--tool-format", "hermes")
    found = planned(made)
    cards = {name: tmp_path / name for name in found.cards}
    gateway = hosting(made.gateway, found, cards, tmp_path)
    assert gateway.control == str(tmp_path / "control.sock")
    a, b = gateway.models
    assert (a.served_name, a.load, a.expected_card) == (["x"], "start", str(tmp_path / "x"))
    assert (b.served_name, b.load, b.tool_format) == (["b"], "first-use", "hermes")
    assert [a.engine, b.engine] == [each.address for each in found.engines.values()]
