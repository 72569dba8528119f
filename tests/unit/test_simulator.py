"""The simulator runs the real engine, and its light model and its figures follow from it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from protocol.config.engine import EngineConfig
from protocol.config.worker import MAX_SLOTS, WorkerConfig
from protocol.engine.messages import Limits
from protocol.shared.state_memory import CHECKPOINTS_PER_SLOT, MAX_EMPTY_BLOCKS
from protocol.tools.simulation import LoadFigures, SimulationConfig, SimulationResult
from protocol.wire.errors import ErrorInfo
from simulator.figures import Histogram, LoadRecorder
from simulator.hardware import GPUS, MODELS, ReplicaMemory, plan_memory, read_table
from simulator.light import LightReplica
from simulator.machine import SimulatedReplicaType, replica_type
from simulator.replica import EngineReplica
from simulator.requests import SimulatedRequest, prompt_of
from simulator.run import Simulation
from simulator.steps import FittedSteps, MeasuredStep, Roofline, StepWork
from simulator.trace import read_trace
from simulator.workload import WorkloadStreams
from tests.support.checkpoints import write_directory
from tests.support.engines import VOCAB, Bench
from tests.support.family_models import RECURRENT, random_model
from tests.support.latent_models import VARIANTS as LATENT
from tools.bench.simulation import result_table
from worker.loading.header import read_header
from worker.startup.memory_plan import PlannedModel, block_bytes, weights_bytes

ENGINE = EngineConfig(worker=WorkerConfig(model=""))
LIMITS = Limits(
    max_len=8192,
    max_slots=64,
    block_tokens=16,
    num_blocks=8000,
    token_budget=1024,
    prefix_cache=True,
)
CONFIG = SimulationConfig(
    engine=ENGINE,
    model="none",
    rate=20.0,
    duration_s=8.0,
    input_tokens=200,
    output_tokens=40,
    prefix_tokens=300,
    prefixes=5,
    exact=0,
)


class EvenSteps:
    """Steps whose time follows from their tokens alone."""

    def seconds(self, work: StepWork) -> float:
        return 0.005 + 0.00005 * (work.decodes + work.chunk_tokens) + 1e-8 * work.context


@dataclass
class Served:
    """A replica that has served a workload on its own."""

    figures: LoadFigures
    busy_s: float
    refused: list[ErrorInfo] = field(default_factory=list)


def serve(
    make: type[EngineReplica] | type[LightReplica],
    config: SimulationConfig,
    limits: Limits = LIMITS,
    engine: EngineConfig = ENGINE,
) -> Served:
    """Let one replica serve a whole workload."""
    recorder, streams, refused = LoadRecorder(0.0, 0.0, 0.0), WorkloadStreams(config), []

    def on_refused(request: SimulatedRequest, refusal: ErrorInfo) -> None:
        refused.append(refusal)
        recorder.on_refused(request)

    replica = make(engine, limits, EvenSteps(), recorder, on_refused)
    for request in streams.arrivals(0):
        recorder.on_arrival(request)
        replica.push(request)
    now = 0.0
    while not replica.is_idle:
        now += 0.05
        replica.advance(now)
        for request, ended_at in recorder.ended:
            if (turn := streams.next_turn(request, ended_at)) is not None:
                turn.at = max(turn.at, now)
                recorder.on_arrival(turn)
                replica.push(turn)
        recorder.ended.clear()
    if isinstance(replica, EngineReplica):
        replica.engine.check()
    return Served(recorder.counts.figures(config), replica.busy_s, refused)


def simulate(config: SimulationConfig, limits: Limits = LIMITS) -> SimulationResult:
    kind = SimulatedReplicaType(config.engine, limits, lambda _: EvenSteps(), "even")
    return [*Simulation(config, kind).results()][-1]


# ---- the real engine


def test_a_simulated_engine_decides_as_one_with_a_worker_that_computes() -> None:
    """The same requests at the same times have the same cached tokens and first tokens."""
    limits = replace(LIMITS, max_slots=8, token_budget=128, num_blocks=120, max_len=1000)
    engine = replace(ENGINE, steps_in_flight=1)
    config = replace(CONFIG, rate=30.0, duration_s=2.0, input_tokens=60, prefix_tokens=100)
    served = serve(EngineReplica, config, limits, engine)
    requests = [*WorkloadStreams(config).arrivals(0)]
    bench = Bench(
        token_budget=128, block_tokens=16, num_blocks=120, max_slots=8, max_len=1000, checks=False
    )
    steps, now, ttfts = EvenSteps(), 0.0, Histogram()
    waiting, open_numbers = [*requests], {}
    while waiting or bench.engine.num_open:
        if not bench.engine.num_open:
            now = max(now, waiting[0].at)
        while waiting and waiting[0].at <= now:
            request = waiting.pop(0)
            bench.tick(request.at)
            prompt = [token % VOCAB for token in prompt_of(request.path).tolist()]
            number = bench.add(prompt, max_tokens=request.output_tokens, ignore_eos=True)
            open_numbers[number] = request
        plan = bench.plan()
        assert plan is not None
        starts, counts = plan.row_starts.tolist(), plan.row_tokens.tolist()
        context = sum(start + 1 for start in starts[: plan.num_decodes])
        work = StepWork(plan.num_decodes, context, 0, sum(counts) - plan.num_decodes)
        now += steps.seconds(work)
        bench.tick(now)
        before = {number for number in open_numbers if bench.tokens(number)}
        bench.finish(steps.seconds(work))
        for number, request in open_numbers.items():
            if number not in before and bench.tokens(number):
                ttfts.add(now - request.at)
    cached = sum(bench.usage(number).cached_tokens for number in open_numbers)
    generated = sum(bench.usage(number).generated_tokens for number in open_numbers)
    assert cached > 0
    assert (served.figures.cached_tokens, served.figures.output_tokens) == (cached, generated)
    assert served.figures.ttft == ttfts.quantiles()


# ---- the light model

USUAL_LOADS = {
    "random arrivals": CONFIG,
    "near capacity": replace(CONFIG, rate=60.0),
    "overload": replace(CONFIG, rate=150.0),
    "bursts": replace(CONFIG, workload="bursts", burst_s=1.0, pause_s=2.0),
    "chat": replace(CONFIG, workload="chat", turns=4, think_s=0.5, rate=30.0),
    "long prompts": replace(CONFIG, rate=3.0, input_tokens=3000),
    "one token": replace(CONFIG, output_tokens=1),
}


@pytest.mark.parametrize("name", USUAL_LOADS)
def test_the_light_model_follows_the_engine(name: str) -> None:
    """Within 3 % while blocks suffice; most loads differ by nothing at all."""
    config = USUAL_LOADS[name]
    real, light = (serve(make, config).figures for make in (EngineReplica, LightReplica))
    assert light.num_completed == pytest.approx(real.num_completed, rel=0.03)
    assert light.cached_tokens == pytest.approx(real.cached_tokens, rel=0.03)
    assert real.ttft is not None
    assert light.ttft is not None
    for percentile in ("p50", "p90", "p99"):
        assert getattr(light.ttft, percentile) == pytest.approx(
            getattr(real.ttft, percentile), rel=0.03
        )
    if real.gap is not None:
        assert light.gap.mean == pytest.approx(real.gap.mean, rel=0.03)


@pytest.mark.parametrize(
    ("config", "num_blocks"),
    [(replace(CONFIG, rate=40.0, output_tokens=200), 700), (USUAL_LOADS["chat"], 600)],
)
def test_the_light_model_is_near_the_engine_when_blocks_run_out(
    config: SimulationConfig, num_blocks: int
) -> None:
    """Within 15 %: it counts blocks of whole segments."""
    limits = replace(LIMITS, num_blocks=num_blocks)
    real, light = (serve(make, config, limits).figures for make in (EngineReplica, LightReplica))
    assert light.duration_s == pytest.approx(real.duration_s, rel=0.15)
    assert light.cached_tokens == pytest.approx(real.cached_tokens, rel=0.15)
    assert real.ttft is not None
    assert light.ttft is not None
    assert light.ttft.mean == pytest.approx(real.ttft.mean, rel=0.15)


def test_the_light_model_refuses_as_the_engine_does() -> None:
    config = replace(CONFIG, rate=300.0, duration_s=4.0)
    engine = replace(ENGINE, max_waiting=50)
    real, light = (serve(make, config, LIMITS, engine) for make in (EngineReplica, LightReplica))
    assert real.figures.num_refused > 100
    assert light.figures.num_refused == pytest.approx(real.figures.num_refused, rel=0.03)
    assert light.refused[0].message == real.refused[0].message


def test_both_refuse_a_prompt_that_is_too_long() -> None:
    config = replace(CONFIG, input_tokens=9000, spread=0.0, prefix_tokens=0, duration_s=1.0)
    for make in (EngineReplica, LightReplica):
        served = serve(make, config)
        assert served.figures.num_refused == served.figures.num_requests > 0
        assert served.refused[0].code == "context_length_exceeded"


# ---- the cluster


def test_routing_by_prefix_finds_more_in_the_caches_than_random_routing() -> None:
    config = replace(CONFIG, replicas=8, rate=100.0, prefixes=64, prefix_tokens=600)
    limits = replace(LIMITS, num_blocks=1500)
    by_prefix, at_random = (
        simulate(replace(config, routing=routing), limits) for routing in ("prefix", "random")
    )
    assert by_prefix.figures.cached_tokens > 1.2 * at_random.figures.cached_tokens
    assert by_prefix.routing.num_by_reason["prefix"] > 0


def test_a_request_that_one_replica_refuses_is_tried_on_the_other() -> None:
    engine = replace(ENGINE, max_waiting=4)
    config = replace(
        CONFIG,
        engine=engine,
        replicas=2,
        rate=90.0,
        prefixes=1,
        routing="random",
        workload="bursts",
        burst_s=1.0,
        pause_s=1.0,
    )
    limits = replace(LIMITS, max_slots=16)
    tried = simulate(config, limits).figures
    alone = serve(EngineReplica, replace(config, rate=45.0), limits, engine).figures
    assert 0 < tried.num_refused < 2 * alone.num_refused


def test_a_mixed_cluster_gives_the_figures_of_a_cluster_with_real_engines() -> None:
    config = replace(CONFIG, replicas=4, gateways=2, rate=80.0)
    light, real = (simulate(replace(config, exact=exact)).figures for exact in (0, 4))
    assert light == real


def test_requests_are_the_same_for_any_number_of_replicas() -> None:
    few, many = (simulate(replace(CONFIG, replicas=number)).figures for number in (1, 3))
    assert (few.num_requests, few.input_tokens) == (many.num_requests, many.input_tokens)


def test_all_replicas_of_a_hybrid_run_the_real_engine_with_checkpoints() -> None:
    """With few checkpoints, those of other conversations are evicted, and prompts are computed."""
    chat = replace(CONFIG, workload="chat", replicas=2, exact=0, rate=8.0)
    plain = simulate(chat)
    assert (plain.exact, plain.states) == (0, None)
    many, few = (
        simulate(chat, replace(LIMITS, state_bytes=1000, num_checkpoints=number))
        for number in (600, 12)
    )
    assert (many.exact, few.exact) == (2, 2)
    assert many.states is not None
    assert few.states is not None
    assert many.states.num_evicted == {"checkpoints": 0, "blocks": 0}
    assert few.states.num_evicted["checkpoints"] > 20
    assert few.states.num_uncovered_tokens > 2 * many.states.num_uncovered_tokens
    assert few.figures.cached_tokens < many.figures.cached_tokens < plain.figures.cached_tokens
    names = [row[0] for row in result_table(few)]
    assert "prompt tokens computed again" in names
    assert "prompt tokens computed again" not in [row[0] for row in result_table(plain)]


def test_a_search_finds_the_smallest_cluster_that_meets_the_target() -> None:
    config = replace(CONFIG, rate=150.0, duration_s=4.0, target_ttft_p99=0.15, exact=2)
    kind = SimulatedReplicaType(ENGINE, LIMITS, lambda _: EvenSteps(), "even")
    simulation = Simulation(config, kind)
    *_, found = simulation.results()
    assert found.meets_target
    assert found.replicas > 1
    assert found.exact > 0
    assert not simulation.simulate(found.replicas - 1, 0).meets_target


def test_a_search_gives_up_at_the_maximum() -> None:
    config = replace(CONFIG, rate=300.0, duration_s=2.0, target_ttft_p99=0.001, max_replicas=3)
    kind = SimulatedReplicaType(ENGINE, LIMITS, lambda _: EvenSteps(), "even")
    results = [*Simulation(config, kind).results()]
    assert [result.replicas for result in results] == [1, 2, 3]
    assert not results[-1].meets_target


# ---- workloads


def arrivals(config: SimulationConfig, gateway: int = 0) -> list[SimulatedRequest]:
    return [*WorkloadStreams(config).arrivals(gateway)]


def test_bursts_have_the_average_rate_and_leave_pauses() -> None:
    config = replace(CONFIG, workload="bursts", rate=50.0, burst_s=1.0, pause_s=3.0, duration_s=80)
    requests = arrivals(config)
    assert all(request.at % 4.0 <= 1.0 for request in requests)
    assert len(requests) == pytest.approx(4000, rel=0.1)


def test_a_turn_starts_with_the_last_prompt_and_its_answer() -> None:
    config = replace(CONFIG, workload="chat", turns=3, think_s=0.1)
    streams = WorkloadStreams(config)
    first = next(streams.arrivals(0))
    second = streams.next_turn(first, 1.0)
    assert second is not None
    assert second.path[: len(first.path)] == first.path
    assert second.path[len(first.path)] == (first.answer_key, first.output_tokens)
    assert prompt_of(second.path).tolist()[: first.input_tokens] == prompt_of(first.path).tolist()
    third = streams.next_turn(second, 2.0)
    assert third is not None
    assert streams.next_turn(third, 3.0) is None


def test_prompts_share_their_prefix_and_nothing_else() -> None:
    one, two, *_ = arrivals(replace(CONFIG, prefixes=1))
    first, second = (prompt_of(request.path).tolist() for request in (one, two))
    assert first[:300] == second[:300]
    assert first[300:304] != second[300:304]


TRACES = {
    "own.jsonl": '{"arrival_s": 5, "input_tokens": 100, "output_tokens": 7}\n'
    '{"arrival_s": 6.5, "input_tokens": 90, "output_tokens": 8}\n',
    "own.csv": "arrival_s,input_tokens,output_tokens,session\n5,100,7,\n6.5,90,8,a\n",
    "azure.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:17:03.9799600,100,7\n2023-11-16 18:17:05.4799600,90,8\n",
    "mooncake.jsonl": '{"timestamp": 0, "input_length": 100, "output_length": 7, "hash_ids": [1]}\n'
    '{"timestamp": 1500, "input_length": 90, "output_length": 8, "hash_ids": [2]}\n',
}


@pytest.mark.parametrize("name", TRACES)
def test_a_trace_of_each_form_is_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(TRACES[name])
    lines = read_trace(path)
    assert [(line.input_tokens, line.output_tokens) for line in lines] == [(100, 7), (90, 8)]
    requests = [*WorkloadStreams(replace(CONFIG, trace=str(path), speed=3.0), lines).arrivals(0)]
    assert [request.at for request in requests] == pytest.approx([0.0, 0.5])
    assert [request.input_tokens for request in requests] == [100, 90]


def test_a_trace_is_played_to_its_end_unless_a_duration_is_given(tmp_path: Path) -> None:
    path = tmp_path / "long.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n0,5,5\n50,5,5\n5000,5,5\n")
    config = replace(CONFIG, trace=str(path))
    for duration_s, number in ((0.0, 3), (60.0, 2)):
        assert simulate(replace(config, duration_s=duration_s)).figures.num_completed == number


def test_a_bad_line_of_a_trace_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n1,5,5\n2,none,5\n")
    with pytest.raises(ValueError, match="line 3: Expected `int`"):
        read_trace(path)


def test_the_blocks_of_a_trace_are_shared(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 1500, "output_length": 5, "hash_ids": [1, 2, 3]}\n'
        '{"timestamp": 9000, "input_length": 1300, "output_length": 5, "hash_ids": [1, 2, 9]}\n'
    )
    config = replace(CONFIG, trace=str(path), duration_s=60.0)
    assert simulate(config).figures.cached_tokens == 1024


def test_a_session_of_a_trace_continues_its_prompt(tmp_path: Path) -> None:
    path = tmp_path / "sessions.csv"
    rows = ("0,100,20,s", "5,160,20,s", "9,50,20,t")
    path.write_text("arrival_s,input_tokens,output_tokens,session\n" + "\n".join(rows) + "\n")
    config = replace(CONFIG, trace=str(path))
    assert simulate(config).figures.cached_tokens == 112  # 100 + 19 computed tokens, in blocks


# ---- step times and hardware


def test_a_fit_finds_the_costs_of_measured_steps() -> None:
    def true_s(work: StepWork) -> float:
        tokens = work.decodes + work.chunk_tokens
        return 0.002 + 2e-5 * tokens + 1e-8 * work.context + 1e-9 * work.pairs

    works = [
        *(StepWork(rows, rows * context) for rows in (1, 2, 4, 8, 30) for context in (50, 2000)),
        *(
            StepWork(3, 900, num, num * size, num * size * (start + size))
            for num in (1, 3)
            for size in (9, 40, 60, 120, 200)
            for start in (0, 900)
        ),
    ]
    fitted = FittedSteps([MeasuredStep(work, true_s(work)) for work in works])
    for work in (StepWork(5, 4000), StepWork(2, 100, 1, 100, 30_000)):
        assert fitted.mean_s(work) == pytest.approx(true_s(work), rel=0.05)


def test_simulated_steps_vary_as_the_measured_ones() -> None:
    work = StepWork(1, 10)
    fitted = FittedSteps([MeasuredStep(work, seconds) for seconds in (0.01, 0.02) * 50])
    replica = fitted.for_replica(1)
    drawn = sorted(replica.seconds(work) for _ in range(1000))
    assert drawn[10] == pytest.approx(0.01, rel=0.05)
    assert drawn[-10] == pytest.approx(0.02, rel=0.05)
    assert sum(drawn) / 1000 == pytest.approx(0.015, rel=0.05)


def test_a_step_takes_at_least_the_time_to_read_what_it_needs() -> None:
    gpu, model = GPUS["H100"], MODELS["qwen3-8b"]
    steps = Roofline(gpu, model, 1)
    for batch in (1, 64, 256):
        work = StepWork(batch, batch * 1024)
        read = 2 * model.shared_parameters + model.kv_bytes * work.context
        assert read / gpu.bandwidth < steps.seconds(work) < 2 * read / gpu.bandwidth
    times = [steps.seconds(StepWork(0, 0, 1, size, size * size // 2)) for size in (1000, 8000)]
    assert times[1] > 7 * times[0]


def test_more_gpus_make_a_step_shorter_but_not_in_proportion() -> None:
    gpu, model = GPUS["H100"], MODELS["llama-3.1-70b"]
    work = StepWork(32, 32 * 1024)
    times = [Roofline(gpu, model, number).seconds(work) for number in (1, 2, 4, 8)]
    assert all(half < whole < 2 * half for whole, half in pairwise(times))


def test_a_mixture_of_experts_reads_more_experts_with_more_tokens() -> None:
    steps = Roofline(GPUS["H100"], MODELS["qwen3-30b-a3b"], 1)
    one, many = (steps.seconds(StepWork(batch, 0)) for batch in (1, 64))
    assert many > 4 * one


def test_weights_that_do_not_fit_are_refused() -> None:
    gpu, model = GPUS["L4"], MODELS["llama-3.1-70b"]
    with pytest.raises(ValueError, match="weights leave no room for K/V in 1 x 24 GiB"):
        plan_memory(gpu, model, tensor_parallel=1, gpu_memory=0.9, block_tokens=16)


# The table has no shape for layers with only a mixer or only an MLP, as those of Nemotron-H.
@pytest.mark.parametrize("model_type", sorted({*RECURRENT} - {"nemotron_h"}))
def test_the_sizes_of_a_hybrid_are_those_that_the_worker_computes(
    tmp_path: Path, model_type: str
) -> None:
    sizes = {} if model_type in LATENT else {"head_dim": 32}
    theirs = random_model(model_type, hidden_size=192, **sizes)
    header = read_header(write_directory(tmp_path, theirs))
    shape = read_table().model(str(tmp_path / "config.json"))
    assert shape.state_bytes == 4 * header.spec.state_items
    of_token = block_bytes(header.spec, 1, "bfloat16") if header.spec.num_kv_layers else 0
    assert shape.kv_bytes == of_token
    planned = PlannedModel(header.name, header.tensors, header.kinds, is_packed=False)
    # The shape has neither norms nor biases nor the rows of convolutions.
    tolerance = 0.25 if model_type.startswith("lfm2") else 0.03
    weights = weights_bytes(planned, "bfloat16")
    assert shape.weight_bytes == pytest.approx(weights, rel=tolerance)


@pytest.mark.parametrize(
    "model_type",
    [
        *("arcee", "ernie4_5", "ernie4_5_moe", "gemma", "glm", "glm4", "glm4_moe", "llama"),
        *("hunyuan_v1_dense", "minimax_m2", "ministral3", "nemotron", "olmoe", "qwen2_moe"),
        *("qwen3_moe", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4", "minicpm3"),
        *("deepseek_v32", "youtu", "apertus", "hunyuan_v1_moe", "phimoe", "llama4_text"),
    ],
)
def test_the_sizes_of_a_model_are_those_that_the_worker_computes(
    tmp_path: Path, model_type: str
) -> None:
    sizes = {} if model_type in LATENT else {"head_dim": 32}
    theirs = random_model(model_type, hidden_size=192, **sizes)
    header = read_header(write_directory(tmp_path, theirs))
    shape = read_table().model(str(tmp_path / "config.json"))
    assert shape.kv_bytes == block_bytes(header.spec, 1, "bfloat16")
    planned = PlannedModel(header.name, header.tensors, header.kinds, is_packed=False)
    assert shape.weight_bytes == pytest.approx(weights_bytes(planned, "bfloat16"), rel=0.03)


def test_kimi_k2_is_counted_as_the_deepseek_v3_that_it_is(tmp_path: Path) -> None:
    file = write_directory(tmp_path, random_model("deepseek_v3")) / "config.json"
    plain = read_table().model(str(file)).weight_bytes
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "kimi_k2"}))
    assert read_table().model(str(file)).weight_bytes == plain


def test_latent_attention_is_not_divided_and_computes_pairs_of_latents(tmp_path: Path) -> None:
    write_directory(tmp_path, random_model("youtu"))
    gpu, model = GPUS["L4"], read_table().model(str(tmp_path / "config.json"))
    assert model.pair_products == 6 * (2 * 128 + 32)
    with pytest.raises(ValueError, match="does not divide models with latent attention"):
        plan_memory(gpu, model, tensor_parallel=2, gpu_memory=0.9, block_tokens=16)


@pytest.mark.parametrize("model_type", ["mamba", "bamba", "glm4_moe"])
def test_a_size_that_is_no_number_is_refused(tmp_path: Path, model_type: str) -> None:
    file = tmp_path / "config.json"
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 99, "intermediate_size": 9}
    for wrong in (None, "3"):
        values = {"num_hidden_layers": wrong, "n_routed_experts": wrong}
        file.write_text(json.dumps({"model_type": model_type, **sizes, **values}))
        with pytest.raises(ValueError, match="int"):
            read_table().model(str(file))


def test_states_take_memory_of_the_cache_and_fewer_slots_leave_more_of_it() -> None:
    gpu, model = GPUS["H100"], MODELS["qwen3.5-9b"]
    options: dict[str, Any] = {"tensor_parallel": 1, "gpu_memory": 0.9, "block_tokens": 16}
    default = plan_memory(gpu, model, **options)
    assert 64 < default.max_slots < MAX_SLOTS.gpu
    assert default.max_slots * 0.7 < default.num_checkpoints <= default.max_slots
    few = plan_memory(gpu, model, **options, max_slots=8)
    assert (few.max_slots, few.num_checkpoints) == (8, 8 * CHECKPOINTS_PER_SLOT)
    freed = default.max_slots + default.num_checkpoints - 40
    gained = (few.num_blocks - default.num_blocks) * 16 * model.kv_bytes
    assert gained == pytest.approx(freed * model.state_bytes, rel=0.001)
    with pytest.raises(ValueError, match=r"GiB of recurrent states \(--max-slots\) leave no room"):
        plan_memory(gpu, model, **options, max_slots=4096)
    with pytest.raises(ValueError, match="does not divide models with recurrent layers"):
        plan_memory(gpu, model, **options | {"tensor_parallel": 2})


def test_the_blocks_of_a_model_without_attention_follow_the_number_of_states(
    tmp_path: Path,
) -> None:
    write_directory(tmp_path, random_model("mamba2"))
    gpu, model = GPUS["L4"], read_table().model(str(tmp_path / "config.json"))
    options: dict[str, Any] = {"tensor_parallel": 1, "gpu_memory": 0.9, "block_tokens": 16}
    assert (model.kv_bytes, model.attention_layers) == (0, 0)
    found = plan_memory(gpu, model, **options, max_slots=4, max_len=320)
    assert found == ReplicaMemory(4, 16, 1 + 20 * 20)
    long = replace(model, max_position_embeddings=1 << 17)
    assert plan_memory(gpu, long, **options).num_blocks == 1 + MAX_EMPTY_BLOCKS
    with pytest.raises(ValueError, match=r"states \(--max-slots\) leave no room in 1 x 24 GiB"):
        plan_memory(gpu, model, **options, max_slots=1 << 20)
    work = StepWork(1, 1000)
    steps = Roofline(gpu, model, 1)
    assert steps.seconds(work) == steps.seconds(StepWork(1, 100_000))


def test_a_table_of_ones_own_adds_gpus(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[gpus.mine]\nflops = 1e15\nbandwidth = 4e12\nmemory_gib = 100\nlink = 1e11\n")
    assert read_table(str(path)).gpu("mine").memory_gib == 100
    kind = replica_type(replace(CONFIG, hardware=str(path), model="qwen3-8b"))
    assert kind.description == "estimated for qwen3-8b on mine"
    with pytest.raises(ValueError, match="'mine' is not in the table; it has A100"):
        read_table().gpu("mine")


def test_a_config_json_describes_a_model(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(
        '{"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, '
        '"num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, '
        '"tie_word_embeddings": true, "max_position_embeddings": 8192}'
    )
    assert read_table().model(str(path)) == MODELS["smollm2-135m"]
    assert MODELS["smollm2-135m"].weight_bytes == pytest.approx(2 * 134.5e6, rel=0.01)


# ---- figures


def test_percentiles_are_right_to_one_percent() -> None:
    times = Histogram()
    for number in range(1, 1001):
        times.add(number / 1e3)
    found = times.quantiles()
    assert found is not None
    assert (found.p50, found.p90, found.p99) == pytest.approx((0.5, 0.9, 0.99), rel=0.01)
    assert found.max == 1.0
    assert found.mean == pytest.approx(0.5005)
    assert times.num_above(0.75) == pytest.approx(250, abs=10)


MakeConfig = Callable[[], SimulationConfig]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: replace(CONFIG, workload="chat", trace="x.csv"), "workload cannot be combined"),
        (lambda: replace(CONFIG, workload="chat", processes=2), "workload 'chat' needs"),
        (lambda: replace(CONFIG, processes=2), "exceeds the number of gateways"),
        (lambda: replace(CONFIG, model=""), "MODEL or steps is needed"),
    ],
)
def test_options_that_exclude_each_other_are_refused(make: MakeConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
