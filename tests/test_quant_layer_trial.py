"""The time of a quantization, said before it starts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
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
from localgen.quant.request.events import (
    LayersEstimateEvent,
    NoteEvent,
    ProgressEvent,
    QuantizeEvent,
)
from localgen.quant.request.recipe import CalibrationConfig, Recipe


class Work:
    """Parts of a layer that take known times of a clock, and longer at first."""

    read_s, batch_read_s, forward_s, once_s, batch_s = 1.0, 0.5, 2.0, 5.0, 7.0
    round_s, step_s, cold_s = 11.0, 13.0, 100.0

    def __init__(self, num_batches: int, num_steps: int) -> None:
        self.now_s, self.num_batches, self.num_steps = 0.0, num_batches, num_steps
        self._cold = {"forward", "collect", "step"}
        forward = LayerForward(read_hf_config(TINY), 8)
        self.layer = CalibrationLayer(0, {}, self.inputs, forward, None, self.inputs)

    def inputs(self) -> Iterator[Tensor]:
        for _ in range(self.num_batches):
            self.now_s += self.batch_read_s
            yield torch.zeros(4, 2, 4)

    def spend(self, seconds: float, what: str) -> None:
        self.now_s += seconds + (self.cold_s if what in self._cold else 0.0)
        self._cold.discard(what)

    def read(self) -> CalibrationLayer:
        self.now_s += self.read_s
        return self.layer

    def run_forward(self, index: int, tensors: object, hidden: Tensor) -> Tensor:
        self.spend(self.forward_s, "forward")
        return hidden

    def collect(self, layer: CalibrationLayer) -> None:
        self.now_s += self.once_s
        for _ in layer.inputs():
            self.spend(self.batch_s, "collect")

    def compute(self, layer: CalibrationLayer, num_steps: int) -> None:
        if self.num_batches:
            self.collect(layer)
        self.now_s += self.round_s
        if num_steps:
            self.pass_over(layer, 2)
            layer.on_learning_step()
            batches = itertools.chain.from_iterable(layer.inputs() for _ in itertools.count())
            for _ in itertools.islice(batches, num_steps):
                self.spend(self.step_s, "step")
                layer.on_learning_step()

    def pass_over(self, layer: CalibrationLayer, times: int) -> None:
        for _ in range(times):
            for batch in layer.inputs():
                self.run_forward(0, {}, batch)

    def estimate_s(self, num_passes: int, num_windows: int) -> float:
        return estimate_layer_s(
            self.read,
            self.collect,
            lambda layer: self.compute(layer, min(self.num_steps, TRIAL_STEPS)),
            device=torch.device("cpu"),
            num_windows=num_windows,
            num_passes=num_passes,
            num_steps=self.num_steps,
        )

    def whole_s(self, num_passes: int) -> float:
        """Of a layer that is not the first."""
        started_s = self.now_s
        layer = self.read()
        self.compute(layer, self.num_steps)
        self.pass_over(layer, num_passes)
        return self.now_s - started_s


@pytest.mark.parametrize(("num_batches", "num_steps"), [(1, 0), (9, 0), (9, 2), (9, 200), (0, 0)])
def test_a_layer_takes_as_long_as_its_parts(
    num_batches: int, num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Work(num_batches, num_steps)
    monkeypatch.setattr(layer_trial, "_now_s", lambda _: work.now_s)
    monkeypatch.setattr(work.layer.forward, "run", work.run_forward)
    estimated_s = work.estimate_s(2, num_windows=4 * num_batches)
    cold_s = work.cold_s if num_steps else 0.0  # of the first step of all
    assert estimated_s - cold_s == pytest.approx(work.whole_s(2))


def test_a_part_of_a_batch_takes_a_part_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for num_windows in (36, 34, 32):
        work = Work(9, 0)
        monkeypatch.setattr(layer_trial, "_now_s", lambda _, work=work: work.now_s)
        monkeypatch.setattr(work.layer.forward, "run", work.run_forward)
        found.append(work.estimate_s(2, num_windows))
    assert found[0] - found[1] == pytest.approx(found[1] - found[2])
    assert found[0] > found[1]


METHODS = [
    Recipe(method="rtn"),
    Recipe(method="awq"),
    Recipe(method="gptq", bits=3, rounding_steps=4),
    Recipe(method="smoothquant", bits=8),
    Recipe(method="fp8", bits=8),
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
    begin = events.index(ProgressEvent("quantizing", 0, 6, "layers"))
    estimate = LayersEstimateEvent("quantizing", 6, told.estimated_s)
    hints = [NoteEvent("most time goes to learned rounding: --rounding-steps 0 is faster")]
    learns = recipe.rounding_steps > 0
    assert events[begin - 1 - learns : begin] == [estimate, *hints[:learns]]
    monkeypatch.setattr("localgen.quant.job._MIN_TIMED_LAYERS", 7)
    events.clear()
    quiet = QuantizeJob("tiny", prepared, tmp_path / "quiet").run(events.append, resume=False)
    assert quiet.estimated_s is None
    assert not any(isinstance(event, LayersEstimateEvent) for event in events)
    names = {path.name for path in (tmp_path / "told").iterdir()}
    assert names == {path.name for path in (tmp_path / "quiet").iterdir()}
    for name in names:
        assert (tmp_path / "told" / name).read_bytes() == (tmp_path / "quiet" / name).read_bytes()


def test_a_resumed_run_is_timed_without_the_finished_layers(tmp_path: Path) -> None:
    prepared = prepare_quantization(
        TINY, Recipe(method="awq"), CalibrationConfig(samples=4, seq_len=32), "cpu"
    )
    out = tmp_path / "out"

    def interrupt(event: QuantizeEvent) -> None:
        if event == ProgressEvent("quantizing", 2, 6, "layers"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        QuantizeJob("tiny", prepared, out).run(interrupt, resume=False)
    events: list[QuantizeEvent] = []
    finished = QuantizeJob("tiny", prepared, out).run(events.append, resume=True)
    (told,) = [event for event in events if isinstance(event, LayersEstimateEvent)]
    assert (told.layers, told.seconds) == (4, finished.estimated_s)
    assert finished.resumed == 2


def test_few_layers_are_not_timed(tmp_path: Path) -> None:
    folder = model_folder("llama", tmp_path / "model")
    events: list[QuantizeEvent] = []
    prepared = prepare_quantization(
        folder, Recipe(method="rtn", group_size=8), CalibrationConfig(), "cpu"
    )
    QuantizeJob("llama", prepared, tmp_path / "out").run(events.append, resume=False)
    assert not any(isinstance(event, LayersEstimateEvent) for event in events)
