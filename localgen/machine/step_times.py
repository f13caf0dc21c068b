"""Time of a decode step on this CPU by GGUF type, measured once per machine with a small model.

`python -m localgen.machine.step_times` measures and prints JSON. It is a process of its own: a
build of llama.cpp for another CPU is killed by a signal.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import msgspec

from localgen.backends.typed_data import decode_json
from localgen.machine.decode_rates import DecodeRates
from localgen.machine.measurements import cached_measurement, cached_or_measured, is_machine_busy
from localgen.machine.python_process import python_command, python_environment

# tokens of the measured steps: one stream, three drafts to verify, many streams
_STEP_SIZES = (1, 4, 16)
# of a prompt, which computes at the full speed of the processor
_PROMPT_TOKENS = 64
# of the main matrices, and of those that llama.cpp stores with more bits in some layers
_TENSOR_TYPES = {
    "Q8_0": ("Q8_0", "Q8_0"),
    "Q6_K": ("Q6_K", "Q6_K"),
    "Q5_K_M": ("Q5_K", "Q6_K"),
    "Q4_K_M": ("Q4_K", "Q6_K"),
    "Q4_K_S": ("Q4_K", "Q4_K"),
    "Q4_1": ("Q4_1", "Q4_1"),
    "Q4_0": ("Q4_0", "Q4_0"),
    "IQ4_NL": ("IQ4_NL", "IQ4_NL"),
    "IQ4_XS": ("IQ4_XS", "IQ4_XS"),
    "Q3_K_M": ("Q3_K", "Q4_K"),
}
MEASURED_TYPES = frozenset(_TENSOR_TYPES)
_REVISION = 2  # of the measurement method
_LAYERS, _HIDDEN, _FFN, _HEADS, _KV_HEADS = 4, 2048, 8192, 32, 8
_KV_SIZE = _HIDDEN // _HEADS * _KV_HEADS
_VOCAB = 256
# every 16-bit scale that this byte is part of is a small normal number
_FILLER = 0x11
_REPEATS = 5
_TIMEOUT_S = 120.0
_SecondsByType = dict[str, tuple[float, float, float, float]]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds per byte of weights of a step of 1, 4 and 16 tokens and of a prompt, by GGUF type."""

    seconds_per_byte: _SecondsByType

    def rates(self, gguf_type: str, weight_bytes: float) -> DecodeRates | None:
        """Return the rates of a model of this type; None if the type was not measured."""
        seconds = self.seconds_per_byte.get(gguf_type.upper())
        if seconds is None or weight_bytes <= 0:
            return None
        pairs = zip(_STEP_SIZES, seconds[:-1], strict=True)
        return DecodeRates(*(size / (each * weight_bytes) for size, each in pairs))

    def flops(self, gguf_type: str, weight_bytes: float, flops_per_token: float) -> float | None:
        """Return the peak of the processor in 1/s with weights of this type, from the prompt.

        weight_bytes, flops_per_token: of one model of this type. None if it was not measured.
        """
        seconds = self.seconds_per_byte.get(gguf_type.upper())
        if seconds is None or weight_bytes <= 0:
            return None
        return _PROMPT_TOKENS * flops_per_token / (seconds[-1] * weight_bytes)


def step_times(notify: Callable[[str], None], *, remeasure: bool = False) -> StepTimes | None:
    """Return the cached or measured step times.

    remeasure: ignore the cache, unless other programs compute now. None: llama.cpp cannot be used
    here, it failed, or other programs compute and nothing is cached.
    """
    if find_spec("llama_cpp") is None:
        return None
    name = f"step times {_REVISION} of llama-cpp-python {version('llama-cpp-python')}"
    cached = cached_measurement(name, _SecondsByType)
    if remeasure or cached is None:
        if is_machine_busy():
            notify("speed by type is not measured while other programs compute")
            return StepTimes(cached.value) if cached else None
        notify("measuring the speed of each type on this CPU, once: about fifteen seconds")
    found = cached_or_measured(name, _SecondsByType, _measure_in_process, remeasure=remeasure)
    if not found.value:
        notify("speed by type could not be measured: the small model did not run in llama.cpp")
        return None
    return StepTimes(found.value)


def _measure_in_process() -> _SecondsByType:
    try:
        # a process that is killed leaves its models behind
        with tempfile.TemporaryDirectory(prefix="localgen-") as folder:
            measured = subprocess.run(
                python_command("localgen.machine.step_times"),
                env=python_environment() | {"TMPDIR": folder},
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=_TIMEOUT_S,
                check=True,
            )
        return decode_json(measured.stdout, _SecondsByType)
    except (subprocess.SubprocessError, OSError, msgspec.DecodeError):
        return {}


