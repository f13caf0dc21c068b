"""The sandbox ends what takes too long, too much memory, or crashes, and works afterwards."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from sandboxed import Probe, probe_without_memory_limit

from localgen.backends import sandbox as sandbox_module
from localgen.backends.errors import InvalidRequest, LocalgenError
from localgen.backends.messages import encode_frame
from localgen.backends.sandbox import (
    CallCancelled,
    Cancellation,
    LimitExceeded,
    Sandbox,
    Sandboxed,
)
from localgen.backends.sandbox_worker import MAX_REPLY_BYTES, CallLimits
from localgen.backends.text.template import ChatTemplate, SandboxedTemplate
from localgen.backends.types import Message
from localgen.machine.python_process import python_environment

# macOS limits no memory of a process before it has it, and has no /proc
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
ENOUGH_S = 60.0
LONG = CallLimits(ENOUGH_S)
SHORT = CallLimits(0.3)
HELLO = [Message("user", "hi")]
CHATML = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
HOSTILE = [
    "{% set n=messages|length %}{{ (9*n)**((9*n)**(9*n)) }}",
    "{% set n=messages|length %}{% if (3*n)**(40000000*n) > 5 %}{% endif %}",
    "{{ '%999999999s'|format('x') }}",
    "{{ 'a'|center(999999999) }}",
    "{{ 'a'*3000000000 }}",
    "{{ ('a'*messages|length)*3000000000 }}",
    "{{ messages * 1000000000 }}",
    "{% set ns=namespace(s='a'*16) %}"
    "{% for i in range(40) %}{% set ns.s=ns.s~ns.s %}{% endfor %}{{ ns.s }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}aaaaaaaaaa{% endfor %}{% endfor %}",
    "{{ range(99999)|join('a'*999999) }}",
    "{{ (['a'*9999]*99999)|join('b'*9999) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% macro f(x) %}{{ f(x~x) }}{% endmacro %}{{ f('aaaaaaaa') }}",
    "{{" + "(" * 5000 + "1" + ")" * 5000 + "}}",
    "{{" + "-" * 100_000 + "1}}",
    "{{ 'x'|indent(999999999) }}",
    "{{ messages|tojson(indent=999999999) }}",
    "{{ '{:>999999999}'.format('x') }}",
    "{{ 1000000000|filesizeformat * 1000000000 }}",
    "{{ lipsum(n=99999, max=99999) }}",
    "{{ range(9)|batch(999999999, 'x')|list }}",
    "{{ 'a'|wordwrap(1)|replace('', 'a'*9999999)|replace('', 'b'*9999999) }}",
]


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return Sandbox(ChatTemplate)


@pytest.fixture(scope="module")
def probe(sandbox: Sandbox) -> Sandboxed:
    return sandbox.create(LONG, Probe)


def until(condition: Any) -> None:
    deadline_s = time.monotonic() + ENOUGH_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# -- templates --------------------------------------------------------------------------------


@on_linux
@pytest.mark.parametrize("source", HOSTILE, ids=[source[:40] for source in HOSTILE])
def test_hostile_templates_end_with_an_error(sandbox: Sandbox, source: str) -> None:
    before = psutil.Process().memory_info().rss
    with pytest.raises(InvalidRequest, match="the chat template ") as caught:
        SandboxedTemplate(sandbox, source).render(HELLO)
    assert "\n" not in caught.value.message
    assert SandboxedTemplate(sandbox, CHATML).render(HELLO) == "user: hi\n"
    assert psutil.Process().memory_info().rss - before < 100 << 20


@pytest.mark.parametrize("when", ["", "{% if messages|length == 1 %}"])
def test_a_template_that_no_request_could_use_is_refused_at_once(
    sandbox: Sandbox, when: str
) -> None:
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(InvalidRequest, match="did not finish within 2 s: use another") as caught:
        SandboxedTemplate(sandbox, f"{when}{endless}{'{% endif %}' if when else ''}")
    assert "--chat-template FILE" in caught.value.message


def test_a_template_that_is_slow_for_some_messages_says_how_to_replace_it(sandbox: Sandbox) -> None:
    slow = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    source = CHATML + "{% if messages|length > 1 %}" + slow + "{% endif %}"
    template = SandboxedTemplate(sandbox, source)
    assert template.render(HELLO) == "user: hi\n"
    with pytest.raises(InvalidRequest, match=r"did not finish within 2 s: `localgen stop` the m"):
        template.render(HELLO * 2)


def test_a_template_that_rejects_a_single_message_is_used(sandbox: Sandbox) -> None:
    source = "{% if messages|length < 2 %}{{ raise_exception('no') }}{% endif %}ok"
    assert SandboxedTemplate(sandbox, source).render(HELLO * 2) == "ok"


def test_both_templates_render_alike(sandbox: Sandbox) -> None:
    source = "{{ bos_token }}" + CHATML + "{{ x }}{{ messages[0].tools }}"
    ours, theirs = ChatTemplate(source, bos="<s>"), SandboxedTemplate(sandbox, source, bos="<s>")
    turns = [Message("system", "é\ud800"), *HELLO]
    assert ours.render(turns, {"x": [1]}, {"tools": "t"}) == theirs.render(
        turns, {"x": [1]}, {"tools": "t"}
    )
    for name in ("x", "bos_token", "y"):
        assert ours.uses_variable(name) == theirs.uses_variable(name)


@pytest.mark.parametrize("source", ["{% if %}", "{{ raise_exception('no') }}", "{{ 1 // 0 }}"])
def test_errors_are_those_of_the_template(sandbox: Sandbox, source: str) -> None:
    said = []
    for make in (ChatTemplate, lambda text: SandboxedTemplate(sandbox, text)):
        with pytest.raises(InvalidRequest) as caught:
            make(source).render(HELLO)
        said.append((caught.value.message, caught.value.param))
    assert said[0] == said[1]


# -- limits -----------------------------------------------------------------------------------


@on_linux
@pytest.mark.parametrize(
    ("method", "argument", "limits", "message"),
    [
        ("power", 10**9, SHORT, r"did not finish within 0\.3 s"),
        ("allocate", 1 << 30, LONG, "needs more than 512 MiB of memory"),
        ("allocate", 1 << 29, CallLimits(ENOUGH_S, 100 << 20), "more than 100 MiB"),
        ("write", MAX_REPLY_BYTES, LONG, "memory"),
    ],
)
def test_limits(
    probe: Sandboxed, method: str, argument: int, limits: CallLimits, message: str
) -> None:
    with pytest.raises(LimitExceeded, match=message):
        probe.call(limits, method, argument)
    assert probe.call(LONG, "echo", "a") == "a"


@pytest.fixture
def unlimited_probe(monkeypatch: pytest.MonkeyPatch) -> Sandboxed:
    """An object in a sandbox whose memory the system does not limit, as on macOS."""
    monkeypatch.setattr(sandbox_module, "_SYSTEM_LIMITS_MEMORY", False)
    return Sandbox().create(LONG, probe_without_memory_limit)


def test_a_process_that_the_system_does_not_limit_is_killed(unlimited_probe: Sandboxed) -> None:
    limits = CallLimits(ENOUGH_S, 100 << 20)
    for _ in range(3):  # what is allowed does not add up
        assert unlimited_probe.call(limits, "hold", 60 << 20, 0.2) == 60 << 20
    before = unlimited_probe.call(limits, "pid")
    with pytest.raises(LimitExceeded, match="needs more than 100 MiB of memory"):
        unlimited_probe.call(limits, "hold", 300 << 20, 20.0)
    assert not is_alive(before)
    assert unlimited_probe.call(LONG, "echo", "a") == "a"


def test_deadlines_of_a_process_that_the_system_does_not_limit(unlimited_probe: Sandboxed) -> None:
    with pytest.raises(LimitExceeded, match=r"did not finish within 0\.3 s"):
        unlimited_probe.call(SHORT, "power", 10**9)
    assert unlimited_probe.call(LONG, "echo", "a" * (1 << 22)) == "a" * (1 << 22)


def test_a_call_within_its_limits_leaves_nothing_behind(probe: Sandboxed) -> None:
    for _ in range(20):
        assert probe.call(LONG, "allocate", 400 << 20) == 400 << 20


def test_a_crash_is_reported(probe: Sandboxed) -> None:
    with pytest.raises(LimitExceeded, match="crashed"):
        probe.call(LONG, "abort")
    assert probe.call(LONG, "echo", "a") == "a"


@on_linux
def test_no_core_is_dumped(probe: Sandboxed) -> None:
    pid = probe.call(LONG, "pid")
    assert resource.prlimit(pid, resource.RLIMIT_CORE) == (0, 0)


def test_a_stopped_process_is_replaced(probe: Sandboxed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_module, "_GRACE_S", 0.2)
    os.kill(probe.call(LONG, "pid"), signal.SIGSTOP)
    with pytest.raises(LimitExceeded, match="did not finish"):
        probe.call(SHORT, "echo", "a")
    assert probe.call(LONG, "echo", "a") == "a"


def test_a_reply_byte_by_byte_has_one_deadline(
    probe: Sandboxed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox_module, "_GRACE_S", 0.2)
    reply = encode_frame(b" " * 200)  # takes 20 s; every byte comes within the limit
    with pytest.raises(LimitExceeded, match="did not finish"):
        probe.call(SHORT, "send_raw", [bytes([byte]) for byte in reply], 0.1)
    assert probe.call(LONG, "echo", "a") == "a"


def test_errors_keep_their_kind(probe: Sandboxed) -> None:
    with pytest.raises(InvalidRequest, match="not this") as refused:
        probe.call(LONG, "refuse")
    assert refused.value.param == "that"
    with pytest.raises(LocalgenError, match="KeyError"):
        probe.call(LONG, "fail")


# -- deaths -----------------------------------------------------------------------------------


def test_killed_between_two_calls(probe: Sandboxed) -> None:
    pid = probe.call(LONG, "pid")
    os.kill(pid, signal.SIGKILL)
    until(lambda: not is_alive(pid))
    assert probe.call(LONG, "pid") != pid


def test_killed_in_a_call_repeats_it(probe: Sandboxed, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(probe.call, LONG, "mark_and_wait", str(mark))
        until(mark.exists)
        os.kill(int(mark.read_text()), signal.SIGKILL)
        assert reply.result(ENOUGH_S) == "repeated"


def test_killed_again_and_again_is_an_error(probe: Sandboxed, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(probe.call, LONG, "mark_and_wait", str(mark))
        for _ in range(3):
            until(mark.exists)
            pid = int(mark.read_text())
            mark.unlink()
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(LimitExceeded, match="killed 3 times"):
            reply.result(ENOUGH_S)
    assert probe.call(LONG, "echo", "a") == "a"


@on_linux
def test_deaths_leave_no_descriptors_and_no_zombies(probe: Sandboxed) -> None:
    def count() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(psutil.Process().children())

    before = count()
    for _ in range(5):
        with pytest.raises(LimitExceeded):
            probe.call(LONG, "abort")
    assert count() == before


@pytest.mark.parametrize("call", ["'pid'", "'power', 10**9"], ids=["idle", "busy"])
def test_no_process_outlives_its_parent(call: str) -> None:
    program = (
        "import sys, threading, time\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from localgen.backends.sandbox import Sandbox\n"
        "from localgen.backends.sandbox_worker import CallLimits\n"
        "from sandboxed import Probe\n"
        "probe = Sandbox().create(CallLimits(60), Probe)\n"
        "print(probe.call(CallLimits(60), 'pid'), flush=True)\n"
        f"probe.call(CallLimits(2), {call})\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=python_environment()
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert is_alive(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until(lambda: not is_alive(pid))


def test_an_unused_sandbox_ends_its_processes() -> None:
    sandbox = Sandbox()
    pid = sandbox.create(LONG, Probe).call(LONG, "pid")
    del sandbox
    until(lambda: not is_alive(pid))


# -- several threads --------------------------------------------------------------------------


def test_calls_run_in_parallel(probe: Sandboxed, tmp_path: Path) -> None:
    marks = [tmp_path / "a", tmp_path / "b"]
    cancellations = [Cancellation(), Cancellation()]

    def call(mark: Path, cancellation: Cancellation) -> None:
        with cancellation:
            probe.call(LONG, "mark_and_wait", str(mark))

    with ThreadPoolExecutor(2) as pool:
        replies = [pool.submit(call, *each) for each in zip(marks, cancellations, strict=True)]
        until(lambda: all(mark.exists() for mark in marks))
        assert probe.call(LONG, "echo", "a") == "a"
        for reply, cancellation in zip(replies, cancellations, strict=True):
            cancellation.cancel()
            with pytest.raises(CallCancelled):
                reply.result(ENOUGH_S)


def test_a_cancelled_thread_makes_no_more_calls(probe: Sandboxed) -> None:
    cancellation = Cancellation()
    with cancellation:
        assert probe.call(LONG, "echo", "a") == "a"
        cancellation.cancel()
        with pytest.raises(CallCancelled):
            probe.call(LONG, "echo", "a")
    assert probe.call(LONG, "echo", "a") == "a"


def test_cancelling_at_any_moment(probe: Sandboxed) -> None:
    for at in range(30):
        cancellation = Cancellation()
        timer = threading.Timer(at * 1e-4, cancellation.cancel)
        timer.start()
        try:
            with cancellation:
                while True:
                    assert probe.call(LONG, "echo", "a") == "a"
        except CallCancelled:
            pass
        timer.join()
        assert probe.call(LONG, "echo", "b") == "b"
