"""A larger context than the default: the model is reloaded while no other client uses it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from serving import MANY_WORDS, ServerHarness, running_alone, server_harness

from localgen.backends.errors import InvalidRequest, LocalgenError
from localgen.backends.model_info import LoadOptions
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.types import Message


@pytest.fixture(scope="module")
def server() -> Iterator[ServerHarness]:
    with server_harness() as built:
        yield built


@pytest.fixture
def served(server: ServerHarness) -> Iterator[ServerHarness]:
    yield from running_alone(server)


def load(served: ServerHarness, model: str, **options: Any) -> Any:
    with served.client() as client:
        client.connect()
        return client.load(model, LoadOptions(**options))


def test_a_larger_context_is_another_load(served: ServerHarness) -> None:
    model = served.model("big")
    assert load(served, model, threads=3).ctx == 2048
    larger = load(served, model, ctx=4096)
    assert (larger.ctx, larger.options.threads) == (4096, 3)
    assert served.loads(model) == 2
    assert load(served, model, ctx=1000).ctx == 4096
    assert load(served, model).ctx == 4096
    assert served.loads(model) == 2
    with pytest.raises(LocalgenError, match="big was trained for 4,096 tokens, use 1 to 4,096"):
        load(served, model, ctx=4097)  # more than it was trained for


def test_context_grows_several_times(served: ServerHarness) -> None:
    model = served.model("big")
    assert [load(served, model, ctx=ctx).ctx for ctx in (1024, 2048, 512, 4096)] == [
        1024, 2048, 2048, 4096,
    ]  # fmt: skip
    assert served.loads(model) == 3


def test_keep_alive_survives_a_reload(served: ServerHarness) -> None:
    model = served.model("big")
    with served.client() as client:
        client.connect()
        client.load(model, LoadOptions(), keep_alive="-1")
        client.load(model, LoadOptions(ctx=4096))
        (running,) = client.running_models()
    assert running.until_s is None
    # by its short name, as `ps` shows it
    assert load(served, "big").ctx == 4096


@pytest.mark.parametrize("chosen", [{"kv_tokens": 4096}, {"draft": True}])
def test_chosen_context_is_not_changed(served: ServerHarness, chosen: dict[str, Any]) -> None:
    model = served.model("big")
    options = {"draft": served.model("small")} if "draft" in chosen else chosen
    load(served, model, **options)
    with pytest.raises(LocalgenError, match="big is loaded with --ctx 2048, not 4096"):
        load(served, model, ctx=4096)
    assert served.loads(model) == 1


def test_other_changed_options_are_rejected_before_a_reload(served: ServerHarness) -> None:
    model = served.model("big")
    load(served, model)
    with pytest.raises(LocalgenError, match="big is loaded without --threads 9"):
        load(served, model, ctx=4096, threads=9)
    assert served.loads(model) == 1


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"threads": 0}, "--threads is 0, it must be at least 1"),
        ({"parallel": 0}, "--parallel is 0, it must be at least 1"),
        ({"max_batch_tokens": 0}, "--batch-size is 0, it must be at least 1"),
        ({"itl_target_ms": -3.0}, "--itl-target-ms is -3.0, it must be at least 1"),
        ({"cache_type_k": "q9"}, "--cache-type-k is 'q9', it must be one of f32, f16"),
        ({"cache_type_v": "fp8"}, "--cache-type-v is 'fp8', it must be one of f32, f16"),
        ({"device": "gpu"}, "--device is 'gpu', it must be cuda, cuda:N or cpu"),
        ({"draft_max": 0}, "--draft-max is 0, it must be at least 1: --draft none for"),
        ({"ctx": 99_999_999}, "--ctx 99,999,999: big was trained for 4,096 tokens"),
    ],
)
def test_an_invalid_option_is_not_another_load(
    served: ServerHarness, options: dict[str, Any], complaint: str
) -> None:
    model = served.model("big")
    load(served, model)
    with pytest.raises(InvalidRequest, match=complaint):
        load(served, model, **options)


def test_all_that_differs_is_named_by_its_flag(served: ServerHarness) -> None:
    model = served.model("big")
    load(served, model, threads=3)
    with pytest.raises(LocalgenError) as raised:
        load(served, model, draft_max=7, threads=2, mlock=True)
    assert raised.value.message == (
        "big is loaded with --threads 3, not 2, without --mlock, "
        "without --draft-max 7: `localgen stop big`, then try again"
    )


def test_sizes_of_tiers_that_differ_are_named_with_their_units(served: ServerHarness) -> None:
    model = served.model("big", options={"kv_ram": 1 << 30})
    load(served, model)
    with pytest.raises(LocalgenError) as raised:
        load(served, model, kv_ram=1 << 31, kv_disk=4 << 30)
    assert "with --kv-ram 1.1 GB, not 2.1 GB, without --kv-disk 4.3 GB: " in raised.value.message


@pytest.mark.parametrize("options", [{"tp": 2}, {"device": "cuda"}])
def test_an_option_that_needs_a_gpu_is_rejected_without_advice_to_stop_the_model(
    served: ServerHarness, options: dict[str, Any]
) -> None:
    model = served.model("big")
    load(served, model)
    with pytest.raises(InvalidRequest, match="no NVIDIA GPU was found"):
        load(served, model, **options)


def test_reload_does_not_interrupt_an_answer(served: ServerHarness) -> None:
    model = served.model("big")
    with served.client() as client:
        client.connect()
        asked = (Message("user", MANY_WORDS),)
        with closing(client.chat(model, asked, SamplingParams())) as stream:
            next(stream)
            with pytest.raises(LocalgenError, match="big is loaded with --ctx 2048, not 4096"):
                load(served, model, ctx=4096)
    assert served.loads(model) == 1


def test_an_empty_name_is_not_the_default_model(served: ServerHarness) -> None:
    with pytest.raises(LocalgenError, match="the model name is empty"):
        load(served, "")
