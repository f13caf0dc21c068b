"""Which prompts a replica still has, as it reports them to the gateways."""

from __future__ import annotations

from collections import OrderedDict

from benchmarks.simulation.prefix_cache import PrefixCache
from benchmarks.simulation.request import Request


class HeldPrompts:
    """See localgen.backends.engine.held_prompts, whose reports these are without their limits."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        # by their last chunk, in order of last use: the prompt, and how many chunks are held
        self._prompts: OrderedDict[bytes, tuple[Request, int]] = OrderedDict()
        self._live = set[int]()  # by the keys of their answers

    def add(self, request: Request) -> None:
        """Note a prompt that is submitted. It counts as held until it has ended at least."""
        self._live.add(request.answer.key)
        for chunk in request.chunks:
            self._prompts.pop(chunk, None)
        if request.chunks:
            self._prompts[request.chunks[-1]] = (request, len(request.chunks))

    def end(self, request: Request) -> None:
        self._live.discard(request.answer.key)

    def take_report(self) -> list[bytes]:
        """The chunks that are held, newest first, each after those before it in its prompt."""
        found: dict[bytes, None] = {}
        for key, (request, count) in reversed(list(self._prompts.items())):
            if request.answer.key not in self._live:
                share = self._cache.cached_tokens(request.prompt) / request.prompt_tokens
                count = min(count, round(len(request.chunks) * share))
                self._prompts[key] = (request, count)
            found.update(dict.fromkeys(request.chunks[:count]))
            if not count:
                del self._prompts[key]
        return list(found)
