"""Packages import only those below them, the core needs few libraries, `localgen` starts light."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# bottom to top: a package imports those above its own line only; the longest prefix counts
ORDER = (
    "localgen",
    "localgen.backends",
    "localgen.backends.formats.architecture",
    "localgen.backends.memory",
    "localgen.backends.formats.hf",
    "localgen.backends.formats.gguf",
    "localgen.backends.formats",
    "localgen.backends.text",
    "localgen.backends.kv_store",
    "localgen.backends.runner",
    "localgen.backends.engine.step_costs",
    "localgen.backends.engine.speculation",
    "localgen.backends.engine",
    "localgen.backends.llamacpp",
    "localgen.backends.cuda.kernels",
    "localgen.backends.cuda.kernels.gemm",
    "localgen.backends.cuda.kernels.attention",
    "localgen.backends.cuda.kernels.moe",
    "localgen.backends.cuda.kernels.sampling",
    "localgen.backends.cuda.kv",
    "localgen.backends.cuda.device",
    "localgen.backends.cuda.model",
    "localgen.backends.cuda.steps",
    "localgen.backends.cuda.parallel",
    "localgen.backends.cuda",
    "localgen.locked_file",
    "localgen.config",
    "localgen.toml_store",
    "localgen.machine",
    "localgen.placement",
    "localgen.hub",
    "localgen.planning",
    "localgen.server.models",
    "localgen.server.stats",
    "localgen.server.requests",
    "localgen.server.openai",
    "localgen.server.responses_api",
    "localgen.server.llama_server",
    "localgen.server.anthropic",
    "localgen.server.ollama",
    "localgen.server.http",
    "localgen.server",
    "localgen.cluster.config",
    "localgen.cluster.running",
    "localgen.client",
    "localgen.cluster",
    "localgen.batch",
    "localgen.bench",
    "localgen.doctor",
    "localgen.quant.request",
    "localgen.quant.files",
    "localgen.quant.calibrate",
    "localgen.quant.methods",
    "localgen.quant.gguf",
    "localgen.quant.mixed",
    "localgen.quant",
    "localgen.mcp_tools",
    "localgen.chat",
    "localgen.audit",
    "localgen.repl",
    "localgen.tui.widgets",
    "localgen.tui.gauges",
    "localgen.tui",
    "localgen.tui.top",
    "localgen.tui.quantize",
    "localgen.tui.chat",
    "localgen.cli",
    "localgen.__main__",
)
# the first does not import the second, although ORDER would allow it
INDEPENDENT = {
    ("localgen.backends.cuda", "localgen.backends.llamacpp"),
    ("localgen.tui", "localgen.repl"),
    ("localgen.tui", "localgen.server"),
}
CORE_PACKAGES = (
    "localgen.backends",
    "localgen.backends.memory",
    "localgen.backends.text",
    "localgen.backends.kv_store",
    "localgen.backends.runner",
    "localgen.backends.engine.speculation",
    "localgen.backends.engine",
)
# these exchange messages with the server, in msgpack
PROCESS_BORDER = {"localgen.backends.engine.wire", "localgen.backends.engine.process"}
CORE_LIBRARIES = {"numpy", "jinja2"}
# loaded by the first request that asks for a grammar
LIBRARIES_OF = {
    "localgen.backends.text.grammar": {"llguidance"},
    "localgen.backends.text.grammar_check": {"llguidance"},
    "localgen.backends.memory.system": {"psutil"},
    "localgen.backends.messages": {"msgspec"},
    "localgen.backends.typed_data": {"msgspec"},
    "localgen.backends.sandbox": {"psutil"},
}
# the CUDA engine without the server does not need these
NOT_ON_A_GPU = "msgspec llama_cpp fastapi uvicorn textual httpx pydantic typer prompt_toolkit gguf"
HEAVY = ("torch", "textual", "llama_cpp", "fastapi", "httpx", "prompt_toolkit")


def modules() -> dict[str, Path]:
    """Path of every module by its import name; those of linked folders once, as localgen.*."""
    found = {}
    for top in ("localgen", "localgen/backends", "localgen/quant", "localgen/tui"):
        for path in (ROOT / top).resolve().rglob("*.py"):
            inside = path.relative_to((ROOT / top).resolve()).with_suffix("")
            found[".".join([*top.split("/"), *inside.parts]).removesuffix(".__init__")] = path
    return found


MODULES = modules()


@functools.cache
def imports(module: str) -> tuple[str, ...]:
    """Full names of all modules that a module imports, inside functions too."""
    return tuple(_imports(module))


def _imports(module: str) -> Iterator[str]:
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = ".".join(parents[: len(parents) + 1 - node.level]) if node.level else ""
            source = ".".join(part for part in (base, node.module) if part)
            for alias in node.names:
                whole = f"{source}.{alias.name}"
                yield whole if whole in MODULES else source


def place(module: str) -> int:
    """Index in ORDER of the longest prefix of a module's name."""
    parts = module.split(".")
    prefixes = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next(ORDER.index(prefix) for prefix in prefixes if prefix in ORDER)


def may_import(importer: str, imported: str) -> bool:
    for here, there in INDEPENDENT:
        if f"{importer}.".startswith(f"{here}.") and f"{imported}.".startswith(f"{there}."):
            return False
    return place(imported) <= place(importer)


def cycles() -> list[list[str]]:
    """Groups of modules that import each other, directly or not (Tarjan 1972)."""
    edges = {
        module: {name for name in imports(module) if name in MODULES and name != module}
        for module in MODULES
    }
    found: list[list[str]] = []
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for name in edges[module]:
            if name not in index:
                visit(name)
            if name in stack:
                low[module] = min(low[module], low[name])
        if low[module] == index[module]:
            group = stack[stack.index(module) :]
            del stack[-len(group) :]
            if len(group) > 1:
                found.append(group)

    for module in MODULES:
        if module not in index:
            visit(module)
    return found


