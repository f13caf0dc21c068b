"""Responses of /completion in llama-server's own format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from localgen.backends.types import Delta, Finished, PositionLogprobs, TokenLogprob
from localgen.server.llama_server.completion_schema import NativeCompletionRequest
from localgen.server.models.request_stream import EngineNotice
from localgen.server.openai.serializer import KEEP_ALIVE_COMMENT, SseFraming, comment
from localgen.server.requests.choices import FinishedChoice
from localgen.server.requests.protocol import Framing, ResponseMetadata, extension_fields


class NativeFraming(SseFraming):
    """Server-sent events. No terminator: the last object has `stop: true`."""

    terminator = b""


NATIVE_SSE = NativeFraming()
_ABSENT = object()


@dataclass(slots=True)
class NativeCompletionSerializer:
    """Serializer of /completion. predicted: tokens of each answer so far."""

    model: str
    body: NativeCompletionRequest
    framing: Framing = NATIVE_SSE
    predicted: dict[int, int] = field(default_factory=dict)

    @classmethod
    def from_metadata(
        cls, metadata: ResponseMetadata, *, body: NativeCompletionRequest
    ) -> NativeCompletionSerializer:
        return cls(metadata.model, body)

    def choice_start(self, index: int) -> list[object]:
        """No events."""
        return []

    def choice_delta(self, index: int, delta: Delta) -> list[object]:
        """New text."""
        self.predicted[index] = delta.num_tokens
        return [
            {
                "index": index,
                "content": delta.text,
                "tokens": self._tokens(delta.logprobs),
                "stop": False,
                "id_slot": -1,
                "tokens_predicted": delta.num_tokens,
                **self._probabilities(delta.logprobs),
            }
        ]

    def choice_end(self, index: int, finished: Finished) -> list[object]:
        """The last object of an answer, without its text."""
        return [self._whole(index, "", (), finished)]

    def stream_end(self, total: Finished) -> list[object]:
        """No events."""
        return []

    def keep_alive(self) -> bytes:
        return KEEP_ALIVE_COMMENT

    def notice(self, notice: EngineNotice) -> bytes:
        return comment(notice)

    def full_response(self, choices: Sequence[FinishedChoice], total: Finished) -> object:
        """An object, or a list of them for several prompts."""
        answers = []
        for index, choice in enumerate(choices):
            text = "".join(delta.text for delta in choice.deltas)
            positions = [each for delta in choice.deltas for each in delta.logprobs]
            answers.append(self._whole(index, text, positions, choice.finished))
        return answers if len(answers) > 1 else answers[0]

    def _whole(
        self, index: int, text: str, positions: Sequence[PositionLogprobs], finished: Finished
    ) -> dict[str, Any]:
        stop_type, word = _stop_type(finished, self.body.stop or ())
        prompt = self.body.prompts[index // (self.body.n or 1)]
        whole = {
            "index": index,
            "content": text,
            "tokens": self._tokens(positions),
            "id_slot": -1,
            "stop": True,
            "model": self.model,
            "tokens_predicted": finished.completion_tokens,
            "tokens_evaluated": finished.prompt_tokens,
            "tokens_cached": finished.prompt_tokens + finished.completion_tokens,
            "generation_settings": self._settings(finished),
            "prompt": prompt,
            "has_new_line": "\n" in text,
            "truncated": False,
            "stop_type": stop_type,
            "stopping_word": word,
            **self._probabilities(positions),
            **extension_fields(finished),
        }
        return _chosen(whole, self.body.response_fields) if self.body.response_fields else whole

    def _settings(self, finished: Finished) -> dict[str, Any]:
        """Build generation_settings: limits, seed, and the samplers that the request set."""
        given = self.body.to_sampling_params()
        limit = self.body.max_predicted
        own = {
            "n_predict": -1 if limit is None else limit,
            "n_ctx": finished.ctx,
            "seed": finished.seed,
            "stop": list(given.stop),
            "n_probs": self.body.n_probs,
            "stream": self.body.stream,
        }
        names = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "grammar")
        return own | {name: value for name in names if (value := getattr(given, name)) is not None}

    def _tokens(self, positions: Sequence[PositionLogprobs]) -> list[int]:
        if not self.body.return_tokens:
            return []
        return [position.chosen.token_id for position in positions]

    def _probabilities(self, positions: Sequence[PositionLogprobs]) -> dict[str, Any]:
        if not (self.body.n_probs and positions):
            return {}
        return {
            "completion_probabilities": [
                _token(each.chosen) | {"top_logprobs": [_token(token) for token in each.top]}
                for each in positions
            ]
        }


def _chosen(whole: dict[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """The value at each path that exists, by the path, as llama-server gives them."""
    plain, chosen = msgspec.to_builtins(whole), {}
    for path in paths:
        value = plain
        for name in path.split("/"):
            value = value.get(name, _ABSENT) if isinstance(value, dict) else _ABSENT
        if value is not _ABSENT:
            chosen[path] = value
    return chosen


def _stop_type(finished: Finished, words: Sequence[str]) -> tuple[str, str]:
    """Why an answer ended, in llama-server's terms, and the stop string that ended it."""
    match finished.reason:
        case "stop" if finished.stop in words:
            return "word", finished.stop or ""
        case "stop":
            return "eos", ""
        case "length":
            return "limit", ""
        case _:
            return "none", ""


def _token(token: TokenLogprob) -> dict[str, Any]:
    return {
        "id": token.token_id,
        "token": token.text,
        "bytes": list(token.text.encode()),
        "logprob": token.logprob,
    }
