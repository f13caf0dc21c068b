"""Where a model would run, and the room that it would have there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from localgen.backends.errors import InvalidRequest, OutOfMemory
from localgen.backends.formats.model_facts import Facts
from localgen.backends.formats.model_files import ModelFile
from localgen.backends.memory import kv_sizing
from localgen.backends.memory.kv_sizing import PoolRules, Size, Wanted
from localgen.backends.model_info import LoadOptions
from localgen.machine.gpus import Gpu
from localgen.placement.backend_choice import Placement, choose
from localgen.placement.footprint import Footprint, Runner, footprint, kept_bytes, parts
from localgen.planning.resources import Machine


@dataclass(frozen=True, slots=True)
class Wish:
    """A model as it is to be loaded on a machine. draft: the model that drafts for it."""

    facts: Facts
    asked: LoadOptions
    machine: Machine
    draft: Facts | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """free_bytes: what there is for weights, buffers and pool together. beside: what the draft
    model takes, whose pool has as many tokens."""

    placement: Placement
    footprint: Footprint
    rules: PoolRules
    free_bytes: int
    beside: Footprint | None = None

    @property
    def room_bytes(self) -> int:
        """What the pools may take of it."""
        return self.free_bytes - sum(one.least_bytes for one in self._both)

    @property
    def token_bytes(self) -> float:
        """Of a token in both pools."""
        return sum(one.token_bytes for one in self._both)

    @property
    def _both(self) -> tuple[Footprint, ...]:
        return (self.footprint,) if self.beside is None else (self.footprint, self.beside)

    def total_bytes(self, tokens: int) -> int:
        """All of it with pools of so many tokens."""
        return sum(one.bytes_with(tokens) for one in self._both)

    def largest_ctx(self) -> int | None:
        """The longest context that fits, at most the model's own; None: not known."""
        shape = self.footprint.shape
        if shape is None or not shape.ctx_train:
            return None
        room = max(0, self.room_bytes) / self.rules.parts
        tokens = kv_sizing.largest(self.token_bytes, room, shape.ctx_train)
        step = self.rules.step_tokens  # a pool has whole ones
        return tokens if tokens == shape.ctx_train else tokens // step * step

    def size(self, asked: LoadOptions, name: str) -> tuple[Size, bool]:
        """Context and pool as the loader would make them, and whether they fit; if not, the least
        that was asked for. InvalidRequest."""
        shape = self.footprint.shape
        trained = (shape.ctx_train if shape else 0) or asked.ctx or kv_sizing.USUAL_TOKENS
        wanted = Wanted(ctx=asked.ctx, kv_tokens=asked.kv_tokens, trained=trained, name=name)
        per_token, room = self.token_bytes, self.room_bytes
        try:
            return kv_sizing.choose(
                wanted, self.rules, token_bytes=per_token, free_bytes=room
            ), True
        except OutOfMemory:
            step, count = self.rules.step_tokens, self.rules.parts
            ctx = asked.ctx or min(step, trained)
            return Size(ctx, max(count * -(-ctx // step) * step, asked.kv_tokens or 0)), False


def settle(wish: Wish) -> Setting:
    """InvalidRequest: what was asked for is not possible here."""
    placement = _placed(wish)
    gpu, runner, draft = placement.gpu, _runner(placement), wish.draft
    if draft is not None and runner == "llamacpp" and not draft.is_gguf:
        raise InvalidRequest(
            f"--draft: llama.cpp runs .gguf files, {draft.name} is none", param="draft"
        )
    return Setting(
        placement=placement,
        footprint=_footprint(wish.facts, runner, wish.asked),
        rules=_rules(runner, gpu, wish.asked),
        free_bytes=wish.machine.ram_bytes if gpu is None else gpu.free_bytes,
        beside=None if draft is None else _footprint(draft, runner, wish.asked),
    )


def _placed(wish: Wish) -> Placement:
    """As the server places it, by what both would need on a GPU."""
    facts, asked = wish.facts, wish.asked
    path = Path(facts.path or (f"{facts.name}.gguf" if facts.is_gguf else facts.name))
    file = ModelFile(facts.name, path, facts.weights_bytes, (), facts.source)
    need = sum(
        _footprint(one, "cuda", asked).need_bytes(asked.ctx)
        for one in (facts, wish.draft)
        if one is not None
    )
    return choose(file, asked, wish.machine.hardware, need)


def _runner(placement: Placement) -> Runner:
    if placement.backend == "llamacpp":
        return "llamacpp"
    return "cuda" if placement.on_gpu else "cuda on cpu"


def _footprint(facts: Facts, runner: Runner, asked: LoadOptions) -> Footprint:
    kept = kept_bytes(facts.weights_bytes, facts.params, runner, is_gguf=facts.is_gguf)
    return footprint(kept, facts.shape, runner, asked)


def _rules(runner: Runner, gpu: Gpu | None, asked: LoadOptions) -> PoolRules:
    if runner == "llamacpp":
        return replace(kv_sizing.LLAMACPP, parts=parts(asked))
    return kv_sizing.CUDA if gpu else kv_sizing.CUDA_ON_CPU
