"""`tidegate serve`: starts a server from the command line.

`run` does, in this order: make the configs from the options (`plan`), check the device, lock the
run directory, find the model, start the processes and check the model meanwhile (`_check_model`),
and watch the processes until they end (`supervise`).

`tools.processes.topology` decides which engines to start, and `tools.processes.supervisor` what to
do while the processes run.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from protocol.config.engine import EngineConfig
from protocol.config.gateway import GatewayConfig, ModelConfig
from protocol.config.serve import ServeConfig
from protocol.config.worker import WorkerConfig
from protocol.engine.model_card import CardFile, read_card
from protocol.engine.model_card import write_card as write_card_file
from protocol.process.exit_codes import ExitCode
from protocol.process.lifeline import attach_if_supervised
from protocol.process.log_lines import LogStyle
from protocol.process.process_title import set_title
from protocol.shared import api_keys
from protocol.wire.cluster_key import write_cluster_key
from protocol.wire.sockets import engine_address, run_directory
from tools.cluster.command import (
    START_GRACE_S,
    launcher_command,
    launcher_config,
    prepare_files,
    with_cluster,
)
from tools.commands.models import add_model, resolve
from tools.config_file import add_config_option, api_keys_in_effect
from tools.failure import Failure
from tools.flags import build
from tools.http.web import KEY_VARIABLE, WebServer
from tools.models.catalogue import CATALOGUE, DEFAULT
from tools.models.fetch import cached_file, free_space, home
from tools.models.preflight import (
    ModelCheck,
    check_device,
    check_models,
    expecting,
    log_larger,
    log_limits,
    log_sampling,
    log_slots,
    memory_facts,
    with_recommended,
    without_trial,
    write_card,
)
from tools.models.pulling import served_name
from tools.models.stored import hub_cache
from tools.models.trials import PassedTrials
from tools.option_groups import add_grouped_flags
from tools.processes import run_lock
from tools.processes.child_environment import warn_of_left_out
from tools.processes.children import Child, Command, module_command, run_module
from tools.processes.detached import Background, run_detached
from tools.processes.gated_start import GatedStart, stop_signals_as_failures
from tools.processes.models_file import given_models, model_config
from tools.processes.new_models import NewModels
from tools.processes.saved_models import (
    read_saved,
    saved_models_file,
    with_saved,
    write_saved,
)
from tools.processes.serve_commands import engine_command, engine_commands, gateway_command
from tools.processes.serve_plan import FOREGROUND, ServePlan, banner, in_background
from tools.processes.server_log import ServerLog, ended_logs, keeping
from tools.processes.several_models import (
    check_shared,
    engines_of_models,
    hosting,
    options_of_others,
    plan_models,
    with_served_name,
)
from tools.processes.start_checks import (
    EXTRAS,
    check_installation,
    check_key,
    check_paths,
)
from tools.processes.topology import (
    check_reachable,
    engines_of,
    num_gpus,
    wired,
    with_model,
)
from tools.processes.watch import ModelManagement, supervise
from tools.terminal import Terminal, log_style

DESCRIPTION = """\
Serve a model over the OpenAI API (HTTP) and over ZeroMQ. Ctrl-C lets open requests finish and then
stops the server; a second Ctrl-C stops it at once.
"""

EXAMPLES = f"""\
examples:
  tidegate serve                                  the default model, {DEFAULT}, on port 8000
  tidegate serve ~/models/qwen3-4b                a Hugging Face directory (safetensors)
  tidegate serve --detach                         in the background
  tidegate serve model.gguf --port 8001           a GGUF file, on another port
  tidegate serve Qwen/Qwen3-0.6B                  a model on the Hugging Face Hub (tidegate pull)
  tidegate serve --max-len 4096 --max-slots 16    use less memory: shorter and fewer requests
  tidegate serve Qwen/Qwen3-0.6B big=./model.gguf --load first-use --max-loaded 1
                                                  two models, one in memory at a time
  tidegate serve --replicas 2                     two engines of the model; streams survive one
