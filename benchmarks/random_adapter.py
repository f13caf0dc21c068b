"""Random LoRA adapters for the built-in model, as PEFT and llama.cpp store them.

python -m benchmarks.random_adapter NAME [--seed 1] [--rank 4] writes the folder NAME, as PEFT
writes it, and NAME.gguf with the same adapter. One that was not trained changes what the model
says, but not for the better.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from localgen.backends.formats.gguf.reader import GgufReader
from localgen.backends.formats.hf.safetensors import NumpyCheckpoint

TINY = Path(__file__).parents[1] / "localgen" / "models" / "tiny"
ALPHA = 8.0
# of the change to a weight, relative to the weight
STRENGTH = 0.4
_GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
Matrix = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class RandomAdapter:
    """matrices: A [rank, inputs] and B [outputs, rank] of each linear, by its name."""

    matrices: dict[str, tuple[Matrix, Matrix]]
    config: dict[str, Any]

    @property
    def scale(self) -> float:
        rank = len(next(iter(self.matrices.values()))[0])
        return ALPHA / rank

    def change(self, module: str) -> Matrix:
        """What it adds to the weight of a linear."""
        a, b = self.matrices[module]
        return np.float32(self.scale) * (b @ a)

    def write_peft(self, folder: Path) -> None:
        folder.mkdir()
        header, content = {}, b""
        for module, pair in self.matrices.items():
            for part, matrix in zip("AB", pair, strict=True):
                offsets = [len(content), len(content) + matrix.nbytes]
                name = f"base_model.model.{module}.lora_{part}.weight"
                header[name] = {"dtype": "F32", "shape": matrix.shape, "data_offsets": offsets}
                content += matrix.tobytes()
        encoded = json.dumps(header).encode()
        (folder / "adapter_model.safetensors").write_bytes(
            len(encoded).to_bytes(8, "little") + encoded + content
        )
        (folder / "adapter_config.json").write_text(json.dumps(self.config))

    def write_gguf(self, path: Path) -> None:
        """As llama.cpp's convert_lora_to_gguf.py writes it."""
        config = json.loads((TINY / "config.json").read_text())
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_type(gguf.GGUFType.ADAPTER)
        writer.add_string("adapter.type", "lora")
        writer.add_float32("adapter.lora.alpha", ALPHA)
        for module, (a, b) in self.matrices.items():
            _, _, layer, kind = module.split(".", 3)
            name = _GGUF_NAMES[kind]
            if name in heads:  # neighbours are rotated in GGUF, halves in Hugging Face's format
                b = b.reshape(heads[name], 2, -1, b.shape[1]).swapaxes(1, 2).reshape(b.shape)
            writer.add_tensor(f"blk.{layer}.{name}.weight.lora_a", a)
            writer.add_tensor(f"blk.{layer}.{name}.weight.lora_b", np.ascontiguousarray(b))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def random_adapter(seed: int, rank: int = 4, base: Path = TINY) -> RandomAdapter:
    """An adapter of all linears of a model. base: a folder in Hugging Face's format."""
    rng, weights = np.random.default_rng(seed), NumpyCheckpoint(base)
    matrices = {}
    for name in weights.names():
        module = name.removesuffix(".weight")
        if module.partition("layers.")[2].partition(".")[2] not in _GGUF_NAMES:
            continue
        outputs, inputs = weights.shape(name)
        spread = float(weights.read(name).std()) * STRENGTH / (ALPHA / rank * np.sqrt(rank))
        a = rng.normal(size=(rank, inputs)).astype(np.float32)
        b = rng.normal(size=(outputs, rank)).astype(np.float32) * np.float32(spread)
        matrices[module] = a, b
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": ALPHA, "bias": "none"}
    config["target_modules"] = sorted(kind.rpartition(".")[2] for kind in _GGUF_NAMES)
    return RandomAdapter(matrices, config)


def write_for_gguf(path: Path, base: Path, seed: int, rank: int) -> None:
    """Write an adapter of all matrices in the layers of a GGUF model, weak enough to do no harm."""
    rng, reader = np.random.default_rng(seed), GgufReader(base)
    writer = gguf.GGUFWriter(path, reader.value("general.architecture"))
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(rank))
    for tensor in reader.tensors:
        if tensor.name.startswith("blk.") and len(tensor.shape) == 2:
            outputs, inputs = tensor.shape
            for part, shape in (("a", (rank, inputs)), ("b", (outputs, rank))):
                values = rng.normal(0, 0.01, shape).astype(np.float32)
                writer.add_tensor(f"{tensor.name}.lora_{part}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rank", type=int, default=4)
    args = parser.parse_args()
    adapter = random_adapter(args.seed, args.rank)
    adapter.write_peft(args.name)
    adapter.write_gguf(args.name.with_name(f"{args.name.name}.gguf"))


if __name__ == "__main__":
    main()
