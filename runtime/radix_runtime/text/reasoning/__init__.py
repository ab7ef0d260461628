"""Families of models by how they write reasoning."""

from dataclasses import dataclass
from typing import Protocol

from ..machine import Event
from .harmony import HarmonyParser
from .think import SPACE, Start, ThinkParser


class ReasoningParser(Protocol):
    """A Parser of text that begins with reasoning. `reasoning_end`: how many characters lie before
    the end of the reasoning; 0 if none has ended."""

    reasoning_end: int

    @property
    def in_reasoning(self) -> bool:
        """Whether the text so far ends in reasoning."""

    @property
    def is_done(self) -> bool:
        """Whether no reasoning can follow."""

    def push(self, text: str) -> list[Event]:
        """See Parser."""

    def finish(self) -> list[Event]:
        """See Parser."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFamily:
    """How a family writes reasoning: between `opening`, before which the regex `space` may match,
    and `closing`; `answer` is what the closing is followed by, `final` what begins an answer that
    calls no tools, with reasoning before it or not. `closing_text` closes open reasoning and begins
    the answer. `is_assumed`: an answer begins with reasoning even where nobody has written the
    opening. `markers` are texts that may be special tokens and must not be hidden from the parser.
    `can_continue`: a parser can begin within the content of a message.
    """

    space: str = SPACE
    opening: str = "<think>"
    closing: str = "</think>"
    answer: str = ""
    final: str = ""
    closing_text: str = "\n</think>\n\n"
    is_assumed: bool = False
    markers: tuple[str, ...] = ("<think>", "</think>")
    can_continue: bool = True

    def begun(self, content: str) -> ReasoningParser:
        """A parser for an answer that goes on with a message of this content."""
        parser = ThinkParser("optional")
        parser.push(content)
        return parser

    def start(self, prompt: str) -> Start:
        """What an answer to a prompt, of which the end is enough, begins with."""
        end = prompt.rstrip()
        if end.endswith(self.closing):
            return "content"
        if self.is_assumed or end.endswith(self.opening):
            return "reasoning"
        return "optional"

    def parser(self, prompt: str) -> ReasoningParser:
        """A parser for the answer to a prompt."""
        return ThinkParser(self.start(prompt))


class _Harmony(ReasoningFamily):
    """gpt-oss: the channel analysis."""

    def parser(self, prompt: str) -> ReasoningParser:
        """A parser for the answer to a prompt."""
        return HarmonyParser()


reasoning_families = {
    "deepseek-r1": ReasoningFamily(is_assumed=True),
    "qwen3": ReasoningFamily(),
    "glm45": ReasoningFamily(),
    "minimax": ReasoningFamily(is_assumed=True),
    "gpt-oss": _Harmony(
        space="",
        opening="<|channel|>analysis<|message|>",
        closing="<|end|>",
        answer="<|start|>assistant",
        final="<|channel|>final<|message|>",
        closing_text="<|end|><|start|>assistant<|channel|>final<|message|>",
        markers=("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"),
        can_continue=False,
    ),
}
