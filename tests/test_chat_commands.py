"""Each slash command, on a session over a scripted client."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripted_client import ScriptedClient, answer, model_info

from localgen.backends.errors import (
    ContextExceeded,
    InvalidRequest,
    LocalgenError,
    ServerUnavailable,
)
from localgen.backends.memory.kv_sizing import DEFAULT_CTX
from localgen.backends.model_info import LoadOptions
from localgen.backends.sampling_params import ANY_JSON_OBJECT, SamplingParams
from localgen.chat import commands
from localgen.chat.conversation import Conversation, Turn
from localgen.chat.parameters import ModelOptions
from localgen.chat.session import ChatSession
from localgen.hub.preset import Preset

TURNS = (Turn("one", "1"), Turn("two", "2"))
LONG_TURNS = (Turn("one", "1" * 300), Turn("two", "2" * 300), Turn("three", "3" * 300))


@pytest.fixture
def session(tmp_path: Path) -> ChatSession:
    return chat_with(ScriptedClient(), tmp_path)


def chat_with(client: ScriptedClient, state_dir: Path) -> ChatSession:
    options = ModelOptions(system="be brief", load=LoadOptions(threads=2, chat_template="x"))
    made = ChatSession(client, state_dir, options)
    made.load(None, lambda _: None)
    made.set_conversation(Conversation("be brief", TURNS))
    return made


def obey(session: ChatSession, line: str) -> str:
    """The output of a command."""
    outcome = commands.run_command(session, line, lambda _: None)
    assert isinstance(outcome, commands.CommandOutput)
    return outcome.text


def test_a_parameter_has_the_name_that_was_typed(session: ChatSession) -> None:
    assert obey(session, "/set parameter think_max 500") == "think_max = 500"
    assert session.options.params.thinking_budget == 500
    assert obey(session, "/set parameter thinking_budget 5") == "thinking_budget = 5"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("/help", True),
        ("/set system x", True),
        ("/nonsense", True),
        ("/?", True),
        ("/usr/bin is what?", False),
        (" /help", False),
        ("/", True),
        ("/ 2", False),
        ("1/2", False),
        ("", False),
    ],
)
def test_command_lines_are_recognized(line: str, expected: bool) -> None:
    assert commands.is_command(line) is expected


@pytest.mark.parametrize(
    ("typo", "meant"), [("/hlep", "/help"), ("/regn", "/regen"), ("/frok", "/fork")]
)
def test_an_unknown_command_offers_the_closest(session: ChatSession, typo: str, meant: str) -> None:
    with pytest.raises(InvalidRequest, match=f"did you mean {meant}"):
        obey(session, typo)


def test_a_word_like_no_command_points_to_help(session: ChatSession) -> None:
    with pytest.raises(InvalidRequest, match="see /help"):
        obey(session, "/xyzzyqwv")


def test_set_system(session: ChatSession) -> None:
    obey(session, '/set system """be\nloud"""')
    assert session.conversation == Conversation("be\nloud", TURNS)
    assert obey(session, "/set system") == "be\nloud\n(/set system default removes it)"
    assert obey(session, "/set system default") == "system prompt removed"
    assert session.conversation.system is None
    assert obey(session, "/set system") == "no system prompt"
    obey(session, '/set system "default"')
    assert session.conversation.system == "default"
    assert obey(session, '/set system ""') == "system prompt removed"


def test_set_without_a_value_shows_it(session: ChatSession) -> None:
    before = session.options
    assert obey(session, "/set ctx") == "context 2,048 tokens"
    assert obey(session, "/set format") == "format text"
    assert obey(session, "/set parameter temp") == "temp = 0.3"
    assert obey(session, "/set top_k") == "top_k = 40"
    assert obey(session, "/set parameter") == obey(session, "/show parameters")
    assert session.options == before
    assert obey(session, "/set temperature 0.5") == "temperature = 0.5"
    assert obey(session, "/set format json") == obey(session, "/set format") == "format json"
    assert obey(session, "/set format default") == "format text"


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("temperature 0.5", "temperature", 0.5),
        ("temp 0", "temperature", 0.0),
        ("top-k 3", "top_k", 3),
        ("seed 42", "seed", 42),
        ("stop END \\n", "stop", ("END", "\n")),
        ('stop "User:"', "stop", ("User:",)),
        ('stop "### User" \'"\'', "stop", ("### User", '"')),
        ('stop "END \\n" ### C:\\d', "stop", ("END \n", "###", "C:\\d")),
        ("stop_token_ids 3 4", "stop_token_ids", (3, 4)),
        ("logit_bias 3=-1.5 4=2", "logit_bias", {3: -1.5, 4: 2.0}),
        ("ignore_eos on", "ignore_eos", True),
        ("regex a+ b", "regex", "a+ b"),
        ('json_schema {"type": "object"}', "json_schema", '{"type": "object"}'),
        ("num_predict 8", "max_tokens", 8),
    ],
)
def test_set_parameter(session: ChatSession, text: str, field: str, value: object) -> None:
    obey(session, f"/set parameter {text}")
    assert getattr(session.options.params, field) == value
    obey(session, f"/set parameter {field} default")
    assert getattr(session.options.params, field) == getattr(ModelOptions().params, field)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("/set parameter regex (a", "regex: invalid regex .* unclosed group"),
        ("/set parameter grammar root ::= foo", "grammar: .* Rule 'foo' not found"),
        ('/set format {"type": 3}', "json_schema: type must be a string"),
        ("/set parameter temperature warm", "give a number"),
        ("/set parameter top_k 1.5", "give a whole number"),
        ("/set parameter temperatur 1", "did you mean temperature"),
        ("/set parameter tempp 0", r"did you mean temp\?"),
        ("/set parameter num-predic 3", "did you mean num_predict"),
        ("/set parameter json_schema yaml", "json_schema yaml is not JSON"),
        (
            "/set format yaml",
            r"^format yaml is not JSON .*: give json, a JSON schema or @FILE",
        ),
        ("/set format @/no/file", "^format file /no/file: No such file"),
        ("/set temperature abc", "^temperature 'abc': give a number"),
        ("/set nonsense abc", "^/set has no 'nonsense abc'; usage: /set system TEXT"),
        ("/set parameter nonsense", "^no parameter 'nonsense'"),
        ("/set parameter ignore_eos maybe", "on or off"),
        ("/set parameter logit_bias x", "ID=BIAS"),
        ("/set parameter stop_token_ids x", "whole numbers"),
        ("/set parameter temperature nan", "finite number"),
        ("/set parameter logit_bias 5=-inf", "5=-100 bans"),
        ("/set parameter stop don't", "close the quote"),
        ('/set parameter stop ""', "cannot be empty"),
        ("/set parameter logprobs 3", "no parameter"),
        ("/set ctx 999999", "was trained for 2,048"),
        ("/set ctx many", "^ctx 'many': give a number of tokens, or default"),
        ("/set temp 900", "^temperature is 900, it must be 0 to 100"),
        ("/set figures maybe", "^figures 'maybe': give on or off"),
        ("/set nothing", "^/set has no 'nothing'; usage: /set system TEXT"),
        ("/set", "^usage: /set system TEXT"),
        ("/show nothing", "^/show has no 'nothing'; usage: /show info"),
        ("/undo 3", "cannot undo 3 of 2"),
        ("/undo 0", "cannot undo 0 of 2"),
        ("/undo x", "number of turns"),
        ("/switch nowhere", "branches are main"),
        ("/fork main", "branch main already exists"),
        ("/load gone", "cannot read"),
        ("/model gone", "Model 'gone' not found"),
    ],
)
def test_a_refused_command_says_why_and_changes_nothing(
    session: ChatSession, line: str, complaint: str
) -> None:
    before = (session.conversation, session.options, session.branch, session.model_info)
    with pytest.raises(LocalgenError, match=complaint):
        obey(session, line)
    assert (session.conversation, session.options, session.branch, session.model_info) == before


def test_the_context_of_a_preset_is_read_once_per_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The TUI shows it whenever it draws, which must not wait for a disk."""
    client, limit = ScriptedClient(), 256
    chat = chat_with(client, tmp_path)
    asked: list[str] = []

    def find(name: str) -> Preset:
        asked.append(name)
        return Preset("tiny", ctx=limit)

    monkeypatch.setattr("localgen.chat.session.find_preset", find)
    for limit in (256, 128):
        chat.load("other", lambda _: None)
        assert (chat.ctx, chat.ctx) == (limit, limit)
    assert asked == ["other", "other"]