"""

CONFIGS = (
    ("the gateway", GatewayConfig),
    ("the engine", EngineConfig),
    ("the worker", WorkerConfig),
    ("the supervisor", ServeConfig),
)
ENGINE_LIBRARIES = frozenset({"torch"})
"""Libraries that are only needed if the server has an engine."""
CHECKED = (
    *("api_keys", "chat_template", "default_chat_template_kwargs", "default_sampling"),
    *("tool_format", "reasoning_format", "otlp_traces_endpoint", "cors_origin", "allowed_host"),
)
"""Fields of GatewayConfig whose values only the gateway's code can check."""
CHECKED_OF_MODELS = [name for name in CHECKED if name in ModelConfig.__struct_fields__]
"""The same for ModelConfig."""
CHECK_TIMEOUT_S = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, several=True)
    add_config_option(parser, CONFIGS, several=True)
    parser.add_argument(
        "--detach",
        action="store_true",
        help="go on in the background when the server is ready, and end with the exit code of the "
        "start",
    )
    add_grouped_flags(parser, [config for _, config in CONFIGS])


def plan(options: Mapping[str, Any], style: LogStyle = "text") -> ServePlan:
    """Return the plan that the options describe.

    style   format of the log lines of all processes

    `worker.model` is the MODEL of the command line, not yet a path. Raises Failure, with the exit
    code of a usage error, if options contradict each other.
    """
    try:
        gateway = build(GatewayConfig, options, log_format=style)
        key = api_keys.new_key() if gateway.has_keys else ""
        gateway = _with_digests(gateway, key)
        directory = run_directory(gateway.port)
        address = engine_address(gateway.port)
        worker_address = f"ipc://{directory / 'worker.sock'}"
        serve = build(ServeConfig, options)
        given = given_models(options, serve)

        def build_engine(changes: Mapping[str, Any]) -> EngineConfig:
            own = {**options, **changes}
            worker = build(
                WorkerConfig, own, model=given[0].model, address=worker_address, log_format=style
            )
            return build(EngineConfig, own, worker=worker, address=address, log_format=style)

        engine = build_engine({})
        models: Mapping[str, EngineConfig] = {}
        managed = None
        if len(given) > 1 or serve.loads_on_demand or gateway.manage_models:
            serve.check_on_demand()
            check_shared(gateway, engine, given)
            given = with_served_name(given, gateway)
            if gateway.manage_models:
                saved = read_saved(saved_models_file(home(), gateway.port))
                managed = with_saved(given, saved, home(), options_of_others(engine.worker))
                given = [*managed.models]
            models = engines_of_models(given, build_engine, directory)
            gateway = msgspec.structs.replace(
                gateway, models=[model_config(each, options, serve) for each in given]
            )
        gpus = num_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
        engines = engines_of(serve, engine, directory, gpus)
        gateway = wired(gateway, serve, engine, engines)
        cluster = None
        if serve.cluster:
            gateway = with_cluster(gateway, directory)
            cluster = launcher_config(serve, engine, gateway, style)
    except ValueError as error:
        raise Failure(str(error), exit_code=2) from None
    name = given[0].name if given[0].is_explicit else served_name(given[0].model)
    has_name = bool(name and (engines or options["model"] or serve.render_only)) and not models
    names = gateway.served_name or ([name] if name and has_name else [])
    store = gateway.response_store or str(home() / "responses" / f"{gateway.port}.db")
    files = gateway.file_store or str(home() / "files" / f"{gateway.port}.db")
    if serve.kv_address:
        check_reachable(serve.kv_address, "--kv-address")
    gateway = msgspec.structs.replace(
        gateway,
        served_name=names,
        response_store=store,
        file_store=files,
        metrics_directory=str(directory / run_lock.METRICS),
    )
    return ServePlan(
        engine, gateway, serve, directory, key, gpus, models, cluster=cluster, managed=managed
    )


