"""Files mentioned in a prompt: which text is sent, and which files are offered."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from localgen.backends.errors import InvalidRequest
from localgen.chat.file_mentions import (
    MAX_FILE_CHARS,
    ExpandedPrompt,
    expand_mentions,
    list_files,
    matching_files,
    mention_of,
    typed_mention,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.py").write_text("one\ntwo\nthree\nfour\n")
    (tmp_path / "my notes.md").write_text("# Notes\n```\ncode\n```\n")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "b.py").write_text("b = 1\n")
    return tmp_path


def test_a_file_is_sent_below_the_prompt(folder: Path) -> None:
    sent = expand_mentions("explain @a.py", folder)
    assert sent.text == "explain @a.py\n\na.py:\n```py\none\ntwo\nthree\nfour\n```"
    assert sent.notices == ("attached a.py (4 lines)",)


@pytest.mark.parametrize(
    ("mention", "title", "body"),
    [
        ("@a.py:2-3", "a.py, lines 2 to 3", "two\nthree"),
        ("@a.py:2", "a.py, lines 2 to 2", "two"),
        ("@a.py:3-99", "a.py, lines 3 to 4", "three\nfour"),
        ("(see @a.py), @src/b.py!", "src/b.py", "b = 1"),
        ("@src/b.py, please", "src/b.py", "b = 1"),
    ],
)
def test_lines_and_punctuation(folder: Path, mention: str, title: str, body: str) -> None:
    assert f"\n\n{title}:\n```py\n{body}\n```" in expand_mentions(mention, folder).text


def test_names_with_spaces_and_longer_fences(folder: Path) -> None:
    text = expand_mentions('sum up @"my notes.md"', folder).text
    assert text.endswith("\n\nmy notes.md:\n````md\n# Notes\n```\ncode\n```\n````")


def test_only_files_below_the_folder_are_sent(folder: Path) -> None:
    assert "one\ntwo" in expand_mentions(f"@{folder}/a.py", folder).text
    (folder / "src" / "link").symlink_to(folder / "a.py")
    for mention in ("@../a.py", f"@{folder}/a.py", "@link"):
        sent = expand_mentions(mention, folder / "src")
        assert sent.text == mention
        assert sent.notices == (f"{mention[1:]} is not below this folder: sent as text",)


def test_a_folder_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert expand_mentions("hello").text == "hello"
    assert list_files() == []
    with pytest.raises(InvalidRequest, match="the current folder is gone"):
        expand_mentions("hello @a.py")


def test_code_is_not_searched_and_nothing_is_sent_twice(folder: Path) -> None:
    quoted = "why?\n```\ncc @a.py\n```"
    assert expand_mentions(quoted, folder).text == quoted
    (folder / "src" / "b.py").write_text("# see @a.py\n")
    once = expand_mentions("explain @src/b.py", folder).text
    assert expand_mentions(once, folder) == ExpandedPrompt(once)
    assert "one\ntwo" not in once


def test_a_file_is_sent_once_and_ranges_of_it_each(folder: Path) -> None:
    sent = expand_mentions("@a.py @a.py and @a.py:1-2 @a.py:4", folder)
    assert [line for line in sent.text.splitlines() if line.startswith("a.py")] == [
        "a.py:",
        "a.py, lines 1 to 2:",
        "a.py, lines 4 to 4:",
    ]
    assert len(sent.notices) == 3


@pytest.mark.parametrize(
    "text", ["@property", "me@a.py", "a @ b", "@", "@src", "no @someone.", "@a:"]
)
def test_other_words_are_left_alone(folder: Path, text: str) -> None:
    sent = expand_mentions(text, folder)
    assert (sent.text, sent.notices) == (text, ())


@pytest.mark.parametrize("word", ["@types/node", "@gone.py:1-2", "@src/gone.py", "@mian.py"])
def test_a_path_that_does_not_exist_is_reported(folder: Path, word: str) -> None:
    sent = expand_mentions(f"what is {word}", folder)
    assert sent.text == f"what is {word}"
    assert sent.notices == (f"no file {word[1:]}: sent as text",)


@pytest.mark.parametrize(
    ("content", "mention", "message"),
    [
        (b"\xff\xfe\x00", "@x", "not a text file"),
        (b"a\0b", "@x", "not a text file"),
        (b"a" * (MAX_FILE_CHARS + 1), "@x", "mention some lines"),
        (b"a\nb\n", "@x:3-4", "has fewer lines"),
        (b"a\nb\n", "@x:2-1", "give the first line and the last"),
        (b"a\nb\n", "@x:0-1", "give the first line and the last"),
        (b"a\nb\n", "@x:5-999999999", "has fewer lines"),
    ],
    ids=["utf-16", "nul", "long", "after-the-end", "backwards", "zero", "large-numbers"],
)
def test_files_that_cannot_be_sent(
    tmp_path: Path, content: bytes, mention: str, message: str
) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(InvalidRequest, match=message):
        expand_mentions(mention, tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read all files")
def test_a_file_without_permission(folder: Path) -> None:
    (folder / "a.py").chmod(0)
    with pytest.raises(InvalidRequest, match=r"cannot read a\.py"):
        expand_mentions("@a.py", folder)


def test_a_fifo_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert expand_mentions("@pipe", tmp_path).text == "@pipe"


def test_lines_far_into_a_large_file(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("".join(f"line {n}\n" for n in range(1, 300_001)))
    assert "\nline 299999\nline 300000\n" in expand_mentions("@x:299999-300000", tmp_path).text


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("see @", (4, "")),
        ("see @src/b", (4, "src/b")),
        ('see @"my no', (4, "my no")),
        ("see @a.py ", None),
        ("me@a.py", None),
        ('see @"my notes.md"', None),
        ("see @a.py\n", None),
    ],
)
def test_typed_mention(text: str, found: tuple[int, str] | None) -> None:
    assert typed_mention(text) == found


def test_mention_of_a_name_with_spaces(folder: Path) -> None:
    assert mention_of("a.py") == "@a.py"
    assert expand_mentions(mention_of("my notes.md"), folder).notices


def test_files_outside_of_a_repository(folder: Path) -> None:
    (folder / ".git").write_text("not a repository")  # nor is one above it
    (folder / ".hidden").mkdir()
    (folder / ".hidden" / "c").write_text("")
    assert list_files(folder) == [".git", "a.py", "my notes.md", "src/b.py"]


def test_files_of_a_repository_without_ignored_ones(folder: Path) -> None:
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    (folder / ".gitignore").write_text("*.md\n")
    assert sorted(list_files(folder)) == [".gitignore", "a.py", "src/b.py"]
    assert list_files(folder / "src") == ["b.py"]


def test_best_match_first() -> None:
    files = ["lib/core/a.py", "core.py", "src/encore.py", "c/o/r/e.txt", "README.md"]
    assert matching_files(files, "core", 10) == [
        "core.py",
        "src/encore.py",
        "lib/core/a.py",
        "c/o/r/e.txt",
    ]
    assert matching_files(files, "CORE", 1) == ["core.py"]
    assert matching_files(files, "", 2) == ["core.py", "README.md"]
    assert matching_files(files, "zz", 2) == []
    assert matching_files(["a" * 4000], "a" * 30 + "z", 2) == []  # at once


def test_lines_are_those_of_an_editor(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("one\x0cstill\u2028one\ntwo\nthree\n", encoding="utf-8")
    sent = expand_mentions("@x:1-2", tmp_path)
    assert "x, lines 1 to 2:" in sent.text
    assert sent.notices == ("attached x (2 lines)",)


def test_line_numbers_without_end_are_no_range(folder: Path) -> None:
    assert expand_mentions("@a.py:1-" + "9" * 5000, folder).text.startswith("@a.py:1-999")


def test_a_path_with_a_conflict_is_listed_once(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        command = ["git", "-c", "user.name=n", "-c", "user.email=e@e", *arguments]
        subprocess.run(command, cwd=tmp_path, check=arguments[0] != "merge", capture_output=True)

    def commit(text: str) -> None:
        (tmp_path / "f.txt").write_text(text)
        git("add", "f.txt")
        git("commit", "-qm", text)

    git("init", "-q", "-b", "main")
    commit("a")
    git("checkout", "-q", "-b", "other")
    commit("b")
    git("checkout", "-q", "main")
    commit("c")
    git("merge", "other")
    assert list_files(tmp_path) == ["f.txt"]


def test_names_that_cannot_be_mentioned_are_not_offered(tmp_path: Path) -> None:
    for name in ('a "b" c', "a\nb", "good"):
        (tmp_path / name).write_text("")
    assert list_files(tmp_path) == ["good"]