def test_set_ctx_and_verbose(session: ChatSession) -> None:
    assert obey(session, "/set ctx 512") == "context 512 tokens"
    assert (session.options.ctx or 0, session.ctx) == (512, 512)
    said = obey(session, "/set ctx 4")
    assert said.startswith("context 4 tokens: the conversation has 4, /compact or /undo")
    obey(session, "/set ctx default")
    assert (session.options.ctx or 0, session.ctx) == (0, 2048)
    obey(session, "/set verbose")
    assert session.options.verbose
    obey(session, "/set verbose off")
    assert not session.options.verbose
    assert session.options.figures
    assert obey(session, "/set figures off") == "figures off"
    assert not session.options.figures


def test_set_format_is_that_of_run(session: ChatSession, tmp_path: Path) -> None:
    assert obey(session, "/set format json") == "format json"
    assert session.options.params.json_schema == ANY_JSON_OBJECT
    obey(session, '/set format {"type": "object"}')
    assert session.options.params.json_schema == '{"type": "object"}'
    path = tmp_path / "my schema"
    path.write_text('{"enum": [1]}\n')
    obey(session, f"/set format @{path}")
    assert session.options.params.json_schema == '{"enum": [1]}'
    obey(session, "/set format text")
    assert session.options.params.json_schema is None
    assert "/set format json|text|SCHEMA|@FILE" in obey(session, "/help")


