"""The options of every command that runs a model, declared once and turned into values once."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from localgen.backends.errors import InvalidRequest
from localgen.backends.model_info import LoadOptions
from localgen.backends.sampling_params import SAMPLERS, SamplingParams
from localgen.chat import parameters
from localgen.chat.parameters import ModelOptions
from localgen.cli import completion_values
from localgen.config import parse_keep_alive

OnOffAuto = Literal["auto", "on", "off"]
Backend = Literal["auto", "llamacpp", "cuda"]
_METAVARS = {list[str]: "<str>", list[int]: "<int>"}


@dataclass(frozen=True, slots=True)
class CliOption:
    """An option and the field it sets. unset_value: a value that means the same as no option."""

    field: str
    value_type: Any
    names: str
    help: str
    unset_value: int | None = None

    @property
    def env_var(self) -> str:
        """`LOCALGEN_` and the long name."""
        return "LOCALGEN_" + self.long_name.removeprefix("--").upper().replace("-", "_")

    @property
    def long_name(self) -> str:
        """The long name, with its dashes."""
        return self.names.split()[-1].split("/")[0]

    def to_parameter(self, panel: str) -> inspect.Parameter:
        option = typer.Option(
            *self.names.split(),
            help=self.help,
            metavar=_METAVARS.get(self.value_type),
            envvar=self.env_var,
            show_envvar=False,
            autocompletion=completion_values.option_completer(self.field),
            rich_help_panel=panel,
        )
        annotated: Any = Annotated  # a type that is only known here
        kind = annotated[self.value_type | None, option]
        keyword = inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(self.field, keyword, default=None, annotation=kind)


REQUEST_OPTIONS = (
    CliOption(
        "ctx", int, "-c --ctx", "Most tokens of prompt and answer together; 0: the model's.", 0
    ),
    CliOption("system", str, "-sys --system", "System prompt."),
    CliOption("priority", int, "--priority", "Higher is served first."),
    CliOption(
        "keep_alive",
        str,
        "--keep-alive",
        "How long the model then stays: 30s, 5m, 0; -1: for ever.",
    ),
    CliOption("verbose", bool, "--verbose", "Show load, prompt and generation speed, and TTFT."),
)
SAMPLING_OPTIONS = (
    CliOption("max_tokens", int, "-n --max-tokens", "Longest answer in tokens; -1: no limit.", -1),
    CliOption("min_tokens", int, "--min-tokens", "Shortest answer in tokens: no end before.", 0),
    CliOption("seed", int, "-s --seed", "Seed of the random stream; -1: a new one each time.", -1),
    *(
        CliOption(
            sampler.name,
            sampler.value_type if sampler.value_type in (int, float) else list[str],
            sampler.flag,
            sampler.help,
        )
        for sampler in SAMPLERS
    ),
    CliOption(
        "logit_bias", list[str], "--logit-bias", "ID=BIAS added to a logit (may be repeated)."
    ),
    CliOption("json_schema", str, "-j --json-schema", "The answer is JSON of this schema; @FILE."),
    CliOption("regex", str, "--regex", "The answer matches this regular expression; @FILE."),
    CliOption("grammar", str, "--grammar", "The answer is of this grammar, GBNF or Lark; @FILE."),
    CliOption("stop", list[str], "--stop", "Text that ends the answer (may be repeated)."),
    CliOption(
        "stop_token_ids", list[int], "--stop-token", "Token id that ends it (may be repeated)."
    ),
    CliOption("ignore_eos", bool, "--ignore-eos", "Go on past the model's end of text."),
)
LOAD_OPTIONS = (
    CliOption("backend", Backend, "--backend", "What runs the model; auto: a GPU where it fits."),
    CliOption("device", str, "--device", "cuda, cuda:N or cpu; the GPU with most room by default."),
    CliOption("tp", int, "--tp", "GPUs among which each layer is divided; 1: one computes all."),
    CliOption("dummy", bool, "--dummy", "Random weights of the model's shapes, to measure speed."),
    CliOption("threads", int, "-t --threads", "CPU threads; as many as physical cores by default."),
    CliOption("threads_batch", int, "-tb --threads-batch", "CPU threads for prompts."),
    CliOption("gpu_layers", int, "-ngl --gpu-layers", "Layers on the GPU; -1: all."),
    CliOption("flash_attn", OnOffAuto, "-fa --flash-attn", "Flash attention."),
    CliOption("cache_type_k", str, "-ctk --cache-type-k", "Type of the cached keys: f16, q8_0, …"),
    CliOption("cache_type_v", str, "-ctv --cache-type-v", "Type of the cached values."),
    CliOption("kv_tokens", int, "--kv-tokens", "Tokens that all requests may cache together."),
    CliOption(
        "kv_unified",
        bool,
        "-kvu --kv-unified/--no-kv-unified",
        "One cache for all requests; or a part for each, the default where -np and -c are given.",
    ),
    CliOption("parallel", int, "-np --parallel", "Most requests computed at once."),
    CliOption("max_batch_tokens", int, "-b --batch-size", "Most tokens computed in one step."),
    CliOption(
        "itl_target_ms", float, "--itl-target-ms", "Prompts yield to keep tokens this close."
    ),
    CliOption("max_queue", int, "--max-queue", "Waiting requests beyond which more are refused."),
    CliOption(
        "draft",
        str,
        "-md --draft",
        "Who proposes tokens ahead: ngram, the text itself; a model beside it; auto, the one that "
        "the catalog has for it; none.",
    ),
    CliOption("draft_max", int, "--draft-max", "Most tokens proposed at once."),
    CliOption(
        "prefix_cache", bool, "--prefix-cache/--no-prefix-cache", "Reuse prompts seen before."
    ),
    CliOption(
        "repack", bool, "--repack/--no-repack", "Copy weights into a faster layout for the CPU."
    ),
    CliOption("mmap", bool, "--mmap/--no-mmap", "Map the weights instead of reading them."),
    CliOption("mlock", bool, "--mlock/--no-mlock", "Keep the weights from being swapped out."),
    CliOption("chat_template", Path, "--chat-template", "File with a Jinja chat template to use."),
)

OPTION_PANELS = {
    "Options": REQUEST_OPTIONS,
    "Sampling": SAMPLING_OPTIONS,
    "Loading (when the model is not loaded yet)": LOAD_OPTIONS,
}


def takes_model_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command all of these options; they reach it as one `options` argument."""
    own = inspect.signature(command, eval_str=True).parameters
    shared = [flag.to_parameter(panel) for panel, flags in OPTION_PANELS.items() for flag in flags]

    def with_options(**given: Any) -> None:
        mine = {name: given.pop(name) for name in own if name != "options"}
        command(**mine, options=build_model_options(given))

    keyword_only = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in own.items()
        if name != "options"
    ]
    setattr(with_options, "__signature__", inspect.Signature([*keyword_only, *shared]))  # noqa: B010
    with_options.__doc__ = command.__doc__
    return with_options


