"""Available memory within control groups."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from localgen.backends.memory import system
from localgen.backends.memory.system import (
    available_memory_bytes,
    cgroup_limits,
    total_memory_bytes,
)

GB = 10**9


def group(folder: Path, limit: str, current: int, **stat: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{current}\n")
    (folder / "memory.stat").write_text("".join(f"{key} {n}\n" for key, n in stat.items()))
    return folder


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hierarchy of control groups with this process in one of them."""
    root = tmp_path / "cgroup"
    own = tmp_path / "own"
    own.write_text("4:memory:/old/style\n0::/user.slice/chat.scope\n")
    group(root, "max", 0)
    found = cgroup_limits

    monkeypatch.setattr(system, "cgroup_limits", lambda: found(root, own))
    return root


def test_limits_of_all_parent_groups_apply(groups: Path) -> None:
    group(groups / "user.slice", "3000000000", 2 * GB, inactive_file=GB // 2, active_file=GB // 4)
    group(groups / "user.slice/chat.scope", "max", GB)
    group(groups / "system.slice", "1000", 0)
    # the page cache is freed when memory is needed
    assert list(system.cgroup_limits()) == [(3 * GB, 2 * GB - GB // 2 - GB // 4)]
    assert available_memory_bytes() == 3 * GB - 5 * GB // 4
    assert total_memory_bytes() == 3 * GB
    group(groups / "user.slice/chat.scope", str(GB), 2 * GB)
    assert available_memory_bytes() == 0
    assert total_memory_bytes() == GB


def test_without_a_limit_all_of_the_machine_is_available(groups: Path) -> None:
    group(groups / "user.slice/chat.scope", "max", GB)
    assert list(system.cgroup_limits()) == []
    assert total_memory_bytes() == psutil.virtual_memory().total
    assert available_memory_bytes() == pytest.approx(psutil.virtual_memory().available, rel=0.2)


@pytest.mark.parametrize("own", ["", "4:memory:/old/style\n", "0::/gone\n", "\xff"])
def test_where_groups_cannot_be_read_nothing_is_limited(tmp_path: Path, own: str) -> None:
    path = tmp_path / "own"
    path.write_text(own, encoding="latin-1")
    assert list(cgroup_limits(tmp_path / "nothing", path)) == []
    assert list(cgroup_limits(tmp_path / "nothing", tmp_path / "no file")) == []


def test_a_container_sees_its_group_as_the_root(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/\n")
    group(tmp_path / "cgroup", "500", 100)
    assert list(cgroup_limits(tmp_path / "cgroup", own)) == [(500, 100)]
