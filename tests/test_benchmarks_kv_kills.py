"""benchmarks.kv_kills tells rounding from wrong blocks, and finds blocks that are damaged."""

from __future__ import annotations

import math
import random
from collections import Counter
from pathlib import Path

import gguf
import pytest
from kv_blocks import NAMESPACE, chain, disk_tier, state_of
from models import TINY_GGUF

from benchmarks.kv_kills import WRITING, KVKills
from benchmarks.kv_kills_parts.answers import SIZES, Answer, distance, prompts_of
from benchmarks.kv_kills_parts.blocks import (
    check_blocks,
    num_refused,
    num_unfinished,
    swap_states,
)
from benchmarks.kv_kills_parts.life import PHASES
from benchmarks.stretched_gguf import stretch
from localgen.backends.kv_store import block_file
from localgen.backends.kv_store.disk_tier import stored_files
from localgen.backends.model_info import LoadOptions
from localgen.config import ServerSettings


def test_answers_are_compared_up_to_where_they_part() -> None:
    one = Answer(({"a": -0.1, "b": -2.0}, {"c": -0.5, "d": -0.6}, {"e": -0.1}))
    other = Answer(({"a": -0.2, "b": -2.1}, {"c": -0.6, "d": -0.5}, {"f": -0.1}))
    assert distance(one, one) == 0
    assert distance(one, other) == pytest.approx(0.1)
    assert distance(Answer(one.tops[2:]), Answer(other.tops[2:])) == math.inf


def test_prompts_share_their_beginnings_only() -> None:
    size = SIZES["llamacpp"]
    prompts = prompts_of(size)
    assert len(set(prompts)) == len(prompts) == size.heads * size.tails
    heads = Counter(prompt.partition(".")[0] for prompt in prompts)
    assert set(heads.values()) == {size.tails}
    assert len(heads) == size.heads


def test_kills_come_evenly_over_the_life_and_over_the_phases(tmp_path: Path) -> None:
    settings = ServerSettings(runtime_dir=tmp_path, state_dir=tmp_path)
    run = KVKills(settings, LoadOptions(), SIZES["llamacpp"], random.Random(1))
    run.durations_s = dict(zip(PHASES, (6.0, 3.0, 0.9, 0.1), strict=True))
    moments = [run.draw(number) for number in range(4000)]
    evenly = Counter(phase for phase, _ in moments[::2])
    assert evenly["loading"] == pytest.approx(1200, rel=0.1)
    assert evenly["answering"] == pytest.approx(600, rel=0.1)
    by_phase = Counter(phase for phase, _ in moments[1::2])
    assert all(by_phase[each] > 300 for each in (*PHASES, WRITING))
    loading_s = [delay_s for phase, delay_s in moments if phase == "loading"]
    assert sum(loading_s) / len(loading_s) == pytest.approx(3.0, rel=0.1)


def test_swapped_states_pass_the_check_and_damaged_files_do_not(tmp_path: Path) -> None:
    disk, source = disk_tier(tmp_path), random.Random(1)
    for _ in range(2):
        for block in chain([source.randrange(1000) for _ in range(300)]):
            disk.write(block)
    assert check_blocks(tmp_path) == (6, [])
    swap_states(tmp_path)
    assert check_blocks(tmp_path) == (6, [])
    folder, key = tmp_path / NAMESPACE.hex(), block_file.read_key(tmp_path)
    paths = [file.path for file in stored_files(folder)]
    for path in paths:
        block = block_file.read_block(path, NAMESPACE, key)
        assert (block.state != state_of(block.parent, block.tokens)).any()
    paths[0].write_bytes(paths[0].read_bytes()[:-1])
    whole, (reason,) = check_blocks(tmp_path)
    assert whole == 5
    assert reason == f"{paths[0]}: its size is wrong"
    assert num_unfinished(tmp_path) == 0
    (folder / block_file.unfinished_name()).touch()
    assert num_unfinished(tmp_path) == 1


def test_refused_blocks_are_counted(tmp_path: Path) -> None:
    settings = ServerSettings(runtime_dir=tmp_path, state_dir=tmp_path)
    assert num_refused(settings) == 0
    line = f"engine 1 WARNING refused {bytes(16).hex()}: it is damaged; its tokens are computed\n"
    settings.log_path.write_text(f"{line}another line\n")
    settings.log_path.with_name(f"{settings.log_path.name}.1").write_text(line)
    assert num_refused(settings) == 2


def test_a_stretched_model_differs_in_its_context_only(tmp_path: Path) -> None:
    copy = stretch(TINY_GGUF, 16_896, tmp_path)
    before, after = TINY_GGUF.read_bytes(), copy.read_bytes()
    assert len(before) == len(after)
    assert sum(one != other for one, other in zip(before, after, strict=True)) <= 4
    assert gguf.GGUFReader(copy).fields["llama.context_length"].contents() == 16_896
