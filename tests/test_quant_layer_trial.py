"""The time of a quantization, said before it starts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from hf_folders import TINY
from quant_models import model_folder
from torch import Tensor

from localgen.backends.formats.hf.config import read_hf_config
from localgen.quant import layer_trial
from localgen.quant.calibrate.layer_forward import CalibrationLayer, LayerForward
from localgen.quant.job import QuantizeJob
from localgen.quant.layer_trial import TRIAL_STEPS, estimate_layer_s
from localgen.quant.preflight import prepare_quantization
from localgen.quant.request.events import NoteEvent, QuantizeEvent
from localgen.quant.request.recipe import CalibrationConfig, Recipe


class Work:
    """Parts of a layer that take known times of a clock."""

    read_s, forward_s, once_s, batch_s, round_s, step_s = 1.0, 2.0, 5.0, 7.0, 11.0, 13.0

    def __init__(self, num_batches: int, num_steps: int) -> None:
        self.now_s, self.num_batches, self.num_steps = 0.0, num_batches, num_steps
        hidden = torch.zeros(1, 2, 4)
        forward = LayerForward(read_hf_config(TINY), 8)
        self.layer = CalibrationLayer(0, {}, lambda: [hidden] * num_batches, forward)

    def read(self) -> CalibrationLayer:
        self.now_s += self.read_s
        return self.layer

    def run_forward(self, index: int, tensors: object, hidden: Tensor) -> Tensor:
        self.now_s += self.forward_s
        return hidden

    def collect(self, layer: CalibrationLayer) -> None:
        self.now_s += self.once_s + self.batch_s * count(layer.inputs())

    def compute(self, layer: CalibrationLayer, num_steps: int) -> None:
        if layer.inputs():
            self.collect(layer)
        self.now_s += self.round_s
        if num_steps:
            self.now_s += 2 * self.forward_s * count(layer.inputs())
            layer.on_learning_step()
            for _ in range(num_steps):
                self.now_s += self.step_s
                layer.on_learning_step()

    def estimate_s(self, num_passes: int) -> float:
        return estimate_layer_s(
            self.read,
            self.collect,
            lambda layer: self.compute(layer, min(self.num_steps, TRIAL_STEPS)),
            device=torch.device("cpu"),
            num_batches=self.num_batches,
            num_passes=num_passes,
            num_steps=self.num_steps,
        )

    def whole_s(self, num_passes: int) -> float:
        started_s = self.now_s
        layer = self.read()
        self.compute(layer, self.num_steps)
        self.now_s += num_passes * self.num_batches * self.forward_s
        return self.now_s - started_s


def count(batches: Iterable[object]) -> int:
    return len(list(batches))


@pytest.mark.parametrize(("num_batches", "num_steps"), [(1, 0), (9, 0), (9, 2), (9, 200), (0, 0)])
def test_a_layer_takes_as_long_as_its_parts(
    num_batches: int, num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Work(num_batches, num_steps)
    monkeypatch.setattr(layer_trial, "_now_s", lambda _: work.now_s)
    monkeypatch.setattr(work.layer.forward, "run", work.run_forward)
    assert work.estimate_s(2) == pytest.approx(work.whole_s(2))


METHODS = [
    Recipe(method="rtn"),
    Recipe(method="awq"),
    Recipe(method="gptq", bits=3, rounding_steps=4),
    Recipe(method="smoothquant", bits=8),
]


@pytest.mark.parametrize("recipe", METHODS, ids=lambda recipe: recipe.method)
def test_the_time_is_told_and_the_result_is_the_same(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = prepare_quantization(TINY, recipe, CalibrationConfig(samples=6, seq_len=32), "cpu")
    events: list[QuantizeEvent] = []
    told = QuantizeJob("tiny", prepared, tmp_path / "told").run(events.append, resume=False)
    assert told.estimated_s is not None
    assert told.estimated_s > 0
    (note,) = [event for event in events if isinstance(event, NoteEvent)]
    assert note.text.startswith("quantizing 6 layers takes about ")
    monkeypatch.setattr("localgen.quant.job._MIN_TIMED_LAYERS", 7)
    events.clear()
    quiet = QuantizeJob("tiny", prepared, tmp_path / "quiet").run(events.append, resume=False)
    assert quiet.estimated_s is None
    assert not any(isinstance(event, NoteEvent) for event in events)
    names = {path.name for path in (tmp_path / "told").iterdir()}
    assert names == {path.name for path in (tmp_path / "quiet").iterdir()}
    for name in names:
        assert (tmp_path / "told" / name).read_bytes() == (tmp_path / "quiet" / name).read_bytes()


def test_few_layers_are_not_timed(tmp_path: Path) -> None:
    folder = model_folder("llama", tmp_path / "model")
    events: list[QuantizeEvent] = []
    prepared = prepare_quantization(
        folder, Recipe(method="rtn", group_size=8), CalibrationConfig(), "cpu"
    )
    QuantizeJob("llama", prepared, tmp_path / "out").run(events.append, resume=False)
    assert not any(isinstance(event, NoteEvent) for event in events)
