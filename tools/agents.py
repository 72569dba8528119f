"""The settings with which coding agents use a server, for one session.

Each agent is a row of AGENTS. Its settings are arguments and environment variables of its process,
and for Cline a file in a private folder, so nothing is written to the user's own settings. The
names of options and variables are from the agents' documentation and `--help`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

NO_KEY = "none"
"""Key for a server without keys: agents refuse to start without one."""
ANSWER_SHARE = 4
"""For an agent that needs a limit for answers, the limit is the context divided by this number."""


@dataclass(frozen=True, slots=True)
class AgentServer:
    """The server of a session.

    url      "http://host:port"
    model    name of the model in its API
    max_len  tokens of prompt and answer together
    key      API key; "": the server needs none
    """

    url: str
    model: str
    max_len: int
    key: str = ""

    @property
    def api_key(self) -> str:
        return self.key or NO_KEY


@dataclass(frozen=True, slots=True)
class AgentSession:
    """The settings with which an agent's process is started.

    arguments    arguments before those of the user
    environment  variables that are added
    folder       argument before the path of a private folder; "": none is needed
    files        path in that folder -> content
    """

    arguments: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    folder: str = ""
    files: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CodingAgent:
    """A coding agent.

    program  name of its program
    about    its name
    install  command that installs it
    tested   version with which it was tested
    session  returns the settings for a server
    """

    program: str
    about: str
    install: str
    tested: str
    session: Callable[[AgentServer], AgentSession]


def _codex(server: AgentServer) -> AgentSession:
    provider = {
        "name": "Tidegate",
        "base_url": f"{server.url}/v1",
        "wire_api": "responses",
        "env_key": "TIDEGATE_API_KEY",
    }
    settings: dict[str, Any] = {f"model_providers.tidegate.{k}": v for k, v in provider.items()}
    settings |= {
        "model_provider": "tidegate",
        "model": server.model,
        "model_context_window": server.max_len,
    }
    pairs = [f"{name}={json.dumps(value)}" for name, value in settings.items()]
    arguments = [word for pair in pairs for word in ("-c", pair)]
    return AgentSession(arguments, {"TIDEGATE_API_KEY": server.api_key})


def _claude(server: AgentServer) -> AgentSession:
    models = ("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL")
    tiers = [f"ANTHROPIC_DEFAULT_{tier}_MODEL" for tier in ("OPUS", "SONNET", "HAIKU")]
    return AgentSession(
        environment={
            "ANTHROPIC_BASE_URL": server.url,
            "ANTHROPIC_AUTH_TOKEN": server.api_key,
            **dict.fromkeys((*models, *tiers), server.model),
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(server.max_len),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        }
    )


def _opencode(server: AgentServer) -> AgentSession:
    limit = {"context": server.max_len, "output": server.max_len // ANSWER_SHARE}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Tidegate",
        "options": {"baseURL": f"{server.url}/v1", "apiKey": server.api_key},
        "models": {server.model: {"name": server.model, "limit": limit}},
    }
    name = f"tidegate/{server.model}"
    config = {"model": name, "small_model": name, "provider": {"tidegate": provider}}
    return AgentSession(environment={"OPENCODE_CONFIG_CONTENT": json.dumps(config)})


def _openai_environment(server: AgentServer, url_variable: str) -> dict[str, str]:
    return {url_variable: f"{server.url}/v1", "OPENAI_API_KEY": server.api_key}


def _qwen(server: AgentServer) -> AgentSession:
    environment = _openai_environment(server, "OPENAI_BASE_URL")
    environment["OPENAI_MODEL"] = server.model
    return AgentSession(["--auth-type", "openai"], environment)


def _aider(server: AgentServer) -> AgentSession:
    arguments = ["--model", f"openai/{server.model}", "--no-show-model-warnings"]
    return AgentSession(arguments, _openai_environment(server, "OPENAI_API_BASE"))


def _cline(server: AgentServer) -> AgentSession:
    kind = "openai-compatible"
    settings = {
        "provider": kind,
        "apiKey": server.api_key,
        "model": server.model,
        "baseUrl": f"{server.url}/v1",
    }
    updated = "2026-01-01T00:00:00.000Z"  # Cline ignores the file without it
    providers = {kind: {"settings": settings, "updatedAt": updated, "tokenSource": "manual"}}
    chosen = {"version": 1, "lastUsedProvider": kind, "modes": {}, "providers": providers}
    return AgentSession(
        ["-P", kind, "-m", server.model],
        folder="--data-dir",
        files={"settings/providers.json": json.dumps(chosen)},
    )


AGENTS: Mapping[str, CodingAgent] = {
    "codex": CodingAgent("codex", "Codex CLI", "npm install -g @openai/codex", "0.171.0", _codex),
    "claude": CodingAgent(
        "claude", "Claude Code", "npm install -g @anthropic-ai/claude-code", "2.1.197", _claude
    ),
    "opencode": CodingAgent(
        "opencode", "opencode", "npm install -g opencode-ai", "1.18.33", _opencode
    ),
    "qwen": CodingAgent(
        "qwen", "Qwen Code", "npm install -g @qwen-code/qwen-code", "0.24.4", _qwen
    ),
    "aider": CodingAgent("aider", "aider", "pip install aider-chat", "0.86.2", _aider),
    "cline": CodingAgent("cline", "Cline CLI", "npm install -g cline", "3.0.65", _cline),
}
"""Name of an agent -> the agent, in the order of `--help`."""