def _with_digests(config: GatewayConfig, key: str) -> GatewayConfig:
    """Return `config` with the digests of the API keys in place of the keys. A gateway needs only
    the digests.

    key   the supervisor's own API key, whose digest is added; "": none

    Raises ValueError for an invalid key.
    """
    for api_key in config.api_key:
        api_keys.check_key(api_key)
    digests = [api_keys.digest_of(api_key) for api_key in config.api_key]
    own = api_keys.digest_of(key) if key else ""
    return msgspec.structs.replace(
        config, api_key=[], api_key_digests=digests, supervisor_digest=own
    )


def commands(plan: ServePlan, *, lock: int) -> list[Command]:
    """Return the commands that start the child processes, in the order in which a drain stops them.

    lock   descriptor of the lock of the run directory, which the children inherit
    """
    launchers = [launcher_command(plan.cluster, lock)] if plan.cluster else []
    return [gateway_command(plan, lock), *engine_commands(plan, lock), *launchers]


def run(options: argparse.Namespace) -> int:
    if options.detach:
        return run_detached(lambda background: _run(options, background))
    return _run(options)


def _run(options: argparse.Namespace, background: Background | None = None) -> int:
    """Run the server, and return its exit code.

    background   the server goes on there when it is ready; None: it stays in the foreground
    """
    started = time.monotonic()
    attach_if_supervised(signal.SIGTERM)  # started by a command, for the time of its run
    own = os.environ.pop(KEY_VARIABLE, "")  # the child processes get only a digest of the key
    api_key = api_keys_in_effect(options, own)
    terminal = Terminal(log_style(options.log_format))
    check_paths([config for _, config in CONFIGS], vars(options))
    planned = plan({**vars(options), "api_key": api_key}, terminal.style)
    libraries = EXTRAS.keys() - (frozenset() if planned.engines else ENGINE_LIBRARIES)
    check_installation(sorted(libraries - (frozenset() if planned.cluster else {"ray"})))
    check_key(planned.serve.cluster_key)
    if planned.engines:
        check_device(planned.engine.worker.device)
    _check_gateway(planned.gateway)
    with (
        stop_signals_as_failures(),
        run_lock.holding(planned.directory) as lock,
        keeping(
            planned.directory,
            planned.serve.log_file_mib,
            terminal,
            kept_in=ended_logs(home()) / planned.directory.name if background else None,
        ) as log,
    ):
        _prepare_directory(planned, lock)
        found = _with_model_path(planned, terminal)
        check = _check_models if found.models else _check_model
        with GatedStart(log) as start, start.interruptible():
            checked = check(found, start, lock, terminal)
        return _serve(checked, start.children, lock, started, terminal, log, background)


def _prepare_directory(plan: ServePlan, lock: int) -> None:
    """Check that the port is free, and write the files that the children and other tools read."""
    run_lock.check_port_is_free(plan.gateway.host, plan.gateway.port)
    if plan.serve.split:
        key_file = plan.directory / run_lock.RUN_KEY  # the directory is private
        key_file.unlink(missing_ok=True)
        write_cluster_key(str(key_file))
    if plan.cluster:
        prepare_files(plan.gateway, plan.serve)
    _describe(lock, plan, plan.gateway.served_name)


def _describe(lock: int, plan: ServePlan, names: Sequence[str | None]) -> None:
    """Write the server's URL and the models' names into the lock, for other tools to find.

    names   names of the model, if there is only one
    """
    model = ", ".join(plan.models) or next(filter(None, names), "")
    run_lock.describe(lock, run_lock.LockFacts(url=plan.url, model=model))


