"""Coding agents that `localgen launch` starts, and how each is told to use this server.

All settings are variables and arguments of the agent's process: no file of an agent is changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

# a prompt of 20,000 tokens takes minutes on a CPU: agents must not give up and send it again
_TIMEOUT_S = 3600
_KEY_VARIABLE = "AGENT_API_KEY"


@dataclass(frozen=True, slots=True)
class AgentModel:
    """Server and model for an agent. url: base URL without a path. ctx: context in tokens."""

    url: str
    key: str
    name: str
    ctx: int


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """variables: environment variables. arguments: before those of the user."""

    variables: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Agent:
    """program: its command. install: how to install it."""

    program: str
    install: str
    settings: Callable[[AgentModel], AgentSettings]


def without_proxy(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that keep requests to this machine, and the key in them, from a proxy."""
    known = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
    hosts = ",".join(filter(None, (known, "127.0.0.1", "localhost")))
    return {"no_proxy": hosts, "NO_PROXY": hosts}


def _claude(model: AgentModel) -> AgentSettings:
    # its documentation: code.claude.com/docs/en/settings. The attribution header and the reminder
    # of the tokens that are left change with each request, near the beginning of the prompt, which
    # then would be computed again.
    models = ("OPUS", "SONNET", "HAIKU")
    return AgentSettings(
        {
            "ANTHROPIC_BASE_URL": model.url,
            "ANTHROPIC_AUTH_TOKEN": model.key,
            "ANTHROPIC_API_KEY": "",
            "ANTHROPIC_MODEL": model.name,
            **{f"ANTHROPIC_DEFAULT_{kind}_MODEL": model.name for kind in models},
            "CLAUDE_CODE_SUBAGENT_MODEL": model.name,
            # other providers, which would be used instead
            **{f"CLAUDE_CODE_USE_{name}": "" for name in ("BEDROCK", "VERTEX", "FOUNDRY")},
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "CLAUDE_CODE_TOTAL_TOKENS_REMINDER": "off",
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(model.ctx),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "API_TIMEOUT_MS": str(_TIMEOUT_S * 1000),
        },
        ("--model", model.name),
    )


def _codex(model: AgentModel) -> AgentSettings:
    provider = {
        "name": "localgen",
        "base_url": f"{model.url}/v1",
        "env_key": _KEY_VARIABLE,
        "wire_api": "responses",
        "stream_idle_timeout_ms": _TIMEOUT_S * 1000,
        "request_max_retries": 0,
        "stream_max_retries": 0,
    }
    options = {
        "model": model.name,
        "model_provider": "localgen",
        "model_context_window": model.ctx,
        "web_search": "disabled",
        **{f"model_providers.localgen.{name}": value for name, value in provider.items()},
    }
    # a value of TOML: JSON has the same strings and numbers
    given = [f"{name}={json.dumps(value)}" for name, value in options.items()]
    arguments = tuple(part for option in given for part in ("-c", option))
    return AgentSettings({_KEY_VARIABLE: model.key}, arguments)


def _opencode(model: AgentModel) -> AgentSettings:
    options = {
        "baseURL": f"{model.url}/v1",
        "apiKey": f"{{env:{_KEY_VARIABLE}}}",
        "timeout": _TIMEOUT_S * 1000,
    }
    limit = {"context": model.ctx, "output": model.ctx // 4}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "localgen",
        "options": options,
        "models": {model.name: {"name": model.name, "tool_call": True, "limit": limit}},
    }
    name = f"localgen/{model.name}"
    config = {"model": name, "small_model": name, "provider": {"localgen": provider}}
    return AgentSettings({"OPENCODE_CONFIG_CONTENT": json.dumps(config), _KEY_VARIABLE: model.key})


def _aider(model: AgentModel) -> AgentSettings:
    return AgentSettings(
        {
            "OPENAI_API_BASE": f"{model.url}/v1",
            "OPENAI_API_KEY": model.key,
            "AIDER_MODEL": f"openai/{model.name}",
            "AIDER_TIMEOUT": str(_TIMEOUT_S),
            "AIDER_SHOW_MODEL_WARNINGS": "false",
        }
    )


def _goose(model: AgentModel) -> AgentSettings:
    return AgentSettings(
        {
            "GOOSE_PROVIDER": "openai",
            "GOOSE_MODEL": model.name,
            "GOOSE_CONTEXT_LIMIT": str(model.ctx),
            "OPENAI_HOST": model.url,
            "OPENAI_BASE_PATH": "v1/chat/completions",
            "OPENAI_API_KEY": model.key,
            "OPENAI_TIMEOUT": str(_TIMEOUT_S),
        }
    )


AGENTS = {
    "claude": Agent("claude", "npm install -g @anthropic-ai/claude-code", _claude),
    "codex": Agent("codex", "npm install -g @openai/codex", _codex),
    "opencode": Agent("opencode", "npm install -g opencode-ai", _opencode),
    "aider": Agent("aider", "pip install aider-chat", _aider),
    "goose": Agent("goose", "see github.com/block/goose for how to install it", _goose),
}
