"""Server settings and their folders."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from localgen.backends.errors import LocalgenError
from localgen.config import (
    BadSetting,
    ServerSettings,
    _is_replaceable,
    parse_hang_timeout,
    parse_keep_alive,
    parse_size,
)


def test_default_settings(tmp_path: Path) -> None:
    settings = ServerSettings.from_environment({"XDG_RUNTIME_DIR": str(tmp_path)})
    assert settings.runtime_dir == tmp_path / "localgen"
    assert settings.socket_path == tmp_path / "localgen" / "server.sock"
    assert settings.keep_alive_s == 300
    assert settings.memory_limit is None
    assert settings.state_dir.name == "localgen"


@pytest.mark.parametrize(("text", "seconds"), [("60", 60.0), ("0.5", 0.5), ("0", None)])
def test_hang_timeout_is_parsed(text: str, seconds: float | None) -> None:
    assert parse_hang_timeout(text) == seconds
    settings = ServerSettings.from_environment({"LOCALGEN_HANG_TIMEOUT": text})
    assert settings.hang_timeout_s == seconds
    assert ServerSettings.from_environment(settings.to_environment()) == settings


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30), ("5m", 300), ("1h", 3600), ("0", 0), ("90", 90), ("1.5m", 90), ("-1", None)],
)
def test_keep_alive_is_parsed(text: str, seconds: float | None) -> None:
    assert parse_keep_alive(text) == seconds


@pytest.mark.parametrize(
    ("text", "size"), [("123", 123), ("8G", 8 << 30), ("1.5gb", 3 << 29), ("512MiB", 512 << 20)]
)
def test_sizes_are_parsed(text: str, size: int) -> None:
    assert parse_size(text, "X") == size


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("LOCALGEN_KEEP_ALIVE", "soon"),
        ("LOCALGEN_MEMORY_LIMIT", "8 apples"),
        ("LOCALGEN_MEMORY_LIMIT", "-1"),
        ("LOCALGEN_MEMORY_LIMIT", "9" * 400),
        ("LOCALGEN_MAX_QUEUE", "0"),
        ("LOCALGEN_HANG_TIMEOUT", "-1"),
        ("LOCALGEN_HANG_TIMEOUT", "nan"),
        ("LOCALGEN_RUNTIME_DIR", "here"),
        ("LOCALGEN_STATE_DIR", "./there"),
    ],
)
def test_a_bad_value_names_its_variable(variable: str, text: str) -> None:
    with pytest.raises(LocalgenError, match=f"{variable}={text}"):
        ServerSettings.from_environment({variable: text})


def test_settings_travel_through_an_environment(tmp_path: Path) -> None:
    settings = ServerSettings(tmp_path / "r", tmp_path / "s", None, 5, 6)
    assert ServerSettings.from_environment(settings.to_environment()) == settings


def test_folders_are_private(tmp_path: Path) -> None:
    settings = ServerSettings(tmp_path / "a" / "r", tmp_path / "s")
    settings.runtime_dir.mkdir(parents=True, mode=0o755)
    settings.create_dirs()
    for folder in (settings.runtime_dir, settings.state_dir):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_that_others_may_write_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(BadSetting, match="other users may write"):
        ServerSettings(folder, tmp_path / "s").create_dirs()
    with pytest.raises(BadSetting, match="other users may replace"):
        ServerSettings(folder / "r", tmp_path / "s").create_dirs()


@pytest.mark.parametrize(
    ("mode", "uid", "replaceable"),
    [
        (0o755, 0, False),
        (0o1777, 0, False),
        (0o777, 0, True),
        (0o700, os.getuid(), False),
        (0o755, 4711, True),
        (0o755, 65534, False),
        (0o775, 65534, True),
        (0o1777, 65534, True),
    ],
)
def test_folders_that_others_can_replace_are_recognized(
    mode: int, uid: int, replaceable: bool
) -> None:
    found = os.stat_result((stat.S_IFDIR | mode, 1, 1, 2, uid, 0, 0, 0, 0, 0))
    assert _is_replaceable(found) is replaceable


def test_a_folder_that_is_a_file_or_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadSetting, match="LOCALGEN_RUNTIME_DIR"):
        ServerSettings(tmp_path / "file", tmp_path / "s").create_dirs()
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    with pytest.raises(BadSetting, match="is not a folder"):
        ServerSettings(tmp_path / "link", tmp_path / "s").create_dirs()


def test_a_missing_xdg_folder_is_refused_rather_than_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / "nonexist"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    monkeypatch.delenv("LOCALGEN_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("LOCALGEN_STATE_DIR", str(tmp_path / "s"))
    settings = ServerSettings.from_environment()
    assert settings.runtime_dir == base / "localgen"
    with pytest.raises(BadSetting, match=f"XDG_RUNTIME_DIR={base} does not exist: unset it, or"):
        settings.create_dirs()
    assert not base.exists()
    base.mkdir(mode=0o700)
    settings.create_dirs()
    assert settings.runtime_dir.is_dir()


def test_a_named_folder_is_created_with_its_parents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / "nonexist"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    monkeypatch.setenv("LOCALGEN_RUNTIME_DIR", str(base / "localgen"))
    ServerSettings(base / "localgen", tmp_path / "s").create_dirs()
    assert (base / "localgen").is_dir()


def test_config_imports_no_heavy_modules() -> None:
    code = "import sys, localgen.config; print(*sys.modules)"
    modules = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()
    assert "localgen.config" in modules
    for heavy in ("httpx", "fastapi", "msgspec", "psutil", "numpy", "huggingface_hub"):
        assert heavy not in modules
