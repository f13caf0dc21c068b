"""`kill -9` of engines at random moments: no stored prefix may be used wrongly afterwards.

    python -m benchmarks.kv_kills [--kills 200] [--seed 1] [--backend cuda] [--head-words N]

One folder of prefixes survives all rounds. In each, an engine is loaded, answers prompts with long
common beginnings, several at once, rests, and is unloaded; meanwhile the engine, its server, or
both are killed. An engine whose server is killed goes on saving beside the next one. Then some of
the prompts are asked one at a time: the probabilities must be those of an engine without tiers,
but for rounding. The RAM tier holds two blocks, the KV cache three prompts, the disk half of all
blocks. At the end every file is checked; then the states of blocks are swapped, which must be seen.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from benchmarks.kv_kills_parts.answers import SIZES, Answer, Size, ask, distance, prompts_of
from benchmarks.kv_kills_parts.blocks import (
    check_blocks,
    num_refused,
    num_unfinished,
    swap_states,
)
from benchmarks.kv_kills_parts.life import OVER, PHASES, Life
from benchmarks.measure import ModelLine, Report, command
from benchmarks.servers import Localgen
from benchmarks.soak_parts.processes import Watch
from benchmarks.streams import StreamFailed
from localgen.backends.errors import LocalgenError
from localgen.backends.kv_store.disk_tier import namespace_folders
from localgen.backends.model_info import LoadOptions
from localgen.bench.private_server import private_settings
from localgen.client import LocalClient
from localgen.config import BUILT_IN_MODEL, ServerSettings
from localgen.hub.packaged import BUILT_IN_PATH

VICTIMS = ("engine", "server", "both")
# of log-probabilities: rounding gives at most 0.01, a block of another prompt at least 0.03
BOUND = 0.02
_FAR = 99.0
# the requests of a life begin within this time
_SPREAD_S = 0.6
WRITING = "writing"
# a file of a block is written in less
_WRITE_S = 0.01
_OPTIONS = LoadOptions(ctx=1024, kv_tokens=2048, draft="none", kv_ram=800_000, kv_disk=10 << 20)


@dataclass
class KVKills:
    """A run, and what it has found. wrong: answers that no rounding explains."""

    settings: ServerSettings
    options: LoadOptions
    size: Size
    source: random.Random
    reference: list[Answer] = field(default_factory=list)
    rounding: float = 0.0
    states: Counter[str] = field(default_factory=Counter)
    victims: Counter[str] = field(default_factory=Counter)
    answers: int = 0
    restored: int = 0
    largest: float = 0.0
    wrong: list[str] = field(default_factory=list)
    durations_s: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.prompts = prompts_of(self.size)
        self.watch = Watch(self.settings.runtime_dir)

    def answers_of(self, numbers: Sequence[int], options: LoadOptions) -> list[Answer]:
        """Load an engine and ask it for these prompts, one at a time."""
        with LocalClient(self.settings) as client:
            client.unload(str(BUILT_IN_PATH))
        server = Localgen(self.settings, BUILT_IN_PATH, options)
        try:
            client = server.client()
            return [ask(client, self.prompts[each], self.size.answer_tokens) for each in numbers]
        finally:
            server.unload()
            server.close()

    def compute_reference(self) -> None:
        """Answers without tiers; those in another order share other prefixes of the KV cache."""
        plain = replace(self.options, kv_ram=0, kv_disk=0)
        order = list(range(len(self.prompts)))
        self.reference = self.answers_of(order, plain)
        self.source.shuffle(order)
        again = self.answers_of(order, plain)
        self.rounding = max(map(distance, again, [self.reference[each] for each in order]))

    def start_life(self) -> tuple[Life, list[int]]:
        """Load an engine and send it random prompts; returns it and their indices."""
        asked = self.source.sample(range(len(self.prompts)), self.size.asked)
        delays_s = [self.source.uniform(0, _SPREAD_S) for _ in asked]
        texts = [self.prompts[each] for each in asked]
        return Life(self.settings, self.options, texts, delays_s, self.size.answer_tokens), asked

    def live(self) -> None:
        """A life without a kill, which shows how long each phase takes."""
        life, _ = self.start_life()
        life.wait(OVER)
        self.durations_s = life.durations_s()

    def draw(self, number: int) -> tuple[str, float]:
        """A moment: a phase, and seconds from its beginning.

        In turn evenly over the whole life, and over phases, of which the writing of a file is one.
        """
        phase = self.source.choice((*PHASES, WRITING))
        if number % 2 == 0:
            (phase,) = self.source.choices(PHASES, [self.durations_s[each] for each in PHASES])
        return phase, self.source.uniform(0, self.durations_s.get(phase, _WRITE_S))

    def round(self, number: int) -> bool:
        """Kill an engine and check the next one; returns False if it ended by itself before."""
        victim, (phase, delay_s) = VICTIMS[number % len(VICTIMS)], self.draw(number)
        life, asked = self.start_life()
        if phase != PHASES[0]:  # looking for processes takes longer than unloading
            life.wait(PHASES[1])
            found = self._processes(victim)
        if phase == WRITING:
            self._await_write(life)
        else:
            life.wait(phase)
        time.sleep(delay_s)
        if phase == PHASES[0]:
            found = self._processes(victim)
        state = life.phase
        for each in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        is_writing = self._changed_s() > time.time() - _WRITE_S
        life.end()
        if state == OVER or not found:
            return False
        self.states[f"{state}, {WRITING}" if is_writing else state] += 1
        self.victims[victim] += 1
        others = self.source.sample(range(len(self.prompts)), self.size.checked)
        checked = [*asked[: self.size.checked // 2], *others][: self.size.checked]
        self._check(checked, f"kill {number + 1}, {victim} {state}")
        return True

    def _processes(self, victim: str) -> list[psutil.Process]:
        watch = self.watch
        kinds = {"engine": watch.engines, "server": watch.servers, "both": watch.all}
        return kinds[victim]()

    def _await_write(self, life: Life) -> None:
        """Wait until a file of a block is begun or ended, or the life is over."""
        before_s = self._changed_s()
        while self._changed_s() == before_s and life.phase != OVER:
            time.sleep(0.001)

    def _changed_s(self) -> float:
        """Unix time at which a file of a block was last begun, ended or removed."""
        folders = namespace_folders(self.settings.kv_dir)
        return max((each.stat().st_mtime for each in folders), default=0.0)

    def _check(self, numbers: list[int], where: str) -> None:
        for number, answer in zip(numbers, self.answers_of(numbers, self.options), strict=True):
            self.answers, self.restored = self.answers + 1, self.restored + answer.restored
            found = distance(answer, self.reference[number])
            self.largest = max(self.largest, found)
            if found > BOUND:
                self.wrong.append(f"{where}: prompt {number}: {found:.3f}, {answer.restored=}")
                print(f"WRONG: {self.wrong[-1]}", file=sys.stderr, flush=True)

    def swapped_distances(self) -> list[float]:
        """How wrong restored answers are after the states of all blocks were swapped."""
        swap_states(self.settings.kv_dir)
        numbers = list(range(0, len(self.prompts), self.size.tails))
        answers = self.answers_of(numbers, self.options)
        pairs = zip(answers, numbers, strict=True)
        return [distance(each, self.reference[n]) for each, n in pairs if each.restored]


def report_of(run: KVKills, bad_blocks: int, swapped: list[float]) -> Report:
    """The figures; the checks are those that must be met."""
    size_bytes = BUILT_IN_PATH.stat().st_size
    kills = sum(run.states.values())
    sizes = {name: getattr(run.options, name) for name in ("ctx", "kv_tokens", "kv_ram", "kv_disk")}
    report = Report(ModelLine(BUILT_IN_MODEL, size_bytes, 0), kills, False, 0, sizes)
    kinds = (("state when killed", run.states), ("victim", run.victims))
    for kind, counts in kinds:
        for name, count in sorted(counts.items()):
            report.add(kind, name, "", [count])
    report.add("answers after a kill", "all", "", [run.answers])
    report.add("files of killed writers", "unfinished", "", [num_unfinished(run.settings.kv_dir)])
    report.add("blocks", "refused by engines", "", [num_refused(run.settings)])
    restored = report.add("tokens restored after a kill", "from RAM or disk", "", [run.restored])
    rounding = report.add("difference by rounding, without tiers", "largest", "", [run.rounding])
    largest = report.add("difference after a kill", "largest", "", [min(run.largest, _FAR)])
    report.least(restored, 100 * kills)
    report.most(rounding, BOUND / 2)
    report.most(largest, BOUND)
    report.most(report.add("answers after a kill", "wrong", "", [len(run.wrong)]), 0)
    report.most(report.add("blocks at the end", "damaged", "", [bad_blocks]), 0)
    # finite, as JSON has no other numbers; 0 if nothing was restored, which shows nothing
    least = min((*swapped, _FAR)) if swapped else 0.0
    report.least(report.add("difference over swapped blocks", "smallest", "", [least]), BOUND)
    report.not_compared += run.wrong
    return report


def run_kills(run: KVKills, kills: int) -> Report:
    """Kill so often, then look at what is left."""
    run.compute_reference()
    run.live()
    number = 0
    while sum(run.states.values()) < kills:
        run.round(number)
        number += 1
        if number % 10 == 0:
            shown = dict(run.states)
            print(f"{sum(run.states.values())} kills: {shown}", file=sys.stderr, flush=True)
    whole, bad = check_blocks(run.settings.kv_dir)
    print(f"blocks at the end: {whole} whole, {len(bad)} damaged", *bad, sep="\n")
    return report_of(run, len(bad), run.swapped_distances())


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark. Returns 1 if an answer or a block is wrong, or if little was restored."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv_kills")
    parser.add_argument("--kills", type=int, default=200, help="default: 200")
    parser.add_argument("--seed", type=int, default=1, help="default: 1")
    parser.add_argument("--backend", choices=SIZES, default="llamacpp", help="cuda: on the CPU")
    parser.add_argument(
        "--head-words", type=int, help="of a common beginning; default: 250, cuda: 320"
    )
    parser.add_argument("--output", type=Path)
    given = parser.parse_args(arguments)
    if given.kills < 1 or (given.head_words is not None and given.head_words < 1):
        parser.error("--kills and --head-words: at least 1")
    size = SIZES[given.backend]
    if given.head_words is not None:
        size = replace(size, head_words=given.head_words)
    options = replace(_OPTIONS, backend=given.backend)
    if given.backend == "cuda":
        options = replace(options, device="cpu")
    source = random.Random(given.seed)
    try:
        with private_settings() as settings:
            report = run_kills(KVKills(settings, options, size, source), given.kills)
    except (StreamFailed, LocalgenError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    report.commands.append(command("benchmarks.kv_kills", arguments))
    print(report.text())
    report.save("kv-kills", given.output)
    return 0 if all(check.met for check in report.checks) else 1


if __name__ == "__main__":
    sys.exit(main())
