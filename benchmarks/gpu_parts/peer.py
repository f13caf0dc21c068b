"""The process of a peer: python -m benchmarks.gpu_parts.peer NAME LOGITS [--quick]

It loads the model, warms up, writes the logits of a fixed prompt to the file LOGITS, and prints an
empty JSON object when it is ready. Then it measures one round per input line, and prints the
figures as a JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.gpu_parts.device import Device
from benchmarks.gpu_parts.hf_peers import ContinuousBatching, StaticGenerate
from benchmarks.gpu_parts.loaded import Loaded
from benchmarks.gpu_parts.plan import QUICK, GpuPlan, full_plan
from benchmarks.gpu_parts.static_decode import StaticDecode

Round = Callable[[], dict[str, float]]
ROOM = 16


def asked_prompt(plan: GpuPlan) -> list[int]:
    """Prompt for which logits of peers and localgen are compared."""
    return random.Random(0).choices(range(plan.plain.spec.vocab_size), k=plan.alone.prompt)


def _prompts(plan: GpuPlan, count: int, tokens: int) -> list[list[int]]:
    return [random.choices(range(plan.plain.spec.vocab_size), k=tokens) for _ in range(count)]


def _static(plan: GpuPlan, device: Device) -> tuple[torch.Tensor, Round]:
    loaded, length = Loaded(plan.plain, device), plan.alone.prompt + plan.alone.answer + ROOM
    peer = StaticDecode(loaded.spec, loaded.weights, device, max_len=length, compiler=plan.compiler)
    peer.warm_up()
    return peer.prompt(asked_prompt(plan)), _decoding(plan, peer)


def _hf_static(plan: GpuPlan, device: Device) -> tuple[torch.Tensor, Round]:
    loaded, length = Loaded(plan.plain, device), plan.alone.prompt + plan.alone.answer + ROOM
    peer = StaticGenerate(loaded.spec, loaded.weights, device, max_len=length)
    run = _decoding(plan, peer)
    run()
    return peer.prompt(asked_prompt(plan)), run


def _hf_batching(plan: GpuPlan, device: Device) -> tuple[torch.Tensor, Round]:
    loaded, group = Loaded(plan.plain, device), plan.peer
    peer = ContinuousBatching(loaded.spec, loaded.weights, device)

    def run() -> dict[str, float]:
        took_s = peer.serve_s(_prompts(plan, group.requests, group.prompt), group.answer)
        return {"tok_s": group.requests * group.answer / took_s}

    # before the first batch, which changes the model's attention implementation
    logits = peer.prompt(asked_prompt(plan))
    run()
    return logits, run


def _decoding(plan: GpuPlan, peer: StaticDecode | StaticGenerate) -> Round:
    group = plan.alone

    def run() -> dict[str, float]:
        (prompt,) = _prompts(plan, 1, group.prompt)
        return {"decode_tok_s": (group.answer - 1) / peer.decode_s(prompt, group.answer)}

    return run


# ALONE: peers measured with one request at a time. BATCH: with several
STATIC, HF_STATIC = "torch.compile, static cache", "transformers, static cache"
HF_BATCHING = "transformers, continuous batching"
ALONE, BATCH = (STATIC, HF_STATIC), (HF_BATCHING,)
_PEERS: dict[str, Callable[[GpuPlan, Device], tuple[torch.Tensor, Round]]] = {
    STATIC: _static,
    HF_STATIC: _hf_static,
    HF_BATCHING: _hf_batching,
}


def main() -> None:
    """Serve rounds until standard input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=[*_PEERS])
    parser.add_argument("logits", type=Path)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    # redirect what libraries print to stderr
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    device = Device.found(gpu=not options.quick)
    plan = QUICK if options.quick else full_plan(device.memory_bytes)
    logits, run = _PEERS[options.name](plan, device)
    torch.save(logits.float().cpu(), options.logits)
    print(json.dumps({}), file=answers)
    for _ in sys.stdin:
        print(json.dumps(run()), file=answers)


if __name__ == "__main__":
    main()
