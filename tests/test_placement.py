"""Which backend runs a model, and the reason given."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from localgen.backends.errors import InvalidRequest
from localgen.backends.formats.model_files import ModelFile
from localgen.backends.model_info import LoadOptions
from localgen.machine.gpus import Gpu
from localgen.placement.backend_choice import Hardware, choose_placement

GGUF = ModelFile("m", Path("/models/m.gguf"), 4 << 30, (), "file")
FOLDER = ModelFile("m", Path("/models/m"), 16 << 30, (), "file")
H200 = Gpu(0, "H200", 140 << 30, 130 << 30, (9, 0))
NOTHING = Hardware((), (), False, lambda: False)
ONE = Hardware((H200,), (), True, lambda: False)
NEED = 18 << 30


def test_without_a_gpu_a_gguf_file_goes_to_llama_cpp() -> None:
    found = choose_placement(GGUF, LoadOptions(), NOTHING, NEED)
    assert (found.backend, found.reason) == ("llamacpp", "no NVIDIA GPU was found")
    assert not found.on_gpu


@pytest.mark.parametrize("file", [GGUF, FOLDER])
def test_model_that_fits_goes_to_the_gpu(file: ModelFile) -> None:
    found = choose_placement(file, LoadOptions(backend="auto"), ONE, NEED)
    assert (found.backend, found.gpu) == ("cuda", H200)
    assert found.reason == "needs 19.3 GB, H200 has 139.6 GB free"


def test_model_that_does_not_fit_stays_in_main_memory() -> None:
    found = choose_placement(GGUF, LoadOptions(), ONE, 200 << 30)
    assert (found.backend, found.gpu) == ("llamacpp", None)
    assert found.reason == "needs 214.7 GB, H200 has 139.6 GB free"


def test_a_llama_cpp_built_for_the_gpu_keeps_gguf_files() -> None:
    there = replace(ONE, llamacpp_has_gpu=lambda: True)
    assert choose_placement(GGUF, LoadOptions(), there, NEED).backend == "llamacpp"
    assert choose_placement(FOLDER, LoadOptions(), there, NEED).backend == "cuda"


def test_the_gpu_with_most_room_or_the_one_that_was_asked_for() -> None:
    roomy = replace(H200, index=1, free_bytes=135 << 30)
    both = replace(ONE, gpus=(H200, roomy))
    assert choose_placement(FOLDER, LoadOptions(), both, NEED).gpu == roomy
    assert choose_placement(FOLDER, LoadOptions(device="cuda:0"), both, NEED).gpu == H200
    assert choose_placement(
        FOLDER, LoadOptions(), both.with_freed_memory({0: 9 << 30}), NEED
    ).gpu == replace(H200, free_bytes=139 << 30)


def test_several_gpus_are_the_first_ones() -> None:
    three = replace(ONE, gpus=(H200, replace(H200, index=1), replace(H200, index=2)))
    found = choose_placement(GGUF, LoadOptions(tp=2), three, 200 << 30)
    assert (found.backend, found.gpus) == ("cuda", three.gpus[:2])
    assert [found.uses(gpu) for gpu in (*three.gpus, None)] == [True, True, False, False]
    one = choose_placement(FOLDER, LoadOptions(tp=1), three, NEED)
    assert len(one.gpus) == 1


@pytest.mark.parametrize(
    ("file", "asked", "there", "message"),
    [
        (FOLDER, LoadOptions(tp=2), ONE, "--tp 2 needs 2 GPUs, there is 1"),
        (
            FOLDER,
            LoadOptions(tp=2, device="cuda:1"),
            replace(ONE, gpus=(H200, H200)),
            "--tp 2 uses the first 2 GPUs: leave --device cuda:1 out",
        ),
        (FOLDER, LoadOptions(), NOTHING, "which only the cuda backend runs, and no NVIDIA GPU"),
        (FOLDER, LoadOptions(backend="llamacpp"), ONE, "llama.cpp runs .gguf files"),
        (GGUF, LoadOptions(backend="cuda"), NOTHING, "no NVIDIA GPU was found: --backend llamacpp"),
        (
            GGUF,
            LoadOptions(backend="cuda"),
            replace(NOTHING, missing_packages=("nvidia-ml-py",)),
            "no NVIDIA GPU was found: --backend llamacpp",
        ),
        (GGUF, LoadOptions(backend="mlx"), ONE, "'mlx', it must be one of auto, llamacpp, cuda"),
        (GGUF, LoadOptions(device="cuda:3"), ONE, "'cuda:3', it must be cpu, cuda, or cuda:0 to"),
        (
            GGUF,
            LoadOptions(backend="cuda", device="cpu"),
            replace(ONE, missing_packages=("torch",)),
            r"needs torch: pip install 'localgen\[cuda\]'",
        ),
        (
            FOLDER,
            LoadOptions(),
            replace(ONE, gpus=(replace(H200, name="T4", capability=(7, 5)),)),
            "T4 has compute capability 7.5, the cuda backend needs 8.0",
        ),
        (
            FOLDER,
            LoadOptions(),
            replace(NOTHING, missing_packages=("nvidia-ml-py",), has_driver=True),
            "nvidia-ml-py not installed",
        ),
    ],
)
def test_impossible_placements_are_rejected_with_a_reason(
    file: ModelFile, asked: LoadOptions, there: Hardware, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        choose_placement(file, asked, there, NEED)


def test_the_cuda_backend_on_the_cpu_needs_no_gpu() -> None:
    found = choose_placement(FOLDER, LoadOptions(backend="cuda", device="cpu"), NOTHING, NEED)
    assert (found.backend, found.gpu) == ("cuda", None)
    without_nvml = replace(NOTHING, missing_packages=("nvidia-ml-py",))
    on_cpu = LoadOptions(backend="cuda", device="cpu")
    assert choose_placement(FOLDER, on_cpu, without_nvml, NEED).backend == "cuda"
    assert (
        choose_placement(FOLDER, LoadOptions(tp=2, device="cpu"), NOTHING, NEED).backend == "cuda"
    )
