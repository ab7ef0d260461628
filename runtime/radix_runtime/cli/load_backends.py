"""How a load generator asks a server for a stream, and what it reads from one."""

import json
from abc import ABC, abstractmethod
from typing import Any

from .figures import Record
from .workload import Item

_USAGE_ONLY = (b'"choices":[]', b'"choices": []')


class Backend(ABC):
    """A route that streams token by token. `common` are fields that all requests have."""

    path: str

    def __init__(self, model: str, temperature: float, cache_salt: str) -> None:
        self.model = model
        self.temperature = temperature
        self.cache_salt = cache_salt

    @abstractmethod
    def body(self, item: Item) -> dict[str, Any]:
        """The request for `item.output_len` tokens after its prompt, whatever they are."""

    @abstractmethod
    def is_piece(self, event: bytes) -> bool:
        """Whether an event brings tokens. Called for each of them: it does not parse it."""

    @abstractmethod
    def read_usage(self, event: dict[str, Any], record: Record) -> None:
        """Notes the counts of tokens that the last event tells."""


class OpenAI(Backend):
    """/v1/completions of any server."""

    path = "/v1/completions"

    def body(self, item: Item) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": item.prompt,
            "max_tokens": item.output_len,
            "temperature": self.temperature,
            "ignore_eos": True,
            "cache_salt": self.cache_salt,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def is_piece(self, event: bytes) -> bool:
        return not any(mark in event for mark in _USAGE_ONLY)

    def read_usage(self, event: dict[str, Any], record: Record) -> None:
        usage = event.get("usage") or {}
        record.output_tokens = usage.get("completion_tokens", record.output_tokens)
        details = usage.get("prompt_tokens_details") or {}
        record.cached_tokens = details.get("cached_tokens") or 0


class SGLang(Backend):
    """/generate, which needs no tokenizer."""

    path = "/generate"

    def body(self, item: Item) -> dict[str, Any]:
        return {
            "input_ids": item.prompt,
            "sampling_params": {
                "max_new_tokens": item.output_len,
                "temperature": self.temperature,
                "ignore_eos": True,
            },
            "cache_salt": self.cache_salt,
            "stream": True,
            "incremental_streaming_output": True,
        }

    def is_piece(self, event: bytes) -> bool:
        return True

    def read_usage(self, event: dict[str, Any], record: Record) -> None:
        meta = event.get("meta_info") or {}
        record.output_tokens = meta.get("completion_tokens", record.output_tokens)
        record.cached_tokens = meta.get("cached_tokens") or 0


BACKENDS: dict[str, type[Backend]] = {"openai": OpenAI, "sglang": SGLang}


class StreamReader:
    """Puts into a record what the events of one answer say, at the time when they came."""

    def __init__(self, backend: Backend, record: Record) -> None:
        self._backend = backend
        self._record = record
        self._last = b""
        self._is_done = False

    def take(self, events: list[bytes], now: float) -> None:
        """The next events, all of which came at `now`."""
        for event in events:
            if event == b"[DONE]":
                self._is_done = True
            else:
                self._last = event
                if self._backend.is_piece(event):
                    self._record.chunks.append(now)

    def finish(self) -> None:
        """The stream has ended: counts its tokens, or notes why it has failed."""
        record = self._record
        try:
            event = json.loads(self._last) if self._last else {}
        except ValueError:
            record.error = "invalid_json: an event of the stream is no JSON"
            return
        if "error" in event:
            record.error = error_text(event)
        elif not self._is_done:
            record.error = "stream_broken: the stream ended without [DONE]"
        else:
            self._backend.read_usage(event, record)


def error_text(answer: Any) -> str:
    """Code and message of an answer, or an event, that is an error."""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    if not isinstance(error, dict):
        return f"unknown: {error}"
    return f"{error.get('code') or error.get('type')}: {error.get('message')}"
