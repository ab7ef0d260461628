"""AnswerFormat: how a model writes reasoning and tool calls, as told or as its template shows."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from ..config import ServerArgs
from ..constraint import Constraint, ReasoningBudget
from ..errors import ConfigError, refusal
from .answer_grammar import AnswerGrammar
from .answer_parser import AnswerParser
from .reasoning import reasoning_families
from .reasoning.think import Start
from .tokenizer import ChatPrompt, Tokenizer
from .tool_grammar import ToolGrammar
from .tool_parsers import tool_parsers
from .tool_parsers.form import CallForm
from .tools import ToolUse

AUTO = "auto"
NONE = "none"
# What a chat template must have for a family; the first that fits is taken.
_TOOL_SIGNS = (
    ("gpt-oss", ("<|channel|>", "<|message|>", "functions.")),
    ("deepseekv3", ("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseekv31", ("<｜tool▁calls▁begin｜>",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("minimax-m2", ("<minimax:tool_call>",)),
    ("glm45", ("<tool_call>", "<arg_key>")),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("hermes", ("<tool_call>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("llama3", ("<|python_tag|>",)),
    ("llama3", ("<|start_header_id|>", '"parameters": ')),
)
_REASONING_SIGNS = (
    ("gpt-oss", ("<|channel|>", "analysis")),
    ("minimax", ("<think>", "<minimax:tool_call>")),
    ("glm45", ("</think>", "<arg_key>")),
    ("qwen3", ("<｜Assistant｜>", "thinking is defined")),  # DeepSeek V3.1 thinks if it is told
    ("deepseek-r1", ("<think>", "<｜Assistant｜>")),
    ("qwen3", ("</think>",)),
)


class Choice(NamedTuple):
    """A parser that was chosen: its name (`none`: no parser) and why."""

    name: str
    why: str


class AnswerFormat:
    """The parsers for the answers of one model. `tools` and `reasoning` say which and why."""

    def __init__(self, tools: Choice, reasoning: Choice, tokenizer: Tokenizer | None) -> None:
        self.tools = tools
        self.reasoning = reasoning
        self._tokenizer = tokenizer
        self._template = None if tokenizer is None else tokenizer.chat_template
        self._tool_parser = None if tools.name == NONE else tool_parsers.get(tools.name)
        self._reasoning = reasoning_families.get(reasoning.name)
        self._call_form: CallForm | None = None
        if self._tool_parser is not None:
            source = self._template.text if self._template is not None else ""
            self._call_form = self._tool_parser.form_for(source)
        self._tool_ids: list[int] = []
        self._reasoning_ids: list[int] = []
        if self._tool_parser is not None:
            self._tool_ids = self._special_ids(self._tool_parser.markers)
        if self._reasoning is not None:
            self._reasoning_ids = self._special_ids(self._reasoning.markers)

    def facts(self) -> dict[str, str]:
        """The settings as they were resolved, and a sentence that says why."""
        return {
            "tool_call_parser": self.tools.name,
            "reasoning_parser": self.reasoning.name,
            "answer_format": (
                f"tool calls: {self.tools.name} ({self.tools.why}); "
                f"reasoning: {self.reasoning.name} ({self.reasoning.why})"
            ),
        }

    @property
    def has_tools(self) -> bool:
        """Whether tool calls can be found in answers."""
        return self._tool_parser is not None

    @property
    def has_reasoning(self) -> bool:
        """Whether reasoning can be found in answers."""
        return self._reasoning is not None

    def require(self, use: ToolUse | None, template_name: str) -> None:
        """Raises RequestError unless this model can be told of the tools of a request.
        `template_name` is what the error calls its chat template."""
        if use is None:
            return
        if self._template is not None and not self._template.takes_tools:
            message = f"the chat template {template_name} takes no tools; see --chat-template"
            raise refusal("unsupported_parameter", message, "tools")
        if not self.has_tools:
            message = f"tool calls are not parsed ({self.tools.why}); see --tool-call-parser"
            raise refusal("unsupported_parameter", message, "tools")
        if self._call_form is None and (use.mode == "required" or use.has_strict):
            message = f"the parser {self.tools.name} has no grammar of calls"
            raise refusal("unsupported_parameter", message, "tool_choice")

    def require_continuing(self) -> None:
        """Raises RequestError unless an answer can go on with a message that was begun."""
        if self._reasoning is not None and not self._reasoning.can_continue:
            message = f"messages of the format {self.reasoning.name} cannot be continued"
            raise refusal("unsupported_parameter", message, "messages")

    def keep_special(self, tools: ToolUse | None, *, reasoning: bool = True) -> list[int]:
        """The special tokens that the parsers of an answer must see."""
        kept = set(self._reasoning_ids if reasoning else ())
        if tools is not None:
            kept.update(self._tool_ids)
        return sorted(kept)

    def constraint(
        self,
        prompt: ChatPrompt,
        use: ToolUse | None,
        given: Constraint | None,
        *,
        ignore_eos: bool = False,
    ) -> Constraint | None:
        """What the answer to a prompt must look like: `given` is what the request says beside its
        tools. With both the answer is one of them, with tools that must be called it is calls.
        Reasoning comes before, also where it is left in the content. Raises RequestError, also
        where the sampling parameter `ignore_eos` contradicts the tools."""
        family = self._reasoning
        start = self._start(prompt)
        opening = "" if family is None else family.final
        if use is not None and (given is not None or use.mode != "auto" or use.has_strict):
            if ignore_eos:
                message = "ignore_eos cannot go with calls that say where the answer ends"
                raise refusal("invalid_combination", message, "ignore_eos")
            given = Constraint(kind="lark", text=self._calls(use, given, opening), param="tools")
            opening = ""  # is in the text
        if given is None or family is None or start == "content":
            return given
        answer = AnswerGrammar(family.markers, self._special_id)
        return msgspec.structs.replace(given, before=answer.behind(family, start, opening))

    def _start(self, prompt: ChatPrompt) -> Start:
        """What the answer to a prompt begins with."""
        if self._reasoning is None:
            return "content"
        if prompt.final:
            return "reasoning" if self._reasoning.begun(prompt.final).in_reasoning else "content"
        return self._reasoning.start(prompt.end)

    def _calls(self, use: ToolUse, given: Constraint | None, final: str) -> str:
        """The grammar of calls, or of an answer that follows `given` behind the text `final`."""
        assert self._call_form is not None
        assert self._tool_parser is not None
        markers = self._tool_parser.markers
        grammar = ToolGrammar(form=self._call_form, markers=markers, special_id=self._special_id)
        schema = None if given is None else _schema_of(given)
        if given is not None and use.mode == "auto":
            return grammar.required(use, schema=schema, final=final)
        return grammar.required(use) if use.mode == "required" else grammar.strict(use)

    def budgeted(
        self, given: Constraint | None, prompt: ChatPrompt, tokens: int, *, param: str
    ) -> Constraint | None:
        """`given`, and reasoning of at most so many tokens, as the field `param` says; what the
        answer to a prompt must look like."""
        family = self._reasoning
        if family is None or self._tokenizer is None or self._start(prompt) == "content":
            return given
        budget = ReasoningBudget(
            tokens=tokens,
            family=self.reasoning.name,
            prompt_end=family.opening if prompt.final else prompt.end,
            closing=self._tokenizer.encode(family.closing_text, add_special_tokens=False),
        )
        return msgspec.structs.replace(given or Constraint("any", param=param), budget=budget)

    def _special_ids(self, markers: Iterable[str]) -> list[int]:
        ids = [self._special_id(marker) for marker in markers]
        return [token for token in ids if token is not None]

    def _special_id(self, text: str) -> int | None:
        """The id of a special token; None if `text` is none."""
        tokenizer = self._tokenizer
        token = None if tokenizer is None else tokenizer.token_to_id(text)
        if tokenizer is None or token not in tokenizer.special_ids:
            return None
        return token

    def parser(
        self,
        prompt: ChatPrompt,
        tools: ToolUse | None,
        *,
        reasoning: bool = True,
        shows_reasoning: bool = True,
    ) -> AnswerParser | None:
        """A parser for one answer to a prompt; None where there is nothing to be found. Not
        `reasoning`: it is left in the content."""
        reasoning_parser = None
        if self._reasoning is not None and reasoning:
            family = self._reasoning
            final = prompt.final
            reasoning_parser = family.begun(final) if final else family.parser(prompt.end)
        tool_parser = None
        if self._tool_parser is not None and tools is not None:
            tool_parser = self._tool_parser(tools.schemas)
        if reasoning_parser is None and tool_parser is None:
            return None
        is_call = tools is not None and tools.mode == "required"
        return AnswerParser(
            reasoning_parser,
            tool_parser,
            is_parallel=tools is None or tools.is_parallel,
            shows_reasoning=shows_reasoning,
            shows_content=not is_call or (self.has_reasoning and not reasoning),
            num_begun=len(prompt.final),
        )


def find_format(args: ServerArgs, tokenizer: Tokenizer | None) -> AnswerFormat:
    """The format that the settings name or, where they say `auto`, that the chat template shows.
    Raises ConfigError."""
    template = None if tokenizer is None else tokenizer.chat_template
    source = None if template is None else template.text
    return AnswerFormat(
        tools=_choose(args.tool_call_parser, _TOOL_SIGNS, source),
        reasoning=_choose(args.reasoning_parser, _REASONING_SIGNS, source),
        tokenizer=tokenizer,
    )


def check_format_names(args: ServerArgs) -> None:
    """Raises ConfigError unless the settings name parsers that there are. Loads none."""
    for flag, name, known in (
        ("--tool-call-parser", args.tool_call_parser, tool_parsers.names()),
        ("--reasoning-parser", args.reasoning_parser, list(reasoning_families)),
    ):
        if name not in (AUTO, NONE, *known):
            names = ", ".join((AUTO, NONE, *known))
            raise ConfigError(f"{flag} must be one of {names}, got {name!r}")


def _choose(name: str, signs: Iterable[tuple[str, tuple[str, ...]]], source: str | None) -> Choice:
    if name != AUTO:
        return Choice(name, "as the flag says")
    if source is None:
        return Choice(NONE, "there is no chat template")
    for family, words in signs:
        if all(word in source for word in words):
            return Choice(family, f"the chat template has {' and '.join(words)}")
    return Choice(NONE, "the chat template shows no known format")


def _schema_of(given: Constraint) -> Any:
    """The schema of a constraint that an answer may follow instead of calling tools."""
    if given.kind == "json_object":
        return {"type": "object"}
    if given.kind != "json_schema":
        message = f"{given.param} cannot go with tools; a JSON Schema can"
        raise refusal("invalid_combination", message, given.param)
    try:
        return msgspec.json.decode(given.text)
    except msgspec.DecodeError as error:
        raise refusal("invalid_schema", f"not valid JSON: {error}", given.param) from None
