"""Greedy text of localgen beside llama.cpp's own llama-completion, on the built-in model.

python -m benchmarks.greedy [--tools DIR]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks import llamacpp_tools
from benchmarks.llamacpp_tools import ToolFailed, Tools
from benchmarks.servers import private_settings
from localgen.backends.model_info import LoadOptions
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.text.template import ChatTemplate
from localgen.backends.types import Message
from localgen.client import Client, TextDelta
from localgen.hub.resolve import BUILT_IN_MODEL, BUILT_IN_PATH

QUESTIONS = Path(__file__).parents[1] / "tests" / "data" / "questions.jsonl"
MAX_TOKENS = 120


@dataclass(frozen=True, slots=True)
class Comparison:
    """The two texts for one prompt."""

    prompt: str
    ours: str
    theirs: str


def main() -> int:
    """Compare all questions; the status is 1 if a text differs."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.greedy")
    parser.add_argument("--tools", type=Path, help="folder with llama-completion")
    try:
        tools = Tools(parser.parse_args().tools or llamacpp_tools.build())
        compared = compare(tools)
    except ToolFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    different = [c for c in compared if c.ours != c.theirs]
    for c in different:
        print(
            f"prompt {c.prompt!r}\n  localgen         {c.ours!r}\n  llama-completion {c.theirs!r}"
        )
    print(f"{len(compared) - len(different)} of {len(compared)} greedy texts are equal")
    return 1 if different else 0


def compare(tools: Tools) -> list[Comparison]:
    """Every question through both."""
    with private_settings() as settings, Client(settings) as client:
        client.connect()
        info = client.load(BUILT_IN_MODEL, LoadOptions(), lambda _share: None)
        assert info.chat_template is not None
        template = ChatTemplate(info.chat_template)
        prompts = [template.render(chat) for chat in _chats()]
        ours = [_ours(client, prompt) for prompt in prompts]
        client.shutdown()
    theirs = [_theirs(tools, prompt) for prompt in prompts]
    return [Comparison(*texts) for texts in zip(prompts, ours, theirs, strict=True)]


def _chats() -> list[list[Message]]:
    lines = QUESTIONS.read_text(encoding="utf-8").splitlines()
    return [[Message(**message) for message in json.loads(line)["messages"]] for line in lines]


def _ours(client: Client, prompt: str) -> str:
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    events = client.complete(BUILT_IN_MODEL, prompt, params)
    return "".join(event.text for event in events if isinstance(event, TextDelta)).strip()


def _theirs(tools: Tools, prompt: str) -> str:
    with tempfile.NamedTemporaryFile("w", encoding="utf-8") as file:
        file.write(prompt)
        file.flush()
        command = tools.command(
            "llama-completion", "-m", str(BUILT_IN_PATH), "-f", file.name, "-n", str(MAX_TOKENS),
            "--temp", "0", "-no-cnv", "--no-display-prompt",
        )  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise ToolFailed(f"llama-completion ended with status {done.returncode}")
    return done.stdout.strip().removesuffix("[end of text]").strip()


if __name__ == "__main__":
    sys.exit(main())
