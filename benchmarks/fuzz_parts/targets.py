"""What parses files and settings of others, one class each, run in a worker process.

A target makes input from random numbers, and uses it as localgen does. If that raises a
LocalgenError, the input is refused. Anything else that is raised is a finding.
"""

from __future__ import annotations

import json
import os
import random
import sqlite3
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Protocol

from benchmarks.fuzz_parts import samples
from benchmarks.fuzz_parts.mutations import Mutator
from localgen.backends.errors import LocalgenError
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.sandbox import Sandbox
from localgen.backends.text.grammar import GrammarCompiler
from localgen.backends.types import Message, ToolCall

_TEXTS = ("", "Hello, wörld! 12345\n\n  x", "<|user|>a\x00b</s>", "aaaaaaaaaaaaaaaaaaaaaaaa 𝕏")
_MAX_READ_VALUES = 1 << 20


class Target(Protocol):
    """name: on the command line. suffix: of files with its input."""

    name: str
    suffix: str

    def make(self, source: random.Random) -> bytes: ...

    def use(self, content: bytes, folder: Path) -> None:
        """folder: empty, for files. Raises LocalgenError if the input is refused."""


class GgufTarget:
    name, suffix = "gguf", ".gguf"

    def make(self, source: random.Random) -> bytes:
        whole = samples.gguf_file()
        mutator = Mutator(source)
        # the tensors' values follow the header, and are half of the file
        head = whole.index(b"blk.0.attn_v.weight") + 200
        if source.random() < 0.8:
            return mutator.data(whole[:head]) + whole[head:]
        return mutator.data(whole)

    def use(self, content: bytes, folder: Path) -> None:
        from localgen.backends.formats.gguf.file import GgufFile
        from localgen.backends.formats.gguf.reader import parse_gguf_header
        from localgen.backends.formats.gguf.spec import read_gguf_architecture, read_gguf_spec
        from localgen.backends.formats.gguf.tokenizer import read_gguf_tokenizer
        from localgen.backends.formats.model_facts import local_model_facts, read_model_shape
        from localgen.backends.formats.model_files import model_file

        path = folder / "model.gguf"
        path.write_bytes(content)
        model = model_file(path)
        read_model_shape(model)
        _each(
            lambda: local_model_facts(model, "Q8_0"),
            lambda: parse_gguf_header(content[: len(content) // 2], "a prefix"),
        )
        file = GgufFile(path)
        _each(
            lambda: read_gguf_architecture(file),
            lambda: read_gguf_spec(file),
            lambda: _use_tokenizer(read_gguf_tokenizer(file, 300)),
            *(lambda name=name: _read_tensor(file, name) for name in file.tensor_names()[:20]),
        )


def _read_tensor(file: object, name: str) -> None:
    import torch

    from localgen.backends.formats.gguf.file import GgufFile

    assert isinstance(file, GgufFile)
    shape = file.shape(name)
    file.read(name, shape, device=torch.device("cpu"), dtype=torch.float32)


class SafetensorsTarget:
    name, suffix = "safetensors", ".safetensors"

    def make(self, source: random.Random) -> bytes:
        mutator = Mutator(source)
        kind = source.random()
        if kind < 0.3:
            return mutator.data(samples.safetensors_file())
        header = mutator.json_text(samples.SAFETENSORS_HEADER)
        length = int(source.choice((0, 1, 2**31, 2**63, 2**64 - 1))) if kind < 0.4 else None
        return samples.safetensors_file(header, length)

    def use(self, content: bytes, folder: Path) -> None:
        import torch

        from localgen.backends.formats.architecture.sharding import ModelShard
        from localgen.backends.formats.hf.checkpoint import SafetensorsCheckpoint
        from localgen.backends.formats.hf.config import read_hf_config
        from localgen.backends.formats.hf.safetensors import (
            NumpyCheckpoint,
            read_safetensors_header,
        )

        path = folder / "model.safetensors"
        path.write_bytes(content)

        def with_numpy() -> None:
            checkpoint = NumpyCheckpoint(folder)
            for name in checkpoint.names():
                list(checkpoint.row_chunks(name))
                checkpoint.read(name)

        def with_torch() -> None:
            whole = ModelShard(read_hf_config(samples.TINY))
            with SafetensorsCheckpoint(folder, torch.device("cpu"), whole) as checkpoint:
                for name in checkpoint.unread_tensors():
                    checkpoint.read(name, checkpoint.shape(name))

        _each(lambda: read_safetensors_header(path), with_numpy, with_torch)


class ConfigTarget:
    """Files of a folder as one JSON object: their text by name."""

    name, suffix = "config", ".json"

    def make(self, source: random.Random) -> bytes:
        files = dict(source.choice(samples.config_files()))
        changed = source.choice(list(files))
        texts = {name: json.dumps(value) for name, value in files.items()}
        texts[changed] = Mutator(source).json_text(files[changed])
        return json.dumps(texts).encode()

    def use(self, content: bytes, folder: Path) -> None:
        from localgen.backends.formats.hf.config import read_hf_config
        from localgen.backends.formats.hf.folder import read_chat_template, read_sampling_defaults
        from localgen.backends.formats.hf.safetensors import weight_files
        from localgen.backends.formats.hf.tensor_names import expected_shapes, linear_shapes
        from localgen.backends.formats.model_facts import local_model_facts, read_model_shape
        from localgen.backends.formats.model_files import model_folder

        for name, text in json.loads(content).items():
            (folder / Path(name).name).write_text(text, "utf-8", "surrogatepass")
        (folder / "model.safetensors").write_bytes(samples.safetensors_file())
        model = model_folder(folder)
        read_model_shape(model)

        def spec() -> None:
            read = read_hf_config(folder)
            expected_shapes(read)
            linear_shapes(read)

        _each(
            lambda: local_model_facts(model, "BF16"),
            spec,
            lambda: read_sampling_defaults(folder),
            lambda: read_chat_template(folder),
            lambda: weight_files(folder),
        )


class TokenizerTarget:
    name, suffix = "tokenizer", ".json"

    def make(self, source: random.Random) -> bytes:
        text = Mutator(source).json_text(samples.tokenizer())
        return text.encode(errors="surrogatepass")

    def use(self, content: bytes, folder: Path) -> None:
        from localgen.backends.formats.hf.tokenizer import HfTokenizer

        (folder / "tokenizer.json").write_bytes(content)
        config = (samples.TINY / "tokenizer_config.json").read_bytes()
        (folder / "tokenizer_config.json").write_bytes(config)
        _use_tokenizer(HfTokenizer.from_folder(folder, 4096, _sandbox()))


@cache
def _sandbox() -> Sandbox:
    """As an engine has one."""
    return Sandbox()


def _use_tokenizer(tokenizer: object) -> None:
    from localgen.backends.formats.hf.tokenizer import HfTokenizer

    assert isinstance(tokenizer, HfTokenizer)
    for text in _TEXTS:
        for token in tokenizer.encode(text):
            tokenizer.piece(token)
    for token in range(min(tokenizer.vocab_size, 4096)):
        tokenizer.piece(token)


class TemplateTarget:
    name, suffix = "template", ".jinja"

    def make(self, source: random.Random) -> bytes:
        template = source.choice(samples.TEMPLATES)
        text = Mutator(source).text(template, samples.TEMPLATE_PIECES)
        return text.encode(errors="surrogatepass")

    def use(self, content: bytes, folder: Path) -> None:
        from localgen.backends.text.template import SandboxedTemplate

        source = content.decode(errors="replace")
        template = SandboxedTemplate(_sandbox(), source, bos="<s>", eos="</s>")
        call = ToolCall("call_1", "weather", '{"city": "Oslo"}')
        plain = (Message("system", "Be brief."), Message("user", "Hi <|assistant|> {{ 1 }}"))
        _each(
            lambda: template.render(plain),
            lambda: template.render(
                (*plain, Message("assistant", "", "why", (call,)), Message("tool", "3")),
                {"tools": [{"type": "function", "function": {"name": "weather"}}]},
            ),
        )


class SchemaTarget:
    """A JSON schema, a regular expression or a grammar: kind, a line feed, the text."""

    name, suffix = "schema", ".txt"

    def make(self, source: random.Random) -> bytes:
        mutator = Mutator(source)
        kind = source.choice(("json_schema", "json_schema", "regex", "grammar"))
        if kind == "json_schema":
            text = mutator.json_text(source.choice(samples.SCHEMAS))
        else:
            text = mutator.text(
                source.choice(samples.REGEXES if kind == "regex" else samples.GRAMMARS)
            )
        return f"{kind}\n{text}".encode(errors="surrogatepass")

    def use(self, content: bytes, folder: Path) -> None:
        kind, _, text = content.decode(errors="surrogatepass").partition("\n")
        field: dict[str, Any] = {kind: text}
        matcher = self._compiler.compile(SamplingParams(**field))
        assert matcher is not None
        for _ in range(8):
            allowed = matcher.allowed_mask().nonzero()[0]
            if not len(allowed):
                break
            matcher.accept(int(allowed[len(allowed) // 2]))

    @cached_property
    def _compiler(self) -> GrammarCompiler:
        from localgen.backends.formats.hf.tokenizer import HfTokenizer

        return GrammarCompiler(HfTokenizer.from_folder(samples.TINY, 4096), _sandbox())


class StateTarget:
    """A state file: its name, a line feed, the content."""

    name, suffix = "state", ".txt"

    def make(self, source: random.Random) -> bytes:
        mutator = Mutator(source)
        name = source.choice((*samples.STATE_FILES, "sessions.db", "sessions.db"))
        if name == "sessions.db":
            content = mutator.data(self._sessions)
        elif source.random() < 0.3:
            content = mutator.data(samples.STATE_FILES[name].encode())
        elif name.endswith(".json"):
            content = mutator.json_text(json.loads(samples.STATE_FILES[name])).encode(
                errors="surrogatepass"
            )
        else:
            content = mutator.text(samples.STATE_FILES[name]).encode(errors="surrogatepass")
        return name.encode() + b"\n" + content

    def use(self, content: bytes, folder: Path) -> None:
        label, _, text = content.partition(b"\n")
        name = Path(label.decode()).name
        for variable in ("LOCALGEN_STATE_DIR", "LOCALGEN_CONFIG_DIR", "XDG_CACHE_HOME"):
            os.environ[variable] = str(folder)
        folder.chmod(0o700)
        if name == "measurements.json":
            (folder / "localgen").mkdir()
            name = f"localgen/{name}"
        (folder / name).write_bytes(text)
        (folder / name).chmod(0o600)
        {
            "models.toml": _use_aliases,
            "endpoints.toml": _use_endpoints,
            "localgen/measurements.json": _use_measurements,
            "sessions.db": _use_sessions,
        }[name](folder)

    @cached_property
    def _sessions(self) -> bytes:
        from tempfile import TemporaryDirectory

        from localgen.chat.conversation import Turn
        from localgen.chat.session_store import SessionRecord
        from localgen.chat.stored_sessions import open_store

        with TemporaryDirectory() as folder:
            with open_store(Path(folder)) as store:
                record = store.create(SessionRecord(id=0, name="a chat"))
                record = store.begin_turn(record, "Hello?")
                record = store.finish_turn(record, Turn("Hello?", "Hello."))
                store.begin_turn(record, "More")
                store.save_unsent_prompt(record.id, "draft")
            path = Path(folder) / "sessions.db"
            with sqlite3.connect(path) as connection:
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            return path.read_bytes()


def _use_aliases(folder: Path) -> None:
    from localgen.hub.aliases import add_alias, load_aliases, remove_alias

    _each(
        load_aliases,
        lambda: add_alias("another", "tiny"),
        lambda: remove_alias("small"),
        lambda: remove_alias("another"),
    )


def _use_endpoints(folder: Path) -> None:
    from localgen.client.endpoints import (
        Endpoint,
        add_endpoint,
        load_endpoints,
        remove_endpoint,
        resolve_endpoint,
    )

    _each(
        load_endpoints,
        lambda: add_endpoint(Endpoint("http://127.0.0.1:1/v1", "another")),
        lambda: resolve_endpoint("cluster"),
        lambda: remove_endpoint("cluster"),
        lambda: remove_endpoint("another"),
    )


def _use_measurements(folder: Path) -> None:
    from localgen.machine.measurements import cached_measurement, cached_or_measured

    cached_measurement("memory bandwidth", float)
    cached_or_measured("memory bandwidth", float, lambda: 1.0, remeasure=False)


def _use_sessions(folder: Path) -> None:
    from localgen.chat.database import session_names
    from localgen.chat.stored_sessions import latest_session, list_with_turns, open_store

    session_names(folder / "sessions.db")
    with open_store(folder) as store:
        _each(lambda: store.recent_prompts(10), lambda: latest_session(store))
        for listed in list_with_turns(store)[:3]:
            record = store.read(listed.id)
            store.load_unsent_prompt(listed.id)
            store.begin_turn(record, "another")


def _each(*uses: object) -> None:
    """Do all of it. Raises the last LocalgenError, so that one refusal does not hide the rest."""
    refusal: LocalgenError | None = None
    for use in uses:
        assert callable(use)
        try:
            use()
        except LocalgenError as error:
            refusal = error
    if refusal is not None:
        raise refusal


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        GgufTarget(),
        SafetensorsTarget(),
        ConfigTarget(),
        TokenizerTarget(),
        TemplateTarget(),
        SchemaTarget(),
        StateTarget(),
    )
}
