"""The memory of an engine's grammars: floods of large ones leave little behind.

The compiler threads and the cache run in a process of their own, which is measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine_core.admission.grammar_cache import MAX_KEPT_BYTES
from protocol.engine.grammar import JsonSchema

ROOT = Path(__file__).parents[2]
SLACK_BYTES = 33 << 20
"""Space for fragments of the heap, and for what llguidance computes once for a vocabulary."""

FLOOD = """
import json, select, sys
import msgspec
from engine_core.admission.grammar_cache import CompileJob, GrammarCache
from engine_core.grammar.service import GrammarService
from protocol.engine.grammar import Body, Grammar, Regex
from tests.support.grammars import signs_card
from tests.support.waiting import eventually

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

def compile_all(grammars):
    results = []
    for grammar in grammars:
        digest, _ = cache.find(grammar)
        service.submit(CompileJob(digest, grammar))
        while service.is_busy:
            select.select([service.fd], [], [], 60)
            for compiled in service.drain():
                cache.on_grammar_compiled(compiled)
                cache.shrink()
                results.append(type(compiled.result).__name__)
        service.trim(cache.num_dropped_bytes)
    return results

cache, service = GrammarCache(), GrammarService(60.0)
service.start(signs_card())
compile_all([Grammar(body=Regex(pattern="a"))])
before = resident()
bodies = msgspec.json.decode(sys.stdin.read(), type=list[Body])
results = compile_all(map(lambda body: Grammar(body=body), bodies))
allowed = before + int(sys.argv[1])
eventually(lambda: resident() <= allowed, within_s=20)
print(json.dumps({"grown": resident() - before, "results": sorted(set(results))}))
"""


def a_schema(schema: dict[str, Any]) -> JsonSchema:
    return JsonSchema(text=json.dumps(schema))


def record(number: int, size: int, *, is_required: bool = False) -> dict[str, Any]:
    properties = {f"p{number}_{n}": {"type": "string"} for n in range(size)}
    required = [*properties] if is_required else []
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def many_records(number: int) -> dict[str, Any]:
    first = 2000 * number
    return {"anyOf": [record(first + n, 3, is_required=True) for n in range(2000)]}


@pytest.mark.parametrize(
    ("bodies", "results"),
    [
        ([a_schema({"const": f"<{n}>" + "x" * 500_000}) for n in range(10)], ["InvalidRequest"]),
        ([a_schema(many_records(n)) for n in range(4)], ["MatcherTemplate"]),
        ([a_schema(record(n, 3000)) for n in range(2)], ["InvalidRequest"]),
    ],
    ids=["long literals", "many records", "too many properties"],
)
def test_a_flood_of_large_grammars_leaves_no_more_than_the_cache_may_keep(
    bodies: list[Any], results: list[str]
) -> None:
    allowed = MAX_KEPT_BYTES + SLACK_BYTES

    ran = subprocess.run(
        [sys.executable, "-c", FLOOD, str(allowed)],
        cwd=ROOT,
        input=msgspec.json.encode(bodies).decode(),
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout)
    assert report["results"] == results
    assert report["grown"] <= allowed
