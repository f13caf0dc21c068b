"""Fixtures used by several test files."""

from __future__ import annotations

import functools
import gc
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

# tests run without a GPU: kernels are defined for Triton's interpreter
os.environ["TRITON_INTERPRET"] = "1"
# threads of torch and of llama.cpp would spin on the same cores while they wait for work
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# other pytest workers use the same cores
os.environ.setdefault("OMP_NUM_THREADS", "1")
# otherwise each process that a test starts would compile all of localgen again
os.environ["PYTHONDONTWRITEBYTECODE"] = ""
# no test is about a frame of an animation, which draws the screen up to 60 times a second
os.environ["TEXTUAL_ANIMATIONS"] = "none"
# smollm2 is the default model where it is installed; tests are written for the built-in one
sys.path.insert(0, str(Path(__file__).with_name("without_smollm2")))
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, (sys.path[0], os.environ.get("PYTHONPATH")))
)

import pytest
from hf_folders import TINY
from hypothesis import settings

from localgen.backends.memory import system

if TYPE_CHECKING:
    from llama_files import LlamaFile
    from textual.css.model import RuleSet
    from textual.css.stylesheet import Stylesheet
    from textual.pilot import Pilot
    from tui_chats import MakeTui, Play, Tui

# the default, 700 objects, takes a fifth of the time of the TUI's tests
gc.set_threshold(20_000)

# llama.cpp's default number of threads, for models that tests load themselves
system.num_physical_cores = lambda: 1

# no test measures time, nor hypothesis that of an example
settings.register_profile("localgen", deadline=None)
settings.load_profile("localgen")

# a shell's background job ignores Ctrl+C, and so would every program that a test starts
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files of quick tests last.

    Workers of pytest-xdist take files in this order and then end at nearly the same time. Its own
    order, by the number of tests, leaves a few slow tests to the end.
    """
    quick = {Path(line).name for line in Path(__file__).with_name("fast.txt").read_text().split()}
    items.sort(key=lambda item: item.path.name in quick)


def pytest_collection_finish() -> None:
    """Speed up garbage collection, Triton's interpreter, sandboxes, commands and TUIs."""
    # a million objects of imported packages, which never become garbage
    gc.freeze()
    if "triton.runtime.interpreter" in sys.modules:
        import fast_interpreter

        fast_interpreter.speed_up()
    for name in ("localgen.backends.llamacpp.loader", "localgen.backends.cuda.loader"):
        # models that tests load themselves share a sandbox: each would start a process
        if (loader := sys.modules.get(name)) is not None:
            loader.Sandbox = functools.cache(loader.Sandbox)  # type: ignore[attr-defined]
    if (commands := sys.modules.get("localgen.cli.commands")) is not None:
        # a program runs one command: each time, pydantic builds a validator of every option
        commands.load_command = functools.cache(commands.load_command)  # type: ignore[attr-defined]
    if (stylesheet := sys.modules.get("textual.css.stylesheet")) is not None:
        share_parsed_css(stylesheet.Stylesheet)


def share_parsed_css(kind: type[Stylesheet]) -> None:
    """Each app would parse the same CSS again."""
    parse = kind._parse_rules
    parsed: dict[object, list[RuleSet]] = {}

    def parse_once(sheet: Stylesheet, *css: Any, **where: Any) -> list[RuleSet]:
        key = (css, *where.items(), *sheet._variables.items())
        if key not in parsed:
            parsed[key] = parse(sheet, *css, **where)
        return parsed[key]

    setattr(kind, "_parse_rules", parse_once)  # noqa: B010 - its arguments are passed on


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the built-in model's folder that a test may damage."""
    return Path(shutil.copytree(TINY, tmp_path / "tiny"))


@pytest.fixture
def open_model() -> Iterator[Callable[..., LlamaFile]]:
    """Opens GGUF files in llama.cpp; closes them after the test."""
    from llama_files import LlamaFile

    opened: list[LlamaFile] = []

    def open_one(path: Path, **options: bool) -> LlamaFile:
        opened.append(LlamaFile(path, **options))
        return opened[-1]

    yield open_one
    for model in opened:
        model.close()


@pytest.fixture
def make_tui(tmp_path: Path) -> Iterator[MakeTui]:
    """Makes TUIs that share one store, from scripts and options; closes them after the test."""
    from tui_chats import Tui

    made: list[Tui] = []

    def one(*scripts: object, **options: object) -> Tui:
        made.append(Tui(tmp_path, *scripts, **options))  # type: ignore[arg-type]
        return made[-1]

    yield one
    for each in made:
        each.close()


@pytest.fixture
def snap_tui(make_tui: MakeTui, snap_compare: Callable[..., bool]) -> Callable[..., None]:
    """Plays a scene in a TUI and compares the screenshot, without blinking cursors."""
    from textual.widgets import Input, TextArea

    from localgen.tui.chat.prompt import Prompt

    def run(scene: Play, size: tuple[int, int], *scripts: Sequence[object]) -> None:
        tui = make_tui(*scripts)

        async def before(pilot: Pilot[None]) -> None:
            await tui.until(lambda: tui.main.current_session)
            await pilot.pause()
            tui.main.query_one(Prompt).cursor_blink = False
            await scene(tui, pilot)
            for area in tui.app.screen.query(TextArea):
                area.cursor_blink = False
            for field in tui.app.screen.query(Input):
                field.cursor_blink = False
            await pilot.pause()

        assert snap_compare(tui.app, terminal_size=size, run_before=before)

    return run


@pytest.fixture
def two_originals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The quantize screen finds two models and torch, and estimates without a delay."""
    from localgen.quant.originals import OriginalModel

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("localgen.tui.quantize.runner.require_packages", lambda: None)
    monkeypatch.setattr("localgen.tui.quantize.screen.DEBOUNCE_S", 0.0)
    here = [
        OriginalModel("tiny", 22_976_512, "built-in"),
        OriginalModel("./other", 5_000_000, "here"),
    ]
    monkeypatch.setattr("localgen.tui.quantize.screen.scan_originals", lambda: here)
