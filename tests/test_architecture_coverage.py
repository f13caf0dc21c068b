"""No model type that transformers knows is computed wrongly in silence."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cuda_configs import CONFIGS, GEMMA, SIZES, THETA, config_json, write_config

pytest.importorskip("torch")
pytest.importorskip("transformers")

import transformers
from cuda_models import ARCHITECTURES
from transformers.models.auto import modeling_auto

from localgen.backends.errors import LoadFailed
from localgen.backends.formats.architecture.families import FAMILIES, UNSUPPORTED, WITH_IMAGES
from localgen.backends.formats.architecture.fields import ConfigFields
from localgen.backends.formats.hf.config import read_hf_config
from localgen.quant.files.layerwise_checkpoint import LayerwiseCheckpoint
from localgen.quant.gguf.convert import convert_to_gguf

# all that a model without experts may need
FIELDS: dict[str, Any] = {**SIZES, **THETA, **GEMMA, "num_local_experts": 4, "num_experts": 4}
FIELDS |= {"num_experts_per_tok": 2, "moe_intermediate_size": 40}
# fields of a family's config that do not change the logits of a decoder
NOT_READ = {
    "_sliding_window_pattern",  # layer_types beside it are read
    "attention_dropout",
    "bos_token_id",
    "embd_pdrop",
    "eos_token_id",
    "initializer_range",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    "resid_pdrop",
    "residual_dropout",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "use_cache",
}


def known_classes() -> Iterator[tuple[str, str]]:
    """Model type and class of every model of transformers."""
    for name, mapping in vars(modeling_auto).items():
        if name.endswith("_NAMES") and isinstance(mapping, dict):
            for kind, found in mapping.items():
                for each in (found,) if isinstance(found, str) else found:
                    yield kind, each


def compared_classes() -> set[tuple[str, str]]:
    """Those whose logits test_cuda_decoder compares."""
    configs = [config_json(name) for name in ARCHITECTURES]
    return {(config["model_type"], config["architectures"][0]) for config in configs}


def refusal(folder: Path, config: dict[str, Any]) -> str | None:
    """The message with which a config.json is refused, or None."""
    (folder / "config.json").write_text(json.dumps(config))
    try:
        read_hf_config(folder)
    except LoadFailed as error:
        return error.message
    return None


def test_every_class_is_compared_with_transformers_or_refused_by_name(tmp_path: Path) -> None:
    classes, compared = set(known_classes()), compared_classes()
    assert len(classes) > 500
    assert compared <= classes
    for kind, name in classes - compared:
        config = {**FIELDS, "model_type": kind, "architectures": [name]}
        config["text_config"] = {**FIELDS, "model_type": kind}
        message = refusal(tmp_path, config)
        assert message is not None, (kind, name)
        assert name in message


def test_every_supported_architecture_is_compared_with_transformers() -> None:
    assert {name for _, name in compared_classes()} == {*FAMILIES, *WITH_IMAGES}
    texts = {config_json(name).get("text_config", {}).get("model_type") for name in ARCHITECTURES}
    assert texts - {None} == {kind for kinds in WITH_IMAGES.values() for kind in kinds}


def test_a_model_type_under_the_name_of_another_is_refused(tmp_path: Path) -> None:
    for kind in {kind for kind, _ in known_classes()} - {"llama"}:
        message = refusal(tmp_path, config_json("llama", model_type=kind))
        assert message is not None, kind
        assert f"model_type {kind} is not supported" in message
        text = {**CONFIGS["mistral3 images"][1]["text_config"], "model_type": kind}
        images = config_json("mistral3 images", text_config=text)
        if kind not in WITH_IMAGES["Mistral3ForConditionalGeneration"]:
            message = refusal(tmp_path, images)
            assert message is not None, kind
            assert f"text_config.model_type {kind} is not supported" in message


def test_models_of_the_catalog_are_refused_with_a_reason(tmp_path: Path) -> None:
    names = {name for _, name in known_classes()}
    for name, reason in UNSUPPORTED.items():
        assert name in names
        message = refusal(tmp_path, config_json("llama", architectures=[name]))
        assert f"architecture {name} is not supported ({reason})" in str(message)


class Recorded(dict[str, Any]):
    """A JSON object that records which keys are looked up."""

    def __init__(self, values: dict[str, Any], seen: set[str]) -> None:
        super().__init__(values)
        self.seen = seen

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.seen.add(str(key))
        return super().__contains__(key)


def fields_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Top-level keys of a config.json that are looked up."""
    seen: set[str] = set()
    read = ConfigFields.from_file

    def recorded(path: Path) -> ConfigFields:
        return ConfigFields(path, Recorded(read(path).values, seen))

    with monkeypatch.context() as patch:
        patch.setattr(ConfigFields, "from_file", recorded)
        read_hf_config(folder)
    return seen


def test_every_field_of_a_config_is_read_or_known_not_to_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain: set[str] = set(transformers.PretrainedConfig().to_dict())
    fields: dict[str, set[str]] = {}
    seen: dict[str, set[str]] = {}
    for name, (kind, more) in CONFIGS.items():
        if "text_config" in more:
            continue
        folder = write_config(tmp_path / name, name)
        config = transformers.AutoConfig.from_pretrained(folder)
        config.save_pretrained(folder / "rewritten")
        fields.setdefault(kind, set()).update(type(config)().to_dict())
        for each in (folder, folder / "rewritten"):
            seen.setdefault(kind, set()).update(fields_read(each, monkeypatch))
    unread = {kind: found - seen[kind] - plain - NOT_READ for kind, found in fields.items()}
    assert {kind: found for kind, found in unread.items() if found} == {}


@pytest.mark.parametrize(
    ("name", "what"),
    [("smollm3", "SmolLM3ForCausalLM"), ("gemma3 images", "a model that also takes images")],
)
def test_what_cannot_be_quantized_is_refused(name: str, what: str, tmp_path: Path) -> None:
    folder = write_config(tmp_path / "hf", name)
    with pytest.raises(LoadFailed, match=f"localgen cannot quantize {what}"):
        LayerwiseCheckpoint(folder)
    with pytest.raises(LoadFailed, match=f"localgen cannot convert {what} to GGUF"):
        convert_to_gguf(folder, tmp_path / "model.gguf")
