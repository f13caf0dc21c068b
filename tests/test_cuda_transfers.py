"""Launching a step does not wait for the device: copies to it are asynchronous, from pinned memory.

The steps run on the meta device, where no result can be read, and where copies from the host are
copies between devices, as with a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cuda_configs import SIZES, write_config
from fake_capture import FakeCapture
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from localgen.backends.cuda.embeddings import Pooler
from localgen.backends.cuda.kernels.launch import record_launches
from localgen.backends.cuda.kv.page_pool import PAGE_TOKENS
from localgen.backends.cuda.kv.paged_cache import PagedCache
from localgen.backends.cuda.model import host_copy
from localgen.backends.cuda.model.decoder import Decoder, KVCache
from localgen.backends.cuda.model.weights import random_weights
from localgen.backends.cuda.runner import CudaRunner, cuda_limits
from localgen.backends.cuda.steps.cuda_graphs import DeviceExecutor
from localgen.backends.formats.hf.config import read_hf_config
from localgen.backends.runner.decode_step import DecodeStep
from localgen.backends.runner.interface import Chunk
from localgen.backends.runner.sequence import Sequence
from localgen.backends.sampling_params import BASE_SAMPLING, SamplingParams

META = torch.device("meta")
PAGES, MAX_LEN = 40, 320
VOCAB = int(SIZES["vocab_size"])


class CopyWatcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations that bring host memory to the device, and lists the blocking ones."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0
        self.blocking: list[str] = []
        self.buffers: list[Tensor] = []  # kept, so that no other tensor gets their addresses

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        tensors = [x for x in tree_leaves((args, kwargs, found)) if isinstance(x, Tensor)]
        host = [x for x in tensors if x.device.type == "cpu" and x.dim()]
        if host and any(x.is_meta for x in tensors):
            self.count += 1
            pinned = {buffer.untyped_storage().data_ptr() for buffer in self.buffers}
            is_pinned = all(x.untyped_storage().data_ptr() in pinned for x in host)
            if not (is_pinned and (kwargs.get("non_blocking") or args[2:3] == (True,))):
                self.blocking.append(str(func))
        return found


class ListWatcher(TorchFunctionMode):
    """Refuses Python numbers as tensors and indices on the device: blocking copies inside torch."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor):
            assert kwargs.get("device") in (None, torch.device("cpu"))
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            assert not any(isinstance(each, list) for each in index)
        return func(*args, **kwargs)


@contextmanager
def watched_copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[CopyWatcher]:
    watcher, host_buffer = CopyWatcher(), host_copy.host_buffer

    def known_buffer(num_bytes: int, device: torch.device) -> Tensor:
        assert device == META, "memory for a copy to the device is pinned"
        watcher.buffers.append(host_buffer(num_bytes, device))
        return watcher.buffers[-1]

    with monkeypatch.context() as patch:
        patch.setattr(host_copy, "host_buffer", known_buffer)
        with watcher, ListWatcher():
            yield watcher


class MetaSteps:
    """A runner on the meta device; all sampled tokens are taken to be 1."""

    def __init__(self, folder: Path, *, graphs: bool) -> None:
        spec = read_hf_config(write_config(folder, "llama"))
        weights = random_weights(spec, device=META, dtype=torch.float16, seed=0)
        cache = KVCache.zeros(spec, PAGES, device=META, dtype=torch.int8)
        self.runner = CudaRunner(
            DeviceExecutor(
                Decoder(spec, weights, MAX_LEN),
                cache,
                use_cuda_graphs=graphs,
                capture=FakeCapture(),
            ),
            PagedCache(PAGES, prefix_cache=True),
            cuda_limits(
                max_seqs=4,
                max_batch_tokens=128,
                max_len=MAX_LEN,
                kv_tokens=MAX_LEN,
                prefix_cache=True,
            ),
            str,
            run_ahead=True,
            pooler=Pooler(),
        )
        self.seqs: list[Sequence] = []
        self._batch: tuple[Sequence, ...] = ()

    def add(self, params: SamplingParams, **more: Any) -> None:
        seq = Sequence(
            id=str(len(self.seqs)),
            tokens=[3, 4, 5],
            num_prompt=3,
            params=params,
            ctx=MAX_LEN,
            max_len=MAX_LEN,
            **more,
        )
        seq.num_computed = self.runner.admit(seq, spare=0)
        self.seqs.append(seq)

    def step(self) -> None:
        assert all(self.runner.grow(seq, seq.num_uncomputed) for seq in self.seqs)
        self.runner.launch(self._chunks())
        for seq in self.seqs:
            seq.num_computed = len(seq.tokens)
            seq.tokens.append(1)

    def _chunks(self) -> Seq[Chunk]:
        if not all(seq.is_decoding for seq in self.seqs):
            return [Chunk.of_uncomputed(seq, seq.num_uncomputed) for seq in self.seqs]
        if self._batch != tuple(self.seqs):
            self._batch = tuple(self.seqs)
        return DecodeStep(self._batch)


