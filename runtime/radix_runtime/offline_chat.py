"""Conversations of `Engine`: their prompts by the chat template, and answers as messages."""

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import msgspec

from .constraint import Constraint
from .errors import RequestError
from .messages import Generate
from .sampling_params import SamplingParams
from .text.answer_format import AnswerFormat
from .text.answer_parser import AnswerMessage, AnswerParser, content_events
from .text.choices import by_choice
from .text.conversation import read_messages
from .text.tokenizer import ChatPrompt, Tokenizer
from .text.tools import ToolSpec, ToolUse, tool_use

Messages = Sequence[Mapping[str, Any]]
Conversations = Messages | Sequence[Messages]
Output = dict[str, Any]


class Chat(NamedTuple):
    """The conversations of one call. `is_single`: one was given as such, not in a list."""

    prompts: list[ChatPrompt]
    tools: ToolUse | None
    is_single: bool

    @property
    def input_ids(self) -> Any:
        """The ids of the prompts, as `Engine.generate` takes them."""
        ids = [prompt.ids for prompt in self.prompts]
        return ids[0] if self.is_single else ids


class ChatBuilder:
    """Writes the prompts of conversations, and knows how answers are read. Raises ValueError for
    what cannot be asked."""

    def __init__(self, tokenizer: Tokenizer | None, format: AnswerFormat) -> None:
        self._tokenizer = tokenizer
        self._format = format

    def chat(
        self,
        conversations: Conversations,
        options: Mapping[str, Any],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        tool_choice: str | Mapping[str, Any] | None,
        parallel_tool_calls: bool | None,
        continues: bool,
    ) -> Chat:
        """The prompts of conversations, or of a single one, by the model's chat template; `options`
        are variables of the template, the rest is as the chat route has it. An answer `continues`
        the last message, or begins a new one."""
        if self._tokenizer is None:
            raise ValueError("this model has no tokenizer: pass input_ids to generate")
        if not isinstance(continues, bool):
            raise ValueError("continue_final_message is True or False")
        try:
            if continues:
                self._format.require_continuing()
            specs = msgspec.convert(list(tools or []), list[ToolSpec])
            use = tool_use(specs, tool_choice, parallel=parallel_tool_calls)
            self._format.require(use, "of this model")
            self._check_variables(options, with_tools=use is not None)
            if use is not None:
                options = {**options, "tools": use.for_template()}
            is_single = len(conversations) == 0 or isinstance(conversations[0], Mapping)
            many: Iterable[Any] = [conversations] if is_single else conversations
            prompts = [
                self._prompt(self._tokenizer, messages, options, continues) for messages in many
            ]
        except msgspec.ValidationError as error:
            raise ValueError(f"tools: {error}") from None
        except RequestError as error:
            raise ValueError(error.message) from None
        return Chat(prompts=prompts, tools=use, is_single=is_single)

    def _check_variables(self, options: Mapping[str, Any], *, with_tools: bool) -> None:
        assert self._tokenizer is not None
        template = self._tokenizer.chat_template
        known = frozenset() if template is None else template.variables(with_tools=with_tools)
        unknown = sorted(set(options) - known)
        if unknown:
            raise ValueError(f"this model's chat template has no {unknown[0]}")

    def _prompt(
        self, tokenizer: Tokenizer, messages: Any, options: Mapping[str, Any], continues: bool
    ) -> ChatPrompt:
        shown = read_messages(messages, continues=continues)
        text = tokenizer.render_chat(shown, continue_final_message=continues, **options)
        prompt = tokenizer.encode_chat(text)
        return prompt._replace(final=shown[-1]["content"]) if continues else prompt

    def sampling(self, given: Any, chat: Chat) -> Any:
        """Sampling parameters of a chat, or a list of them: to the end of the context where a dict
        leaves `max_new_tokens` out, and with the special tokens that the parsers need."""
        if isinstance(given, list | tuple):
            return [self.sampling(params, chat) for params in given]
        kept = self._format.keep_special(chat.tools)
        if isinstance(given, SamplingParams):
            kept = [*(given.keep_special or []), *kept]
            return msgspec.structs.replace(given, keep_special=kept)
        if given is not None and not isinstance(given, Mapping):
            return given  # is refused with the request
        values = {"max_new_tokens": None, **(given or {})}
        values["keep_special"] = [*(values.get("keep_special") or []), *kept]
        return values

    def constraint(
        self, chat: Chat, prompt: ChatPrompt, given: Constraint | None, params: SamplingParams
    ) -> Constraint | None:
        """What the answer to a prompt must look like: see AnswerFormat. Raises RequestError."""
        return self._format.constraint(prompt, chat.tools, given, ignore_eos=params.ignore_eos)

    def answers(self, chat: Chat, requests: Sequence[Generate], field: str) -> "ChatAnswers":
        """The messages of the answers to `requests`, which are those of the conversations; `field`
        is the name of the reasoning in them."""
        parsers = []
        for prompt, request in zip(chat.prompts, requests, strict=True):
            for _ in range(request.sampling.n):
                parsers.append(self._format.parser(prompt, chat.tools))
        assert len(parsers) == len(by_choice(requests))
        return ChatAnswers([_ChoiceMessage(parser, field) for parser in parsers])


class _ChoiceMessage:
    """The message of one choice, whose text is given again and again, longer each time."""

    def __init__(self, parser: AnswerParser | None, field: str) -> None:
        self._parser = parser
        self._field = field
        self._message = AnswerMessage()
        self._seen = 0

    def extend(self, text: str, *, is_whole: bool) -> Output:
        """The message with all of `text`."""
        new = text[self._seen :]
        self._seen = len(text)
        if self._parser is None:
            self._message.extend(content_events(new))
        else:
            self._message.extend(self._parser.push(new))
            if is_whole:
                self._message.extend(self._parser.finish())
        return self._message.as_openai(self._field)


class ChatAnswers:
    """Adds `message` to the outputs of a chat: the answer as the conversation goes on with it."""

    def __init__(self, choices: Sequence[_ChoiceMessage]) -> None:
        self._choices = choices

    def complete(self, result: Output | list[Output]) -> Output | list[Output]:
        """What `Engine.generate` gave, with the messages."""
        outputs = result if isinstance(result, list) else [result]
        for choice, output in enumerate(outputs):
            self._add(choice, output)
        return result

    def stream(self, outputs: Generator[Output, None, None]) -> Iterator[Output]:
        """Outputs as they come, with the messages so far."""
        with closing(outputs):
            for output in outputs:
                self._add(output.get("index", 0), output)
                yield output

    def _add(self, choice: int, output: Output) -> None:
        is_whole = output["meta_info"]["finish_reason"] is not None
        output["message"] = self._choices[choice].extend(output["text"], is_whole=is_whole)
