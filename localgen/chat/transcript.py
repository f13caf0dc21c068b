"""A conversation as Markdown."""

from __future__ import annotations

from localgen.chat.conversation import Conversation


def transcript_markdown(name: str, conversation: Conversation) -> str:
    """The transcript of a session as Markdown, with reasoning in collapsed sections."""
    parts = [f"# {name}\n"]
    if conversation.system:
        parts.append(f"System prompt:\n\n{_blockquote(conversation.system)}\n")
    for turn in conversation.turns:
        parts.append(f"## You\n\n{turn.prompt}\n")
        thought = (
            f"<details><summary>Reasoning</summary>\n\n{turn.reasoning}\n\n</details>\n\n"
            if turn.reasoning
            else ""
        )
        served = f"\n\n*{' · '.join(turn.summary.splitlines())}*" if turn.summary else ""
        parts.append(f"## Answer\n\n{thought}{turn.answer}{served}\n")
    return "\n".join(parts)


def _blockquote(text: str) -> str:
    return "\n".join(f"> {line}" for line in text.splitlines())
