"""`localgen warm`."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from localgen.backends.engine_stats import SAVE_TIMEOUT_S, KVTierStats
from localgen.backends.errors import InvalidRequest
from localgen.backends.model_info import ModelInfo
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.types import Message, Timings
from localgen.backends.units import format_count
from localgen.chat.parameters import ModelOptions, read_text_file
from localgen.cli.arguments import ModelArgument, read_stdin
from localgen.cli.options import takes_load_options
from localgen.cli.pull import run_or_offer_pull

if TYPE_CHECKING:
    from localgen.client import LocalClient
    from localgen.repl.load_progress import LoadProgressLine

# one token, which is thrown away
_ANSWER = SamplingParams(max_tokens=1, temperature=0.0)
# used again, a prefix is kept however short it is
_TIMES = 2
# of a prompt that was read before, so few at its end may be computed again
_END_TOKENS = 64
# as often as an engine reports
_POLL_S = 0.25
_UNTIL_UNLOADED = "they stay until the model is unloaded: "


@takes_load_options
def command(
    options: ModelOptions,
    model: ModelArgument = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            *("-f", "--prompt-file"),
            help="System prompt to read ahead of time; - for standard input.",
            dir_okay=False,
        ),
    ] = None,
) -> None:
    """Read a long system prompt ahead of time.

    Chats that begin with it (chat --system @FILE) answer without computing it again, also after a
    restart.
    """
    if prompt_file is None:
        raise InvalidRequest("no prompt: give one with --prompt-file FILE", param="prompt_file")
    if str(prompt_file) == "-":
        system = read_stdin("the prompt")
    else:
        system = read_text_file(prompt_file, "--prompt-file", "prompt_file")
    system = system.removesuffix("\n")
    if not system.strip():
        raise InvalidRequest(f"--prompt-file {prompt_file}: it is empty", param="prompt_file")
    from localgen.cli.one_shot import stderr_console
    from localgen.client import LocalClient
    from localgen.hub.packaged import default_model
    from localgen.repl.load_progress import LoadProgressLine

    loading = LoadProgressLine(stderr_console(), model or default_model())
    with closing(LocalClient(notify=loading.notify)) as client:
        run_or_offer_pull(model, lambda: _warm(client, loading, model, system, options))


def _warm(
    client: LocalClient,
    loading: LoadProgressLine,
    model: str | None,
    system: str,
    options: ModelOptions,
) -> None:
    with loading:
        client.connect()
        with loading.notices_to(loading.print_notice):
            info = client.load(model, options.load, loading.update)
    if not info.can_rewind or info.options.prefix_cache is False:
        raise InvalidRequest(
            f"{info.name} keeps no prefixes: not with its architecture, or --no-prefix-cache"
        )
    disk = _disk_tier(client, info)
    unwritten = disk.unwritten_tokens_total if disk is not None else 0
    messages = [Message(role="system", content=system), Message(role="user", content=".")]
    with loading.reading(lambda: client.prompt_progress):
        timings, *_ = [_ask(client, model, messages, options.ctx) for _ in range(_TIMES)]
    print(f"{info.name} {_what_was_read(timings)}", flush=True)
    print(_where_they_are(client, info, unwritten, timings.cache_n + timings.prompt_n))


def _what_was_read(timings: Timings) -> str:
    """timings.prompt_n tokens were computed: with the few that end every prompt."""
    size, took = timings.cache_n + timings.prompt_n, f"{timings.prompt_ms / 1e3:.1f} s"
    if timings.prompt_n <= _END_TOKENS < timings.cache_n:
        return f"had read {format_count(size, 'token')} before"
    if not timings.cache_n:
        return f"has read {format_count(size, 'token')} in {took}"
    new = format_count(timings.prompt_n, "token")
    return f"has read {new} in {took}, and had read {timings.cache_n:,} before"


def _where_they_are(client: LocalClient, info: ModelInfo, unwritten: int, num_tokens: int) -> str:
    """Wait until the disk is written; say whether the prompt's tokens are there, and why not.

    unwritten: its unwritten_tokens_total before the prompt was read.
    """
    if not info.options.kv_disk:
        notes = [note for note in info.notes if note.startswith("prefixes are")]
        return _UNTIL_UNLOADED + (notes[0] if notes else "it keeps no prefixes on disk")
    left, until_s = -1, 0.0
    while True:
        time.sleep(_POLL_S)
        tier = _disk_tier(client, info)
        if tier is None:
            return "it was unloaded before they were on disk"
        if tier.error:
            return f"{_UNTIL_UNLOADED}the disk cannot be written: {tier.error}"
        if not tier.unsaved_tokens:
            break
        if tier.unsaved_tokens != left:
            left, until_s = tier.unsaved_tokens, time.monotonic() + SAVE_TIMEOUT_S
        elif time.monotonic() > until_s:
            return f"{format_count(left, 'token')} of prefixes are written when it is idle"
    if count := tier.unwritten_tokens_total - unwritten:
        count = min(count, num_tokens)  # other requests' count too, and attempts that are repeated
        return (
            f"up to {format_count(count, 'token')} of them stay until the model is unloaded: "
            "--kv-disk has no room for them, too much waited for it, or they are read slower than "
            "computed"
        )
    return "they are on disk"


def _disk_tier(client: LocalClient, info: ModelInfo) -> KVTierStats | None:
    """The disk of a loaded model, or None."""
    from localgen.client.snapshot import parse_localgen_stats

    models = parse_localgen_stats(client.stats()).models
    tiers = (tier for each in models if each.path == info.path for tier in each.kv_tiers)
    return next((tier for tier in tiers if tier.tier == "disk"), None)


def _ask(
    client: LocalClient, model: str | None, messages: list[Message], ctx: int | None
) -> Timings:
    from localgen.client import Completion

    *_, last = client.chat(model, messages, _ANSWER, ctx=ctx)
    assert isinstance(last, Completion)
    return last.timings
