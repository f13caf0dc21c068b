"""The engine process: one model, connected to the server by one socket."""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections.abc import Iterator
from dataclasses import replace

from localgen.backends.engine import wire
from localgen.backends.engine.draft_loading import create_drafters
from localgen.backends.engine.engine import Engine
from localgen.backends.engine.input_processor import InputProcessor
from localgen.backends.engine.loaded_model import LoadedModel, ModelLoader
from localgen.backends.engine_stats import SAVE_TIMEOUT_S
from localgen.backends.errors import LocalgenError
from localgen.backends.kv_store.store import PrefixStore
from localgen.backends.messages import FrameSocket, inherited_socket
from localgen.backends.model_info import ModelLoadRequest
from localgen.backends.runner.interface import StepFailed
from localgen.backends.text.grammar import GrammarCompiler
from localgen.backends.types import MAX_DRAFT_TOKENS, TokenizeRequest

# of a loading engine, whatever its progress: without it, the server takes the engine for stopped
HEARTBEAT_S = 1.0
# after SAVE_TIMEOUT_S, an engine has this time to say what it has not saved
_LAST_WORDS_S = 1.0
log = logging.getLogger(__name__)


def main(fd: int, load: ModelLoader) -> int:
    """Serve requests from the socket `fd` until the server closes it; return the exit status.

    load: loads the model and reports the progress (0 to 1); may raise LocalgenError.
    """
    logging.basicConfig(format="%(asctime)s engine %(process)d %(levelname)s %(message)s")
    return _EngineServer(inherited_socket(fd), load).run()


class _EngineServer:
    def __init__(self, server: FrameSocket, load: ModelLoader) -> None:
        self._socket, self._load = server, load
        self._messages = map(wire.CODEC.decode, self._socket)
        self._engine: Engine | None = None
        self._sending = threading.Lock()
        self._progress = 0.0
        self._loading_ended = threading.Event()
        self._engine_ended = threading.Event()
        self._prefix_store: PrefixStore | None = None

    def run(self) -> int:
        first = next(self._messages, None)
        if not isinstance(first, ModelLoadRequest):
            return 1
        # a thread reads from here on, so that the process exits as soon as the server closes
        threading.Thread(target=self._read_requests, args=(self._messages,), daemon=True).start()
        threading.Thread(target=self._send_heartbeats, daemon=True).start()
        try:
            model = self._load(first, self._report_progress)
        except LocalgenError as error:
            self._loading_ended.set()
            self._send(wire.LoadError(error.code, error.message))
            return 1
        if first.sampling is not None:
            model = replace(model, info=replace(model.info, sampling=first.sampling))
        return self._serve(model)

    def _serve(self, model: LoadedModel) -> int:
        options = model.info.options
        assert options.itl_target_ms is not None
        assert options.max_queue is not None
        self._engine = Engine(
            model.runner,
            InputProcessor(
                limits=model.runner.limits,
                tokenizer=model.tokenizer,
                template=model.template,
                defaults=model.info.sampling,
                grammar_compiler=GrammarCompiler(model.tokenizer, model.sandbox),
                ctx_train=model.info.ctx_train,
                read_adapter=model.read_adapter,
            ),
            itl_target_ms=options.itl_target_ms,
            max_queue=options.max_queue,
            publish=self._send,
            drafters=create_drafters(model),
            max_drafts=options.draft_max or MAX_DRAFT_TOKENS,
            prefix_store=model.prefix_store,
        )
        self._prefix_store = model.prefix_store
        # what was loaded stays: collections during steps, which look at all objects, can skip it
        gc.collect()
        gc.freeze()
        self._loading_ended.set()
        self._send(wire.LoadComplete(model.info))
        try:
            self._engine.run()
        except StepFailed as error:
            log.error("%s", error)
            return 1
        finally:
            self._engine_ended.set()
        return 0

    def _report_progress(self, share: float) -> None:
        self._progress = share
        self._send(wire.LoadProgress(share))

    def _send_heartbeats(self) -> None:
        """Repeat the progress until the model is loaded, also while native code runs."""
        while not self._loading_ended.wait(HEARTBEAT_S):
            self._send(wire.LoadProgress(self._progress))

    def _send(self, message: wire.WireMessage) -> None:
        try:
            with self._sending:
                self._socket.send(wire.CODEC.encode(message))
        except OSError:  # the server is gone; with a store, _read_requests ends the process
            if self._prefix_store is None:
                os._exit(0)

    def _read_requests(self, messages: Iterator[wire.WireMessage]) -> None:
        try:
            for message in messages:
                assert self._engine is not None
                match message:
                    case wire.Submit(request):
                        self._engine.submit(request)
                    case wire.SubmitEmbedding(texts):
                        self._engine.submit_embedding(texts)
                    case TokenizeRequest():
                        self._engine.submit_tokenize(message)
                    case wire.Cancel(request_id):
                        self._engine.cancel(request_id)
                    case wire.AnswerNow(request_id):
                        self._engine.answer_now(request_id)
                    case _:
                        raise ValueError(f"unexpected {type(message).__name__}")
        except (OSError, ValueError) as error:
            log.error("the server's socket failed: %s", error)
        # without prefixes to save, exit without waiting for the step in flight
        if self._engine is not None and self._prefix_store is not None:
            self._prefix_store.hurry()
            self._engine.stop()
            if not self._engine_ended.wait(SAVE_TIMEOUT_S + _LAST_WORDS_S):
                log.warning("prefixes were not saved: the last step takes too long")
        os._exit(0)
