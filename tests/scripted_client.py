"""A client that answers from a script, for tests of its users."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from localgen.backends.errors import ModelNotFound, ServerUnavailable
from localgen.backends.model_info import LoadOptions, ModelInfo
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.types import Message, Timings, Tool
from localgen.client import Completion, Health, LocalClient, ModelCard, RunningModel, TextDelta

TIMINGS = Timings(
    cache_n=12,
    prompt_n=34,
    prompt_ms=55.0,
    prompt_per_second=618.2,
    predicted_n=3,
    predicted_ms=73.0,
    predicted_per_second=41.2,
    ttft_ms=56.4,
    queue_ms=0.4,
    template_ms=1.2,
)


def answer(**changes: Any) -> Completion:
    """An answer with plausible numbers."""
    known: dict[str, Any] = {
        "model": "tiny",
        "finish_reason": "stop",
        "prompt_tokens": 46,
        "cached_tokens": 12,
        "completion_tokens": 3,
        "timings": TIMINGS,
        "ctx": 2048,
        "seed": 7,
        "stop": None,
        "notes": (),
    }
    return Completion(**(known | changes))


def model_info(name: str = "tiny", **changes: Any) -> ModelInfo:
    """A loaded model with plausible numbers."""
    known: dict[str, Any] = {
        "name": name,
        "path": f"/models/{name}.gguf",
        "architecture": "llama",
        "description": "llama 6M F16",
        "params": 6_000_000,
        "size_bytes": 12_000_000,
        "vocab": 4096,
        "ctx_train": 2048,
        "ctx": 2048,
        "kv_tokens": 8192,
        "max_seqs": 32,
        "kv_bytes": 1 << 20,
        "layers": 4,
        "backend": "llamacpp",
        "processor": "100% CPU",
        "load_ms": 40.0,
        "can_rewind": True,
        "chat_template": "{{ messages }}",
        "sampling": SamplingParams(temperature=0.3),
        "options": LoadOptions(threads=2),
    }
    return ModelInfo(**(known | changes))


@dataclass(frozen=True)
class Asked:
    """A chat request as it reached the client."""

    model: str
    messages: tuple[Message, ...]
    params: SamplingParams
    ctx: int | None
    priority: int
    save_prefix: bool = True
    on_overflow: str = "error"
    tools: tuple[Tool, ...] = ()
    tool_choice: str = "auto"


@dataclass
class Record:
    """The calls made to the client, in order."""

    asked: list[Asked] = field(default_factory=list)
    loaded: list[tuple[str | None, LoadOptions]] = field(default_factory=list)
    keep_alives: list[str | None] = field(default_factory=list)
    connects: int = 0
    closed_early: int = 0
    embedded: list[tuple[str | None, tuple[str, ...]]] = field(default_factory=list)
    unloaded: list[str] = field(default_factory=list)
    shutdowns: int = 0
    answers_now: int = 0


Script = Sequence[str | TextDelta | Completion | BaseException]


class ScriptedClient(LocalClient):
    """Plays one script per request: texts, an answer, or an error to raise; then echoes prompts."""

    def __init__(self, *scripts: Script, running: bool = True) -> None:
        self.scripts = list(scripts)
        self.record = Record()
        self.is_running = running
        self.names = ("tiny", "other")

    def connect(self) -> None:
        self.record.connects += 1
        self.is_running = True

    def load(
        self,
        model: str | None,
        options: LoadOptions,
        on_progress: Callable[[float], None] = print,
        keep_alive: str | None = None,
    ) -> ModelInfo:
        if (model or "tiny") not in self.names:
            raise ModelNotFound(f"Model {model!r} not found")
        on_progress(0.5)
        self.record.loaded.append((model, options))
        self.record.keep_alives.append(keep_alive)
        return model_info(model or "tiny")

    def chat(
        self,
        model: str | None,
        messages: Sequence[Message],
        params: SamplingParams,
        *,
        ctx: int | None = None,
        priority: int = 0,
        save_prefix: bool = True,
        on_overflow: str = "error",
        tools: tuple[Tool, ...] = (),
        tool_choice: str = "auto",
    ) -> Generator[TextDelta | Completion, None, None]:
        self.record.asked.append(
            Asked(
                *(model or "tiny", tuple(messages), params, ctx, priority, save_prefix),
                *(on_overflow, tools, tool_choice),
            )
        )
        script = self.scripts.pop(0) if self.scripts else (f"re: {messages[-1].content}", answer())
        return self._play(script)

    def _play(self, script: Script) -> Generator[TextDelta | Completion, None, None]:
        try:
            for tokens, step in enumerate(script, 1):
                if isinstance(step, BaseException):
                    raise step
                yield TextDelta(step, tokens) if isinstance(step, str) else step
        except GeneratorExit:
            self.record.closed_early += 1
            raise

    @property
    def is_localgen(self) -> bool:
        return True

    def answer_now(self) -> bool:
        self.record.answers_now += 1
        return True

    def embed(
        self, model: str | None, texts: Sequence[str], dimensions: int | None = None
    ) -> Iterator[list[float]]:
        self.record.embedded.append((model, tuple(texts)))
        return iter([[1.0]] * len(texts))

    def models(self) -> list[ModelCard]:
        return [ModelCard(name, f"/models/{name}.gguf", 12, "idle", "cache") for name in self.names]

    def running_models(self) -> list[RunningModel]:
        if not self.is_running:
            raise ServerUnavailable("no server")
        return [
            RunningModel(
                "tiny", "a1b2", 12_000_000, "100% CPU", 2048, 299.0, 0, memory_bytes=130_000_000
            )
        ]

    def stats(self) -> dict[str, Any]:
        return {
            "server": {"status": "ok"},
            "models": [{"name": "tiny", "memory_bytes": 130_000_000, "rate": 41.234, "info": {}}],
            "uptime_s": 3,
        }

    def unload(self, model: str) -> bool:
        self.record.unloaded.append(model)
        return model == "tiny"

    def shutdown(self) -> bool:
        self.record.shutdowns += self.is_running
        return self.is_running

    def health(self) -> Health | None:
        return Health("ok", "0.1.0", 123, 0, protocol=1) if self.is_running else None

    def close(self) -> None:
        pass

    def abort(self) -> None:
        pass