def test_show_info(session: ChatSession) -> None:
    text = obey(session, "/show info")
    for part in (
        "tiny",
        "/models/tiny.gguf",
        "llama 6M F16",
        "12.0 MB",
        "2,048",
        "100% CPU",
        "2 t",
    ):
        assert part in text
    assert obey(session, "/show") == text
    assert "KV tiers" not in text


def test_show_info_has_the_sizes_of_the_tiers(session: ChatSession) -> None:
    options = LoadOptions(kv_ram=1 << 30, kv_disk=4 << 30)
    session.model_info = model_info(options=options)
    (line,) = [each for each in obey(session, "/show").splitlines() if "tiers" in each]
    assert line == "KV tiers  1.1 GB of RAM · 4.3 GB of disk, for all models together"
    session.model_info = model_info(options=replace(options, kv_ram=0))
    assert "KV tiers  4.3 GB of disk, for all models together" in obey(session, "/show")
    session.model_info = model_info(options=replace(options, kv_ram=0, kv_disk=0))
    assert "KV tiers" not in obey(session, "/show")


def test_show_parameters_names_the_source_of_each_value(session: ChatSession) -> None:
    obey(session, "/set parameter top_k 7")
    rows = {
        line.split()[0]: line.split()[1:] for line in obey(session, "/show parameters").split("\n")
    }
    assert rows["top_k"] == ["7", "yours"]
    assert rows["temperature"] == ["0.3", "model"]
    assert rows["top_p"] == ["0.95"]
    assert rows["max_tokens"] == ["-"]
    assert rows["min_tokens"] == ["0"]


def test_show_template_and_system(session: ChatSession) -> None:
    assert obey(session, "/show template") == "{{ messages }}"
    assert obey(session, "/show system") == "be brief"


def test_save_and_load(session: ChatSession, tmp_path: Path) -> None:
    obey(session, "/set parameter top_k 7")
    assert "2 turns" in obey(session, "/save talk")
    saved = session.conversation
    obey(session, "/clear")
    obey(session, "/set parameter top_k default")
    assert "talk" in obey(session, "/load")
    assert "2 turns" in obey(session, "/load talk")
    assert session.conversation == saved
    assert session.options.params.top_k == 7
    obey(session, f"/save {tmp_path}/elsewhere.json")
    assert (tmp_path / "elsewhere.json").is_file()