@pytest.fixture(params=[False, True], ids=["eager", "graphs"])
def steps(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MetaSteps]:
    with record_launches(90, 132):
        yield MetaSteps(tmp_path, graphs=request.param)


def test_the_watchers_see_what_would_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    there = torch.empty(4, device=META)
    with watched_copies(monkeypatch) as copies:
        torch.arange(4).to(META)
        torch.arange(4).to(META, non_blocking=True)
        there[torch.arange(4)]
        assert len(copies.blocking) == copies.count == 3
        host_copy.to_device([torch.arange(4).numpy()], META)
        assert len(copies.blocking) == copies.count - 1
        with pytest.raises(AssertionError):
            torch.tensor([1], device=META)
        with pytest.raises(AssertionError):
            there[[1, 3]]
        with pytest.raises(AssertionError):
            there[[1, 3]] = 0
        with pytest.raises(RuntimeError):
            there.tolist()


def test_stored_pages_are_sent_in_one_copy_that_nothing_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = read_hf_config(write_config(tmp_path, "llama"))
    for dtype in (torch.float16, torch.int8):
        cache = KVCache.zeros(spec, PAGES, device=META, dtype=dtype)
        page = sum(tensor[0].nbytes for layer in cache.layers for tensor in layer.tensors)
        with watched_copies(monkeypatch) as copies:
            cache.write_pages([3, 1], np.zeros((2, page), np.uint8))
        assert (copies.count, copies.blocking) == (1, [])


def test_stored_pages_are_gathered_without_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = read_hf_config(write_config(tmp_path, "llama"))
    cache = KVCache.zeros(spec, PAGES, device=META, dtype=torch.int8)
    with watched_copies(monkeypatch) as copies:
        cache.read_pages([3, 1])
    assert (copies.count, copies.blocking) == (1, []), "only the numbers of the pages"


def test_a_plain_step_waits_for_nothing_and_sends_what_changed(
    steps: MetaSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        steps.add(BASE_SAMPLING)
    steps.step()
    steps.step()
    has_graph = steps.runner.prepare_while_idle()
    steps.step()
    copied = []
    while len(steps.seqs[0].tokens) < 2 * PAGE_TOKENS + 3:
        assert steps.runner._run_ahead_step is not None
        begins_page = (len(steps.seqs[0].tokens) + 1) % PAGE_TOKENS == 1
        with watched_copies(monkeypatch) as copies:
            steps.step()
        assert copies.blocking == []
        assert copies.count == (begins_page if has_graph else 1), "new pages; all inputs"
        copied.append(copies.count)
    assert not has_graph or sum(copied) == 2
    steps.seqs.pop()
    with watched_copies(monkeypatch) as copies:
        steps.step()
    assert copies.blocking == []
    assert copies.count == 2, "also the sampling parameters"


class AnyText:
    """A grammar that allows every token."""

    def draft_masks(self, drafts: list[int], banned: object) -> list[Any]:
        return [np.ones(VOCAB, np.bool_)] * (1 + len(drafts))


def test_a_step_with_requests_of_every_kind_waits_for_nothing(
    steps: MetaSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps.add(BASE_SAMPLING)
    steps.add(BASE_SAMPLING, matcher=AnyText())
    steps.add(replace(BASE_SAMPLING, repeat_penalty=1.2, repeat_last_n=8))
    steps.add(replace(BASE_SAMPLING, logprobs=3))
    steps.step()
    steps.step()
    steps.runner.prepare_while_idle()
    assert steps.runner._run_ahead_step is not None
    steps.runner.kv_cache._schedule_copy(PAGES - 1, PAGES - 2)
    with watched_copies(monkeypatch) as copies:
        steps.step()
    assert copies.blocking == []
    assert copies.count == 2 + 3, "edits; the pages to copy, the mask, the logprobs' row"
    steps.seqs.pop(0)  # ended: the rows of the others are picked
    with watched_copies(monkeypatch) as copies:
        steps.step()
    assert copies.blocking == []
    assert copies.count == 3 + 3, "also the sampling parameters"
