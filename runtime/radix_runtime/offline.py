"""Engine: the runtime without a server.

Scheduler and detokenizer run in the caller's process, on the caller's thread: a call pumps them
until its own requests are done, and so advances the requests of other threads too. The other
tensor-parallel ranks are child processes.
"""

import asyncio
from collections.abc import AsyncIterator, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np

from .config import SECRETS, ServerArgs
from .engine.device_defaults import with_device_defaults
from .engine.facts import resolved_settings
from .errors import ConfigError
from .offline_chat import ChatBuilder, Conversations
from .offline_loop import Call, EngineLoop, Output
from .offline_requests import (
    InputIds,
    LogprobOptions,
    Prompts,
    RequestBatch,
    RequestBuilder,
    are_ids,
)
from .offline_settings import settings_of
from .prepare import prepare_model
from .progress import progress_bar
from .sampling_params import SamplingParams
from .text.answer_format import find_format
from .text.choices import scored
from .text.generation_config import eos_token_ids, sampling_defaults
from .text.tokenizer import Tokenizer, check_vocabulary, has_tokenizer, load_tokenizer


class Engine(EngineLoop, AbstractContextManager["Engine"]):
    """A loaded model. `model_path` is a directory, a hub name, or None for the embedded demo model;
    keyword arguments are the fields of ServerArgs, also under their flags' other spellings (unknown
    ones raise TypeError). `tokenizer` may replace the model's; a model without one takes
    `input_ids` only and gives no text.

        with Engine("path/to/model", page_size=16) as engine:
            engine.generate("Hello", {"temperature": 0})["text"]

    `args` are the settings, `config` the model's, `executor` runs the steps. Raises ConfigError for
    what cannot work; ValueError for a bad request, with the reason; EngineDeadError, on every call,
    once the engine has died. Threads may share an engine, forked processes may not. An engine that
    nobody refers to any more is shut down.
    """

    def __init__(
        self,
        model_path: str | Path | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        **server_args: Any,
    ) -> None:
        if isinstance(tokenizer, str | Path):
            raise ConfigError("tokenizer is a Tokenizer; a path is tokenizer_path")
        if model_path is not None:
            server_args = {"model_path": model_path, **server_args}
        args = settings_of(server_args)
        args.validate()
        args, self.config, _ = prepare_model(args)
        args = with_device_defaults(args)
        folder = Path(args.model_path or "")
        self.args = args
        self.tokenizer = tokenizer or _load_tokenizer(args, folder)
        if self.tokenizer is not None:
            check_vocabulary(self.tokenizer, args.tokenizer_path or folder, self.config.vocab_size)
        super().__init__(
            args, self.config, self.tokenizer, eos_ids=eos_token_ids(folder, self.tokenizer)
        )
        self._chats = ChatBuilder(self.tokenizer, find_format(args, self.tokenizer))
        self._requests = RequestBuilder(
            self.tokenizer,
            self._scheduler.limits,
            defaults=sampling_defaults(args, folder),
            grammars=self._grammars,
        )

    # Generation ---------------------------------------------------------------------------

    @overload
    def generate(
        self,
        prompt: Prompts | None = None,
        sampling_params: Any = None,
        input_ids: InputIds | None = None,
        *,
        return_logprob: bool = False,
        logprob_start_len: int = -1,
        top_logprobs_num: int = 0,
        stream: Literal[False] = False,
        use_tqdm: bool = False,
    ) -> Any: ...

    @overload
    def generate(
        self,
        prompt: Prompts | None = None,
        sampling_params: Any = None,
        input_ids: InputIds | None = None,
        *,
        return_logprob: bool = False,
        logprob_start_len: int = -1,
        top_logprobs_num: int = 0,
        stream: Literal[True],
        use_tqdm: bool = False,
    ) -> Iterator[Output]: ...

    def generate(
        self,
        prompt: Prompts | None = None,
        sampling_params: Any = None,
        input_ids: InputIds | None = None,
        *,
        return_logprob: bool = False,
        logprob_start_len: int = -1,
        top_logprobs_num: int = 0,
        stream: bool = False,
        use_tqdm: bool = False,
    ) -> Any:
        """Completes one prompt or a list of them, as text or token ids.

        `sampling_params` is a SamplingParams, or a dict of its fields and of those of
        ConstrainedParams (json_schema, regex and others), one for all prompts or a list of the same
        length; what a dict leaves out comes from the model's generation_config.json.
        Each output is a dict: `text`, `output_ids`, `meta_info` as /generate gives it (with
        `return_logprob` also output_token_logprobs, a list of [logprob, id, None], and
        input_token_logprobs, those of the prompt from position `logprob_start_len` on if that is
        not -1; with `top_logprobs_num` output_top_logprobs and input_top_logprobs). A single prompt
        with n = 1 gives one output, else a list, the choices of a prompt side by side.
        `stream=True` is SGLang's spelling of the method `stream`. `use_tqdm` shows a bar on a
        terminal.
        """
        logprobs = LogprobOptions(
            return_logprob=return_logprob,
            logprob_start_len=logprob_start_len,
            top_logprobs_num=top_logprobs_num,
        )
        batch = self._requests.batch(prompt, sampling_params, input_ids, logprobs, stream=stream)
        if stream:
            return self._stream(Call(batch))
        return self._complete(Call(batch), use_tqdm=use_tqdm)

    def stream(
        self,
        prompt: Prompts | None = None,
        sampling_params: Any = None,
        input_ids: InputIds | None = None,
        *,
        return_logprob: bool = False,
        logprob_start_len: int = -1,
        top_logprobs_num: int = 0,
    ) -> Iterator[Output]:
        """As `generate`, but yields an output whenever a choice has grown: all of it so far,
        `finish_reason` None until its last, and, with more than one choice, its `index`. Closing
        the iterator aborts what is unfinished."""
        logprobs = LogprobOptions(
            return_logprob=return_logprob,
            logprob_start_len=logprob_start_len,
            top_logprobs_num=top_logprobs_num,
        )
        batch = self._requests.batch(prompt, sampling_params, input_ids, logprobs, stream=True)
        return self._stream(Call(batch))

    def chat(
        self,
        messages: Conversations,
        sampling_params: Any = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        stream: bool = False,
        use_tqdm: bool = False,
    ) -> Any:
        """Answers a conversation, a list of messages as the chat route takes them, or a list of
        conversations.

        Outputs, `sampling_params`, `stream` and `use_tqdm` are those of `generate`, but answers go
        to the end of the context where `max_new_tokens` is left out, and each output also has
        `message`: the answer with its reasoning and tool calls, as a conversation goes on with it.
        `tools`, `tool_choice` and `parallel_tool_calls` are those of the chat route;
        `chat_template_kwargs` are variables of the chat template, such as `enable_thinking`. With
        `continue_final_message` an answer goes on with the last message, which is the assistant's,
        and has only what it adds.
        """
        chat = self._chats.chat(
            messages,
            chat_template_kwargs or {},
            tools=tools,
            tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls,
            continues=continue_final_message,
        )
        params = self._chats.sampling(sampling_params, chat)
        constrain = [partial(self._chats.constraint, chat, prompt) for prompt in chat.prompts]
        batch = self._requests.batch(
            None, params, chat.input_ids, LogprobOptions(), stream=stream, constrain=constrain
        )
        answers = self._chats.answers(chat, batch.requests, self.args.reasoning_field)
        if stream:
            return answers.stream(self._stream(Call(batch)))
        return answers.complete(self._complete(Call(batch), use_tqdm=use_tqdm))

    async def async_generate(
        self,
        prompt: Prompts | None = None,
        sampling_params: Any = None,
        input_ids: InputIds | None = None,
        *,
        return_logprob: bool = False,
        logprob_start_len: int = -1,
        top_logprobs_num: int = 0,
        stream: bool = False,
    ) -> Any:
        """As `generate`, for coroutines, any number of which run side by side. With `stream=True`
        it gives an asynchronous iterator. A coroutine that is cancelled aborts its requests."""
        logprobs = LogprobOptions(
            return_logprob=return_logprob,
            logprob_start_len=logprob_start_len,
            top_logprobs_num=top_logprobs_num,
        )
        batch = await asyncio.to_thread(
            self._requests.batch, prompt, sampling_params, input_ids, logprobs, stream=stream
        )
        if stream:
            return self._stream_async(Call(batch))
        return await self._complete_async(Call(batch))

    def score(
        self,
        query: str | Sequence[int],
        items: Prompts | InputIds,
        label_token_ids: Sequence[int] | None = None,
        *,
        apply_softmax: bool = False,
        item_first: bool = False,
    ) -> list[list[float]]:
        """Scores each of `items` against `query`; one list of numbers an item. Without labels: the
        log-probability of each token of the item as continuation of the query. With labels: the
        probability of each label token after query and item (after item and query with
        `item_first`), normalised over the labels with `apply_softmax`."""
        many: Any = [items] if isinstance(items, str) or are_ids(items) else items
        if label_token_ids is None:
            if apply_softmax or item_first:
                raise ValueError("apply_softmax and item_first need label_token_ids")
            prefix = self._requests.ids(query)
            return self._continuations([(prefix, self._requests.ids(item, False)) for item in many])
        prefixes = [
            self._requests.joined(item, query) if item_first else self._requests.joined(query, item)
            for item in many
        ]
        pairs = [(prefix, [label]) for prefix in prefixes for label in label_token_ids]
        flat = self._continuations(pairs)
        table = np.array(flat, np.float64).reshape(len(prefixes), len(label_token_ids))
        if apply_softmax:
            table -= np.logaddexp.reduce(table, axis=1, keepdims=True)
        return np.exp(table).tolist()

    def _continuations(self, pairs: list[tuple[list[int], list[int]]]) -> list[list[float]]:
        """Log-probabilities of the second part's tokens after the first, by prefill alone."""
        if not all(prefix and tail for prefix, tail in pairs):
            raise ValueError("score needs at least one token before and one to score")
        requests = []
        for prefix, tail in pairs:
            logprobs = LogprobOptions(return_logprob=True, logprob_start_len=len(prefix))
            params = SamplingParams(max_new_tokens=0)
            requests.append(self._requests.build(prefix + tail, params, logprobs))
        call = Call(RequestBatch(requests))
        self._complete(call)
        return [
            [entry.logprob or 0.0 for entry in scored(logprobs)]
            for _, logprobs in sorted(call.prompt_logprobs.items())
        ]

    def _complete(self, call: Call, *, use_tqdm: bool = False) -> Output | list[Output]:
        left = call.unfinished
        with (
            closing(self._advance(call)) as news,
            progress_bar("prompts", left, hidden=not use_tqdm) as bar,
        ):
            for _ in news:
                bar.update(left - call.unfinished)
                left = call.unfinished
        return call.result()

    def _stream(self, call: Call) -> Generator[Output, None, None]:
        with closing(self._advance(call)) as news:
            for grown in news:
                for choice in grown:
                    yield call.output(choice)

    async def _complete_async(self, call: Call) -> Output | list[Output]:
        async with aclosing(self._grown(call)) as news:
            async for _ in news:
                pass
        return call.result()

    async def _stream_async(self, call: Call) -> AsyncIterator[Output]:
        async with aclosing(self._grown(call)) as news:
            async for outputs in news:
                for output in outputs:
                    yield output

    # Administration -----------------------------------------------------------------------

    def flush_cache(self) -> bool:
        """Forgets all cached prefixes. False when requests are running."""
        with self._turn():
            self._pump()  # takes in what was sent, as the abort of a stream that was closed early
            while not self._scheduler.is_idle and not self._open:
                self._pump()  # the last steps of what has ended
            return self._scheduler.flush_cache()

    def get_server_info(self) -> dict[str, Any]:
        """The resolved settings (without keys), sizes, and the scheduler's figures."""
        with self._turn():
            self._pump()
            stats = self._scheduler.stats()
        settings = asdict(self.args) | resolved_settings(self.args, self.config)
        settings = {name: value for name, value in settings.items() if name not in SECRETS}
        return {
            **settings,
            "max_total_num_tokens": self._scheduler.limits.max_total_tokens,
            "max_context": self.executor.max_context,
            "internal_states": [stats],
        }

    def shutdown(self) -> None:
        """Ends the engine and its processes; does nothing in a forked process. Idempotent; later
        calls of other methods raise EngineDeadError."""
        if self._close.alive:
            with self._lock:
                self._dead = "the engine was shut down"
                self._close()

    def __exit__(self, *exception: object) -> None:
        self.shutdown()


def _load_tokenizer(args: ServerArgs, folder: Path) -> Tokenizer | None:
    """The tokenizer that the settings name, or the model's; None if it has none."""
    if args.skip_tokenizer_init:
        return None
    if args.tokenizer_path is not None:
        folder = Path(args.tokenizer_path)
    elif not has_tokenizer(folder):
        return None
    return load_tokenizer(folder, args.chat_template)
