"""Every reader of model files gives facts or LoadFailed in our own words, whatever a file holds."""

from __future__ import annotations

import json
import pickle
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from command_line import own_folders
from gguf_files import header_bytes
from hf_folders import TINY
from models import TINY_GGUF

from localgen.backends.errors import LoadFailed, LocalgenError
from localgen.backends.formats.gguf.reader import GgufReader, read_gguf_header
from localgen.backends.formats.hf.config import read_hf_config
from localgen.backends.formats.hf.folder import read_chat_template, read_sampling_defaults
from localgen.backends.formats.hf.safetensors import NumpyCheckpoint, read_safetensors_header
from localgen.backends.formats.model_facts import local_model_facts
from localgen.backends.model_info import LoadOptions, ModelLoadRequest
from localgen.cli.main import run_command_line
from localgen.cli.show import _format_value, _local_facts
from localgen.hub.resolve import resolve_model

__all__ = ["own_folders"]
DEEP = "[" * 100_000 + "]" * 100_000
DEEP_OBJECT = '{"a":' * 100_000 + "1" + "}" * 100_000
VALUES = [
    *("[]", "{}", '"x"', "1", "-1", "1.5", "1e999", "-Infinity", "NaN", "true", "null", "[1]"),
    *('["x"]', "[{}]", "[[]]", '{"a": []}', "9" * 400, '"\\ud800"', '"a\\u001b"'),
]
KEYS = {
    "config.json": (
        *("text_config", "quantization_config", "rope_scaling", "layer_types", "head_dim"),
        *("sliding_window", "dtype", "num_experts"),
    ),
    "generation_config.json": ("do_sample", "eos_token_id"),
    "tokenizer_config.json": ("chat_template", "bos_token", "eos_token", "add_bos_token"),
    "model.safetensors.index.json": ("weight_map",),
}
# words of Python and its libraries
FOREIGN = (
    *("object is not", "unhashable", "recursion", "codec"),
    *("numpy", "ndarray", "reshape", "larger dtype"),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY, tmp_path / "model"))


def check(read: Callable[[], object]) -> str:
    """The message of the error, which must be one for users; empty if there was none."""
    message = ""
    try:
        read()
    except LocalgenError as error:
        message = error.message
    assert "\n" not in message
    assert not [words for words in FOREIGN if words in message], message
    return message


def show(name: str) -> None:
    for key, value in _local_facts(resolve_model(name)).items():
        _format_value(key, value)


def readers(folder: Path, name: str) -> Iterator[Callable[[], object]]:
    yield lambda: read_hf_config(folder)
    yield lambda: read_chat_template(folder)
    yield lambda: read_sampling_defaults(folder)
    yield lambda: show(str(folder))
    yield lambda: local_model_facts(resolve_model(str(folder)), "x")
    if name not in ("tokenizer_config.json", "generation_config.json"):
        return  # loading a vocabulary takes longer than the rest
    with suppress(ImportError):
        from localgen.backends.formats.hf.tokenizer import HfTokenizer

        yield lambda: HfTokenizer.from_folder(folder, 4096)


@pytest.mark.parametrize("name", KEYS)
def test_json_of_a_folder(folder: Path, name: str) -> None:
    path = folder / name
    whole = json.loads(path.read_text()) if path.exists() else {}
    texts = [*VALUES, DEEP, DEEP_OBJECT]
    for key in {*whole, *KEYS[name]}:
        others = "".join(f", {json.dumps(k)}: {json.dumps(whole[k])}" for k in whole if k != key)
        texts += [f"{{{json.dumps(key)}: {value}{others}}}" for value in VALUES]
    for text in texts:
        path.write_text(text)
        for read in readers(folder, name):
            check(read)


@pytest.mark.parametrize("deep", [DEEP, DEEP_OBJECT], ids=["lists", "objects"])
def test_deep_nesting_is_said(folder: Path, deep: str) -> None:
    (folder / "config.json").write_text(deep)
    assert "config.json cannot be read: its JSON is nested too deeply" in check(
        lambda: show(str(folder))
    )
    path = folder / "model.safetensors"
    path.write_bytes(len(deep).to_bytes(8, "little") + deep.encode())
    assert "nested too deeply" in check(lambda: read_safetensors_header(path))


