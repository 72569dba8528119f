"""A server of the Model Context Protocol over stdin and stdout, with one tool: `read_note` returns
the content of note.txt in the working directory."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

TOOL = {
    "name": "read_note",
    "description": "Returns the note.",
    "inputSchema": {"type": "object", "properties": {"path": {"type": "string"}}},
}


def result_of(request: dict[str, Any]) -> dict[str, Any]:
    match request["method"]:
        case "initialize":
            return {
                "protocolVersion": request["params"]["protocolVersion"],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "notes", "version": "1"},
            }
        case "tools/list":
            return {"tools": [TOOL]}
        case "tools/call":
            return {"content": [{"type": "text", "text": Path("note.txt").read_text()}]}
        case _:
            return {}


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        if "id" in request:
            answer = {"jsonrpc": "2.0", "id": request["id"], "result": result_of(request)}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
