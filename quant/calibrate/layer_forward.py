"""Forward pass of single decoder layers in plain torch, for calibration and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from localgen.backends.formats.architecture.model_spec import ModelSpec
from localgen.backends.formats.hf.tensor_names import LayerTensors, layer_names
from localgen.quant.files.layerwise_checkpoint import LayerwiseCheckpoint

# called with the name of a linear and its input, [tokens, in], in the dtype of the multiplication
InputHook = Callable[[str, Tensor], None]
# batches of a layer's input, float32 [sequences, length, hidden]; each call starts again
LayerInputs = Callable[[], Iterable[Tensor]]


class LayerForward:
    """The layers of a model over whole sequences of up to seq_len tokens.

    As in the engine, LongRoPE uses its long factors if seq_len exceeds the trained length.
    dtype: of the matrix multiplications; everything else is float32.
    """

    def __init__(
        self,
        spec: ModelSpec,
        seq_len: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.spec = spec
        self._dtype = dtype
        self._names = layer_names(spec)
        self._rope = _to_device(device, spec.rope.cos_sin_table(seq_len))
        self._local_rope = _to_device(device, (spec.local_rope or spec.rope).cos_sin_table(seq_len))

    @torch.no_grad()
    def run(
        self, index: int, tensors: LayerTensors, hidden: Tensor, hook: InputHook | None = None
    ) -> Tensor:
        """Output of layer `index` for hidden: float32 [sequences, length, hidden].

        tensors: by name within the layer, experts as in LayerNames. hook: called with the input of
        every linear; for an expert with the tokens routed to it, if any.
        """
        return self.run_differentiable(index, tensors, hidden, hook)

    def run_differentiable(
        self, index: int, tensors: LayerTensors, hidden: Tensor, hook: InputHook | None = None
    ) -> Tensor:
        """As `run`, with gradients of the tensors where those are enabled."""
        names, layer = self._names, _LayerWithHook(self.spec, tensors, hook, self._dtype)
        mixed = self._attention(index, layer, layer.norm(names.attention_norm, hidden))
        sandwich = self.spec.sandwich_norms
        if sandwich:
            mixed = layer.norm("post_attention_layernorm", mixed)
        hidden = hidden + mixed
        mapped = self._mlp(layer, layer.norm(names.mlp_norm, hidden))
        if sandwich:
            mapped = layer.norm("post_feedforward_layernorm", mapped)
        return hidden + mapped

    def _attention(self, index: int, layer: _LayerWithHook, x: Tensor) -> Tensor:
        spec, length = self.spec, x.shape[1]
        sizes = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        joined = torch.cat([layer.linear(name, x) for name in self._names.qkv], -1)
        heads = joined.view(*x.shape[:2], sum(sizes), spec.head_dim).transpose(1, 2)
        q, k, v = torch.split(heads, sizes, 1)
        if spec.qk_norm:
            q, k = layer.norm("self_attn.q_norm", q), layer.norm("self_attn.k_norm", k)
        window = spec.sliding_windows[index]
        cos, sin = self._rope if window is None else self._local_rope
        q, k = (
            _apply_rope(q, cos[:length], sin[:length]),
            _apply_rope(k, cos[:length], sin[:length]),
        )
        mixed = _causal_attention(q, k, v, spec, window)
        return layer.linear(self._names.out, mixed.transpose(1, 2).flatten(2))

    def _mlp(self, layer: _LayerWithHook, x: Tensor) -> Tensor:
        names, moe = self._names, self.spec.moe
        if names.router is None or moe is None:
            return layer.gated_mlp(names.gate_up, names.down, x)
        rows = x.flatten(0, 1)
        shares, ids = layer.linear(names.router, rows).softmax(-1).topk(moe.top_k)
        if moe.normalize_topk:
            shares = shares / shares.sum(-1, keepdim=True)
        out = torch.zeros_like(rows)
        for expert in range(moe.num_experts):
            chosen, place = (ids == expert).nonzero(as_tuple=True)
            if len(chosen):
                gate_up = tuple(name.format(expert) for name in names.gate_up)
                found = layer.gated_mlp(gate_up, names.down.format(expert), rows[chosen])
                # an expert has each row once at most
                out[chosen] += shares[chosen, place, None] * found
        return out.view_as(x)


@dataclass(frozen=True, slots=True, eq=False)
class CalibrationLayer:
    """A decoder layer to be quantized, with its inputs from the calibration text.

    tensors: float32, by name within the layer, as in LayerNames. inputs: read only by methods that
    calibrate; the loss is smallest if they are outputs of the quantized layers before.
    original_inputs, original_outputs: of the same batches in the original model; None if they are
    not available. on_learning_step: called before the first step of learned rounding, and after
    each.
    """

    index: int
    tensors: LayerTensors
    inputs: LayerInputs
    forward: LayerForward
    original_inputs: LayerInputs | None = None
    original_outputs: LayerInputs | None = None
    on_learning_step: Callable[[], None] = lambda: None

    @property
    def spec(self) -> ModelSpec:
        return self.forward.spec

    def weight(self, linear: str) -> Tensor:
        """Weight of a linear, [out, in]."""
        return self.tensors[f"{linear}.weight"]

    def full_name(self, name: str) -> str:
        """Name in the checkpoint of a tensor or module of this layer."""
        return f"model.layers.{self.index}.{name}"

    def run_inputs(self, hook: InputHook, original_hook: InputHook | None = None) -> None:
        """Run all inputs through the layer, for the hook only.

        original_hook: called with the inputs of the linears in the original model, before `hook`
        for the same batch.
        """
        if original_hook is None:
            for hidden in self.inputs():
                self.forward.run(self.index, self.tensors, hidden, hook)
            return
        assert self.original_inputs is not None
        for hidden, original in zip(self.inputs(), self.original_inputs(), strict=True):
            self.forward.run(self.index, self.tensors, original, original_hook)
            self.forward.run(self.index, self.tensors, hidden, hook)


def embed_tokens(spec: ModelSpec, weight: Tensor, ids: Tensor) -> Tensor:
    """Input of the first layer for ids [sequences, length]: float32 [sequences, length, hidden].

    weight: [vocab, hidden] in the checkpoint's dtype, to which the scale is rounded.
    """
    scale = torch.tensor(spec.embed_scale, dtype=weight.dtype).item()
    return weight[ids].float() * scale


def embed_windows(source: LayerwiseCheckpoint, ids: Tensor) -> Tensor:
    """Input of the first layer for ids, int64 [windows, length]; reads only their embeddings."""
    rows, places = torch.unique(ids, return_inverse=True)
    weight = source.gather_rows("model.embed_tokens.weight", rows)
    return embed_tokens(source.spec, weight, places)


@torch.no_grad()
def compute_logits(spec: ModelSpec, norm: Tensor, head: Tensor, hidden: Tensor) -> Tensor:
    """Logits of the last layer's output: float32 [..., vocab].

    norm: [hidden]. head: [vocab, hidden].
    """
    found = functional.linear(_rms_norm(spec, hidden, norm), head)
    cap = spec.logit_softcap
    return found if not cap else (found / cap).tanh() * cap


class _LayerWithHook:
    """A layer's modules by name; linears call the hook."""

    def __init__(
        self, spec: ModelSpec, tensors: LayerTensors, hook: InputHook | None, dtype: torch.dtype
    ) -> None:
        self._spec, self._tensors, self._hook, self._dtype = spec, tensors, hook, dtype

    def norm(self, name: str, x: Tensor) -> Tensor:
        return _rms_norm(self._spec, x, self._tensors[f"{name}.weight"])

    def linear(self, name: str, x: Tensor) -> Tensor:
        x = x.to(self._dtype)
        if self._hook is not None:
            self._hook(name, x.reshape(-1, x.shape[-1]))
        found = functional.linear(x, self._tensors[f"{name}.weight"].to(self._dtype)).float()
        bias = self._tensors.get(f"{name}.bias")
        return found if bias is None else found + bias

    def gated_mlp(self, gate_up: tuple[str, ...], down: str, x: Tensor) -> Tensor:
        gate, up = torch.cat([self.linear(name, x) for name in gate_up], -1).chunk(2, -1)
        if self._spec.activation == "silu":
            acted = functional.silu(gate)
        else:
            acted = functional.gelu(gate, approximate="tanh")
        return self.linear(down, acted * up)


def _to_device(device: torch.device | str, table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return table[0].to(device), table[1].to(device)


def _rms_norm(spec: ModelSpec, x: Tensor, weight: Tensor) -> Tensor:
    scale = 1.0 + weight if spec.norm_offset else weight
    return x * (x.square().mean(-1, keepdim=True) + spec.norm_eps).rsqrt() * scale


def _apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [..., length, head_dim]. cos, sin: [length, rotated / 2]; the rest passes through."""
    half = cos.shape[-1]
    low, high, rest = torch.split(x, [half, half, x.shape[-1] - 2 * half], -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin, rest], -1)


def _causal_attention(
    q: Tensor, k: Tensor, v: Tensor, spec: ModelSpec, window: int | None
) -> Tensor:
    """[sequences, heads, length, head_dim]. window: number of positions that a token attends to."""
    length, cap = q.shape[2], spec.attn_softcap
    k, v = (part.repeat_interleave(spec.num_heads // spec.num_kv_heads, 1) for part in (k, v))
    mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    if window is not None:
        mask = mask.triu(1 - window)
    if not cap:
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=spec.attn_scale
        )
    scores = ((q @ k.transpose(-1, -2)) * (spec.attn_scale / cap)).tanh() * cap
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v