def build_model_options(values: dict[str, Any]) -> ModelOptions:
    """The values of the options. LocalgenError: one does not say what it should."""
    for flag in (*SAMPLING_OPTIONS, *LOAD_OPTIONS):
        _require_finite(flag, values.get(flag.field))
    sampling = _values_of(SAMPLING_OPTIONS, values)
    if "logit_bias" in sampling:
        sampling["logit_bias"] = parameters.parse_logit_bias(sampling["logit_bias"])
    for field in ("json_schema", "regex", "grammar"):
        if str(sampling.get(field, "")).startswith("@"):
            sampling[field] = _read_option_file(Path(sampling[field][1:]), field)
    loading = _values_of(LOAD_OPTIONS, values)
    if "chat_template" in loading:
        loading["chat_template"] = _read_option_file(loading["chat_template"], "chat_template")
    asking = _values_of(REQUEST_OPTIONS, values)
    if "keep_alive" in asking:
        parse_keep_alive(asking["keep_alive"], "--keep-alive")
    # a model that is not loaded yet gets at least the context that is asked of it
    loading |= {"ctx": asking["ctx"]} if "ctx" in asking else {}
    return ModelOptions(params=SamplingParams(**sampling), load=LoadOptions(**loading), **asking)


def _values_of(flags: tuple[CliOption, ...], values: dict[str, Any]) -> dict[str, Any]:
    # an option that was not repeated arrives as None, a repeated one as a list
    return {
        flag.field: tuple(value) if isinstance(value, list) else value
        for flag in flags
        if (value := values.get(flag.field)) is not None and value != flag.unset_value
    }


def _require_finite(flag: CliOption, value: object) -> None:
    # JSON has no such numbers, and no setting means anything with one
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequest(f"{flag.long_name} {value}: give a finite number", param=flag.field)


def _read_option_file(path: Path, field: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        name = field.replace("_", "-")
        raise InvalidRequest(f"--{name} {path}: {reason}", param=field) from error
