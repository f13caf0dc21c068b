"""The stored blocks of all rounds: swapped ones, damaged ones, and those that engines refused."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from localgen.backends.kv_store import block_file
from localgen.backends.kv_store.blocks import KVBlock
from localgen.backends.kv_store.disk_tier import namespace_folders, stored_files
from localgen.backends.kv_store.inventory import check_model, read_key, stored_models
from localgen.config import ServerSettings

_REFUSED = re.compile(rb" refused [0-9a-f]{32}: ")


def check_blocks(kv_dir: Path) -> tuple[int, list[str]]:
    """Whole blocks, and the reasons of the others, as `localgen kv verify` finds them."""
    key = read_key(kv_dir)
    checked = [check_model(model, key, remove=False) for model in stored_models(kv_dir)]
    refused = [f"{block.path}: {block.reason}" for each in checked for block in each.refused]
    return sum(each.whole for each in checked), refused


def num_unfinished(kv_dir: Path) -> int:
    """Files whose writers were killed."""
    folders = (kv_dir, *namespace_folders(kv_dir))
    return sum(block_file.is_unfinished(path.name) for each in folders for path in each.iterdir())


def swap_states(kv_dir: Path) -> None:
    """Give each block the state of another one at its position, signed as the engine does."""
    key = block_file.read_key(kv_dir)
    for folder in namespace_folders(kv_dir):
        namespace, alike = bytes.fromhex(folder.name), defaultdict[tuple[int, int], list[KVBlock]]()
        alike.default_factory = list
        for file in stored_files(folder):
            block = block_file.read_block(file.path, namespace, key)
            alike[block.start, len(block.tokens)].append(block)
        for blocks in alike.values():
            for block, other in itertools.pairwise([*blocks, blocks[0]]):
                swapped = replace(block, state=other.state)
                block_file.write_block(folder, namespace, swapped, key)


def num_refused(settings: ServerSettings) -> int:
    """Blocks that engines have refused, by the server's log."""
    logs = settings.log_path.parent.glob(f"{settings.log_path.name}*")
    return sum(len(_REFUSED.findall(each.read_bytes())) for each in logs)
