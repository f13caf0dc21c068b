"""`localgen kv`: what is stored, its removal, and the check of every block."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Terminal, own_folders, pipe_in
from kv_blocks import chain

from localgen.backends.kv_store import block_file
from localgen.backends.kv_store.block_file import load_key, write_block
from localgen.backends.kv_store.blocks import BLOCK_TOKENS, KVBlock
from localgen.backends.kv_store.disk_tier import (
    DiskCleared,
    DiskRemoval,
    DiskTier,
    NoRoomForBlock,
    stored_files,
)
from localgen.cli import errors, tables
from localgen.cli.completion_values import complete_stored_model
from localgen.cli.main import run_command_line
from localgen.hub.aliases import add_alias

__all__ = ["own_folders"]
INVALID = errors.EXIT_STATUS_BY_CODE["invalid_request"]
NOT_FOUND = errors.EXIT_STATUS_BY_CODE["model_not_found"]
BAD_SETTING = errors.EXIT_STATUS_BY_CODE["bad_setting"]
LIMIT = 5_000_000
ONE, TWO = bytes(range(16)), bytes(range(16, 32))
# blocks of a prompt: two whole ones and a shorter one
PROMPT = list(range(2 * BLOCK_TOKENS + 20))

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "state" / "kv"


@pytest.fixture
def kv(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a `kv` command; returns its exit status, standard output and standard error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        status = run_command_line(["kv", *arguments])
        return status, *capsys.readouterr()

    return run


def blocks_of(namespace: bytes, tokens: list[int]) -> list[KVBlock]:
    return list(chain(tokens, namespace=namespace))


def store(
    root: Path,
    model: str,
    namespace: bytes = ONE,
    prompts: tuple[list[int], ...] = (PROMPT,),
    **about: str,
) -> Path:
    """Store prompts of a model as an engine does; returns the folder of its blocks."""
    root.parent.mkdir(mode=0o700, exist_ok=True)
    tier = DiskTier(root, namespace, LIMIT, {"model": model} | about)
    for prompt in prompts:
        for block in blocks_of(namespace, prompt):
            tier.write(block)
    return root / namespace.hex()


def files_in(folder: Path) -> list[Path]:
    """The blocks in order of their size, the shortest first."""
    return [file.path for file in sorted(stored_files(folder), key=lambda file: file.num_bytes)]


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in files_in(folder))


# -- list ---------------------------------------------------------------------------------------


def test_nothing_is_stored(kv: Run, root: Path) -> None:
    for arguments in (["list"], ["verify"], ["rm", "--all"]):
        status, out, err = kv(*arguments)
        assert (status, out) == (0, "")
        assert err.startswith("no prefixes are stored: ")
        assert "--kv-disk" in err
    assert kv("list", "--json") == (0, "[]\n", "")
    assert not root.parent.exists(), "created by a command that only looks"


def test_a_loaded_model_without_prompts_is_no_row(kv: Run, root: Path) -> None:
    store(root, "tiny", prompts=())
    assert kv("list")[1] == ""
    assert kv("verify")[1] == ""


def test_a_row_for_each_namespace_and_a_total(kv: Run, root: Path, tmp_path: Path) -> None:
    other = [*PROMPT[:BLOCK_TOKENS], *range(9000, 9050)]
    model = tmp_path / "m.gguf"
    model.touch()
    first = store(
        root, "tiny", ONE, (PROMPT, other), path=str(model), cache_type_k="f16", cache_type_v="f16"
    )
    second = store(root, "tiny", TWO, path=str(tmp_path / "gone"), cache_type_k="q8_0", build="x 1")
    for path in files_in(first):
        os.utime(path, (0, time.time() - 200))
    status, out, err = kv("list")
    head, *rows, total = [line.split("   ") for line in out.splitlines()]
    assert (status, err) == (0, "")
    assert head[0] == "NAME"
    cells = [[cell.strip() for cell in row if cell.strip()] for row in (*rows, total)]
    note = "model file is gone"
    assert cells[0][:4] == ["tiny", TWO.hex()[:12], "276", "1"], "the latest is the first"
    assert cells[0][5:] == ["0 s ago", "q8_0", "x 1", note]
    assert cells[1][:4] == ["tiny", ONE.hex()[:12], "326", "2"], "the shared block counts once"
    assert cells[1][5:] == ["3 min ago", "f16", "-"]
    assert cells[2][:3] == ["total", "602", "3"]
    assert cells[2][3].endswith(" of 5.0 MB")
    listed = json.loads(kv("list", "--json")[1])
    assert [each["size_bytes"] for each in listed] == [size_of(second), size_of(first)]
    assert [each["is_model_gone"] for each in listed] == [True, False]
    assert listed[0]["limit_bytes"] == LIMIT
    assert kv("list", ONE.hex()[:12])[1].count(ONE.hex()[:12]) == 1
    assert " of 5.0 MB" not in kv("list", "tiny")[1], "the limit is that of all models"


def test_blocks_without_their_facts_go_by_an_id(kv: Run, root: Path) -> None:
    folder = store(root, "tiny")
    for content in ("", "{", "[]", "3", '{"model": 5, "limit_bytes": "many"}'):
        (folder / "model.json").write_text(content)
        status, out, _ = kv("list")
        assert status == 0
        assert out.splitlines()[2].split()[:4] == ["total", "276", "1", "4.4"], content
    (folder / "model.json").unlink()
    assert kv("list")[1].splitlines()[1].startswith(ONE.hex()[:12])
    assert kv("rm", "--yes", ONE.hex()[:12])[0] == 0
    assert not folder.exists()


def test_ages() -> None:
    ages = [tables.format_age(seconds) for seconds in (-1, 59, 61, 7300, 2 * 86400 + 5)]
    assert ages == ["0 s ago", "59 s ago", "1 min ago", "2 h ago", "2 d ago"]


# -- rm -----------------------------------------------------------------------------------------


def test_rm_asks_and_frees_one_model(kv: Run, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, other = store(root, "tiny"), store(root, "big", TWO)
    freed = sum(path.stat().st_size for path in mine.iterdir())
    for typed, status in ((b"n\n", 1), (b"", errors.INTERRUPTED), (b"y\n", 0)):
        assert mine.exists()
        monkeypatch.setattr(sys, "stdin", Terminal(typed))
        found, out, err = kv("rm", "tiny")
        assert found == status
        assert "Remove 1 stored prefix of tiny (" in err
        assert "internal error" not in err
    # a terminal's echo of the answer is missing here
    assert out.strip() == f"1 stored prefix of tiny removed, {freed / 1000:.1f} KB freed"
    assert not mine.exists()
    assert len(files_in(other)) == 3
    assert (root / "key").exists()


def test_rm_without_a_terminal_needs_yes(
    kv: Run, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = store(root, "tiny")
    pipe_in(monkeypatch, b"y\n")
    status, _, err = kv("rm", "tiny")
    assert (status, "--yes" in err) == (INVALID, True)
    assert len(files_in(folder)) == 3


def test_rm_all(kv: Run, root: Path) -> None:
    store(root, "tiny"), store(root, "big", TWO)
    status, out, _ = kv("rm", "--all", "-y")
    assert (status, out.startswith("2 stored prefixes of big, tiny removed, ")) == (0, True)
    assert [path.name for path in root.iterdir()] == ["key"]


@pytest.mark.parametrize("arguments", [[], ["tiny", "--all"]])
def test_rm_needs_a_model_or_all(kv: Run, root: Path, arguments: list[str]) -> None:
    folder = store(root, "tiny")
    status, _, err = kv("rm", "-y", *arguments)
    assert (status, "either a model or --all" in err) == (INVALID, True)
    assert len(files_in(folder)) == 3


def test_rm_takes_only_files_of_localgen(kv: Run, root: Path, tmp_path: Path) -> None:
    folder, outside = store(root, "tiny"), tmp_path / "outside"
    outside.mkdir()
    target = outside / "file"
    target.write_text("kept")
    (folder / f"12-{'a' * 16}.new").write_text("unfinished")
    (folder / f"{'4' * 32}-{'5' * 32}.kv").symlink_to(target)
    block_names = [f"{'0' * 32}-{'1' * 32}.kv", f"12-{'b' * 16}.new"]
    for name in block_names:
        (outside / name).write_text("kept")
    (root / ("e" * 32)).symlink_to(outside)
    (root / "notes").mkdir()
    (root / "notes" / block_names[0]).write_text("kept")
    foreign = [folder / "notes.txt", folder / "draft.new", folder / "model.json.bak"]
    for path in foreign:
        path.write_text("kept")
    (folder / f"{'2' * 32}-{'3' * 32}.kv").mkdir()
    status, _, err = kv("rm", "--all", "--yes")
    assert status == 0
    assert {path.name for path in folder.iterdir()} == {
        f"{'2' * 32}-{'3' * 32}.kv",
        *(path.name for path in foreign),
    }
    assert all(f"kept: {path} is no file of localgen\n" in err for path in foreign)
    assert sorted(path.name for path in outside.iterdir()) == sorted(["file", *block_names])
    assert target.read_text() == "kept"
    assert (root / "notes" / block_names[0]).exists()


@pytest.mark.parametrize("command", ["list", "rm", "verify"])
def test_an_unknown_model_names_those_that_exist(kv: Run, root: Path, command: str) -> None:
    status, _, err = kv(command, "nothing")
    assert status == NOT_FOUND
    assert err == "localgen: no prefixes of 'nothing' are stored; nor of any other model\n"
    store(root, "tiny"), store(root, "big", TWO)
    status, out, err = kv(command, "nothing")
    assert (status, out) == (NOT_FOUND, "")
    assert err == "localgen: no prefixes of 'nothing' are stored; stored are those of big, tiny\n"


def test_a_model_goes_by_its_other_names(kv: Run, root: Path, tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(b"GGUF")
    folder = store(root, "m", path=str(model))
    add_alias("mine", str(model))
    assert kv("list", "mine")[0] == 0
    assert kv("list", str(model))[0] == 0
    assert kv("rm", "mine", "-y")[0] == 0
    assert not folder.exists()


def test_an_engine_writes_on_after_rm(kv: Run, root: Path) -> None:
    root.parent.mkdir(mode=0o700)
    tier = DiskTier(root, ONE, LIMIT, {"model": "tiny"})
    first, second, _ = blocks_of(ONE, PROMPT)
    tier.write(first)
    for _ in range(2):
        assert kv("rm", "tiny", "-y")[0] == 0
        for block in (first, second):
            with pytest.raises(DiskCleared):
                tier.write(block)
        assert not (root / ONE.hex()).exists()
        assert tier.refresh() is DiskRemoval.CLEARED
        with pytest.raises(NoRoomForBlock):
            tier.write(second)  # useless without the first
        tier.write(first)
        assert tier.refresh() is DiskRemoval.NONE
        assert (root / ONE.hex() / "model.json").exists(), "the name is known again"
    assert kv("rm", "tiny", "-y")[0] == 0
    (root / ONE.hex()).mkdir(mode=0o700)  # as if rm had not removed the folder yet
    with pytest.raises(DiskCleared):
        tier.write(second)
    assert tier.refresh() is DiskRemoval.CLEARED
    tier.write(first)
    assert tier.read(first.digest) is not None
    assert kv("list")[1].splitlines()[1].startswith("tiny ")


def test_rm_in_the_middle_of_a_write(kv: Run, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root.parent.mkdir(mode=0o700)
    tier = DiskTier(root, ONE, LIMIT, {"model": "tiny"})
    first, second, _ = blocks_of(ONE, PROMPT)
    tier.write(first)
    unfinished = list[str]()

    def rename(path: Path, target: Path) -> None:
        if not unfinished:
            unfinished.append(path.name)
            assert kv("rm", "tiny", "-y")[0] == 0
        os.rename(path, target)

    monkeypatch.setattr(Path, "replace", rename)
    with pytest.raises(DiskCleared):
        tier.write(second)
    assert unfinished
    assert not (root / ONE.hex()).exists()
    assert tier.refresh() is DiskRemoval.CLEARED
    tier.write(first)
    assert kv("list")[1].splitlines()[1].startswith("tiny ")


# -- verify -------------------------------------------------------------------------------------


def damaged(root: Path) -> dict[Path, str]:
    """Two models, with two whole blocks; returns the other files and why they are refused."""
    folder, other = store(root, "tiny"), store(root, "big", TWO)
    short, flipped, _ = files_in(folder)
    os.truncate(short, 300)
    content = bytearray(flipped.read_bytes())
    content[-100] ^= 1
    flipped.write_bytes(content)
    copied, linked, renamed = files_in(other)
    moved = folder / copied.name
    copied.rename(moved)
    target = root.parent / "target.kv"
    linked.rename(target)
    linked.symlink_to(target)
    twin = renamed.with_name(renamed.name[:-4] + "0.kv")
    assert twin != renamed
    twin.write_bytes(renamed.read_bytes())
    twin.chmod(0o600)
    return {
        short: "its size is wrong",
        flipped: "it is damaged, or another key wrote it",
        moved: "it is of another model, or another version of llama.cpp",
        linked: "it is a symbolic link",
        twin: "its name is that of another block",
    }


def test_whole_blocks(kv: Run, root: Path) -> None:
    store(root, "tiny")
    status, out, err = kv("verify")
    assert (status, err) == (0, "")
    assert out.splitlines()[1].split() == ["tiny", ONE.hex()[:12], "3", "0"]
    assert kv("verify", "tiny", "--remove")[0] == 0


def test_refused_blocks_are_counted_by_reason(kv: Run, root: Path) -> None:
    bad = damaged(root)
    status, out, err = kv("verify")
    assert (status, "localgen kv verify --remove" in err) == (1, True)
    assert [line.split()[2:] for line in out.splitlines()[1:3]] == [["1", "2"], ["1", "3"]]
    assert len(out.splitlines()) == 3 + len(bad)
    for path, reason in bad.items():
        name = "tiny" if path.parent.name == ONE.hex() else "big"
        assert f"1 block of {name} refused: {reason}\n" in out
    status, out, err = kv("verify", "--json")
    assert (status, err) == (1, "")
    refused = [block for each in json.loads(out) for block in each["refused"]]
    assert {Path(block["path"]): block["reason"] for block in refused} == bad
    assert not any(block["removed"] for block in refused)
    assert all(path.is_symlink() or path.exists() for path in bad)


def test_refused_blocks_are_removed_on_request(kv: Run, root: Path) -> None:
    bad = damaged(root)
    status, out, _ = kv("verify", "--remove")
    assert (status, out.count(" removed: ")) == (0, len(bad))
    assert not any(path.is_symlink() or path.exists() for path in bad)
    assert (root.parent / "target.kv").exists()
    status, out, _ = kv("verify")
    assert [line.split()[2:] for line in out.splitlines()[1:]] == [["1", "0"], ["1", "0"]]


def test_blocks_of_another_key(kv: Run, root: Path, tmp_path: Path) -> None:
    folder = store(root, "tiny")
    (tmp_path / "other").mkdir(mode=0o700)
    key = load_key(tmp_path / "other")
    write_block(folder, ONE, blocks_of(ONE, list(range(5000, 5020)))[0], key)
    status, out, _ = kv("verify")
    assert (status, out.splitlines()[1].split()[2:]) == (1, ["3", "1"])
    assert "1 block of tiny refused: it is damaged, or another key wrote it\n" in out


def test_a_missing_key_is_not_created(kv: Run, root: Path) -> None:
    store(root, "tiny")
    (root / "key").unlink()
    status, out, err = kv("verify")
    assert (status, f"the key is missing in {root}" in err) == (1, True)
    assert "3 blocks of tiny refused: there is no key to check it with\n" in out
    assert [path.name for path in root.iterdir()] == [ONE.hex()]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda key: key.chmod(0o644), "other users may access it"),
        (lambda key: key.write_text("short"), "has 5 bytes, not 32"),
    ],
)
def test_a_key_that_cannot_be_used(
    kv: Run, root: Path, change: Callable[[Path], None], reason: str
) -> None:
    folder = store(root, "tiny")
    change(root / "key")
    status, out, err = kv("verify", "--remove")
    assert (status, out) == (errors.OTHER_ERROR, "")
    assert f"the key in {root} is refused" in err
    assert reason in err
    assert len(files_in(folder)) == 3, "the key may be repaired"


def test_a_block_that_cannot_be_read(kv: Run, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, _ = files_in(store(root, "tiny"))
    read = block_file.read_block

    def fail(path: Path, namespace: bytes, key: bytes) -> KVBlock:
        if path == first:
            raise PermissionError(13, "Permission denied", str(path))
        if path == second:
            path.unlink()  # as an engine does meanwhile
        return read(path, namespace, key)

    monkeypatch.setattr(block_file, "read_block", fail)
    status, out, _ = kv("verify")
    assert (status, out.splitlines()[1].split()[2:]) == (1, ["1", "1"])
    assert "1 block of tiny refused: it cannot be read (Permission denied)\n" in out


# -- what the system refuses --------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["list"], ["rm", "-y", "tiny"], ["verify"]])
def test_folders_that_cannot_be_read(
    kv: Run, root: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = store(root, "tiny")

    def refuse(path: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", refuse)
        status, out, err = kv(*arguments)
    assert (status, out) == (BAD_SETTING, "")
    assert f"cannot use {folder} (Permission denied): give yourself access to {root}" in err
    assert err.count("\n") == 1
    root.rename(root.with_name("other"))
    root.write_text("a file")
    status, _, err = kv(*arguments)
    assert (status, "Not a directory" in err) == (BAD_SETTING, True)


def test_files_that_cannot_be_removed(kv: Run, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = store(root, "tiny")

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    status, out, err = kv("rm", "tiny", "-y")
    assert (status, out) == (BAD_SETTING, "")
    assert f"cannot use {folder}/" in err
    assert len(files_in(folder)) == 3


@pytest.mark.parametrize("arguments", [["list"], ["rm", "-y", "tiny"], ["verify"]])
def test_a_state_folder_that_others_may_write(kv: Run, root: Path, arguments: list[str]) -> None:
    folder = store(root, "tiny")
    root.parent.chmod(0o777)
    status, _, err = kv(*arguments)
    assert (status, "other users may write" in err) == (BAD_SETTING, True)
    assert len(files_in(folder)) == 3


# -- completion ---------------------------------------------------------------------------------


def test_stored_models_are_completed(root: Path) -> None:
    assert complete_stored_model("") == []
    store(root, "tiny"), store(root, "owner/big:Q8_0", TWO)
    assert complete_stored_model("") == ["owner/big:Q8_0", "tiny"]
    assert complete_stored_model("t") == ["tiny"]
