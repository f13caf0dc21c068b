"""Completion as shells request it: through the environment, with the real command line."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from serving import server_harness

from localgen.chat.session_store import SessionRecord
from localgen.chat.stored_sessions import open_store
from localgen.cli import shells
from localgen.cli.commands import COMMANDS
from localgen.hub.cache_scan import cached_names
from localgen.hub.resolve import installed_models

LOCALGEN = "from localgen.cli.main import main; main()"
HEAVY = ("httpx", "huggingface_hub", "rich", "pydantic", "torch", "fastapi", "msgspec")


def add_files(cache: Path, repo: str, *files: str) -> None:
    """Write files of a repository in huggingface_hub's layout."""
    root = cache / f"models--{repo.replace('/', '--')}"
    snapshot = root / "snapshots" / ("1" * 40)
    snapshot.mkdir(parents=True, exist_ok=True)
    (root / "refs").mkdir(exist_ok=True)
    (root / "refs" / "main").write_text("1" * 40)
    for name in files:
        (snapshot / name).write_bytes(b"GGUF")


class Desk:
    """A user's folders, and a shell in one of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = dict(os.environ) | {
            "LOCALGEN_STATE_DIR": str(folder / "state"),
            "LOCALGEN_RUNTIME_DIR": str(folder / "run"),
            "HF_HUB_CACHE": str(folder / "cache"),
            "HOME": str(folder),
            "PYTHONPATH": os.pathsep.join(
                [str(Path(__file__).parents[1]), os.environ["PYTHONPATH"]]
            ),
        }

    def ask(self, environment: dict[str, str], program: str = LOCALGEN) -> str:
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=self.folder,
            env=self.environment | environment,
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert done.stderr == ""
        return done.stdout

    def bash(self, *words: str) -> list[str]:
        """Completions for bash; words: as bash splits the line, the last one unfinished."""
        return self.ask(
            {
                "_LOCALGEN_COMPLETE": "complete_bash",
                "COMP_WORDS": "\n".join(["localgen", *words]),
                "COMP_CWORD": str(len(words)),
            }
        ).splitlines()

    def other(self, shell: str, line: str) -> str:
        return self.ask(
            {"_LOCALGEN_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": f"localgen {line}"}
        )


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "models.toml").write_text('work = "acme/Chat-GGUF:Q8_0"\n')
    add_files(tmp_path / "cache", "acme/Chat-GGUF", "Chat-Q8_0.gguf", "Chat-Q4_K_M.gguf")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mine.gguf").touch()
    (tmp_path / "models" / "notes.txt").touch()
    return Desk(tmp_path)


def test_command_names_are_completed(desk: Desk) -> None:
    assert desk.bash("") == list(COMMANDS)
    assert desk.bash("st") == ["stop"]
    assert desk.bash("nothing", "") == []


@pytest.mark.parametrize(
    ("words", "among"),
    [
        (["run", "ti"], ["tiny"]),
        (["chat", "wo"], ["work"]),
        (["run", "acme"], ["acme/Chat-GGUF:Q8_0", "acme/Chat-GGUF:Q4_K_M"]),
        (["run", "llama-8"], ["llama-8b"]),
        (["show", "LLAMA-8"], ["LLAMA-8b"]),
        (["rm", ""], ["work", "acme/Chat-GGUF:Q8_0"]),
        (["serve", "ti"], ["tiny"]),
        # bash splits a name at its colon and inserts only what follows
        (["pull", "llama-8b", ":", "q"], ["q4_K_M", "q8_0"]),
        (["pull", "llama-8b", ":"], ["auto", "Q4_K_M"]),
        (["run", "acme/Chat-GGUF", ":", "q8"], ["q8_0"]),
    ],
)
def test_model_names_are_completed(desk: Desk, words: list[str], among: list[str]) -> None:
    assert set(among) <= set(desk.bash(*words))


def test_session_names_are_completed(desk: Desk) -> None:
    assert desk.bash("history", "") == []
    with open_store(desk.folder / "state") as store:
        for name in ("trip", "two words", "Tea$(rm)", "notes"):
            store.create(SessionRecord(0, name))
        # read while another program has it open
        assert desk.bash("chat", "--session", "t") == ["trip"]
    assert desk.bash("history", "") == ["notes", "trip"]


def test_rm_and_stop_complete_only_what_they_can_act_on(desk: Desk) -> None:
    assert "tiny" not in desk.bash("rm", "")
    assert desk.bash("stop", "") == []


@pytest.mark.parametrize(
    ("words", "all_of_them"),
    [
        (["run", "--backend", ""], ["auto", "llamacpp", "cuda"]),
        (["run", "--backend", "=", "ll"], ["llamacpp"]),
        (["chat", "tiny", "-fa", "o"], ["on", "off"]),
        (["run", "-ctk", "q8"], ["q8_0"]),
        (["run", "--cache-type-v", "i"], ["iq4_nl", "int8"]),
        # an invalid value of another option does not matter
        (["run", "-c", "many", "--device", "cuda", ":", ""], ["0"]),
        (["serve", "--log-format", ""], ["text", "json"]),
        (["completion", ""], ["bash", "zsh", "fish"]),
        (["chat", "--temp"], ["--temp"]),
    ],
)
def test_options_and_values_are_completed(
    desk: Desk, words: list[str], all_of_them: list[str]
) -> None:
    assert desk.bash(*words) == all_of_them


@pytest.mark.parametrize(
    ("words", "all_of_them"),
    [
        (["run", "./mo"], ["./models/"]),
        (["run", "models/"], ["models/mine.gguf"]),
        (["run", "~/models/"], ["~/models/mine.gguf"]),
        (["run", "-j", "@", "models/n"], ["models/notes.txt"]),
        (["run", "./nowhere/"], []),
        (["chat", "--chat-template", "mod"], []),  # bash does it
    ],
)
def test_files_are_completed(desk: Desk, words: list[str], all_of_them: list[str]) -> None:
    assert desk.bash(*words) == all_of_them


def test_running_models_are_completed(desk: Desk) -> None:
    with server_harness() as served:
        served.start()
        served.chat(served.model("warm"), "a")
        desk.environment["LOCALGEN_RUNTIME_DIR"] = str(served.settings.runtime_dir)
        assert desk.bash("stop", "") == ["warm"]
        assert "warm" in desk.bash("run", "wa")


def test_unresponsive_server_does_not_block_completion(desk: Desk) -> None:
    (desk.folder / "run").mkdir()
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(desk.folder / "run" / "server.sock"))
        silent.listen()
        assert desk.bash("stop", "") == []
        assert "tiny" in desk.bash("run", "ti")


def test_hanging_disk_does_not_block_completion(desk: Desk) -> None:
    program = (
        "import time, pathlib; pathlib.Path.glob = lambda *_: time.sleep(60); "
        "from localgen.cli import shells; shells._TIMEOUT_S = 0.5; " + LOCALGEN
    )
    begun_s = time.monotonic()
    asked = {"COMP_WORDS": "localgen\nrm\n", "COMP_CWORD": "2"}
    assert desk.ask({"_LOCALGEN_COMPLETE": "complete_bash", **asked}, program) == ""
    assert time.monotonic() - begun_s < 20


@pytest.mark.parametrize(
    "environment",
    [
        {"_LOCALGEN_COMPLETE": ""},
        {"_LOCALGEN_COMPLETE": "complete_tcsh"},
        {"_LOCALGEN_COMPLETE": "complete_bash", "COMP_WORDS": 'localgen "', "COMP_CWORD": "x"},
        {"_LOCALGEN_COMPLETE": "complete_zsh_more"},
    ],
)
def test_invalid_completion_requests_print_nothing(desk: Desk, environment: dict[str, str]) -> None:
    assert desk.ask({"COMP_WORDS": "", "COMP_CWORD": "0"} | environment) == ""


def test_damaged_alias_file_is_ignored(desk: Desk) -> None:
    (desk.folder / "state" / "models.toml").write_text("= nonsense")
    assert "tiny" in desk.bash("run", "ti")


def test_completion_loads_no_heavy_modules(desk: Desk) -> None:
    program = (
        "import sys\nfrom localgen.cli import main, shells\n"
        "shells.run_completion(main.app, 'complete_bash')\n"
        "print('MODULES', *sys.modules)"
    )
    said = desk.ask({"COMP_WORDS": "localgen\nrun\nti", "COMP_CWORD": "2"}, program)
    names, _, modules = said.partition("MODULES")
    assert "tiny" in names
    assert [name for name in HEAVY if name in modules.split()] == []


def test_fish_completion_format(desk: Desk) -> None:
    assert "chat\tChat with a model in the terminal." in desk.other("fish", "ch")
    assert desk.other("fish", "run ti").splitlines()[0] == "tiny"
    assert desk.other("fish", "run models/") == "models/mine.gguf\n"
    assert desk.other("fish", "chat --chat-template mod") == "models/\n"


def test_zsh_completion_format(desk: Desk) -> None:
    said = desk.other("zsh", "run acme")
    assert said == (
        '_arguments \'*: :(("acme/Chat-GGUF\\\\:Q4_K_M" "acme/Chat-GGUF\\\\:Q8_0"))\'\n'
    )
    assert "'" not in desk.other("zsh", "")[len("_arguments '") : -2]
    assert desk.other("zsh", "run ./mo") == "_files -g '*.gguf'\n"
    assert desk.other("zsh", "run tiny x") == "_files\n"


def test_names_with_shell_metacharacters_are_not_offered(desk: Desk) -> None:
    for odd in ("$(touch x)", "`id`", "a b", "a;b", "a'b"):
        add_files(desk.folder / "cache", "acme/Chat-GGUF", f"{odd}.gguf")
    assert len(desk.bash("run", "acme")) == 2


def scripted(desk: Desk, shell: str, *arguments: str) -> str:
    """Output of a real shell that runs the script of `localgen completion`."""
    found = shutil.which(shell)
    if found is None:
        pytest.skip(f"there is no {shell} here")
    folder = desk.folder / "bin"
    folder.mkdir()
    program = folder / "localgen"
    program.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{LOCALGEN}' \"$@\"\n")
    program.chmod(0o755)
    path = f"{folder}{os.pathsep}{desk.environment['PATH']}"
    done = subprocess.run(
        [found, *arguments],
        cwd=desk.folder,
        env=desk.environment | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == ""
    return done.stdout


def test_script_works_in_bash(desk: Desk) -> None:
    lines = (
        'eval "$(localgen completion bash)"; complete -p localgen',
        "COMP_WORDS=(localgen run llama-8b : q4); COMP_CWORD=4; _localgen_completion localgen",
        'printf "%s\\n" "${COMPREPLY[@]}"',
    )
    said = scripted(desk, "bash", "--norc", "-c", "\n".join(lines)).splitlines()
    assert said[0] == "complete -o default -F _localgen_completion localgen"
    assert "q4_K_M" in said[1:]


def test_script_works_in_fish(desk: Desk) -> None:
    lines = 'localgen completion fish | source; complete --do-complete "localgen run acme"'
    said = scripted(desk, "fish", "--no-config", "-c", lines)
    assert said.splitlines() == ["acme/Chat-GGUF:Q4_K_M", "acme/Chat-GGUF:Q8_0"]


def test_script_works_in_zsh(desk: Desk) -> None:
    lines = "compdef() { print $2 }; localgen completion zsh > script; source ./script"
    assert scripted(desk, "zsh", "-f", "-c", lines) == "localgen\n"


def test_completion_script_is_for_the_users_shell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from localgen.cli.main import run_command_line

    monkeypatch.setenv("SHELL", "/usr/bin/fish")
    assert run_command_line(["completion"]) == 0
    assert capsys.readouterr().out == shells.completion_script("fish") + "\n"
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    assert run_command_line(["completion"]) == 3
    assert "give one of bash, zsh, fish" in capsys.readouterr().err


def test_cache_scan_finds_what_the_library_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_files(tmp_path, "acme/Chat-GGUF", "Chat-Q8_0.gguf", "mmproj-F16.gguf")
    add_files(tmp_path, "b/many", "Big-Q6_K-00001-of-00002.gguf", "Big-Q6_K-00002-of-00002.gguf")
    add_files(tmp_path, "c/Folder", "config.json", "model.safetensors")
    monkeypatch.setattr("localgen.hub.cache.cache_folder", lambda: tmp_path)
    # first: the library is imported with the cache of the user, and keeps it after this test
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert cached_names() == [file.name for file in installed_models()][1:]
    assert len(cached_names()) == 3


def test_cache_types_are_those_of_both_backends() -> None:
    from localgen.backends.cuda.device.options import CACHE_DTYPES as CUDA
    from localgen.backends.formats.architecture.model_shape import CACHE_ELEMENT_BYTES
    from localgen.backends.llamacpp.library import CACHE_TYPES as LLAMACPP

    assert set(CACHE_ELEMENT_BYTES) == {*CUDA, *LLAMACPP}


@pytest.mark.parametrize(
    ("words", "typed"),
    [
        (["run", "a", ":", "q"], ["run", "a:q"]),
        (["--device", "=", "cuda", ":", "0"], ["--device=cuda:0"]),
        (["-j", "@", "f"], ["-j", "@f"]),
        (["run", ""], ["run", ""]),
    ],
)
def test_words_split_by_bash_are_joined(words: list[str], typed: list[str]) -> None:
    assert shells._join_words(words) == typed
