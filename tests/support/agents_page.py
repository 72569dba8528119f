"""The generated parts of docs/use/agents.md.

`python -m tests.support.agents_page` prints the settings of all agents. The table of scenarios is
written by `python -m tests.torture.agents --page`.
"""

from __future__ import annotations

from collections.abc import Iterable

from tests.support.processes import ROOT
from tools.agents import AGENTS, AgentServer, CodingAgent
from tools.commands.launch import command_text

PAGE = ROOT / "docs" / "use" / "agents.md"
SERVER = AgentServer("http://127.0.0.1:8000", "my-model", 65536)


def settings() -> str:
    """Return a section for each agent, with what `tidegate launch AGENT --print` prints."""
    return "\n\n".join(f"### {agent.about}\n\n{_settings(agent)}" for agent in AGENTS.values())


def _settings(agent: CodingAgent) -> str:
    command = command_text(agent, agent.session(SERVER), [], "")
    return (
        f"Tested version: {agent.tested}. Installed with `{agent.install}`.\n\n"
        f"<!-- not run: it starts an agent -->\n```console\n{command}\n```"
    )


def scenario_table(scenarios: Iterable[str], rows: Iterable[tuple[str, list[str]]]) -> str:
    """Return the table of what works.

    rows   name of a row of the table with its agent's version, and the result of each scenario
    """
    names = list(scenarios)
    head = [f"| | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    return "\n".join([*head, *(f"| {name} | {' | '.join(cells)} |" for name, cells in rows)])


def part(mark: str) -> str:
    """Return the part of the page between two marks."""
    _, _, rest = PAGE.read_text().partition(f"<!-- {mark} -->\n")
    return rest.partition(f"\n<!-- /{mark} -->")[0]


def replace_part(mark: str, text: str) -> None:
    PAGE.write_text(
        PAGE.read_text().replace(
            f"<!-- {mark} -->\n{part(mark)}\n<!-- /{mark} -->",
            f"<!-- {mark} -->\n{text}\n<!-- /{mark} -->",
        )
    )


if __name__ == "__main__":
    print(settings())
