"""LoRA adapters in the memory of a llama.cpp model."""

from __future__ import annotations

import ctypes
from collections import Counter, OrderedDict
from dataclasses import replace
from typing import Any

import llama_cpp.llama_cpp as C

from localgen.backends.adapters import MAX_LOADED_ADAPTERS, Adapter, Adapters
from localgen.backends.engine_stats import AdapterStats
from localgen.backends.errors import LoadFailed
from localgen.backends.llamacpp.library import llama_library
from localgen.backends.llamacpp.native import LlamaContext, LlamaModel
from localgen.backends.runner.interface import NoRoom

_libc = ctypes.CDLL(None)
_libc.fdopen.argtypes, _libc.fdopen.restype = [ctypes.c_int, ctypes.c_char_p], ctypes.c_void_p
_libc.fclose.argtypes = [ctypes.c_void_p]


class LoadedAdapters:
    """At most MAX_LOADED_ADAPTERS; those that no running sequence uses are evicted, LRU first.

    Not while a step is in flight.
    """

    def __init__(self, model: LlamaModel, context: LlamaContext) -> None:
        self._model, self._context = model, context
        self._loaded: OrderedDict[str, tuple[Adapter, Any]] = OrderedDict()  # by key
        self._users = Counter[str]()
        self._used: Adapters = ()  # by the last step

    def acquire(self, adapters: Adapters) -> None:
        """Load what is not loaded, and keep it until `release`.

        Raises NoRoom if running sequences use the others, LoadFailed with llama.cpp's reason.
        """
        if not adapters:
            return
        keys = {adapter.key for adapter in adapters}
        if len(keys.union(self._users)) > MAX_LOADED_ADAPTERS:
            raise NoRoom
        for adapter in adapters:
            if adapter.key not in self._loaded:
                self._evict_for_one(keys)
                # its file is not kept open for it
                self._loaded[adapter.key] = replace(adapter, content=None), self._load(adapter)
            self._loaded.move_to_end(adapter.key)
        self._users.update(keys)

    def release(self, adapters: Adapters) -> None:
        """A sequence that acquired them has ended."""
        for adapter in adapters:
            self._users[adapter.key] -= 1
            if not self._users[adapter.key]:
                del self._users[adapter.key]

    def use(self, adapters: Adapters) -> None:
        """Compute the next steps with these, which are acquired."""
        if adapters == self._used:
            return
        count = len(adapters)
        handles = (C.llama_adapter_lora_p_ctypes * count)(
            *[self._loaded[adapter.key][1] for adapter in adapters]
        )
        scales = (ctypes.c_float * count)(*[adapter.scale for adapter in adapters])
        C.llama_set_adapters_lora(self._context.handle, handles, count, scales)
        self._used = adapters

    def stats(self) -> tuple[AdapterStats, ...]:
        """The loaded ones, the latest used last."""
        return tuple(
            AdapterStats(adapter.name, adapter.num_bytes, self._users[key])
            for key, (adapter, _) in self._loaded.items()
        )

    def _evict_for_one(self, wanted: set[str]) -> None:
        """Make room for one more."""
        if len(self._loaded) < MAX_LOADED_ADAPTERS:
            return
        key = next(key for key in self._loaded if key not in self._users and key not in wanted)
        if any(adapter.key == key for adapter in self._used):
            self.use(())
        C.llama_adapter_lora_free(self._loaded.pop(key)[1])

    def _load(self, adapter: Adapter) -> Any:
        log = llama_library()
        log.clear()
        file = _libc.fdopen(adapter.content.descriptor(), b"rb")
        try:
            handle = C.llama_adapter_lora_init_from_file_ptr(self._model.handle, file)
        finally:
            _libc.fclose(file)
        if not handle:
            raise LoadFailed(f"cannot load the adapter {adapter.name}: {log.reason()}")
        return handle