def test_load_says_when_the_model_is_another(session: ChatSession) -> None:
    obey(session, "/save talk")
    obey(session, "/model other")
    assert "saved with tiny, current model other" in obey(session, "/load talk")


def test_clear_keeps_the_system_prompt(session: ChatSession) -> None:
    obey(session, "/clear")
    assert session.conversation == Conversation("be brief")


def long_chat_with(client: ScriptedClient, state_dir: Path) -> ChatSession:
    session = chat_with(client, state_dir)
    session.set_conversation(Conversation("be brief", LONG_TURNS))
    return session


def test_compact_replaces_the_turns_by_a_summary(tmp_path: Path) -> None:
    client = ScriptedClient(("  They asked", " one and two. ", answer()))
    session = long_chat_with(client, tmp_path)
    session.used_tokens = 900
    text = obey(session, "/compact")
    turn, last = session.conversation.turns
    assert turn.answer == "They asked one and two."
    assert last == LONG_TURNS[-1]
    assert session.conversation.system == "be brief"
    (asked,) = client.record.asked
    contents = [message.content for message in asked.messages]
    assert contents == ["be brief", "one", "1" * 300, "two", "2" * 300, turn.prompt]
    assert not asked.save_prefix
    used = session.estimate_used_tokens()
    assert text == (
        "They asked one and two.\n\n"
        f"2 turns became a summary: about {used} tokens instead of 900; /undo takes that back"
    )


def test_undo_after_compact_brings_the_turns_back(tmp_path: Path) -> None:
    session = long_chat_with(ScriptedClient(("Short.", answer())), tmp_path)
    before = session.conversation
    obey(session, "/compact")
    assert obey(session, "/undo") == "the summary is gone, the 3 turns are back"
    assert session.conversation == before
    assert obey(session, "/undo") == "2 turns left"


def test_undo_removes_a_turn_that_came_after_compact(tmp_path: Path) -> None:
    session = long_chat_with(ScriptedClient(("Short.", answer())), tmp_path)
    obey(session, "/compact")
    session.add_turn(Turn("new", "answer"), None)
    assert obey(session, "/undo") == "2 turns left"
    assert [turn.answer for turn in session.conversation.turns] == ["Short.", "3" * 300]


def test_a_single_turn_becomes_a_summary(tmp_path: Path) -> None:
    session = long_chat_with(ScriptedClient(("Short.", answer())), tmp_path)
    session.set_conversation(Conversation("be brief", LONG_TURNS[:1]))
    obey(session, "/compact")
    assert [turn.answer for turn in session.conversation.turns] == ["Short."]


def test_a_full_context_names_what_makes_room(tmp_path: Path) -> None:
    text = "the prompt is too long: 9 tokens, the context is 8: shorten the prompt, or raise ctx"
    exceeded = ContextExceeded(text, param="messages")
    session = long_chat_with(ScriptedClient(*((exceeded,) for _ in range(4))), tmp_path)

    def said(prompt: str) -> str:
        with pytest.raises(ContextExceeded) as raised:
            list(session.stream(prompt))
        return raised.value.message

    assert said("hi") == (
        "the prompt is too long: 9 tokens, the context is 8: /compact replaces the earlier turns "
        "by a summary, --on-overflow drop-oldest leaves the oldest out, or raise ctx"
    )
    assert said("hi " * 9999) == text  # is too long alone
    session.set_options(on_overflow="drop-oldest")
    assert said("hi") == text  # the last turn alone is too long
    session.set_options(on_overflow="error")
    session.set_conversation(Conversation())
    assert said("hi") == text


def test_compact_leaves_out_what_does_not_fit(tmp_path: Path) -> None:
    exceeded = ContextExceeded("the prompt does not fit")
    client = ScriptedClient((exceeded,), ("Only two.", answer()))
    session = long_chat_with(client, tmp_path)
    assert "; without the first 1, which did not fit the context" in obey(session, "/compact")
    assert [message.content for message in client.record.asked[1].messages][1:3] == [
        "two",
        "2" * 300,
    ]
    assert session.conversation.turns[0].answer == "Only two."


