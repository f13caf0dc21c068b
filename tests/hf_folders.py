"""Model folders in Hugging Face's layout, made from the built-in model and changed by tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"
TINY = Path(__file__).parents[1] / "localgen/models/tiny"
QWEN2 = json.loads((TINY / "tokenizer.json").read_text())["pre_tokenizer"]["pretokenizers"][0]
LLAMA3 = {**QWEN2, "pattern": {"Regex": QWEN2["pattern"]["Regex"].replace("N}|", "N}{1,3}|")}}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
GPT2_BYTES = {**BYTES, "use_regex": True}
DIGITS = {"type": "Digits", "individual_digits": True}


def edit(path: Path, **changes: Any) -> None:
    """Change top-level keys of a JSON file; None removes one."""
    value = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: item for key, item in value.items() if item is not None}))


def edit_tokenizer(path: Path, steps: list[dict[str, Any]], ignore_merges: bool) -> None:
    model = json.loads(path.read_text())["model"]
    step = steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": steps}
    edit(path, pre_tokenizer=step, model=model | {"ignore_merges": ignore_merges})


def write_safetensors(path: Path, tensors: dict[str, tuple[str, list[int], bytes]]) -> None:
    header, start = {}, 0
    for name, (dtype, shape, raw) in tensors.items():
        offsets = [start, start + len(raw)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        start += len(raw)
    encoded = json.dumps(header).encode()
    body = b"".join(raw for _, _, raw in tensors.values())
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + body)


def read_safetensors(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        tensors[name] = (entry["dtype"], entry["shape"], raw[start + first : start + last])
    return tensors
