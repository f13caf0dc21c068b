"""Where a model would run, and the memory available there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from localgen.backends.errors import InvalidRequest, OutOfMemory
from localgen.backends.formats.model_facts import ModelFacts
from localgen.backends.formats.model_files import ModelFile
from localgen.backends.memory import kv_sizing
from localgen.backends.memory.kv_sizing import KVPoolRules, KVSize, KVSizeRequest
from localgen.backends.model_info import LoadOptions
from localgen.machine.gpus import Gpu
from localgen.placement.backend_choice import Placement, choose_placement
from localgen.placement.footprint import (
    Footprint,
    RunnerKind,
    estimate_footprint,
    loaded_weight_bytes,
    num_kv_parts,
)
from localgen.planning.resources import MachineResources


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A model to be loaded on a machine. draft: its draft model, if any."""

    facts: ModelFacts
    options: LoadOptions
    resources: MachineResources
    draft: ModelFacts | None = None


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """A model placed on a device.

    free_bytes: memory for weights, buffers and KV pool together. draft_footprint: of the draft
    model, whose pool has the same number of tokens.
    """

    placement: Placement
    footprint: Footprint
    pool_rules: KVPoolRules
    free_bytes: int
    draft_footprint: Footprint | None = None

    @property
    def kv_budget_bytes(self) -> int:
        """Memory left for the KV pools."""
        return self.free_bytes - sum(one.min_bytes for one in self._footprints)

    @property
    def token_bytes(self) -> float:
        """Bytes per token, in both pools together."""
        return sum(one.token_bytes for one in self._footprints)

    @property
    def _footprints(self) -> tuple[Footprint, ...]:
        return (
            (self.footprint,)
            if self.draft_footprint is None
            else (self.footprint, self.draft_footprint)
        )

    def total_bytes(self, tokens: int) -> int:
        """Total memory with KV pools of that many tokens."""
        return sum(one.total_bytes(tokens) for one in self._footprints)

    def largest_ctx(self) -> int | None:
        """Longest context that fits, at most ctx_train. Returns None if unknown."""
        shape = self.footprint.shape
        if shape is None or not shape.ctx_train:
            return None
        room = max(0, self.kv_budget_bytes) / self.pool_rules.num_parts
        tokens = kv_sizing.max_fitting_tokens(self.token_bytes, room, shape.ctx_train)
        step = self.pool_rules.granularity_tokens  # pool sizes are multiples of it
        return tokens if tokens == shape.ctx_train else tokens // step * step

    def choose_kv_size(self, options: LoadOptions, name: str) -> tuple[KVSize, bool]:
        """Return the context and pool size that the loader would choose, and whether they fit.

        If they do not fit, returns the smallest size that satisfies the options. Raises
        InvalidRequest.
        """
        shape = self.footprint.shape
        trained = (shape.ctx_train if shape else 0) or options.ctx or kv_sizing.DEFAULT_POOL_TOKENS
        wanted = KVSizeRequest(
            ctx=options.ctx, kv_tokens=options.kv_tokens, ctx_train=trained, model_name=name
        )
        per_token, room = self.token_bytes, self.kv_budget_bytes
        try:
            return kv_sizing.resolve_kv_size(
                wanted, self.pool_rules, token_bytes=per_token, free_bytes=room
            ), True
        except OutOfMemory:
            step, count = self.pool_rules.granularity_tokens, self.pool_rules.num_parts
            ctx = options.ctx or min(step, trained)
            return KVSize(ctx, max(count * -(-ctx // step) * step, options.kv_tokens or 0)), False


def place_model(request: PlanRequest) -> PlacedModel:
    """Place a model. Raises InvalidRequest if the options are not possible on this machine."""
    placement = _choose_placement(request)
    gpu, runner, draft = placement.gpu, _runner(placement), request.draft
    if draft is not None and runner == "llamacpp" and not draft.is_gguf:
        raise InvalidRequest(
            f"--draft: llama.cpp runs .gguf files, {draft.name} is not one", param="draft"
        )
    return PlacedModel(
        placement=placement,
        footprint=_footprint(request.facts, runner, request.options),
        pool_rules=_pool_rules(runner, gpu, request.options),
        free_bytes=request.resources.ram_bytes if gpu is None else gpu.free_bytes,
        draft_footprint=None if draft is None else _footprint(draft, runner, request.options),
    )


def _choose_placement(request: PlanRequest) -> Placement:
    """Place the model as the server does, by the GPU memory of target and draft model together."""
    facts, options = request.facts, request.options
    path = Path(facts.path or (f"{facts.name}.gguf" if facts.is_gguf else facts.name))
    file = ModelFile(facts.name, path, facts.weights_bytes, (), facts.source)
    need = sum(
        _footprint(one, "cuda", options).need_bytes(options.ctx)
        for one in (facts, request.draft)
        if one is not None
    )
    return choose_placement(file, options, request.resources.hardware, need)


def _runner(placement: Placement) -> RunnerKind:
    if placement.backend == "llamacpp":
        return "llamacpp"
    return "cuda" if placement.on_gpu else "cuda on cpu"


def _footprint(facts: ModelFacts, runner: RunnerKind, options: LoadOptions) -> Footprint:
    kept = loaded_weight_bytes(facts.weights_bytes, facts.params, runner, is_gguf=facts.is_gguf)
    return estimate_footprint(kept, facts.shape, runner, options)


def _pool_rules(runner: RunnerKind, gpu: Gpu | None, options: LoadOptions) -> KVPoolRules:
    if runner == "llamacpp":
        return replace(kv_sizing.LLAMACPP_POOL, num_parts=num_kv_parts(options))
    return kv_sizing.CUDA_POOL if gpu else kv_sizing.CUDA_ON_CPU_POOL