def test_compact_reads_the_end_of_a_single_turn_that_does_not_fit(tmp_path: Path) -> None:
    exceeded = ContextExceeded("the prompt does not fit")
    client = ScriptedClient((exceeded,), ("The end.", answer()))
    session = chat_with(client, tmp_path)
    session.set_conversation(Conversation("", (Turn("count", "begin" + "x" * 300 + "end"),)))
    assert "; of the last one it has only the end, as it did not fit" in obey(session, "/compact")
    read = client.record.asked[1].messages[1].content
    assert read.endswith("end")
    assert "begin" not in read
    assert [turn.answer for turn in session.conversation.turns] == ["The end."]


def test_compact_asks_for_a_summary_whatever_answers_have_to_be(tmp_path: Path) -> None:
    client = ScriptedClient(("A summary.", answer()))
    session = long_chat_with(client, tmp_path)
    strict = SamplingParams(temperature=0.5, regex="yes|no", stop=("x",), min_tokens=9, seed=3)
    session.set_options(params=strict)
    obey(session, "/compact")
    assert client.record.asked[0].params == SamplingParams(temperature=0.5, seed=3, max_tokens=512)
    assert session.options.params == strict


def test_a_summary_that_becomes_too_long_is_kept_and_reported(tmp_path: Path) -> None:
    cut = answer(finish_reason="length", completion_tokens=1024)
    session = long_chat_with(ScriptedClient(("So long", cut)), tmp_path)
    assert "the summary was cut, as it became too long" in obey(session, "/compact")
    assert session.conversation.turns[0].answer == "So long"


@pytest.mark.parametrize(
    ("scripts", "error"),
    [
        (((ContextExceeded("too long"),),) * 3, "no room for a summary"),
        ((("half", answer(finish_reason="length")),) * 3, "no room for a summary"),
        (((" ", answer()),), "wrote no summary"),
        ((("long " * 200, answer()),), "would be longer than the conversation"),
        ((("half", ServerUnavailable("gone")),), "gone"),
    ],
)
def test_compact_that_fails_changes_nothing(tmp_path: Path, scripts: Any, error: str) -> None:
    session = long_chat_with(ScriptedClient(*scripts), tmp_path)
    with pytest.raises(LocalgenError, match=error):
        obey(session, "/compact")
    assert session.conversation == Conversation("be brief", LONG_TURNS)


def test_ctrl_c_during_a_summary_changes_nothing(tmp_path: Path) -> None:
    session = long_chat_with(ScriptedClient(("half", KeyboardInterrupt())), tmp_path)
    with pytest.raises(KeyboardInterrupt):
        obey(session, "/compact")
    assert session.conversation == Conversation("be brief", LONG_TURNS)


def test_compact_needs_an_answer_and_no_argument(session: ChatSession) -> None:
    with pytest.raises(InvalidRequest, match="usage: /compact"):
        obey(session, "/compact all")
    obey(session, "/clear")
    with pytest.raises(InvalidRequest, match="no answer to summarize"):
        obey(session, "/compact")


def test_model_command_keeps_turns_and_drops_the_old_template(session: ChatSession) -> None:
    assert obey(session, "/model").splitlines() == ["tiny", "other"]
    assert "other" in obey(session, "/model other")
    assert session.model.name == "other"
    assert session.conversation.turns == TURNS
    client = session.client
    assert isinstance(client, ScriptedClient)
    assert client.record.loaded[-1] == ("other", LoadOptions(threads=2))


def test_regen_asks_the_last_prompt_again(session: ChatSession) -> None:
    assert commands.run_command(session, "/regen", lambda _: None) == commands.Regenerate("two")
    assert session.conversation.turns == TURNS


def test_regen_needs_a_prompt(session: ChatSession) -> None:
    obey(session, "/clear")
    with pytest.raises(InvalidRequest, match="there is no answer to regenerate"):
        obey(session, "/regen")