def _check_gateway(config: GatewayConfig) -> None:
    """Check the options in CHECKED, in a process of the gateway that ends at once.

    Importing the gateway takes time, so the check is skipped if all these options have their
    defaults. Raises Failure if an option is wrong.
    """
    default, default_model = GatewayConfig(), ModelConfig()
    if all(getattr(config, name) == getattr(default, name) for name in CHECKED) and all(
        getattr(model, name) == getattr(default_model, name)
        for model in config.models
        for name in CHECKED_OF_MODELS
    ):
        return
    done = run_module(
        "checking the gateway's options",
        module_command("gateway.startup_checks"),
        timeout_s=CHECK_TIMEOUT_S,
        **config.to_environment(),
    )
    if done.code == ExitCode.USAGE:
        raise Failure(done.error, exit_code=ExitCode.USAGE)


def _with_model_path(plan: ServePlan, terminal: Terminal) -> ServePlan:
    """Download the model if necessary, and return the plan with the model's path. Raises Failure if
    the model cannot be found or downloaded."""
    render_only = plan.serve.render_only
    if not plan.engines and not render_only:
        return plan
    print_line = terminal.progress
    if plan.models:
        paths = {
            name: resolve(each.worker.model, home(), print_line)
            for name, each in plan.models.items()
        }
        return replace(
            plan,
            models={name: with_model(each, paths[name]) for name, each in plan.models.items()},
        )
    path = resolve(plan.engine.worker.model, home(), print_line, text_only=render_only)
    draft = "" if render_only else plan.engine.worker.draft_model
    engine = with_model(plan.engine, path, resolve(draft, home(), print_line) if draft else None)
    return replace(plan, engine=engine)


def _check_model(plan: ServePlan, start: GatedStart, lock: int, terminal: Terminal) -> ServePlan:
    """Check whether the model can be served, and return the plan with the gateway's final config.

    The processes are started meanwhile, each as soon as its config is known. Raises Failure if the
    model cannot be served.
    """
    if not plan.engines and not plan.serve.render_only:
        return plan
    start.start(engine_commands(plan, lock))
    gateway, plans, facts = plan.gateway, [], None
    model, trials = plan.engine.worker.model, PassedTrials(home() / "trials")
    file = plan.directory / run_lock.CARD_FILE
    with ModelCheck(gateway) as check:
        if gateway.hosted[0].names_formats or not trials.is_expected(model):
            check.start()
        if plan.serve.render_only:
            write_card(plan.engine.worker, file)
            gateway = msgspec.structs.replace(gateway, card=str(file))
            card = read_card(file).card
        else:
            found = check_models(
                [worker for each in plan.engines.values() for worker in each.checked_workers]
            )
            assert found.card is not None
            plans, facts = found.plans, found.memory
            card = with_recommended(found.card, plan.engine.worker)
            gateway = expecting(gateway, card, file)
        checked = replace(plan, gateway=without_trial(gateway, card))
        start.start([gateway_command(checked, lock)])
        if gateway.hosted[0].names_formats or not trials.has_passed(model, card.tokenizer):
            check.run(card)
            trials.add(model, card.tokenizer)
    log_limits(plans, terminal)
    if plans and model == str(cached_file(CATALOGUE[DEFAULT], home())):
        log_larger(plans[0], terminal, lambda: facts or memory_facts(home() / "measurements"))
    log_sampling(card, gateway.hosted[0].default_sampling, terminal)
    return checked