def test_safetensors_headers(folder: Path) -> None:
    path = folder / "model.safetensors"
    frames = [
        "{}",
        '{"a": {}}',
        '{"a": {"dtype": {}, "shape": [1], "data_offsets": [0, 2]}}',
        '{"a": {"dtype": "F16", "shape": {}, "data_offsets": [0, 2]}}',
        '{"a": {"dtype": "F16", "shape": [{}], "data_offsets": [0, 2]}}',
        '{"a": {"dtype": "F16", "shape": [1], "data_offsets": {}}}',
        '{"a": {"dtype": "F16", "shape": [1], "data_offsets": [{}, 2]}}',
        '{"a": {"dtype": "F16", "shape": [1], "data_offsets": [0, {}]}}',
        '{"a": {"dtype": "F16", "shape": [9223372036854775807, {}], "data_offsets": [0, 2]}}',
    ]
    for frame in frames:
        for value in (*VALUES, DEEP):
            text = frame.replace("{}", value) if "{}" in frame else frame
            raw = text.encode()
            path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(8))
            check(lambda: read_safetensors_header(path))
            check(lambda: NumpyCheckpoint(folder))
            check(lambda: local_model_facts(resolve_model(str(folder)), "x"))


def test_a_list_where_an_object_belongs_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    raw = b'{"norm": [1, 2]}'
    path.write_bytes(len(raw).to_bytes(8, "little") + raw)
    assert check(lambda: read_safetensors_header(path)) == f"{path}: norm is [1, 2], not an object"


# --- GGUF ---


def test_random_damage_of_gguf_headers(tmp_path: Path) -> None:
    """Numbers and bytes of the metadata and of the tensor table are replaced."""
    whole, rng, path = TINY_GGUF.read_bytes(), random.Random(7), tmp_path / "m.gguf"
    vocabulary, table, data = header_bytes()
    numbers = [0, 1, 4, 8, 9, 255, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
    failed = 0
    for _ in range(150):
        content = bytearray(whole)
        for _ in range(rng.choice((1, 2, 4))):
            at = rng.choice((rng.randrange(4, vocabulary), rng.randrange(table, data)))
            new = struct.pack("<Q", rng.choice((rng.choice(numbers), rng.randrange(2**64))))
            content[at : at + 8] = new[: rng.choice((1, 4, 8))]
            content = content[: len(whole)]
        path.write_bytes(content)
        failed += bool(check(lambda: GgufReader(path)))
        check(lambda: read_gguf_header(path))
        check(lambda: show(str(path)))
    assert failed > 50


def gguf(path: Path, num_keys: int, num_tensors: int = 0, rest: bytes = b"") -> Path:
    """A file with one key, which claims another number of keys and tensors."""
    content = b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_keys)
    path.write_bytes(content + text("general.architecture") + u32(8) + text("llama") + rest)
    return path


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def u32(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def u64(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


@pytest.mark.parametrize(
    ("num_keys", "num_tensors", "message"),
    [
        (65_537, 0, "it has 65,537 metadata keys, at most 65,536 are read"),
        (2**64 - 1, 0, "metadata keys, at most 65,536 are read"),
        (1, 65_537, "it has 65,537 tensors, at most 65,536 are read"),
    ],
)
def test_number_of_keys_and_tensors_is_bounded(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    num_keys: int,
    num_tensors: int,
    message: str,
) -> None:
    path = gguf(tmp_path / "m.gguf", num_keys, num_tensors, bytes(1000))
    for command in ("show", "plan"):
        assert run_command_line([command, str(path)]) == 8
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ((), "x has 0 dimensions, not 1 to 4"),
        ((1,) * 65, "x has 65 dimensions, not 1 to 4"),
        ((2**63, 0), "x has no elements"),
        ((0, 2**63), "x has no elements"),
        ((2**40, 2**40), "x has dimensions beyond 64 bits"),
    ],
)
def test_dimensions_are_checked(tmp_path: Path, dims: tuple[int, ...], message: str) -> None:
    table = text("x") + u32(len(dims)) + u64(*dims) + u32(0) + u64(0)
    path = gguf(tmp_path / "m.gguf", 1, 1, table + bytes(200))
    with pytest.raises(LoadFailed, match=message):
        GgufReader(path)


class _Evil:
    """Its pickle creates a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[Path]]:
        return (Path.touch, (self._path,))


def test_code_in_a_model_folder_is_not_run(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from localgen.backends.cuda.loader import load_cuda_model

    ran = tmp_path / "ran"
    (folder / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass Evil: pass\n")
    for name in ("config.json", "tokenizer_config.json"):
        content = json.loads((folder / name).read_text())
        classes = ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")
        content["auto_map"] = dict.fromkeys(classes, "evil.Evil")
        (folder / name).write_text(json.dumps(content))
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Evil(ran)))
    show(str(folder))
    request = ModelLoadRequest("tiny", str(folder), LoadOptions(device="cpu", ctx=64))
    load_cuda_model(request, lambda share: None).runner.close()
    assert not ran.exists()
    (folder / "model.safetensors").unlink()
    with pytest.raises(LoadFailed, match="safetensors"):
        load_cuda_model(request, lambda share: None)
    assert not ran.exists()
