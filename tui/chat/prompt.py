"""The prompt editor: several lines, history, completion, and pastes of any size."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence
from typing import ClassVar, cast

from textual import events
from textual._ansi_sequences import ANSI_SEQUENCES_KEYS
from textual.binding import Binding, BindingType
from textual.keys import Keys
from textual.message import Message
from textual.widgets import TextArea

from localgen.chat.file_mentions import mention_of, typed_mention
from localgen.tui.chat.shell_command import is_prompt
from localgen.tui.key_file import with_names
from localgen.tui.widgets.jump import JumpOverlay
from localgen.tui.widgets.text_field import TextField

# Alt+Enter as terminals send it; Textual would read it as Enter
cast(dict[str, object], ANSI_SEQUENCES_KEYS)["\x1b\r"] = (Keys.ControlJ,)
# longer pastes are folded: the editor would redraw all of it on every key press
FOLD_PASTE_CHARS = 4_000
_FOLDED_PASTE = re.compile(r"⟦paste (\d+): [\d,]+ characters⟧")
_FOLD_AT_END = re.compile(_FOLDED_PASTE.pattern + r"\Z")


def _keys_of(bindings: Sequence[BindingType]) -> frozenset[str]:
    listed = [each.key.split(",") for each in bindings if isinstance(each, Binding)]
    return frozenset(key for keys in listed for key in keys)


class Prompt(TextField):
    """Posts Submitted on Enter.

    completions: returns completions of a text that starts with `/`. find_files: returns files that
    match what is typed after `@`, the best first. move_suggestion: marks the next (1) or previous
    (-1) of them; False if none are listed.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "send", "Send", show=False),
        *with_names(
            Binding("ctrl+j,shift+enter,alt+enter", "newline", "New line", show=False),
            Binding("tab", "complete", "Complete a command or a file", show=False),
            Binding("up", "previous_prompt", "Earlier prompt, on the first line", show=False),
            Binding("down", "next_prompt", "Later prompt, on the last line", show=False),
            # keys that TextArea binds to editing functions a prompt does not need
            Binding("ctrl+f", "app.search", "Search"),
            Binding("ctrl+y", "app.copy", "Copy the last answer, then its code", show=False),
            Binding("ctrl+x", "cut_or_answer", "End the reasoning: answer now", show=False),
            Binding("pageup", "screen.scroll(-1)", "Scroll back", show=False, id="scroll_back"),
            Binding(
                "pagedown", "screen.scroll(1)", "Scroll forward", show=False, id="scroll_forward"
            ),
            Binding("f6", "screen.toggle_gauges", "Show or hide gauges", show=False),
            Binding("f7", "screen.toggle_sessions", "Show or hide sessions", show=False),
        ),
    ]
    # with which the text is edited
    EDITING_KEYS = _keys_of(TextArea.BINDINGS) - _keys_of(BINDINGS)
    DEFAULT_CSS = """
    Prompt {
        height: auto; min-height: 3; max-height: 10; border: round $border;
        padding: 0 1; background: $background; scrollbar-size-vertical: 1;
    }
    Prompt:focus { border: round $primary; }
    """

    class Submitted(Message):
        """A prompt or a command, with its pastes expanded."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    def __init__(
        self,
        completions: Callable[[str], list[str]],
        find_files: Callable[[str], list[str]] = lambda _: [],
        move_suggestion: Callable[[int], bool] = lambda _: False,
        drops_key: Callable[[events.Key], bool] = lambda _: False,
    ) -> None:
        super().__init__(
            id="prompt",
            compact=False,
            show_line_numbers=False,
            highlight_cursor_line=False,
            placeholder="Ask something, / for commands, ? for keys",
        )
        self._completions, self._find_files = completions, find_files
        self._move_suggestion, self._drops_key = move_suggestion, drops_key
        self.starters: Sequence[str] = ()  # texts that Tab puts into an empty prompt, in turn
        self._pastes: dict[int, str] = {}
        self._history: list[str] = []
        self._history_index = 0
        self._draft_text = ""
        self._num_holds = 0
        self._held_keys: deque[events.Key | events.Paste] = deque()

    @property
    def full_text(self) -> str:
        """The text with its pastes expanded."""
        return _FOLDED_PASTE.sub(self._expand_paste, self.text)

    def set_text(self, text: str) -> None:
        """Replace the text; a long one is folded."""
        self._pastes.clear()
        self.text = text if len(text) <= FOLD_PASTE_CHARS else self._fold_paste(text)
        self.move_cursor(self.document.end)

    def set_history(self, prompts: list[str]) -> None:
        """Set the earlier prompts, oldest first."""
        self._history = prompts
        self._history_index = len(prompts)

    def action_send(self) -> None:
        text = self.full_text
        if text.strip():
            self.hold_keys()
            self.post_message(self.Submitted(text))

    def hold_keys(self) -> None:
        """Keep the keys from now on until as many calls of release_keys()."""
        self._num_holds += 1

    def release_keys(self) -> None:
        """Handle the keys that were held, in order, once nothing holds them."""
        self._num_holds -= 1
        self.call_next(self._replay_keys)

    async def _replay_keys(self) -> None:
        while self._held_keys and not self._num_holds:
            await self._act_on(self._held_keys.popleft())

    async def _act_in_order(self, event: events.Key | events.Paste) -> None:
        """Act on a key or a paste, after those that are held."""
        event.prevent_default().stop()
        if self._num_holds or self._held_keys:
            self._held_keys.append(event)
        else:
            await self._act_on(event)

    async def _act_on(self, event: events.Key | events.Paste) -> None:
        await (self._act_on_key(event) if isinstance(event, events.Key) else self._paste(event))

    def mark_submitted(self, text: str) -> None:
        """Add the submitted text to the history and clear the prompt."""
        self._history = [*(entry for entry in self._history if entry != text), text]
        self._history_index = len(self._history)
        self.set_text("")

    def select_refused(self, text: str) -> None:
        """Select the submitted text, so that typing replaces it."""
        if self.full_text == text:
            self.select_all()

    async def action_cut_or_answer(self) -> None:
        """Cut what is selected; without a selection, end the reasoning of the answer."""
        if self.selected_text:
            self.action_cut()
        else:
            await self.run_action("app.answer_now")

    def action_delete_left(self) -> None:
        """Delete a character, or a whole folded paste."""
        begin = _FOLD_AT_END.search(self.text_before_cursor)
        if self.selected_text or begin is None:
            super().action_delete_left()
        else:
            row, column = self.cursor_location
            self.delete((row, column - len(begin[0])), (row, column))

    def action_newline(self) -> None:
        self.insert("\n")

    @property
    def text_before_cursor(self) -> str:
        return self.document.get_text_range((0, 0), self.cursor_location)

    def insert_file(self, path: str) -> None:
        """Complete the mention before the cursor to a path."""
        mention = typed_mention(self.text_before_cursor)
        if mention is not None:
            row, column = self.cursor_location
            typed = len(self.text_before_cursor) - mention[0]
            self.replace(mention_of(path) + " ", (row, column - typed), (row, column))

    def action_complete(self) -> None:
        """Insert the best file, the only completion, or the common prefix of all."""
        mention = typed_mention(self.text_before_cursor)
        if mention is not None and is_prompt(self.text):
            for path in self._find_files(mention[1])[:1]:
                self.insert_file(path)
            return
        found = self._completions(self.text)
        if not found:
            if not self.text or self.text in self.starters:
                self._insert_starter()
            return
        begin = _common_prefix(found)
        self.set_text(begin + (" " if len(found) == 1 else ""))

    def _insert_starter(self) -> None:
        if self.starters:
            at = self.starters.index(self.text) + 1 if self.text else 0
            self.set_text(self.starters[at % len(self.starters)])

    def action_previous_prompt(self) -> None:
        if self._move_suggestion(-1):
            return
        row, column = self.cursor_location
        if (
            row > 0
            or not self._history
            or self.wrapped_document.location_to_offset((row, column)).y
        ):
            self.action_cursor_up()
            return
        if self._history_index == len(self._history):
            self._draft_text = self.full_text
        self._show_history_entry(max(0, self._history_index - 1))

    def action_next_prompt(self) -> None:
        if self._move_suggestion(1):
            return
        at_end = self.cursor_location[0] == self.document.line_count - 1
        if not at_end or self._history_index >= len(self._history):
            self.action_cursor_down()
            return
        self._show_history_entry(self._history_index + 1)

    def check_consume_key(self, key: str, character: str | None = None) -> bool:
        """Leave `?` to the key help while the prompt is empty."""
        return not self._is_help_key(key) and super().check_consume_key(key, character)

    def _is_help_key(self, key: str) -> bool:
        return key == "question_mark" and not self.text

    async def _on_key(self, event: events.Key) -> None:
        await self._act_in_order(event)

    async def _act_on_key(self, event: events.Key) -> None:
        """Edit, or run the key's binding at once: bubbling would let the next key overtake it."""
        if isinstance(self.app.screen, JumpOverlay):  # opened by the key before, in one burst
            self.app.screen.choose(event.key)
        elif event.key == "enter":
            self.action_send()
        elif self._is_help_key(event.key):
            await self.run_action("app.keys")
        elif event.key == "shift+\r":  # Shift+Enter from xterm and tmux
            self.action_newline()
        elif event.is_printable and not event.key.startswith("alt+"):
            await super()._on_key(event)
        elif not self._drops_key(event):
            await self.app._check_bindings(event.key)

    async def _on_paste(self, event: events.Paste) -> None:
        await self._act_in_order(event)

    async def _paste(self, event: events.Paste) -> None:
        text = event.text.replace("\r\n", "\n").replace("\r", "\n")
        self.insert(text if len(text) <= FOLD_PASTE_CHARS else self._fold_paste(text))
        self.focus()

    def _show_history_entry(self, index: int) -> None:
        self._history_index = index
        self.set_text(self._history[index] if index < len(self._history) else self._draft_text)

    def _fold_paste(self, text: str) -> str:
        number = len(self._pastes) + 1
        self._pastes[number] = text
        return f"⟦paste {number}: {len(text):,} characters⟧"

    def _expand_paste(self, found: re.Match[str]) -> str:
        return self._pastes.get(int(found[1]), found[0])


def _common_prefix(found: list[str]) -> str:
    first, last = min(found), max(found)
    same = (at for at, (one, other) in enumerate(zip(first, last, strict=False)) if one != other)
    return first[: next(same, min(len(first), len(last)))]