def test_every_package_has_its_place() -> None:
    packages = {m for m in MODULES if MODULES[m].name == "__init__.py"}
    assert packages - set(ORDER) == set()
    modules_of_their_own = {
        "localgen.backends.engine.step_costs",
        "localgen.locked_file",
        "localgen.config",
        "localgen.toml_store",
        "localgen.cluster.config",
        "localgen.cluster.running",
        "localgen.__main__",
    }
    assert set(ORDER) - packages == modules_of_their_own
    assert len(set(MODULES.values())) == len(MODULES)


def test_no_import_cycles() -> None:
    assert cycles() == []


@pytest.mark.parametrize(
    ("importer", "imported", "allowed"),
    [
        ("localgen.cli.main", "localgen.client.client", True),
        ("localgen.server.app", "localgen.cli.main", False),
        ("localgen.backends.types", "localgen.quant.gguf.convert", False),
        ("localgen.backends.engine.engine", "localgen.backends.llamacpp.runner", False),
        ("localgen.backends.llamacpp.runner", "localgen.backends.cuda.runner", False),
        ("localgen.repl.repl", "localgen.tui.app", False),
        ("localgen.tui.app", "localgen.server.app", False),
        ("localgen.tui.app", "localgen.client.client", True),
        ("localgen.tui.app", "localgen.backends.terminal_text", True),
        ("localgen.backends.engine.engine", "localgen.backends.text.template", True),
    ],
)
def test_may_import(importer: str, imported: str, allowed: bool) -> None:
    assert may_import(importer, imported) is allowed


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_go_down_only(module: str) -> None:
    ours = [name for name in imports(module) if name.split(".")[0] == "localgen"]
    assert [name for name in ours if not may_import(module, name)] == []


@pytest.mark.parametrize("module", sorted(MODULES))
def test_import_names_are_those_of_the_package(module: str) -> None:
    top_level = {"backends", "quant", "tui", "tests", "benchmarks"}
    assert [name for name in imports(module) if name.split(".")[0] in top_level] == []


@pytest.mark.parametrize("module", sorted(m for m in MODULES if ORDER[place(m)] in CORE_PACKAGES))
def test_core_packages_need_only_numpy_and_jinja(module: str) -> None:
    libraries = {name.split(".")[0] for name in imports(module)} - {"localgen"}
    allowed = CORE_LIBRARIES | LIBRARIES_OF.get(module, set())
    assert libraries - sys.stdlib_module_names <= allowed


@pytest.mark.parametrize(
    "program",
    [
        "import localgen.cli.main",
        "import sys; sys.argv = ['localgen', '--help']\n"
        "from localgen.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code",
    ],
    ids=["import", "help"],
)
def test_the_command_line_starts_light(program: str) -> None:
    report = "\nimport sys; print('MODULES', *sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program + report],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.rpartition("MODULES")[2].split())
    assert "localgen.cli.main" in loaded
    assert [name for name in HEAVY if name in loaded] == []


def test_the_client_is_imported_without_the_command_line_of_httpx() -> None:
    program = "import sys, localgen.client.client; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert "httpx" in loaded
    assert {"click", "pygments", "rich"} & loaded == set()


def test_the_engine_of_llama_cpp_needs_no_torch() -> None:
    """Users of GGUF files do not install it."""
    program = (
        "import sys, localgen.backends.engine.process, localgen.backends.llamacpp.loader\n"
        "print({'torch', 'triton', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "set()\n", done.stderr


def test_the_server_starts_without_what_it_may_not_need() -> None:
    program = (
        "import sys, localgen.server.app\n"
        "from fastapi.openapi.models import OpenAPI\n"
        "print('built' if OpenAPI.__pydantic_complete__ else 'deferred', *sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    openapi, *loaded = done.stdout.split()
    assert openapi == "deferred"
    assert "localgen.server.ollama.routes" in loaded
    assert {"numpy", "torch", "llama_cpp", "httpx", "huggingface_hub"} & set(loaded) == set()


def test_the_tui_computes_nothing() -> None:
    program = (
        "import sys, localgen.tui.chat.app\n"
        "quant = [name for name in sys.modules if name.startswith('localgen.quant')]\n"
        "assert not quant, 'the start waits for what only F10 needs'\n"
        "import localgen.tui.quantize.screen\n"
        "from localgen.quant.request.form import QuantizeForm\n"
        "QuantizeForm().to_request()\n"
        "QuantizeForm(method='GGUF', gguf_calibration='scales').to_request()\n"
        "print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert "localgen.tui.quantize.screen" in loaded
    assert {"torch", "tokenizers", "llama_cpp", "gguf", "numpy"} & loaded == set()


def test_the_cuda_engine_needs_nothing_of_the_server() -> None:
    folders = ("formats", "text", "runner", "engine", "cuda")
    parts = tuple(f"localgen.backends.{folder}" for folder in folders)
    outside = PROCESS_BORDER | {"localgen.backends.cuda.__main__"}
    wanted = [name for name in MODULES if name.startswith(parts) and name not in outside]
    assert "localgen.backends.cuda.loader" in wanted
    program = (
        "import importlib, sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] in {NOT_ON_A_GPU.split()!r}:\n"
        "            raise ImportError(f'{name} is not here')\n"
        "sys.meta_path.insert(0, Refuse())\n"
        f"for name in {sorted(wanted)!r}:\n"
        "    importlib.import_module(name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
