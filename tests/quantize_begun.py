"""A quantization in a process of its own, in its middle. Imports no torch."""

from __future__ import annotations

from slow_processes import slowed

from localgen.quant.process import QuantizeProcess
from localgen.quant.request.events import ProgressEvent
from localgen.quant.request.recipe import CalibrationConfig, Recipe
from localgen.quant.request.request import QuantizeRequest

GPTQ = QuantizeRequest(
    model="tiny",
    recipe=Recipe(method="gptq"),
    gguf=None,
    mode="round",
    calibration=CalibrationConfig(samples=24, seq_len=128),
    output=None,
    device="cpu",
    resume=False,
    eval_set=None,
)


def begun() -> QuantizeProcess:
    """A run that has finished at least one layer and is not done."""
    work = QuantizeProcess(GPTQ)
    events = (event for event in work.events() if isinstance(event, ProgressEvent))
    assert any(event.step == "quantizing" for event in events)
    # at full speed, all layers may be done before this process reads of the first
    with slowed(lambda: [work.pid], run_s=0.05, stop_s=0.2):
        assert any(event.done >= 1 for event in events), "it ended too soon"
        return work
