"""What `localgen tui` takes while several sessions are answered at once.

CPU, memory, and from a key to its echo. The server and the built-in model are real, and share the
machine with it.

python -m benchmarks.tui [--rounds 3]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.measure import ModelLine, Report
from benchmarks.terminal import Screen
from localgen.config import ServerSettings
from localgen.machine.python_process import python_command, python_environment

RESULTS = Path(__file__).parent / "results"
SIZE, STREAMS = (120, 40), 4
# none of them is in what the model says
_TYPED = "ΓΔΘΛΞΠΣΦΨΩαβγδεζηθκλ"
_CTRL_N = b"\x0e"
_EACH_S = 0.2


def _round(settings: ServerSettings, tokens: int, presses: int) -> dict[str, list[float]]:
    screen = Screen(settings, SIZE, "tui", "tiny", "--ignore-eos", "--max-tokens", str(tokens))
    try:
        painted_s = screen.read(screen.started_s + 30, b"localgen tui")
        assert painted_s is not None, "nothing was painted"
        screen.read(time.monotonic() + 2)
        for number in range(STREAMS):
            if number:
                screen.press(_CTRL_N)
                screen.read(time.monotonic() + 0.7)
            screen.press(f"Tell me a story about the number {number}.\r".encode())
            screen.read(time.monotonic() + (4 if number == 0 else 0.7))  # the first one loads
        before, since_s = screen.usage.cpu_times(), time.monotonic()
        key_ms = [_echo_ms(screen, character) for character in _TYPED[:presses]]
        after, took_s = screen.usage.cpu_times(), time.monotonic() - since_s
        assert _running(settings) == STREAMS, "an answer came to its end meanwhile"
        busy_s = after.user + after.system - before.user - before.system
        return {
            "first paint": [painted_s - screen.started_s],
            "CPU of a core": [100 * busy_s / took_s],
            "RSS": [screen.usage.memory_info().rss / 1e6],
            "key to its echo": key_ms,
        }
    finally:
        screen.close()


def _echo_ms(screen: Screen, character: str) -> float:
    screen.read(time.monotonic() + _EACH_S)
    since_s = time.monotonic()
    screen.press(character.encode())
    seen_s = screen.read(since_s + 5, character.encode())
    assert seen_s is not None, "the key did nothing"
    return (seen_s - since_s) * 1e3


def _running(settings: ServerSettings) -> int:
    from localgen.client import Client

    with Client(settings) as client:
        models = client.stats()["models"]
    return sum(model["stats"]["running"] for model in models)


def main() -> int:
    """The exit status: 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=1900, help="of each answer")
    parser.add_argument("--presses", type=int, default=len(_TYPED))
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    found: dict[str, list[float]] = {}
    for _ in range(asked.rounds):
        with tempfile.TemporaryDirectory(prefix="lg") as folder:
            settings = ServerSettings(
                runtime_dir=Path(folder) / "run", state_dir=Path(folder) / "state"
            )
            settings.create_dirs()
            try:
                for name, values in _round(settings, asked.tokens, asked.presses).items():
                    found.setdefault(name, []).extend(values)
            finally:
                subprocess.run(
                    python_command("localgen.cli.main", "stop"),
                    env=python_environment() | settings.to_environment(),
                    check=False,
                )
    test = f"{SIZE[0]}×{SIZE[1]}, {STREAMS} answers at once"
    report = Report(ModelLine("built in", 0, 0), asked.rounds, False, threads=0, load_options={})
    report.commands.append(f"python -m benchmarks.tui --rounds {asked.rounds}")
    units = {"first paint": "s", "CPU of a core": "%", "RSS": "MB", "key to its echo": "ms"}
    for name, values in found.items():
        series = report.add(test, name, units[name], values)
        if name == "key to its echo":
            report.most(series, 50.0)
    print(report.text())
    target = asked.output or RESULTS / f"tui-{datetime.now(UTC):%Y%m%d}.json"
    report.write(target)
    print(f"written to {target}", file=sys.stderr)
    return 0 if all(check.met for check in report.checks) else 1


if __name__ == "__main__":
    sys.exit(main())