def _check_models(plan: ServePlan, start: GatedStart, lock: int, terminal: Terminal) -> ServePlan:
    """Check whether the models in `plan.models` can be served together, and return the plan with
    their final configs. Their engines are started after the check, because it decides the size of
    their K/V caches."""
    added = plan.managed.added if plan.managed else ()
    planned = plan_models(plan.models, plan.gateway.models, plan.serve, optional=added)
    for name in plan.models.keys() - planned.engines.keys():
        terminal.warn(f"model {name} is left out: {planned.left_out[name]}")
    cards = {}
    for number, (name, known) in enumerate(planned.cards.items(), start=1):
        card = with_recommended(known, planned.engines[name].worker)
        cards[name] = plan.directory / f"model-{number}{run_lock.CARD_SUFFIX}"
        write_card_file(cards[name], CardFile(card=card, max_len=planned.plans[name].max_len))
    gateway = hosting(plan.gateway, planned, cards, plan.directory)
    checked = replace(plan, gateway=gateway, models=planned.engines, planned=planned)
    at_start = [each for each in commands(checked, lock=lock) if each.group in planned.loaded]
    start.start([*at_start, gateway_command(checked, lock)])
    trials = PassedTrials(home() / "trials")
    for hosted in gateway.models:
        worker = planned.engines[hosted.supervised_name].worker
        card, model = with_recommended(planned.cards[hosted.supervised_name], worker), worker.model
        if hosted.names_formats or not trials.has_passed(model, card.tokenizer):
            with ModelCheck(msgspec.structs.replace(plan.gateway, models=[hosted])) as check:
                check.run(card)
            trials.add(model, card.tokenizer)
        log_sampling(card, hosted.default_sampling, terminal)
    log_limits(planned.plans.values(), terminal)
    workers = {name: engine.worker for name, engine in planned.engines.items()}
    log_slots(workers, planned.plans, terminal)
    return checked


def _serve(
    plan: ServePlan,
    children: Sequence[Child],
    lock: int,
    started: float,
    terminal: Terminal,
    log: ServerLog,
    background: Background | None,
) -> int:
    set_title("supervisor")
    has_model = bool(plan.engines or plan.serve.render_only)
    loads = bool(plan.planned.loaded if plan.planned else plan.engines)

    def log_start(children: Sequence[Child]) -> None:
        processes = ", ".join(f"{child.name} started (pid {child.pid})" for child in children)
        paths = [each.worker.model for each in plan.models.values()] or [plan.engine.worker.model]
        noun = "models" if len(paths) > 1 else "model"
        terminal.log(processes + f"; {noun} {', '.join(paths)}" * has_model)
        warn_of_left_out(terminal)

    def show_banner(model: str | None) -> None:
        _describe(lock, plan, [model])
        ending = in_background(plan) if background else FOREGROUND
        terminal.show(banner(plan, model, time.monotonic() - started, ending))
        if background:
            background.enter()

    return supervise(
        commands(plan, lock=lock),
        WebServer(plan.url, plan.key),
        terminal,
        started=children,
        start_timeout_s=plan.serve.start_timeout_s + bool(plan.cluster) * START_GRACE_S,
        drain_s=plan.gateway.drain_s,
        max_restarts=plan.serve.max_restarts,
        replica_restarts=plan.serve.restart_limit,
        fleet=plan.planned.fleet(plan.serve, time.monotonic()) if plan.planned else None,
        management=_management(plan, lock),
        control_directory=plan.directory,
        on_started=log_start,
        on_listening=lambda: terminal.log(
            f"listening at {plan.url}" + ("; the model is loading" if loads else "")
        ),
        on_ready=show_banner,
        log=log,
    )


def _management(plan: ServePlan, lock: int) -> ModelManagement | None:
    """Return how clients manage the models; None if they do not."""
    if plan.managed is None:
        return None
    models = plan.managed.at_start(plan.gateway.models, plan.models)
    file = saved_models_file(home(), plan.gateway.port)
    facts = memory_facts(home() / "measurements")
    new = NewModels(
        engine=plan.engine,
        hosted=msgspec.structs.replace(plan.gateway.own_model, served_name=[]),
        directory=plan.directory,
        command=lambda name, engine: engine_command(f"engine {name}", engine, lock, group=name),
        num_engines=len(plan.managed.models),
        disk_free=lambda: free_space(hub_cache() or home()),
        read_bytes_per_s=facts.read_bytes_per_s if facts else 0.0,
    )
    return ModelManagement(models, new, partial(write_saved, file))
