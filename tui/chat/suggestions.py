"""Completions of the text in the prompt: commands with their arguments, and mentioned files."""

from __future__ import annotations

import asyncio

from textual import work
from textual.content import Content
from textual.message import Message
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from localgen.backends.terminal_text import escape_name
from localgen.chat.file_mentions import list_files, matching_files, typed_mention
from localgen.tui.chat.shell_command import is_prompt, is_shell_line
from localgen.tui.chat.slash_commands import CompletionSources, command_suggestions

_MAX_ROWS = 50
_SHELL_ROW = (
    "!COMMAND",
    "runs in the shell, its output comes here; a leading space sends the line",
)


class Suggestions(OptionList):
    """Lists completions above the prompt. A click on one posts Chosen."""

    can_focus = False
    DEFAULT_CSS = """
    Suggestions {
        height: auto; max-height: 8; border: none; padding: 0 2; margin: 0;
        background: $panel; color: $text-muted; display: none;
        text-wrap: nowrap; text-overflow: ellipsis;
    }
    """

    class Chosen(Message):
        """text: the whole line of a command, or the path of a file if is_file."""

        def __init__(self, text: str, *, is_file: bool) -> None:
            super().__init__()
            self.text, self.is_file = text, is_file

    def __init__(self, sources: CompletionSources) -> None:
        super().__init__()
        self._sources = sources
        self._mention: tuple[int, str] | None = None  # before the cursor, as typed_mention()
        self._files: list[str] = []

    def show_for(self, text: str, before_cursor: str) -> None:
        """Show the completions of the prompt's text; none hides the list."""
        # neither the shell nor a command reads mentions
        before = self._mention
        self._mention = typed_mention(before_cursor) if is_prompt(text) else None
        if self._mention is None:
            is_shell = is_shell_line(text)
            rows = [_SHELL_ROW] if is_shell else command_suggestions(text, self._sources)
            self._show_rows(rows[:_MAX_ROWS], disabled=is_shell)
            return
        if before is None or before[0] != self._mention[0]:
            self._load_files()  # a new mention: files may have been added
        self._show_files()

    def files(self, typed: str) -> list[str]:
        """Files that match what is typed of a path, the best first; or the one that is marked."""
        marked = self.highlighted_option
        if marked is not None and marked.id is not None and self._mention is not None:
            return [marked.id]
        return matching_files(self._files, typed, _MAX_ROWS)

    def move(self, by: int) -> bool:
        """Mark the next (1) or previous (-1) file. Returns False if none are listed."""
        if self._mention is None or not self.display:
            return False
        if by > 0:
            self.action_cursor_down()
        else:
            self.action_cursor_up()
        return True

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        if event.option.id is not None:
            self.post_message(self.Chosen(event.option.id, is_file=self._mention is not None))

    @work(group="files", exclusive=True)
    async def _load_files(self) -> None:
        self._files = await asyncio.to_thread(list_files)
        self._show_files()

    def _show_files(self) -> None:
        if self._mention is not None:
            found = matching_files(self._files, self._mention[1], _MAX_ROWS)
            self._show_rows([(path, "") for path in found])

    def _show_rows(self, rows: list[tuple[str, str]], *, disabled: bool = False) -> None:
        if not rows and not self.display:
            return  # as at most keys
        self.display = bool(rows)
        self.clear_options()
        width = max((len(text) for text, _ in rows), default=0)
        self.add_options(
            Option(_row_content(text, meaning, width), id=text, disabled=disabled)
            for text, meaning in rows
        )


def _row_content(text: str, meaning: str, width: int) -> Content:
    name = (f"{escape_name(text):<{width}}", "bold $foreground")
    return Content.assemble(name, f"  {meaning}")
