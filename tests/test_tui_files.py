"""Files and output of the shell in the prompt of the TUI."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from scripted_client import answer
from textual.pilot import Pilot
from textual.widgets._footer import FooterKey
from tui_chats import Tui, notice_text, play

from localgen.tui.chat.suggestions import Suggestions


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "main.py").write_text("print(1)\nprint(2)\n")
    (folder / "my notes.md").write_text("Notes\n")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("SHELL", "/bin/sh")
    return folder


def footer(tui: Tui) -> list[str]:
    return [key.description for key in tui.main.query(FooterKey)]


def suggested(tui: Tui) -> list[str]:
    listed = tui.main.query_one(Suggestions)
    return [str(option.id) for option in listed.options] if listed.display else []


async def type_keys(pilot: Pilot[None], text: str) -> None:
    await pilot.press(*text)


def test_a_mentioned_file_is_completed_and_sent(tmp_path: Path, folder: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.type(pilot, "explain @")
        await tui.until(lambda: suggested(tui) == ["main.py", "my notes.md"])
        await pilot.press("m", "p", "y")
        assert suggested(tui) == ["main.py"]
        await pilot.press("tab")
        assert tui.prompt_text == "explain @main.py "
        assert suggested(tui) == []
        await pilot.press("enter")
        await tui.wait_until_idle(pilot)
        assert tui.asked == ["explain @main.py \n\nmain.py:\n```py\nprint(1)\nprint(2)\n```"]
        assert notice_text(tui) == "attached main.py (2 lines)"
        await pilot.press("up")
        assert tui.prompt_text == "explain @main.py "

    play(Tui(tmp_path, ("It prints.", answer())), scene)


def test_a_file_is_chosen_in_the_middle_of_a_prompt(tmp_path: Path, folder: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.type(pilot, "sum up  please")
        await pilot.press(*["left"] * 7, "@")
        await tui.until(lambda: "my notes.md" in suggested(tui))
        tui.main.query_one(Suggestions).action_select()  # nothing is highlighted: no effect
        await pilot.click(Suggestions, offset=(4, 1))
        await pilot.pause()
        assert tui.prompt_text == 'sum up @"my notes.md"  please'
        await type_keys(pilot, "x")
        assert tui.prompt_text == 'sum up @"my notes.md" x please'

    play(Tui(tmp_path), scene)


def test_arrows_choose_a_file(tmp_path: Path, folder: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.type(pilot, "see @m")
        await tui.until(lambda: suggested(tui) == ["main.py", "my notes.md"])
        await pilot.press("down", "down", "up", "down", "tab")
        assert tui.prompt_text == 'see @"my notes.md" '
        await pilot.press("up")  # no list: the history, which is empty
        assert tui.prompt_text == 'see @"my notes.md" '

    play(Tui(tmp_path), scene)


def test_files_are_listed_anew_for_each_mention(tmp_path: Path, folder: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.type(pilot, "@m")
        await tui.until(lambda: suggested(tui) == ["main.py", "my notes.md"])
        (folder / "new.txt").write_text("")
        (folder / "main.py").unlink()
        await tui.type(pilot, " @new")
        await tui.until(lambda: suggested(tui) == ["new.txt"])

    play(Tui(tmp_path), scene)


def test_a_file_that_cannot_be_sent_leaves_the_prompt(tmp_path: Path, folder: Path) -> None:
    (folder / "picture.png").write_bytes(b"\x89PNG\r\n\x00")

    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.ask(pilot, "what is on @picture.png")
        assert "picture.png is not a text file" in notice_text(tui)
        assert tui.prompt_text == "what is on @picture.png"
        assert tui.asked == []

    play(Tui(tmp_path), scene)


def test_output_of_the_shell_comes_into_the_prompt(tmp_path: Path, folder: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.type(pilot, "!ls; printf '\\033[1mbold\\033[0m'; exit 3")
        assert suggested(tui) == ["!COMMAND"]
        await pilot.press("enter")
        await tui.until(lambda: tui.prompt_text)
        block = "main.py\nmy notes.md\nbold\n[exit status 3]\n```\n"
        assert tui.prompt_text.endswith(block)
        assert tui.prompt_text.startswith("```console\n$ ls; printf")
        assert notice_text(tui) == ""
        assert tui.asked == []
        await type_keys(pilot, "why")
        assert tui.prompt_text.endswith("```\nwhy")

    play(Tui(tmp_path), scene)


@pytest.mark.parametrize("line", ["true", "sleep 0.5"])  # before and after the output is put
def test_a_shell_line_is_stopped_with_its_children(tmp_path: Path, folder: Path, line: str) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.type(pilot, "!echo begun; sleep 1000 | cat")
        await pilot.press("enter")
        await tui.until(lambda: "Ctrl+C stops it" in notice_text(tui))
        await tui.type(pilot, f"!{line}")
        await pilot.press("enter")
        await tui.until(lambda: "is still running" in notice_text(tui))
        assert tui.prompt_text == f"!{line}"
        await pilot.press("ctrl+c")
        await tui.until(lambda: "is done: send or clear" in notice_text(tui))
        await pilot.press("enter")
        await tui.until(lambda: "[stopped]" in tui.prompt_text and f"$ {line}" in tui.prompt_text)
        assert tui.prompt_text.index("begun") < tui.prompt_text.index(f"$ {line}")

    play(Tui(tmp_path), scene)


@pytest.mark.parametrize("typed", ["/comp", "!true"])
def test_output_waits_for_a_command_that_is_being_typed(
    tmp_path: Path, folder: Path, typed: str
) -> None:
    gate = tmp_path / "gate"

    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.type(pilot, f"!until [ -e {gate} ]; do sleep 0.01; done; echo done")
        await pilot.press("enter")
        await tui.until(lambda: "Ctrl+C stops it" in notice_text(tui))
        await tui.type(pilot, typed)
        gate.touch()
        await tui.until(lambda: "is done: send or clear" in notice_text(tui))
        assert tui.prompt_text == typed
        await pilot.press("ctrl+u")
        await tui.until(lambda: "\ndone\n```" in tui.prompt_text)

    play(Tui(tmp_path), scene)


def test_output_that_waits_is_kept_by_quitting(tmp_path: Path, folder: Path) -> None:
    gate = tmp_path / "gate"

    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.type(pilot, f"!until [ -e {gate} ]; do sleep 0.01; done; echo done")
        await pilot.press("enter")
        await tui.until(lambda: "Ctrl+C stops it" in notice_text(tui))
        await tui.type(pilot, "/comp")
        gate.touch()
        await tui.until(lambda: "is done: send or clear" in notice_text(tui))
        await pilot.press("ctrl+q")
        await tui.until(lambda: not tui.app.is_running)
        kept = tui.store.load_unsent_prompt(tui.opened.id)
        assert "\ndone\n```" in kept
        assert kept.endswith("/comp")

    play(Tui(tmp_path), scene)


def test_a_shell_line_without_a_command(tmp_path: Path, folder: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.type(pilot, "! ")
        await pilot.press("enter")
        await tui.until(lambda: "give a command after !" in notice_text(tui))
        assert not tui.asked

    play(Tui(tmp_path), scene)


@pytest.mark.parametrize(
    ("command", "output"),
    [("printf 'a: 1\\r\\nb: 2\\r\\n'", "a: 1\nb: 2"), ("printf '10%%\\r99%%'", "99%")],
)
def test_line_ends_of_other_systems(
    tmp_path: Path, folder: Path, command: str, output: str
) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.type(pilot, f"!{command}")
        await pilot.press("enter")
        await tui.until(lambda: tui.prompt_text)
        assert tui.prompt_text == f"```console\n$ {command}\n{output}\n```\n"

    play(Tui(tmp_path), scene)


def test_a_child_in_the_background_is_stopped(tmp_path: Path, folder: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.type(pilot, "!sleep 1000 & echo $!")
        await pilot.press("enter")
        await tui.until(lambda: "Ctrl+C stops it" in notice_text(tui))
        await tui.until(lambda: "Stop" in footer(tui))
        assert "!sleep 1000 & echo $! is running · context" in tui.screen_text()
        await pilot.press("ctrl+q")
        await tui.until(lambda: "sleep 1000 & echo $! is still running" in tui.screen_text())
        await pilot.press("n")
        await pilot.press("ctrl+c")
        await tui.until(lambda: "[stopped]" in tui.prompt_text)
        await tui.until(lambda: "Quit" in footer(tui))

    play(Tui(tmp_path), scene)


def test_a_line_that_no_shell_can_run(tmp_path: Path, folder: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.type(pilot, "!echo \0")
        await pilot.press("enter")
        await tui.until(lambda: "cannot run this line" in notice_text(tui))

    play(Tui(tmp_path), scene)


def test_several_lines_are_a_prompt(tmp_path: Path, folder: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.ask(pilot, "!echo a\nimport this")
        assert tui.asked == ["!echo a\nimport this"]

    play(Tui(tmp_path, ("Yes.", answer())), scene)


def test_neither_the_shell_nor_a_command_reads_mentions(tmp_path: Path, folder: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        for text in ("!cat @main", "/set system see @main"):
            tui.prompt.text = ""
            await tui.type(pilot, text)
            await pilot.press("tab")
            assert tui.prompt_text == text
        tui.prompt.text = ""
        await tui.type(pilot, "/usr/bin or @main")
        await tui.until(lambda: "main.py" in tui.screen_text())
        await pilot.press("tab")
        assert tui.prompt_text == "/usr/bin or @main.py "

    play(Tui(tmp_path), scene)


def test_a_prompt_that_comes_back_sends_its_file_once(tmp_path: Path, folder: Path) -> None:
    gate = threading.Event()

    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.type(pilot, "first")
        await pilot.press("enter")
        await tui.until(lambda: tui.asked == ["first"])
        await tui.type(pilot, "see @main.py")
        await pilot.press("enter", "ctrl+c")
        await tui.until(lambda: tui.prompt_text == "see @main.py")
        await tui.wait_until_idle(pilot)
        await pilot.press("enter")
        await tui.wait_until_idle(pilot)
        assert tui.asked[-1].count("print(1)") == 1

    play(Tui(tmp_path, (gate, answer()), ("Yes.", answer())), scene)


def test_a_leading_space_sends_the_line(tmp_path: Path, folder: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.ask(pilot, " !ls")
        assert tui.asked == [" !ls"]

    play(Tui(tmp_path, ("Yes.", answer())), scene)


def test_long_output_is_cut_at_its_start(tmp_path: Path, folder: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.type(pilot, "!seq 100000")
        await pilot.press("enter")
        await tui.until(lambda: tui.opened.unsent_prompt)
        text = tui.main.query_one("#prompt").full_text  # type: ignore[attr-defined]
        assert "bytes before this left out]" in text
        assert text.endswith("\n99999\n100000\n```\n")
        assert len(text) < 101_000

    play(Tui(tmp_path), scene)


def test_without_a_shell(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHELL", "/nowhere/sh")

    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.ask(pilot, "!ls")
        await tui.until(lambda: "cannot run /nowhere/sh" in notice_text(tui))

    play(Tui(tmp_path), scene)
