"""docs/use/agents.md agrees with the settings of `tidegate launch`, and its table of results is
that of the versions and scenarios that are tested now."""

from __future__ import annotations

from tests.support import agents_page
from tests.torture.agents.scenarios import SCENARIOS
from tests.torture.agents.variants import VARIANTS, row_name


def test_the_settings_are_those_of_launch() -> None:
    """`python -m tests.support.agents_page` prints them."""
    assert agents_page.part("settings") == agents_page.settings()


def test_the_table_has_each_agent_and_scenario() -> None:
    """`python -m tests.torture.agents --page` writes it."""
    head, _, *rows = agents_page.part("scenarios").splitlines()
    assert head == f"| | {' | '.join(SCENARIOS)} |"
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == list(map(row_name, VARIANTS))
    for row in rows:
        assert all(cell.strip() in ("yes", "no", "-") for cell in row.strip("|").split("|")[1:])
