"""Runs real coding agents against a scripted engine, and prints what works.

    python -m tests.torture.agents [--agent codex --agent claude] [--scenario tool] [--newest]

Each agent is started with `tidegate launch`, without a terminal, in a new home and a new folder.
The AI SDK is a library, so a small agent that uses it is run (ai_sdk.mjs), with each API.
The chat template accepts a system message only at the start, as those of Qwen 3.5 and later do. The
versions in `tools/agents.py` are installed from npm and PyPI into --folder. With --newest the
newest ones are, and what then differs is what an update of an agent breaks. An agent that cannot be
installed is named. The command exits with 1 if there is any complaint.

| scenario | the engine | what must happen |
|---|---|---|
| plain | answers | the answer is printed |
| tool | calls the agent's shell, then answers | the output of the shell is in the next prompt |
| edit | calls the agent's tool for files | the file is there |
| parallel | calls the shell twice in one answer | both outputs are in one prompt |
| cut | fails in the middle of the first answer | the agent asks again, or names the error |
| busy | refuses the first request with 429 | the agent asks again |
| failing | refuses the first request with 500 | the agent asks again, or names the error |
| turns | calls the shell nine times, one after the other | prompts begin with those before |
| overflow | refuses the second prompt as too long | the agent shortens it, or names the error |
| resume | answers two runs of one session | the second prompt has the first answer |
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.support import agents_page
from tests.torture.agents.running import FOLDER, AgentRun, agent_runner
from tests.torture.agents.scenarios import SCENARIOS
from tests.torture.agents.variants import VARIANTS, about, install, row_name, tested
from tests.torture.table import print_table

COLUMNS = {"agent": 22, "scenario": 10, "requests": 8, "exit": 6, "result": 0}


def outcomes(options: argparse.Namespace) -> Iterator[AgentRun]:
    folder = Path(options.folder)
    versions = {
        name: install(folder, name, newest=options.newest)
        for name in dict.fromkeys(VARIANTS[variant].agent for variant in options.agent)
    }
    for name, version in versions.items():
        change = f", tested with {tested(name)}" if version != tested(name) else ""
        print(f"{about(name)}: {version or 'cannot be installed'}{change if version else ''}")
    with agent_runner(folder) as runner:
        for variant in options.agent:
            if versions[VARIANTS[variant].agent]:
                for scenario in options.scenario:
                    yield runner.run(variant, scenario)
        if "Traceback" in runner.log:
            yield AgentRun("the gateway", "", (), 1, "a traceback is in its log", runner.log)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--agent", action="append", choices=list(VARIANTS))
    parser.add_argument("--scenario", action="append", choices=list(SCENARIOS))
    parser.add_argument("--newest", action="store_true", help="install the newest versions")
    parser.add_argument("--folder", default=str(FOLDER), help=f"default: {FOLDER}")
    parser.add_argument(
        "--page", action="store_true", help="write the results to docs/use/agents.md"
    )
    options = parser.parse_args()
    if options.page and (options.agent or options.scenario or options.newest):
        parser.error("--page needs all agents and scenarios, with the tested versions")
    options.agent = options.agent or list(VARIANTS)
    options.scenario = options.scenario or list(SCENARIOS)
    if shutil.which("npm") is None:
        print("npm is missing; only agents that are installed already are run")
    runs: list[AgentRun] = []
    code = print_table(COLUMNS, _kept(outcomes(options), runs), 1.0)
    if options.page:
        agents_page.replace_part("scenarios", _scenario_table(runs))
    return code


def _kept(runs: Iterator[AgentRun], kept: list[AgentRun]) -> Iterator[AgentRun]:
    for run in runs:
        kept.append(run)
        yield run


def _scenario_table(runs: Sequence[AgentRun]) -> str:
    """Return the table in docs/use/agents.md. Agents that were not installed have no row."""
    found = {(run.variant, run.scenario): run for run in runs}
    rows = [
        (row_name(variant), [found[variant, name].word for name in SCENARIOS])
        for variant in VARIANTS
        if (variant, "plain") in found
    ]
    return agents_page.scenario_table(SCENARIOS, rows)


if __name__ == "__main__":
    sys.exit(main())
