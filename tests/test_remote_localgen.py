"""Another localgen, over TCP and with a key: its statistics, every setting, its errors."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import asdict, fields
from typing import Any

import pytest
from serving import ServerHarness, server_harness, wait_until

from localgen.backends.errors import ContextExceeded, LocalgenError, ModelNotFound
from localgen.backends.model_info import LoadOptions
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.types import Message
from localgen.client import Client, Completion, TextDelta
from localgen.client.connection import EndpointConnection
from localgen.client.endpoints import Endpoint
from localgen.client.errors import EndpointUnavailable
from localgen.client.snapshot import parse_localgen_stats
from localgen.hub.hf_client import AccessDenied

KEY = "a-key-of-some-length"
# every setting, within its range; grammars are given one at a time
EVERYTHING = SamplingParams(
    temperature=0.7,
    top_k=20,
    top_p=0.9,
    min_p=0.1,
    typical_p=0.9,
    top_n_sigma=1.0,
    xtc_probability=0.1,
    xtc_threshold=0.2,
    dynatemp_range=0.1,
    dynatemp_exponent=1.1,
    adaptive_target=0.5,
    adaptive_decay=0.8,
    mirostat=2,
    mirostat_tau=4.0,
    mirostat_eta=0.2,
    repeat_penalty=1.1,
    repeat_last_n=32,
    presence_penalty=0.1,
    frequency_penalty=0.2,
    dry_multiplier=0.5,
    dry_base=1.5,
    dry_allowed_length=3,
    dry_penalty_last_n=128,
    thinking_budget=99,
    dry_sequence_breakers=("\n", "."),
    logit_bias={5: -1.0},
    seed=7,
    max_tokens=50,
    stop=("END",),
    stop_token_ids=(2,),
    ignore_eos=True,
)


def named(built: ServerHarness, name: str, **script: Any) -> str:
    """A fake model under an alias, which clients over TCP need."""
    with (built.settings.state_dir / "models.toml").open("a") as names:
        names.write(f"{name} = {json.dumps(built.model(name, **script))}\n")
    return name


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with server_harness() as built, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        named(built, "echo")
        process = built.start(port=port, keys=[KEY])
        wait_until(lambda: built.healthy() or process.poll() is not None)
        yield f"http://127.0.0.1:{port}/v1"


@pytest.fixture
def client(url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.setenv("THEIR_KEY", KEY)
    made = Client(EndpointConnection(Endpoint(url, key_env="THEIR_KEY")))
    yield made
    made.close()


def ask(
    client: Client, text: str, params: SamplingParams = SamplingParams(), model: str = "echo"
) -> tuple[list[TextDelta], Completion]:
    *texts, end = client.chat(model, [Message("user", text)], params)
    assert isinstance(end, Completion)
    return [part for part in texts if isinstance(part, TextDelta)], end


def test_remote_localgen_sends_its_own_statistics(client: Client) -> None:
    texts, end = ask(client, "one two three")
    assert "".join(part.text for part in texts) == "one two three"
    assert [(part.num_tokens, part.estimated) for part in texts] == [
        (1, False),
        (2, False),
        (3, False),
    ]
    assert (end.client_measured, end.estimated) == (False, False)
    assert (end.prompt_tokens, end.cached_tokens, end.completion_tokens) == (5, 2, 3)
    assert (end.ctx, end.stop, end.timings.prompt_n) == (2048, "</s>", 3)
    assert not [note for note in client.load("echo", LoadOptions()).notes if "measured" in note]


def test_the_state_of_a_remote_localgen_can_be_read(client: Client) -> None:
    ask(client, "one two three")
    (model,) = parse_localgen_stats(client.stats()).models
    assert (model.name, model.state, model.names) == ("echo", "loaded", ("echo",))


def test_texts_are_continued(client: Client) -> None:
    *texts, end = client.complete("echo", "a b c", SamplingParams(max_tokens=2))
    assert "".join(part.text for part in texts if isinstance(part, TextDelta)) == "a b"
    assert isinstance(end, Completion)
    assert end.finish_reason == "length"


def test_every_setting_is_sent(client: Client) -> None:
    _, end = ask(client, "x", EVERYTHING)
    default = SamplingParams()
    held = ("json_schema", "regex", "grammar", "logprobs", "infill_sampler")
    ours = [field.name for field in fields(SamplingParams) if field.name not in held]
    unset = [name for name in ours if getattr(EVERYTHING, name) == getattr(default, name)]
    assert set(unset) <= {"min_tokens"}
    reached = json.loads(end.notes[1])
    wanted = json.loads(json.dumps(asdict(EVERYTHING)))
    assert {name: reached[name] for name in wanted} == wanted
    assert not [note for note in end.notes if "may ignore" in note]


@pytest.mark.parametrize(
    ("field", "value"),
    [("json_schema", '{"type": "object"}'), ("regex", "a+"), ("grammar", 'root ::= "a"')],
)
def test_grammars_are_sent(client: Client, field: str, value: str) -> None:
    given: dict[str, Any] = {field: value}
    _, end = ask(client, "x", SamplingParams(**given))
    assert json.loads(end.notes[1])[field] == value


def test_remote_errors_are_raised_as_their_classes(client: Client) -> None:
    with pytest.raises(ContextExceeded, match="context is 1000"):
        ask(client, "word " * 1001)
    with pytest.raises(ModelNotFound, match=r"no model nix at .*, models are .*tiny"):
        ask(client, "x", model="nix")


def test_engine_that_dies_during_an_answer_is_an_error(client: Client) -> None:
    with pytest.raises(EndpointUnavailable, match="ended the answer"):
        ask(client, "one two !die")
    assert ask(client, "one")[1].finish_reason == "stop"


def test_wrong_key_is_rejected(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THEIR_KEY", "another-key-of-that-length")
    for endpoint in (Endpoint(url), Endpoint(url, key_env="THEIR_KEY")):
        with pytest.raises(AccessDenied, match="401") as raised:
            Client(EndpointConnection(endpoint)).load("echo", LoadOptions())
        assert "another-key" not in raised.value.message


def test_unreachable_server_is_an_error(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THEIR_KEY", KEY)
    gone = url.rpartition(":")[0] + ":9/v1"
    with pytest.raises(LocalgenError, match="connection refused"):
        Client(EndpointConnection(Endpoint(gone, key_env="THEIR_KEY"))).load("echo", LoadOptions())
