"""Choose the backend and GPUs for a model."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec

from localgen.backends.errors import InvalidRequest
from localgen.backends.formats.model_files import ModelFile
from localgen.backends.model_info import LoadOptions
from localgen.backends.units import format_size
from localgen.machine.gpus import Gpu, nvidia_gpus
from localgen.machine.llama_build import LlamaBuild, probe_llamacpp

BACKENDS = ("auto", "llamacpp", "cuda")
# the cuda backend's kernels need bfloat16 and asynchronous copies
MIN_CAPABILITY = (8, 0)
_CUDA_PACKAGES = {
    "torch": "torch",
    "triton": "triton",
    "safetensors": "safetensors",
    "tokenizers": "tokenizers",
    "pynvml": "nvidia-ml-py",
}
# without a GPU, nothing asks for its memory
_GPU_PACKAGE = _CUDA_PACKAGES["pynvml"]
INSTALL_COMMAND = "pip install 'localgen[cuda]'"


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a model runs. backend: llamacpp or cuda. reason: shown to users.

    gpus: the GPUs of the cuda backend; several are used for tensor parallelism.
    """

    backend: str
    reason: str
    gpus: tuple[Gpu, ...] = ()

    @property
    def gpu(self) -> Gpu | None:
        """The first GPU, or None."""
        return self.gpus[0] if self.gpus else None

    @property
    def on_gpu(self) -> bool:
        """True if its memory is a GPU's, as with the cuda backend unless --device cpu."""
        return bool(self.gpus)

    def uses(self, gpu: Gpu | None) -> bool:
        """Return True if the model takes memory of this GPU. None: of main memory."""
        return not self.gpus if gpu is None else gpu.index in (own.index for own in self.gpus)


@dataclass(frozen=True, slots=True)
class Hardware:
    """The hardware and software to run models on.

    missing_packages: packages that the cuda backend needs.
    has_driver: NVIDIA's tools are installed, with or without a GPU.
    llamacpp_has_gpu: llama.cpp was built for a GPU; probed only when needed.
    """

    gpus: tuple[Gpu, ...]
    missing_packages: tuple[str, ...]
    has_driver: bool
    llamacpp_has_gpu: Callable[[], bool]

    def with_freed_memory(self, freed_bytes: Mapping[int, int]) -> Hardware:
        """Return a copy with more free GPU memory. freed_bytes: by GPU index."""
        gpus = (
            replace(g, free_bytes=g.free_bytes + freed_bytes.get(g.index, 0)) for g in self.gpus
        )
        return replace(self, gpus=tuple(gpus))

    @property
    def may_have_gpu(self) -> bool:
        """True if there is a GPU, or a driver for one that missing packages may hide."""
        return bool(self.gpus) or self.has_driver

    @property
    def cuda_unavailable_reason(self) -> str | None:
        """Why the cuda backend cannot run here, or None if it can."""
        able = [gpu for gpu in self.gpus if gpu.capability >= MIN_CAPABILITY]
        if self.missing_packages and self.may_have_gpu:
            return f"{', '.join(self.missing_packages)} not installed: {INSTALL_COMMAND}"
        if not self.gpus:
            return "no NVIDIA GPU was found"
        if not able:
            gpu = self.gpus[0]
            return (
                f"{gpu.name} has compute capability {gpu.capability[0]}.{gpu.capability[1]}, "
                f"the cuda backend needs {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]}"
            )
        return None


def detect_hardware() -> Hardware:
    """Detect the hardware now."""
    missing = tuple(name for module, name in _CUDA_PACKAGES.items() if find_spec(module) is None)
    has_driver = shutil.which("nvidia-smi") is not None
    return Hardware(nvidia_gpus(), missing, has_driver, _llamacpp_has_gpu)


@cache
def _llamacpp_has_gpu() -> bool:
    build = probe_llamacpp()
    return isinstance(build, LlamaBuild) and build.gpu


