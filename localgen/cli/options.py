"""Options shared by the commands that run a model, and their conversion to ModelOptions."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from localgen.backends.errors import InvalidRequest
from localgen.backends.model_info import LoadOptions
from localgen.backends.sampling_params import PARAMETER_HELP, SAMPLERS, SamplingParams
from localgen.backends.types import OnOverflow
from localgen.chat import parameters
from localgen.chat.parameters import ModelOptions
from localgen.cli import completion_values
from localgen.config import parse_keep_alive, parse_size
from localgen.hub.preset import PRESET_PARAMETERS

OnOffAuto = Literal["auto", "on", "off"]
Backend = Literal["auto", "llamacpp", "cuda"]
Stabilize = Annotated[
    bool,
    typer.Option(
        "--stabilize",
        help="Remove from prompts what changes with each request, so that the prefix cache serves "
        "more: attribution headers, dates and clock times of the system message, order of tools.",
        envvar="LOCALGEN_STABILIZE",
    ),
]
_METAVARS = {list[str]: "<str>", list[int]: "<int>"}


@dataclass(frozen=True, slots=True)
class CliOption:
    """A command-line option and the field it sets.

    unset_value: value equivalent to omitting the option; unset_meaning describes it.
    lowest: of the other values, if the server would refuse lower ones.
    """

    field: str
    value_type: Any
    names: str
    help: str
    unset_value: int | None = None
    unset_meaning: str = ""
    lowest: int | None = None

    @property
    def env_var(self) -> str:
        """The environment variable: `LOCALGEN_` and the long name in capitals."""
        return "LOCALGEN_" + self.long_name.removeprefix("--").upper().replace("-", "_")

    @property
    def long_name(self) -> str:
        """The long name with its dashes, for example `--ctx`."""
        return self.names.split()[-1].split("/")[0]

    def to_parameter(self, panel: str, *, has_variable: bool = True) -> inspect.Parameter:
        """The parameter of a command. has_variable: its environment variable sets it, too."""
        option = typer.Option(
            *self.names.split(),
            help=self.help,
            metavar=_METAVARS.get(self.value_type),
            envvar=self.env_var if has_variable else None,
            show_envvar=False,
            autocompletion=completion_values.option_completer(self.field),
            rich_help_panel=panel,
        )
        annotated: Any = Annotated  # Any: the type is known only at run time
        kind = annotated[self.value_type | None, option]
        keyword = inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(self.field, keyword, default=None, annotation=kind)


REQUEST_OPTIONS = (
    CliOption(
        "ctx",
        int,
        "-c --ctx",
        "Context length in tokens, prompt plus answer (default: 0 = 8,192; with the CUDA "
        "backend on a GPU the largest that fits; at most what the model was trained for).",
        0,
        "the default",
        1,
    ),
    CliOption("system", str, "-sys --system", "System prompt; @FILE reads a file."),
    CliOption(
        "priority",
        int,
        "--priority",
        "Request priority; higher runs first, below 0 only in time that others leave (default: 0).",
    ),
    CliOption(
        "keep_alive",
        str,
        "--keep-alive",
        "Unload the model when idle for this time: 30s, 5m, 0; -1: never (default: 5m). The server "
        "itself keeps to LOCALGEN_KEEP_ALIVE.",
    ),
    CliOption(
        "on_overflow",
        OnOverflow,
        "--on-overflow",
        "If the conversation does not fit the context: error, or drop-oldest, which leaves out "
        "the oldest turns and says so (default: error).",
    ),
    CliOption("verbose", bool, "--verbose", "Show load time, TTFT, prefill and decode speed."),
)
SAMPLING_OPTIONS = (
    CliOption(
        "max_tokens",
        int,
        "-n --max-tokens",
        PARAMETER_HELP["max_tokens"] + "; -1: no limit.",
        -1,
        "no limit",
        1,
    ),
    CliOption("min_tokens", int, "--min-tokens", PARAMETER_HELP["min_tokens"] + ".", 0, lowest=0),
    CliOption(
        "thinking_budget",
        int,
        "--think-max",
        PARAMETER_HELP["thinking_budget"] + "; -1: no limit.",
        -1,
        "no limit",
        0,
    ),
    CliOption(
        "seed",
        int,
        "-s --seed",
        PARAMETER_HELP["seed"] + "; -1: a new one each time.",
        -1,
        "a new one each time",
        0,
    ),
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
        "logit_bias",
        list[str],
        "--logit-bias",
        PARAMETER_HELP["logit_bias"] + " (may be repeated).",
    ),
    CliOption(
        "json_schema",
        str,
        "-j --format --json-schema",
        PARAMETER_HELP["json_schema"] + "; @FILE reads a file; json: any JSON object.",
    ),
    CliOption("regex", str, "--regex", PARAMETER_HELP["regex"] + "; @FILE reads a file."),
    CliOption("grammar", str, "--grammar", PARAMETER_HELP["grammar"] + "; @FILE reads a file."),
    CliOption("stop", list[str], "--stop", PARAMETER_HELP["stop"] + " (may be repeated)."),
    CliOption(
        "stop_token_ids",
        list[int],
        "--stop-token",
        PARAMETER_HELP["stop_token_ids"] + " (may be repeated).",
    ),
    CliOption("ignore_eos", bool, "--ignore-eos", PARAMETER_HELP["ignore_eos"] + "."),
)
LOAD_OPTIONS = (
    CliOption(
        "backend",
        Backend,
        "--backend",
        "Inference backend (default: auto, on a GPU if the model fits, else llama.cpp).",
    ),
    CliOption(
        "device",
        str,
        "--device",
        "cuda, cuda:N or cpu (default: the GPU with the most free memory).",
    ),
    CliOption("tp", int, "--tp", "Tensor parallelism: number of GPUs (cuda only; default: 1)."),
    CliOption("dummy", bool, "--dummy", "Use random weights, for benchmarks (cuda only)."),
    CliOption(
        "threads",
        int,
        "-t --threads",
        "CPU threads for decode (default: the physical cores that other programs leave free).",
    ),
    CliOption(
        "threads_batch",
        int,
        "-tb --threads-batch",
        "CPU threads for prefill (default: same as --threads).",
    ),
    CliOption(
        "gpu_layers",
        int,
        "-ngl --gpu-layers",
        "Layers to offload to the GPU; -1: all (default: all if llama.cpp has GPU support).",
    ),
    CliOption("flash_attn", OnOffAuto, "-fa --flash-attn", "Flash attention (default: auto)."),
    CliOption(
        "cache_type_k",
        str,
        "-ctk --cache-type-k",
        "KV cache data type for K: f16, q8_0, … (default: f16; cuda: the model's).",
    ),
    CliOption(
        "cache_type_v",
        str,
        "-ctv --cache-type-v",
        "KV cache data type for V (default: f16; cuda: the model's).",
    ),
    CliOption(
        "kv_tokens",
        int,
        "--kv-tokens",
        "KV cache size in tokens, for all requests together (default: from free memory).",
    ),
    CliOption(
        "kv_unified",
        bool,
        "-kvu --kv-unified/--no-kv-unified",
        "Share one KV cache among all requests, or split it into equal parts (default: shared, "
        "unless both -np and -c are given).",
    ),
    CliOption(
        "parallel",
        int,
        "-np --parallel",
        "Maximum number of requests computed at once (default: 32; cuda: 256).",
    ),
    CliOption(
        "max_batch_tokens",
        int,
        "-b --batch-size",
        "Maximum number of tokens per step (default: 512; cuda: 8192).",
    ),
    CliOption(
        "itl_target_ms",
        float,
        "--itl-target-ms",
        "Target inter-token latency in ms: prefill yields to decode (default: 2000; cuda: 100).",
    ),
    CliOption(
        "max_queue",
        int,
        "--max-queue",
        "Maximum number of waiting requests; more are rejected (default: 512).",
    ),
    CliOption(
        "draft",
        str,
        "-md --draft",
        "Speculative decoding: a draft model, auto (the catalog's draft model), ngram (the n-gram "
        "drafter alone) or none (default: ngram).",
    ),
    CliOption(
        "draft_max",
        int,
        "--draft-max",
        "Maximum number of draft tokens per sequence and step (default: 63).",
    ),
    CliOption(
        "prefix_cache",
        bool,
        "--prefix-cache/--no-prefix-cache",
        "Reuse the KV cache of earlier prompts with the same prefix (default: on).",
    ),
    CliOption(
        "kv_ram",
        str,
        "--kv-ram",
        "RAM for prefixes that no longer fit the KV cache: 512M, 2G; 0: none (default: 1G, at most "
        "1/16 of the memory).",
    ),
    CliOption(
        "kv_disk",
        str,
        "--kv-disk",
        "Disk for prefixes of all models, which survive a restart: 4G; 0: none (default: 4G).",
    ),
    CliOption(
        "kv_listen",
        str,
        "--kv-listen",
        "Let other engines of the model fetch prefixes: HOST:PORT or the path of a Unix socket.",
    ),
    CliOption(
        "kv_peer",
        str,
        "--kv-peer",
        "Fetch prefixes from the engine that listens at this address (--kv-listen).",
    ),
    CliOption(
        "repack",
        bool,
        "--repack/--no-repack",
        "Repack weights into a faster layout for the CPU (default: on).",
    ),
    CliOption(
        "mmap",
        bool,
        "--mmap/--no-mmap",
        "Memory-map the weights instead of reading them (default: on).",
    ),
    CliOption("mlock", bool, "--mlock/--no-mlock", "Lock the weights in RAM (default: off)."),
    CliOption(
        "chat_template",
        Path,
        "--chat-template",
        "Jinja chat template, FILE or @FILE (default: the model's template).",
    ),
)

OPTION_PANELS = {
    "Options": REQUEST_OPTIONS,
    "Sampling": SAMPLING_OPTIONS,
    "Load options (used if the model is not loaded yet)": LOAD_OPTIONS,
}


# those of `localgen serve`: it has defaults of its own for the other load options
_SERVE_OWN = ("draft", "parallel", "max_queue")
SERVE_PANELS = {
    "Load options (of MODEL; without MODEL, of every model)": (
        *(flag for flag in REQUEST_OPTIONS if flag.field == "ctx"),
        *(flag for flag in LOAD_OPTIONS if flag.field not in _SERVE_OWN),
    )
}
LOAD_PANELS = {
    "Load options (used if the model is not loaded yet)": (
        *(flag for flag in REQUEST_OPTIONS if flag.field == "ctx"),
        *LOAD_OPTIONS,
    )
}
BENCH_PANELS = {"Load options": next(iter(LOAD_PANELS.values()))}
CLUSTER_PANELS = {
    "Load options (of MODEL, in each replica)": tuple(
        flag
        for flag in next(iter(LOAD_PANELS.values()))
        if flag.field not in ("kv_listen", "kv_peer")
    )
}
PRESET_PANELS = {
    "Options": tuple(flag for flag in REQUEST_OPTIONS if flag.field in ("ctx", "system")),
    "Sampling": tuple(flag for flag in SAMPLING_OPTIONS if flag.field in PRESET_PARAMETERS),
}
Panels = Mapping[str, tuple[CliOption, ...]]


def takes_model_options(command: Callable[..., None]) -> Callable[..., None]:
    """Decorator: add the shared options to a command, which gets them as one `options` argument."""
    return _with_options(command, OPTION_PANELS)


def takes_load_options(command: Callable[..., None]) -> Callable[..., None]:
    """Decorator: as takes_model_options, with load options only."""
    return _with_options(command, LOAD_PANELS)


def takes_bench_options(command: Callable[..., None]) -> Callable[..., None]:
    """Decorator: as takes_load_options, for a command that always loads the model itself."""
    return _with_options(command, BENCH_PANELS)


def takes_serve_options(command: Callable[..., None]) -> Callable[..., None]:
    """Decorator: as takes_model_options, with load options only."""
    return _with_options(command, SERVE_PANELS)


def takes_cluster_options(command: Callable[..., None]) -> Callable[..., None]:
    """Decorator: as takes_load_options, for the replicas of a cluster."""
    return _with_options(command, CLUSTER_PANELS)


def takes_preset_options(command: Callable[..., None]) -> Callable[..., None]:
    """Decorator: as takes_model_options, for what a preset stores.

    The variables of chat and run are not stored: they are settings of those.
    """
    return _with_options(command, PRESET_PANELS, has_variables=False)


def _with_options(
    command: Callable[..., None], panels: Panels, *, has_variables: bool = True
) -> Callable[..., None]:
    own = inspect.signature(command, eval_str=True).parameters
    shared = [
        flag.to_parameter(panel, has_variable=has_variables)
        for panel, flags in panels.items()
        for flag in flags
    ]

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
    """Convert option values, by field, to ModelOptions.

    Raises InvalidRequest or BadSetting if a value is invalid.
    """
    for flag in (*REQUEST_OPTIONS, *SAMPLING_OPTIONS, *LOAD_OPTIONS):
        _validate_number(flag, values.get(flag.field))
    values = values | _read_at_files(values)
    sampling = _values_of(SAMPLING_OPTIONS, values)
    if "logit_bias" in sampling:
        sampling["logit_bias"] = parameters.parse_logit_bias(sampling["logit_bias"])
    if "json_schema" in sampling:
        sampling["json_schema"] = parameters.parse_format(
            sampling["json_schema"], _flag_of("json_schema")
        )
    loading = _values_of(LOAD_OPTIONS, values)
    if "chat_template" in loading:
        path = Path(str(loading["chat_template"]).removeprefix("@"))
        loading["chat_template"] = _read_option_file(path, "chat_template")
    loading |= {
        field: parse_size(loading[field], _flag_of(field))
        for field in ("kv_ram", "kv_disk")
        if field in loading
    }
    loading |= {  # the engine has another working folder
        field: str(Path(loading[field]).expanduser().absolute())
        for field in ("kv_listen", "kv_peer")
        if "/" in loading.get(field, "")
    }
    asking = _values_of(REQUEST_OPTIONS, values)
    if "keep_alive" in asking:
        parse_keep_alive(asking["keep_alive"], "--keep-alive")
    # a model loaded for this request must have at least the requested context
    loading |= {"ctx": asking["ctx"]} if "ctx" in asking else {}
    return ModelOptions(params=SamplingParams(**sampling), load=LoadOptions(**loading), **asking)


def _read_at_files(values: dict[str, Any]) -> dict[str, str]:
    """The contents of the files of options given as @FILE, without the last newline.

    parse_format() reads that of a JSON schema.
    """
    return {
        field: _read_option_file(Path(text[1:]), field).removesuffix("\n")
        for field in completion_values.FILE_OPTIONS
        if field != "json_schema" and (text := values.get(field) or "").startswith("@")
    }


def _values_of(flags: tuple[CliOption, ...], values: dict[str, Any]) -> dict[str, Any]:
    # options that may be repeated arrive as a list
    return {
        flag.field: tuple(value) if isinstance(value, list) else value
        for flag in flags
        if (value := values.get(flag.field)) is not None and value != flag.unset_value
    }


def _validate_number(flag: CliOption, value: object) -> None:
    is_low = isinstance(value, int) and flag.lowest is not None and value < flag.lowest
    if is_low and value != flag.unset_value:
        other = f", or {flag.unset_value} for {flag.unset_meaning}" if flag.unset_meaning else ""
        message = f"{flag.long_name} must be at least {flag.lowest}{other}"
        raise InvalidRequest(message, param=flag.field)
    # JSON has no NaN or infinity, and no option accepts them
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequest(f"{flag.long_name} {value}: give a finite number", param=flag.field)


def _read_option_file(path: Path, field: str) -> str:
    return parameters.read_text_file(path, _flag_of(field), field)


def _flag_of(field: str) -> str:
    return "--" + field.replace("_", "-")
