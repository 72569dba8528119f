"""The bounds in docs/operate/request-limits.md are those of the code."""

from __future__ import annotations

from typing import get_args

import pytest

from gateway.http import body
from gateway.http.body_memory import NUM_SHARES
from gateway.http.connections import MAX_CONNECTIONS, NUM_RESERVED, NUM_SPARE
from gateway.http.text_fields import Label, Name, TemplateText
from protocol.config.gateway import GatewayConfig
from tests.support.processes import ROOT

TEXT = " ".join((ROOT / "docs" / "operate" / "request-limits.md").read_text().split())
CONFIG = GatewayConfig()
BODY_MIB, MEMORY_MIB = CONFIG.max_body_mib, CONFIG.body_memory_bytes >> 20
LENGTHS = [get_args(kind)[1].max_length for kind in (Label, Name, TemplateText)]


@pytest.mark.parametrize(
    "phrase",
    [
        f"`--max-body-mib` ({BODY_MIB}) and M for `--body-memory-mib` (eight times B,",
        f"4 · M/{NUM_SHARES} + 4 · B | {4 * MEMORY_MIB // NUM_SHARES + 4 * BODY_MIB} |",
        f"4 · M + 4 · B | {4 * MEMORY_MIB + 4 * BODY_MIB} |",
        f"4 · M + 3 · B | {4 * MEMORY_MIB + 3 * BODY_MIB} |",
        f"at most {MAX_CONNECTIONS - NUM_SPARE:,} connections",
        f"may open files, less {NUM_RESERVED + NUM_SPARE}.",
        f"above {body.SMALL_BYTES >> 10} KiB at {body.MIN_BYTES_PER_S >> 10} KiB per second",
        f"after {body.WAIT_S} seconds they are refused (429)",
        "at most {:,} characters (names of models {:,}, a chat template {:,})".format(*LENGTHS),
    ],
)
def test_a_bound_is_that_of_the_code(phrase: str) -> None:
    assert phrase in TEXT


def test_the_memory_for_bodies_is_a_multiple_of_the_largest_unless_it_is_set() -> None:
    assert MEMORY_MIB == 8 * BODY_MIB
    assert GatewayConfig(max_body_mib=1000).body_memory_bytes == 8000 << 20
    assert GatewayConfig(body_memory_mib=40).body_memory_bytes == 40 << 20
    with pytest.raises(ValueError, match="less than twice max_body_mib"):
        GatewayConfig(body_memory_mib=20)
