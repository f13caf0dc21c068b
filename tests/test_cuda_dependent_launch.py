"""Programmatic dependent launch: which launches have the attribute, and where their code waits."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_configs import write_config
from dependent_builds import ARCH, Code, dependent_builds

from localgen.backends.cuda.kernels.dependent_launch import supports_dependent_launch
from localgen.backends.cuda.kernels.launch import KernelLaunch, record_launches
from localgen.backends.cuda.launch_plan import FakeTensorParallelGroup, decode_inputs
from localgen.backends.cuda.model.batch import inputs_to_device
from localgen.backends.cuda.model.decoder import Decoder, KVCache
from localgen.backends.cuda.model.weights import random_weights
from localgen.backends.formats.architecture.model_spec import QuantizationConfig
from localgen.backends.formats.architecture.sharding import ModelShard
from localgen.backends.formats.hf.config import read_hf_config

META = torch.device("meta")
# kernels that load weights before they wait, and the argument
PREFETCHED = {"_gemv_kernel": {"weight"}, "_qkv_rope_kernel": {"weight"}}


@pytest.fixture(scope="module")
def codes() -> list[Code]:
    return dependent_builds()


WAIT, SIGNAL = "griddepcontrol.wait", "griddepcontrol.launch_dependents"


def before_wait(code: Code) -> str:
    """PTX between a kernel's entry and its wait."""
    body = code.ptx[code.ptx.index(".entry") :]
    return body[: body.index(WAIT)]


def loaded_arguments(code: Code) -> list[set[str]]:
    """For each load before the wait, the pointer arguments that its address was computed from."""
    sources: dict[str, set[str]] = {}
    loads = []
    for line in before_wait(code).splitlines():
        if param := re.search(r"ld\.param\S*\s+(%\w+), \[\w+_param_(\d+)\]", line):
            name = code.arguments[int(param[2])]
            sources[param[1]] = {name}
            continue
        registers = re.findall(r"%[a-z]+\d+", line)
        if "ld.global" in line:
            address = re.findall(r"%[a-z]+\d+", line[line.rindex("[") :])
            loads.append(set().union(*(sources.get(one, set()) for one in address)))
        elif registers:
            used = [sources.get(one, set()) for one in registers[1:]]
            sources[registers[0]] = set().union(*used)
    return [load - {"ins_16", "outs"} for load in loads]


def test_every_kernel_waits_once_before_it_touches_activations(codes: list[Code]) -> None:
    assert {code.kernel for code in codes} == {
        "_rms_norm_kernel",
        "_rope_and_store_kv_kernel",
        "_gemv_kernel",
        "_qkv_rope_kernel",
        "_skinny_gemm_kernel",
        "_int4_gemm_kernel",
        "_int4_gemv_kernel",
        "_int4_qkv_rope_kernel",
        "_decode_attention_kernel",
        "_combine_splits_kernel",
    }
    for code in codes:
        assert code.ptx.count(WAIT) == code.ptx.count(SIGNAL) == 1, code.variant
        before = before_wait(code)
        # in every program: no branch goes around the wait
        assert not re.search(r"\bbra\b|\bret\b|\bst\.|\bred\.|\batom", before), code.variant
        assert before.count("$L__BB") == 0, code.variant
        for found in loaded_arguments(code):
            assert found == PREFETCHED.get(code.kernel), code.variant


def test_weights_are_loaded_while_the_kernel_before_ends(codes: list[Code]) -> None:
    for code in codes:
        assert bool(loaded_arguments(code)) == (code.kernel in PREFETCHED), code.variant


def test_the_machine_code_keeps_the_order(codes: list[Code]) -> None:
    """On sm_90 the wait is ACQBULK and the signal PREEXIT."""
    for code in codes:
        assert code.sass.count("ACQBULK") == code.sass.count("PREEXIT") == 1, code.variant
        before = code.sass[: code.sass.index("ACQBULK")]
        assert not re.search(r"\b(STG|RED|ATOM|LDGSTS|BRA|EXIT)\b", before), code.variant
        loads = len(re.findall(r"\bLDG\b", before))
        assert loads == len(loaded_arguments(code)), code.variant


def test_kernels_for_dependent_launch_do_not_spill(codes: list[Code]) -> None:
    for code in codes:
        usage = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", code.sass)
        assert usage is not None
        assert usage[2] == usage[3] == "0", code.variant


# -- launches ---------------------------------------------------------------------------------


INT4 = QuantizationConfig(method="awq", bits=4, group_size=64, zero_point=True)


def step(
    folder: Path,
    *,
    arch: int = ARCH,
    tp: int = 1,
    wanted: bool = True,
    quant: QuantizationConfig | None = None,
) -> list[KernelLaunch]:
    """Launches of a decode step of a Llama."""
    config = write_config(folder, "llama", hidden_size=256, intermediate_size=256)
    spec = read_hf_config(config)
    spec = replace(spec, num_layers=1, sliding_windows=spec.sliding_windows[:1], quant=quant)
    shard = ModelShard(spec, 0, tp)
    with record_launches(arch, 132) as recorded, torch.inference_mode():
        weights = random_weights(shard.local_spec, device=META, dtype=torch.bfloat16, seed=0)
        group = FakeTensorParallelGroup(shard)
        decoder = Decoder(shard.local_spec, weights, 1, group, dependent_launch=wanted)
        cache = KVCache.zeros(shard.local_spec, 1, device=META, dtype=torch.bfloat16)
        decoder.forward(inputs_to_device(decode_inputs(1, 1024), META), cache)
    return recorded.launches


@pytest.mark.parametrize("quant", [None, INT4], ids=["dense", "int4"])
def test_all_kernels_of_a_step_are_launched_dependently(
    quant: QuantizationConfig | None, tmp_path: Path
) -> None:
    launches = step(tmp_path, quant=quant)
    names = {each.kernel.fn.__name__ for each in launches}
    assert ("_int4_gemv_kernel" in names) == (quant is not None)
    assert len(launches) == 8  # of a layer six, then norm and head
    for each in launches:
        assert each.options["pdl"] is each.options["launch_pdl"] is True


@pytest.mark.parametrize(
    "given", [{"arch": 89}, {"tp": 2}, {"wanted": False}], ids=["sm_89", "two ranks", "off"]
)
def test_otherwise_launches_wait_for_those_before(given: dict[str, Any], tmp_path: Path) -> None:
    for each in step(tmp_path, **given):
        assert not {"pdl", "launch_pdl"} & set(each.options)


def test_not_on_a_cpu() -> None:
    assert not supports_dependent_launch(torch.zeros(1))