def main() -> int:
    """Measure each type and print the seconds per byte as JSON. Returns the exit status."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="localgen-") as folder:
        for name, types in _TENSOR_TYPES.items():
            path = Path(folder) / "model.gguf"
            _write_model(path, *types)
            found[name] = _measure(path)
            path.unlink()
    print(msgspec.json.encode(found).decode())
    return 0


def _write_model(path: Path, main_type: str, finer_type: str) -> None:
    """Write a Llama model whose quantized tensors are all _FILLER."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(_LAYERS)
    writer.add_context_length(1024)
    writer.add_embedding_length(_HIDDEN)
    writer.add_feed_forward_length(_FFN)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i:03}" for i in range(_VOCAB)])
    writer.add_token_merges(["t 0"])
    for name, shape, is_finer in _tensors():
        if len(shape) == 1:
            writer.add_tensor(name, np.ones(shape, np.float32))
            continue
        kind = gguf.GGMLQuantizationType[finer_type if is_finer else main_type]
        stored = gguf.quant_shape_to_byte_shape(shape, kind)
        writer.add_tensor(name, np.full(stored, _FILLER, np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors() -> Iterator[tuple[str, tuple[int, ...], bool]]:
    """Yield name, shape, and whether llama.cpp's mixed types store it with more bits."""
    yield "token_embd.weight", (_VOCAB, _HIDDEN), False
    yield "output_norm.weight", (_HIDDEN,), False
    for layer in range(_LAYERS):
        prefix, is_finer = f"blk.{layer}.", layer % 2 == 1
        yield f"{prefix}attn_norm.weight", (_HIDDEN,), False
        yield f"{prefix}attn_q.weight", (_HIDDEN, _HIDDEN), False
        yield f"{prefix}attn_k.weight", (_KV_SIZE, _HIDDEN), False
        yield f"{prefix}attn_v.weight", (_KV_SIZE, _HIDDEN), is_finer
        yield f"{prefix}attn_output.weight", (_HIDDEN, _HIDDEN), False
        yield f"{prefix}ffn_norm.weight", (_HIDDEN,), False
        yield f"{prefix}ffn_gate.weight", (_FFN, _HIDDEN), False
        yield f"{prefix}ffn_up.weight", (_FFN, _HIDDEN), False
        yield f"{prefix}ffn_down.weight", (_HIDDEN, _FFN), is_finer


def _measure(path: Path) -> list[float]:
    """Return the seconds per byte of weights by step size: the best of several steps."""
    from localgen.backends.llamacpp.batch import LlamaBatch
    from localgen.backends.llamacpp.native import LlamaContext, LlamaModel
    from localgen.backends.llamacpp.options import resolve_llama_options
    from localgen.backends.model_info import LoadOptions
    from localgen.backends.runner.interface import Chunk
    from localgen.backends.runner.sequence import Sequence
    from localgen.backends.sampling_params import SamplingParams

    options = resolve_llama_options(LoadOptions(gpu_layers=0))
    options = replace(options, adapts_threads=False)
    model = LlamaModel(path, options, lambda _: None)
    context = LlamaContext(model, options, kv_tokens=256, n_seq_max=max(_STEP_SIZES))
    batch = LlamaBatch(_PROMPT_TOKENS)
    seq = Sequence(id="", tokens=[], num_prompt=0, params=SamplingParams(), ctx=0, max_len=0)

    def step(size: int, tokens_each: int = 1) -> float:
        chunk = Chunk(seq=seq, start=0, tokens=[5] * tokens_each, is_sampled=True)
        batch.fill([chunk] * size, range(size))
        started_s = time.perf_counter()
        status = context.decode(batch.native).result()
        took_s = time.perf_counter() - started_s
        assert status == 0, status
        for sequence in range(size):
            context.truncate(sequence, 0)
        return took_s

    # the first step of a size allocates
    sizes = [(size, 1) for size in _STEP_SIZES] + [(1, _PROMPT_TOKENS)]
    times = [min([step(*size) for _ in range(1 + _REPEATS)][1:]) for size in sizes]
    per_byte = [seconds / model.size_bytes for seconds in times]
    context.close()
    model.close()
    return per_byte


if __name__ == "__main__":
    sys.exit(main())