def choose_placement(
    file: ModelFile, options: LoadOptions, hardware: Hardware, need_bytes: int
) -> Placement:
    """Choose where a model runs. need_bytes: for its weights and a useful context.

    Raises InvalidRequest if the options are not possible.
    """
    backend = options.backend or "auto"
    if backend not in BACKENDS:
        raise InvalidRequest(
            f"backend is {backend!r}, it must be one of {', '.join(BACKENDS)}", param="backend"
        )
    only_cuda = options.dummy or (options.tp or 1) > 1 or (options.device or "").startswith("cuda")
    if backend == "auto" and only_cuda:
        backend = "cuda"
    if backend == "cuda":
        return _place_on_cuda(options, hardware)
    if backend == "llamacpp":
        if not file.is_gguf:
            message = f"llama.cpp runs .gguf files, {file.path} is not one"
            raise InvalidRequest(message, param="backend")
        return Placement("llamacpp", "as requested")
    return _place_automatically(file, hardware, need_bytes)


def _place_on_cuda(options: LoadOptions, hardware: Hardware) -> Placement:
    on_cpu = options.device == "cpu"
    missing = [one for one in hardware.missing_packages if not (on_cpu and one == _GPU_PACKAGE)]
    # without a GPU, packages are not the reason
    if missing and (on_cpu or hardware.may_have_gpu):
        raise InvalidRequest(
            f"the cuda backend needs {', '.join(missing)}: {INSTALL_COMMAND}", param="backend"
        )
    if on_cpu:
        return Placement("cuda", "as requested")
    if hardware.cuda_unavailable_reason is not None:
        raise InvalidRequest(
            f"{hardware.cuda_unavailable_reason}: --backend llamacpp for a .gguf file, or "
            "--backend cuda --device cpu to run any model slowly",
            param="backend",
        )
    if (options.tp or 1) > 1:
        return Placement("cuda", "as requested", _tp_gpus(options, hardware))
    return Placement("cuda", "as requested", (_requested_gpu(options, hardware),))


def _tp_gpus(options: LoadOptions, hardware: Hardware) -> tuple[Gpu, ...]:
    """Return the first `tp` GPUs in torch's order. Raises InvalidRequest."""
    tp, found = options.tp or 1, len(hardware.gpus)
    if tp > found:
        are = "is 1" if found == 1 else f"are {found}"
        raise InvalidRequest(f"--tp {tp} needs {tp} GPUs, there {are}", param="tp")
    if options.device not in (None, "cuda"):
        raise InvalidRequest(
            f"--tp {tp} uses the first {tp} GPUs: leave --device {options.device} out, "
            "CUDA_VISIBLE_DEVICES selects their order",
            param="device",
        )
    return hardware.gpus[:tp]


def _requested_gpu(options: LoadOptions, hardware: Hardware) -> Gpu:
    """Return the requested GPU, or the one with the most free memory. Raises InvalidRequest."""
    name = options.device or "cuda"
    if name == "cuda":
        return max(hardware.gpus, key=lambda gpu: gpu.free_bytes)
    for gpu in hardware.gpus:
        if name == f"cuda:{gpu.index}":
            return gpu
    raise InvalidRequest(
        f"device is {name!r}, it must be cpu, cuda, or cuda:0 to cuda:{len(hardware.gpus) - 1}",
        param="device",
    )


def _place_automatically(file: ModelFile, hardware: Hardware, need_bytes: int) -> Placement:
    why_not = hardware.cuda_unavailable_reason
    if why_not is None:
        gpu = max(hardware.gpus, key=lambda gpu: gpu.free_bytes)
        numbers = f"needs {format_size(need_bytes)}, {gpu.name} has {format_size(gpu.free_bytes)}"
        if need_bytes > gpu.free_bytes:
            why_not = f"{numbers} free"
        elif file.is_gguf and hardware.llamacpp_has_gpu():
            return Placement("llamacpp", "it runs quantized GGUF weights directly on the GPU")
        else:
            return Placement("cuda", f"{numbers} free", (gpu,))
    if not file.is_gguf:
        raise InvalidRequest(
            f"{file.name} is a Hugging Face model, which only the cuda backend runs, and "
            f"{why_not}: use a .gguf file, or --backend cuda --device cpu to run it slowly",
            param="model",
        )
    return Placement("llamacpp", why_not)
