"""TextWork: prompts become token ids, and ids text, without holding up the event loop."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import numpy as np

from ..errors import refusal
from ..sampling_params import Ids, Limits
from ..text.tokenizer import ChatPrompt, Tokenizer
from .chat_renderer import ChatRenderer
from .protocol import MAX_PROMPTS
from .request_rules import IDS_ONLY
from .turns import in_turns

_SHORT = 256 << 10  # characters
_SHORT_THREADS = 4
_LONG_THREADS = 1

R = TypeVar("R")


class TextWork:
    """Tokenizes on threads and renders conversations in processes. A text that can never fit
    `limits` is refused by its length; one that takes long has a thread of its own kind, so that
    short ones never wait behind it."""

    def __init__(self, tokenizer: Tokenizer | None, limits: Limits) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._renderer: ChatRenderer | None = None
        if tokenizer is not None and tokenizer.chat_template is not None:
            self._renderer = ChatRenderer(tokenizer.chat_template)
        self._short = ThreadPoolExecutor(_SHORT_THREADS, thread_name_prefix="texts")
        self._long = ThreadPoolExecutor(_LONG_THREADS, thread_name_prefix="long texts")
        # Looks at the whole vocabulary: now, and not when the first text comes.
        self._longest_token = 1 if tokenizer is None else tokenizer.max_token_length

    def start(self) -> None:
        """Starts the processes that the first conversations would otherwise start."""
        if self._renderer is not None:
            self._renderer.start()

    def close(self) -> None:
        """Ends them."""
        if self._renderer is not None:
            self._renderer.close()
        self._short.shutdown(wait=False, cancel_futures=True)
        self._long.shutdown(wait=False, cancel_futures=True)

    async def _run(self, size: int, work: Callable[[], R]) -> R:
        """Does `work` on a thread; it is for a text, or ids, of so many characters."""
        pool = self._short if size <= _SHORT else self._long
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises RequestError where the server takes token ids only."""
        if self._tokenizer is None:
            raise refusal("no_tokenizer", IDS_ONLY)
        return self._tokenizer

    @property
    def has_tokenizer(self) -> bool:
        """Whether texts are taken."""
        return self._tokenizer is not None

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations are taken."""
        return self._tokenizer is not None and self._tokenizer.chat_template is not None

    def template_variables(self, *, with_tools: bool) -> frozenset[str]:
        """What the chat template of a conversation can be told; empty without a template."""
        template = self.tokenizer.chat_template
        return frozenset() if template is None else template.variables(with_tools=with_tools)

    async def encode(
        self, prompt: str | Sequence[Any] | np.ndarray, param: str, special_tokens: bool = True
    ) -> list[Ids]:
        """Ids of each prompt: str, [str], ids or [ids], which are lists or arrays. A text that is
        far too long is not tokenized. Raises RequestError."""
        prompts: list[Any]
        if isinstance(prompt, str | np.ndarray):
            prompts = [prompt]
        else:
            prompts = list(prompt)
        kinds = {type(item) for item in prompts}
        if len(kinds) > 1:
            raise refusal("invalid_type", f"{param}: texts, ids and lists of ids are mixed", param)
        if kinds == {int}:
            prompts = [prompts]
        if not prompts or (kinds == {str} and "" in prompts):
            raise refusal("empty_input", f"{param} is empty", param)
        if len(prompts) > MAX_PROMPTS:
            raise refusal("invalid_value", f"at most {MAX_PROMPTS} prompts", param)
        if kinds == {str}:
            for text in prompts:
                self._check_bytes(text, param)
            size = sum(len(text) for text in prompts)
            return await self._run(size, partial(self._encode_texts, prompts, special_tokens))
        await in_turns(self._checked_ids(prompts, param))
        return prompts

    def _checked_ids(self, prompts: Sequence[Ids], param: str) -> Iterator[None]:
        for ids in prompts:
            self._limits.check_ids(ids, param)
            yield

    def _encode_texts(self, texts: Sequence[str], special_tokens: bool) -> list[Ids]:
        """Runs on another thread, which also frees the lists: a list of a million ids takes as long
        to free as to make."""
        encode = self.tokenizer.encode
        return [np.asarray(encode(text, special_tokens), dtype=np.int32) for text in texts]

    async def encode_chat(
        self,
        messages: Callable[[], Sequence[Mapping[str, Any]]],
        options: Mapping[str, Any],
        param: str,
    ) -> ChatPrompt:
        """The prompt of a conversation, which `messages` gives on the other thread; `options` are
        variables of the chat template, `param` is what the route calls the conversation. Raises
        RequestError."""
        tokenizer = self.tokenizer
        renderer = self._renderer
        if renderer is None:
            raise refusal("chat_template_error", "this model has no chat template", param)

        def render() -> str:
            return renderer.render(messages(), options, param)

        text = await asyncio.get_running_loop().run_in_executor(renderer.pool, render)
        self._check_bytes(text, param)
        return await self._run(len(text), partial(tokenizer.encode_chat, text))

    async def decode(self, lists: Sequence[Ids], skip_special_tokens: bool) -> list[str]:
        """The text of each list of ids."""
        decode = self.tokenizer.decode
        size = sum(len(ids) for ids in lists)
        return await self._run(size, lambda: [decode(ids, skip_special_tokens) for ids in lists])

    def _check_bytes(self, text: str, param: str) -> None:
        self._limits.check_length(len(text) // self._longest_token, param, known="at least ")
