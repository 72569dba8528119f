"""The agents, how each is run without a terminal, and how it is installed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import copy

from tests.torture.agents.scenarios import MADE, AgentTools
from tools.agents import AGENTS

MODEL, KNOWN_MODEL = "tg-model", "gpt-5.5"
NOTES_SERVER = Path(__file__).parent / "notes_server.py"
AI_SDK = "ai-sdk"
AI_SDK_SCRIPT = Path(__file__).parent / "ai_sdk.mjs"
AI_SDK_PACKAGES = {
    "ai": "7.0.173",
    "@ai-sdk/openai-compatible": "3.0.92",
    "@ai-sdk/openai": "4.0.118",
    "@ai-sdk/anthropic": "4.0.105",
    "zod": "4.6.7",
}
"""npm package -> tested version. The first one's is the version of the SDK."""


@dataclass(frozen=True)
class AgentVariant:
    """A row of the table.

    agent    name in AGENTS, or AI_SDK
    command  command that is started in place of `tidegate launch`, before the arguments of `tools`
    """

    agent: str
    model: str
    tools: AgentTools
    command: Sequence[str] = ()


PATCH = f"*** Begin Patch\n*** Add File: {MADE}\n+hello\n*** End Patch\n"
_FREE = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
_NOTES = (
    *("-c", f"mcp_servers.notes.command={json.dumps(sys.executable)}"),
    *("-c", f"mcp_servers.notes.args={json.dumps([str(NOTES_SERVER)])}"),
)
_CODEX = AgentTools(
    run=("exec", *_FREE),
    resume=("exec", "resume", "--last", *_FREE),
    shell="exec_command",
    arguments=lambda command: {"cmd": command},
    write=lambda folder: ("exec_command", {"cmd": f"echo hello > {MADE}"}),
)
_AI_SDK_TOOLS = AgentTools(
    run=(),
    shell="shell",
    arguments=lambda command: {"command": command},
    write=lambda folder: ("write", {"path": f"{folder}/{MADE}", "content": "hello\n"}),
)
VARIANTS: Mapping[str, AgentVariant] = {
    "codex": AgentVariant("codex", MODEL, _CODEX),
    "codex, known model": AgentVariant(
        "codex",
        KNOWN_MODEL,
        AgentTools(
            run=_CODEX.run,
            resume=_CODEX.resume,
            shell="exec_command",
            arguments=_CODEX.arguments,
            write=lambda folder: ("apply_patch", {"input": PATCH}),
        ),
    ),
    "codex, MCP server": AgentVariant(
        "codex",
        MODEL,
        AgentTools(
            run=("exec", *_FREE, *_NOTES),
            shell="mcp__notes__read_note",
            arguments=lambda command: {"path": command},
        ),
    ),
    "claude": AgentVariant(
        "claude",
        MODEL,
        AgentTools(
            run=("-p", "--dangerously-skip-permissions"),
            resume=("-c", "-p", "--dangerously-skip-permissions"),
            shell="Bash",
            arguments=lambda command: {"command": command, "description": "x"},
            write=lambda folder: (
                "Write",
                {"file_path": f"{folder}/{MADE}", "content": "hello\n"},
            ),
        ),
    ),
    "opencode": AgentVariant(
        "opencode",
        MODEL,
        AgentTools(
            run=("run",),
            resume=("run", "--continue"),
            shell="bash",
            arguments=lambda command: {"command": command, "description": "x"},
            write=lambda folder: (
                "write",
                {"filePath": f"{folder}/{MADE}", "content": "hello\n"},
            ),
        ),
    ),
    "qwen": AgentVariant(
        "qwen",
        MODEL,
        AgentTools(
            run=("--yolo", "-p"),
            resume=("--continue", "--yolo", "-p"),
            shell="run_shell_command",
            arguments=lambda command: {"command": command, "is_background": False},
            write=lambda folder: (
                "write_file",
                {"file_path": f"{folder}/{MADE}", "content": "hello\n"},
            ),
        ),
    ),
    "cline": AgentVariant(
        "cline",
        MODEL,
        AgentTools(
            run=(),
            shell="run_commands",
            arguments=lambda command: {"commands": [command]},
        ),
    ),
    "aider": AgentVariant(
        "aider",
        MODEL,
        AgentTools(
            run=("--yes-always", "--no-check-update", "--edit-format", "whole", "--message"),
            text=f"{MADE}\n```\nhello\n```\n",
        ),
    ),
    **{
        f"{AI_SDK}, {api}": AgentVariant(
            AI_SDK,
            MODEL,
            _AI_SDK_TOOLS,
            ("node", f"{AI_SDK}/{AI_SDK_SCRIPT.name}", api, MODEL),
        )
        for api in ("chat", "responses", "messages")
    },
}
"""Name of the row -> the row."""
INSTALLED_AS = {
    "codex": "@openai/codex",
    "claude": "@anthropic-ai/claude-code",
    "opencode": "opencode-ai",
    "qwen": "@qwen-code/qwen-code",
    "cline": "cline",
}


def about(name: str) -> str:
    """Return an agent's name for people."""
    return "AI SDK" if name == AI_SDK else AGENTS[name].about


def tested(name: str) -> str:
    """Return the version with which an agent was tested."""
    return AI_SDK_PACKAGES["ai"] if name == AI_SDK else AGENTS[name].tested


def row_name(variant: str) -> str:
    """Return the name of an agent and its version, as docs/use/agents.md has it."""
    name, _, note = variant.partition(", ")
    return f"{about(name)} {tested(name)}{f', {note}' if note else ''}"


def install(folder: Path, name: str, *, newest: bool) -> str:
    """Install an agent into `folder`, unless it is there. Return the version; "" if that fails."""
    if name == "aider":
        return _install_aider(folder, newest=newest)
    home = folder / name
    if name == AI_SDK:
        version = _install_packages(home, AI_SDK_PACKAGES, newest=newest)
        copy(AI_SDK_SCRIPT, home)
        return version
    return _install_packages(home, {INSTALLED_AS[name]: tested(name)}, newest=newest)


def _install_packages(home: Path, packages: Mapping[str, str], *, newest: bool) -> str:
    """Install npm packages, and return the version of the first one; "" if that fails."""
    home.mkdir(parents=True, exist_ok=True)
    if newest or not (home / "node_modules").exists():
        wanted = [f"{name}@{'latest' if newest else packages[name]}" for name in packages]
        command = ["npm", "install", "--no-fund", "--no-audit", "--prefix", str(home), *wanted]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            return ""
    data = (home / "node_modules" / next(iter(packages)) / "package.json").read_text()
    found = re.search(r'"version":\s*"([^"]+)"', data)
    return found[1] if found else ""


def _install_aider(folder: Path, *, newest: bool) -> str:
    home = folder / "aider"
    pip = home / "bin" / "pip"
    if newest or not (home / "bin" / "aider").exists():
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        package = "aider-chat" if newest else f"aider-chat=={AGENTS['aider'].tested}"
        done = subprocess.run([pip, "install", "-q", package], capture_output=True, check=False)
        if done.returncode:
            return ""
    shown = subprocess.run(
        [pip, "show", "aider-chat"], capture_output=True, text=True, check=False
    ).stdout
    found = re.search(r"^Version: (\S+)", shown, re.MULTILINE)
    return found[1] if found else ""