def test_forks_are_independent(session: ChatSession) -> None:
    obey(session, "/fork side")
    obey(session, "/undo")
    assert len(session.conversation.turns) == 1
    assert "* side · 1 turn" in obey(session, "/switch")
    obey(session, "/switch main")
    assert session.conversation == Conversation("be brief", TURNS)
    obey(session, "/fork")
    assert session.branch == "fork2"


def test_undo(session: ChatSession) -> None:
    assert obey(session, "/undo") == "1 turn left"
    obey(session, "/undo 1")
    assert session.conversation == Conversation("be brief")


def test_token_counts_are_reset_when_the_conversation_changes(session: ChatSession) -> None:
    session.add_turn(Turn("three", "3"), answer())
    assert session.estimate_used_tokens() == 49
    obey(session, "/undo")
    assert session.last_completion is None
    assert session.estimate_used_tokens() < 49


def test_short_stats(session: ChatSession, monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {
        "running": 1,
        "threads": 2,
        "threads_max": 2,
        "prefix_cache_hits_total": 30,
        "prefix_cache_queries_total": 120,
        "speculation": {"draft_tokens_total": 10, "accepted_tokens_total": 6},
    }
    known = {"name": "tiny", "processor": "100% CPU", "memory_bytes": 130_000_000, "stats": stats}
    reply: dict[str, Any] = {"server": {}, "models": [{"name": "other"}, known]}
    monkeypatch.setattr(session.client, "stats", lambda: reply)
    session.add_turn(Turn("three", "3"), answer())
    assert [line.split(maxsplit=1) for line in obey(session, "/stats").splitlines()] == [
        ["model", "tiny · 100% CPU"],
        ["context", "49 of 2,048 tokens"],
        ["last", "answer  41.2 tok/s · first token 56 ms · 49 of 2,048"],
        ["cache", "reuse  25 % of the prompt tokens since the model was loaded"],
        ["drafts", "10 tokens, 60 % accepted"],
        ["memory", "130 MB"],
        ["threads", "2 of at most 2"],
        ["requests", "1 running, 0 waiting"],
    ]
    ram = {"tier": "ram", "blocks": 4, "num_bytes": 512_000_000, "limit_bytes": 1_000_000_000}
    disk = {"tier": "disk", "blocks": 9, "num_bytes": 1_200_000_000, "limit_bytes": 4_000_000_000}
    stats["kv_tiers"] = [
        ram | {"hit_tokens_total": 0, "saved_s_total": 0.0},
        disk | {"hit_tokens_total": 12_288, "saved_s_total": 125.0, "error": "No space left"},
    ]
    lines = obey(session, "/stats").splitlines()
    assert lines[4:6] == [
        "KV RAM       512 MB of 1.0 GB · 0 tokens reused",
        "KV disk      1.2 GB of 4.0 GB · 12,288 tokens reused · 2 min 05 s saved · "
        "not written any more: No space left",
    ]
    peer = {"tier": "peer", "blocks": 0, "num_bytes": 0, "limit_bytes": 0, "error": "timed out"}
    stats["kv_tiers"] = [peer | {"hit_tokens_total": 8, "saved_s_total": 0.0}]
    assert "KV peer      8 tokens reused · no blocks: timed out" in obey(session, "/stats")
    stats["threads"] = 1
    assert "threads      1 of at most 2, other programs use the rest" in obey(session, "/stats")
    replicas = [known | {"name": f"tiny@{each}", "replica": each} for each in ("a", "b")]
    reply["models"] = [*replicas, known | {"name": "other@a", "replica": "a"}]
    lines = obey(session, "/stats").splitlines()
    assert [line for line in lines if "@" in line] == [
        "model        tiny@a · 100% CPU",
        "model        tiny@b · 100% CPU",
    ]
    assert lines.count("memory       130 MB") == 2
    assert sum(line.startswith("context ") for line in lines) == 1
    other = known | {"name": "HF/tiny:Q4", "names": ["tiny", "tiny:q4"], "ctx": 512}
    reply["models"] = [other]  # as a server at a URL names a model from its cache
    assert "model        HF/tiny:Q4 · 100% CPU" in obey(session, "/stats")
    monkeypatch.setattr(session.client, "stats", lambda: reply | {"models": []})
    assert obey(session, "/stats") == "tiny is not loaded: the next prompt loads it"
    with pytest.raises(InvalidRequest, match="/stats all: give raw, or nothing"):
        obey(session, "/stats all")


def test_stats_of_a_model_whose_context_the_client_does_not_know(
    session: ChatSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply = {"server": {}, "models": [{"name": "tiny", "ctx": 512}], "replicas": {"a": {"x": 1}}}
    monkeypatch.setattr(session.client, "stats", lambda: dict(reply))
    monkeypatch.setattr(type(session), "ctx", None)
    assert "of 512 tokens" in obey(session, "/stats")
    assert "replicas" not in obey(session, "/stats raw")


def test_raw_stats_are_flat(session: ChatSession) -> None:
    lines = [line.split() for line in obey(session, "/stats raw").splitlines()]
    assert lines == [
        ["server.status", "ok"],
        ["models[0].name", "tiny"],
        ["models[0].memory_bytes", "130000000"],
        ["models[0].rate", "41.2"],
        ["uptime_s", "3"],
    ]


def test_help_names_every_command(session: ChatSession) -> None:
    text = obey(session, "/help")
    assert all(name in text for name in commands.SLASH_COMMANDS)
    assert obey(session, "/?") == text
    first, second = text.splitlines()[:2]
    assert first == "/set system TEXT          changes a setting; without a value, shows it"
    assert second == "/set parameter NAME VALUE"
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("line", ["/bye", "/exit", "/quit"])
def test_bye(session: ChatSession, line: str) -> None:
    assert commands.run_command(session, line, lambda _: None) == commands.LeaveChat()


def test_a_larger_context_loads_the_model_again(session: ChatSession) -> None:
    info = session.model
    session.model_info = replace(info, ctx=512, ctx_train=2048)
    assert "the next prompt loads the model again" in obey(session, "/set ctx 1024")
    assert _loaded_ctx(session) == 1024
    # a smaller one only limits requests
    assert obey(session, "/set ctx 100") == "context 100 tokens"
    assert _loaded_ctx(session) is None
    obey(session, "/set ctx default")
    assert _loaded_ctx(session) is None


def test_a_session_kept_its_larger_context(session: ChatSession) -> None:
    session.model_info = None
    session.set_options(ctx=DEFAULT_CTX + 1)
    assert _loaded_ctx(session) == DEFAULT_CTX + 1
    session.set_options(ctx=512)
    assert _loaded_ctx(session) is None


def _loaded_ctx(session: ChatSession) -> int | None:
    """The context with which the next prompt loads the model."""
    before = session.model_info
    session.ensure_loaded(lambda _: None)
    session.model_info = before
    client = session.client
    assert isinstance(client, ScriptedClient)
    _, options = client.record.loaded[-1]
    ctx: int | None = options.ctx
    return ctx


class Vanishing(ChatSession):
    """A session whose model and last completion another thread resets right after each read."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name in ("model_info", "last_completion"):
            setattr(self, name, None)
        return value


@pytest.mark.parametrize("is_remote", [False, True])
def test_values_reset_by_another_thread_are_read_once(tmp_path: Path, is_remote: bool) -> None:
    client = ScriptedClient()
    client.url = "http://127.0.0.1:9" if is_remote else ""
    session = Vanishing(client, tmp_path, ModelOptions())
    info = client.load(None, LoadOptions(), lambda _: None, None)
    readers: dict[str, Callable[[], object]] = {
        "model": lambda: session.model.name,
        "name": lambda: session.name,
        "requested_name": lambda: session.requested_name,
        "ctx": lambda: session.ctx,
        "used": session.estimate_used_tokens,
    }
    for read in readers.values():
        session.model_info, session.last_completion = info, answer()
        read()
