"""The grammar backends by name. Imports their libraries: for the grammar processes alone."""

from ..registry import Registry
from .backend import GrammarBackend
from .llguidance_backend import LlguidanceBackend

grammar_backends: Registry[type[GrammarBackend]] = Registry(
    "grammar backend", "radix.grammar_backends", items={"llguidance": LlguidanceBackend}
)
