"""Where a model would run, and the room that it would have there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from localgen.backends.errors import OutOfMemory
from localgen.backends.memory import pool
from localgen.backends.memory.pool import PoolRules, Size, Wanted
from localgen.backends.models import LoadOptions
from localgen.gpus import Gpu
from localgen.hub.files import ModelFile
from localgen.placement import Placement, choose
from localgen.planning.facts import Facts
from localgen.planning.footprint import Footprint, Runner, footprint, kept_bytes, parts
from localgen.planning.machine import Machine


@dataclass(frozen=True, slots=True)
class Setting:
    """free_bytes: what there is for weights, buffers and pool together."""

    placement: Placement
    footprint: Footprint
    rules: PoolRules
    free_bytes: int

    @property
    def room_bytes(self) -> int:
        """What the pool may take of it."""
        return self.free_bytes - self.footprint.weights_bytes - self.footprint.fixed_bytes

    def total_bytes(self, tokens: int) -> int:
        """All of it with a pool of so many tokens."""
        if self.footprint.shape is None:
            return self.footprint.need_bytes()
        fixed = self.footprint.weights_bytes + self.footprint.fixed_bytes
        return fixed + int(tokens * self.footprint.token_bytes)

    def largest_ctx(self) -> int | None:
        """The longest context that fits, at most the model's own; None: not known."""
        shape = self.footprint.shape
        if shape is None or not shape.ctx_train:
            return None
        room = max(0, self.room_bytes) / self.rules.parts
        tokens = pool.largest(self.footprint.token_bytes, room, shape.ctx_train)
        step = self.rules.step_tokens  # a pool has whole ones
        return tokens if tokens == shape.ctx_train else tokens // step * step

    def size(self, asked: LoadOptions, name: str) -> tuple[Size, bool]:
        """Context and pool as the loader would make them, and whether they fit; if not, the least
        that was asked for. InvalidRequest."""
        shape = self.footprint.shape
        trained = (shape.ctx_train if shape else 0) or asked.ctx or pool.USUAL_TOKENS
        wanted = Wanted(ctx=asked.ctx, kv_tokens=asked.kv_tokens, trained=trained, name=name)
        per_token, room = self.footprint.token_bytes, self.room_bytes
        try:
            return pool.choose(wanted, self.rules, token_bytes=per_token, free_bytes=room), True
        except OutOfMemory:
            step, count = self.rules.step_tokens, self.rules.parts
            ctx = asked.ctx or min(step, trained)
            return Size(ctx, max(count * -(-ctx // step) * step, asked.kv_tokens or 0)), False


def settle(facts: Facts, asked: LoadOptions, machine: Machine) -> Setting:
    """InvalidRequest: what was asked for is not possible here."""
    placement = _placed(facts, asked, machine)
    gpu, runner = placement.gpu, _runner(placement)
    return Setting(
        placement=placement,
        footprint=_footprint(facts, runner, asked),
        rules=_rules(runner, gpu, asked),
        free_bytes=machine.ram_bytes if gpu is None else gpu.free_bytes,
    )


def _placed(facts: Facts, asked: LoadOptions, machine: Machine) -> Placement:
    """As the server places it, by what it would need on a GPU."""
    path = Path(facts.path or (f"{facts.name}.gguf" if facts.is_gguf else facts.name))
    file = ModelFile(facts.name, path, facts.weights_bytes, (), facts.source)
    need = _footprint(facts, "cuda", asked).need_bytes(asked.ctx)
    return choose(file, asked, machine.hardware, need)


def _runner(placement: Placement) -> Runner:
    if placement.backend == "llamacpp":
        return "llamacpp"
    return "cuda" if placement.on_gpu else "cuda on cpu"


def _footprint(facts: Facts, runner: Runner, asked: LoadOptions) -> Footprint:
    kept = kept_bytes(facts.weights_bytes, facts.params, runner, is_gguf=facts.is_gguf)
    return footprint(kept, facts.shape, runner, asked)


def _rules(runner: Runner, gpu: Gpu | None, asked: LoadOptions) -> PoolRules:
    if runner == "llamacpp":
        return replace(pool.LLAMACPP, parts=parts(asked))
    return pool.CUDA if gpu else pool.CUDA_ON_CPU
