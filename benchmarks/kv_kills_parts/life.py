"""An engine from its load to its end, in a thread of its own, while another one kills it."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from benchmarks.kv_kills_parts.answers import ask
from benchmarks.streams import StreamFailed
from localgen.backends.errors import LocalgenError
from localgen.backends.model_info import LoadOptions
from localgen.client import LocalClient
from localgen.config import ServerSettings
from localgen.hub.packaged import BUILT_IN_PATH

PHASES = ("loading", "answering", "idle", "unloading")
OVER = "over"
_IDLE_S = 0.4
_HANG_S = 120.0


@dataclass
class Life:
    """An engine from its load to its end. began_s: when each phase did (monotonic seconds)."""

    settings: ServerSettings
    options: LoadOptions
    prompts: Sequence[str]
    delays_s: Sequence[float]
    answer_tokens: int
    began_s: dict[str, float] = field(default_factory=dict)
    phase: str = PHASES[0]
    error: Exception | None = None

    def __post_init__(self) -> None:
        self._client = LocalClient(self.settings)
        self._begun = {phase: threading.Event() for phase in (*PHASES, OVER)}
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def durations_s(self) -> dict[str, float]:
        """Of the phases of a whole life."""
        times = list(self.began_s.values())
        return {
            phase: after - before
            for phase, (before, after) in zip(PHASES, itertools.pairwise(times), strict=True)
        }

    def wait(self, phase: str) -> None:
        """Wait until a phase begins. Raises StreamFailed with the error that came first."""
        if not self._begun[phase].wait(_HANG_S) or self.error is not None:
            raise StreamFailed(f"{self.phase}: {self.error or 'it hangs'}")

    def end(self) -> None:
        """End the requests after a kill. Raises StreamFailed if one hangs."""
        self._client.abort()
        self._thread.join(_HANG_S)
        if self._thread.is_alive():
            raise StreamFailed("a request did not end after a kill")

    def _run(self) -> None:
        try:
            with self._client as client, ThreadPoolExecutor(len(self.prompts)) as pool:
                self._begin("loading")
                client.connect()
                client.load(str(BUILT_IN_PATH), self.options)
                self._begin("answering")
                list(pool.map(self._ask, self.prompts, self.delays_s))
                self._begin("idle")
                time.sleep(_IDLE_S)
                self._begin("unloading")
                client.unload(str(BUILT_IN_PATH))
        except (LocalgenError, StreamFailed) as error:
            self.error = error
        self._begin(OVER)
        for event in self._begun.values():  # nobody waits for what does not come any more
            event.set()

    def _begin(self, phase: str) -> None:
        self.phase, self.began_s[phase] = phase, time.monotonic()
        self._begun[phase].set()

    def _ask(self, prompt: str, delay_s: float) -> None:
        time.sleep(delay_s)
        ask(self._client, prompt, self.answer_tokens)
