"""Valid input that targets change: small models, templates, schemas, state files."""

from __future__ import annotations

import json
import struct
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import numpy as np

import localgen

TINY = Path(localgen.__file__).parent / "models/tiny"


@cache
def config_files() -> tuple[dict[str, Any], ...]:
    """JSON files of model folders, by name."""
    tiny = {path.name: json.loads(path.read_text()) for path in TINY.glob("*config.json")}
    llama = tiny["config.json"]
    scaled = llama | {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        }
    }
    yarn = llama | {
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 512,
        },
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
        },
    }
    experts = llama | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
    }
    gemma = llama | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "sliding_window": 64,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 64,
        "rope_local_base_freq": 10000.0,
        "hidden_activation": "gelu_pytorch_tanh",
    }
    packed = llama | {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {
                        "num_bits": 8,
                        "type": "int",
                        "strategy": "channel",
                        "symmetric": True,
                    },
                }
            },
            "ignore": ["lm_head"],
        }
    }
    index = {"metadata": {"total_size": 8}, "weight_map": {"model.norm.weight": "a.safetensors"}}
    sampling = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "eos_token_id": [2, 3]}
    return (
        tiny,
        tiny | {"model.safetensors.index.json": index},
        *({"config.json": one} for one in (scaled, yarn, experts, gemma, packed)),
        {"config.json": llama, "generation_config.json": sampling},
    )


@cache
def tokenizer() -> dict[str, Any]:
    """A tokenizer.json of the 300 first tokens of the built-in model."""
    whole: dict[str, Any] = json.loads((TINY / "tokenizer.json").read_text())
    vocabulary = {text: token for text, token in whole["model"]["vocab"].items() if token < 300}
    merges = [
        pair
        for pair in whole["model"]["merges"]
        if all(part in vocabulary for part in (*pair, "".join(pair)))
    ]
    return whole | {"model": whole["model"] | {"vocab": vocabulary, "merges": merges[:50]}}


@cache
def gguf_file() -> bytes:
    """A Llama of one layer with 300 tokens, and tensors of several types."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "sample.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_context_length(128)
        writer.add_embedding_length(32)
        writer.add_block_count(1)
        writer.add_feed_forward_length(64)
        writer.add_head_count(2)
        writer.add_head_count_kv(1)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(10000.0)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("llama-bpe")
        model = tokenizer()["model"]
        writer.add_token_list(list(model["vocab"]))
        writer.add_token_types([1] * len(model["vocab"]))
        writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
        writer.add_eos_token_id(2)
        writer.add_chat_template(TEMPLATES[0])
        random = np.random.default_rng(0)
        shapes = {"token_embd": (300, 32), "output_norm": (32,), "blk.0.attn_norm": (32,)}
        shapes |= {"blk.0.attn_q": (32, 32), "blk.0.attn_k": (16, 32), "blk.0.attn_v": (16, 32)}
        shapes |= {"blk.0.attn_output": (32, 32), "blk.0.ffn_norm": (32,)}
        shapes |= {"blk.0.ffn_gate": (64, 32), "blk.0.ffn_up": (64, 32), "blk.0.ffn_down": (32, 64)}
        for name, shape in shapes.items():
            values = random.normal(size=shape).astype(np.float32)
            kind = gguf.GGMLQuantizationType.Q8_0 if len(shape) > 1 else None
            data = values if kind is None else gguf.quants.quantize(values, kind)
            writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path.read_bytes()


def safetensors_file(header: str | None = None, length: int | None = None) -> bytes:
    """Three tensors. header, length: in place of the right ones."""
    text = nested_header() if header is None else header
    encoded = text.encode(errors="surrogatepass")
    size = len(encoded) if length is None else length
    return struct.pack("<Q", size % 2**64) + encoded + bytes(SAFETENSORS_BYTES)


def nested_header() -> str:
    return json.dumps(SAFETENSORS_HEADER)


SAFETENSORS_BYTES = 32 + 16 + 8
SAFETENSORS_HEADER: dict[str, Any] = {
    "__metadata__": {"format": "pt"},
    "model.norm.weight": {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]},
    "lm_head.weight": {"dtype": "F16", "shape": [2, 4], "data_offsets": [32, 48]},
    "model.embed_tokens.weight": {"dtype": "BF16", "shape": [1, 4], "data_offsets": [48, 56]},
}
TEMPLATES = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "{{ bos_token }}{%- if tools %}{% for t in tools %}{{ t | tojson(indent=2) }}{% endfor %}"
    "{%- endif %}{%- set ns = namespace(n=0) %}{%- for m in messages %}{%- set ns.n = ns.n + 1 %}"
    "{{- '[' ~ ns.n ~ m['role'] ~ ']' + m['content'].split('</think>')[-1] }}"
    "{%- if m.tool_calls %}{% for c in m.tool_calls %}{{ c.function.arguments | items | list }}"
    "{% endfor %}{% endif %}{% endfor %}{{ strftime_now('%d %b') }}",
    "{%- macro turn(m, i) -%}{{ x if false }}{{ i }}: {{ m.content | upper }}{%- endmacro %}"
    "{%- for m in messages if m.content is string -%}{{ turn(m, loop.index0) }}{% break %}"
    "{%- endfor -%}{% if messages[0].role != 'user' %}{{ raise_exception('first') }}{% endif %}"
    "{% generation %}{{ messages | map(attribute='role') | join(',') }}{% endgeneration %}",
)
TEMPLATE_PIECES = (
    *("{{", "}}", "{%", "%}", "{#", "{% endfor %}", "{% endif %}", "| tojson", "| length", "loop."),
    *("messages", "[-1]", "[0:2]", "is defined", ".__class__", "range(9)", "| sort", "| batch(2)"),
    *("cycler(1,2)", "{% include 'x' %}", "{% extends 'x' %}", "| attr('x')", "lipsum()", "self"),
    *("| format(3)", "| xmlattr", "| replace('a','b')", "{% call x() %}", "{% raw %}", "joiner()"),
)
SCHEMAS: tuple[dict[str, Any], ...] = (
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 9, "pattern": "^[a-z]+$"},
            "age": {"type": "integer", "minimum": 0, "maximum": 150, "multipleOf": 5},
            "tags": {"type": "array", "items": {"enum": ["a", "b", 3, None]}, "maxItems": 3},
            "when": {"type": "string", "format": "date-time"},
        },
        "required": ["name"],
        "additionalProperties": False,
    },
    {
        "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
        "anyOf": [{"$ref": "#/$defs/node"}, {"allOf": [{"type": "number"}, {"minimum": 0.5}]}],
    },
    {"type": "array", "prefixItems": [{"const": {"a": [1]}}, {"type": ["null", "boolean"]}]},
)
REGEXES = (r"[a-z]{2,5}(-\d+)?", r"(?:yes|no){2}", r"\p{Lu}\w*[^\n]{0,20}\.", r"(?i)a(b|c)*d")
GRAMMARS = ('start: "a" b+\nb: /[0-9]{1,3}/ | "x" start?\n', 'root ::= "yes" | [a-z]+ root\n')
STATE_FILES: dict[str, str] = {
    "models.toml": '# mine\nsmall = "tiny"\n"my.model" = "user/repo:Q4_K_M"\n',
    "endpoints.toml": '[cluster]\nurl = "https://example.com/v1"\nkey_env = "CLUSTER_KEY"\n'
    'model = "llama"\n\n["b"]\nurl = "http://127.0.0.1:8000"\n',
    "measurements.json": '{"memory bandwidth 1: here": 1000000000.0, "x": {"a": [1, 2]}}',
}
