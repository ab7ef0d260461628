"""Constraint: what an answer must look like, and the fields by which callers say so."""

import hashlib
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import msgspec

from .errors import refusal
from .sampling_params import SamplingParams

ConstraintKind = Literal[
    "json_schema", "json_object", "regex", "choice", "ebnf", "lark", "structural_tag", "any"
]

_encode = msgspec.msgpack.Encoder(order="deterministic").encode


class ReasoningBudget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Reasoning that is still open behind `tokens` tokens of an answer is closed there: the ids
    `closing` follow. `family` is the name of its ReasoningFamily, `prompt_end` what the answer's
    prompt ends with."""

    tokens: int
    family: str
    prompt_end: str
    closing: list[int]


class Constraint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A grammar that the text of an answer follows from its first token to its end.

    `text` is, by `kind`: the JSON Schema; nothing; the regular expression; a JSON array of strings;
    a grammar in GBNF or Lark; a grammar in Lark with llguidance's extensions; the JSON object of a
    structural tag; nothing: any tokens. `whitespace` is the regular expression of what may stand
    between the tokens of JSON; "": nothing, None: as the server has it. `before` is a grammar in
    Lark of the whole answer, in which `@body` stands for this one, as behind reasoning; "": this
    one is the whole. `budget` is that of the reasoning. `param` is the dotted path of the field
    that gave it, for errors."""

    kind: ConstraintKind
    text: str = ""
    whitespace: str | None = None
    before: str = ""
    budget: ReasoningBudget | None = None
    param: str | None = None

    @property
    def key(self) -> bytes:
        """32 bytes that only constraints share which have the same grammar."""
        grammar = msgspec.structs.replace(self, param=None, budget=None)
        return hashlib.sha256(_encode(grammar)).digest()


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`structured_outputs`, as vLLM has it: one constraint, and the whitespace of its JSON."""

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None

    def constraints(self, path: str = "structured_outputs") -> Iterator[Constraint]:
        """Every constraint that is set. Raises RequestError if there is none."""
        given = {
            "json": self.json,
            "regex": self.regex,
            "choice": self.choice,
            "grammar": self.grammar,
            "json_object": self.json_object or None,
            "structural_tag": self.structural_tag,
        }
        whitespace = "" if self.disable_any_whitespace else self.whitespace_pattern
        found = False
        for name, value in given.items():
            if value is not None:
                found = True
                text = "" if name == "json_object" else _text(value)
                kind = _VLLM_KINDS[name]
                yield Constraint(kind, text, whitespace=whitespace, param=f"{path}.{name}")
        if not found:
            raise refusal("missing_field", f"{path} sets no constraint", path)


_VLLM_KINDS: dict[str, ConstraintKind] = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "ebnf",
    "json_object": "json_object",
    "structural_tag": "structural_tag",
}
_SGLANG_KINDS: tuple[ConstraintKind, ...] = ("json_schema", "regex", "ebnf", "structural_tag")


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`response_format.json_schema`. `strict` changes nothing: every schema is kept."""

    schema: Any = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`response_format` of the OpenAI routes; of a structural tag either `structures` and
    `triggers`, or `format`."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    structures: list[Any] | None = None
    triggers: list[str] | None = None
    format: Any = None

    def constraints(self, path: str = "response_format") -> Iterator[Constraint]:
        """The constraint; none for `text`. Raises RequestError."""
        if self.type == "json_object":
            yield Constraint("json_object", param=path)
        elif self.type == "json_schema":
            inner = f"{path}.json_schema"
            if self.json_schema is None:
                raise refusal("missing_field", f"{inner} is required", inner)
            if self.json_schema.schema is None:
                raise refusal("missing_field", f"{inner}.schema is required", f"{inner}.schema")
            text = _text(self.json_schema.schema)
            yield Constraint("json_schema", text, param=f"{inner}.schema")
        elif self.type == "structural_tag":
            parts = {"structures": self.structures, "triggers": self.triggers}
            tag = {name: part for name, part in parts.items() if part is not None}
            if self.format is not None:
                tag["format"] = self.format
            yield Constraint("structural_tag", _text(tag), param=path)


class ConstrainedParams(SamplingParams, kw_only=True):
    """SamplingParams and what the answer must look like, by SGLang's names and by vLLM's: one of
    them at most. A JSON Schema and a structural tag are objects, or their JSON as a text.

    `path`: what errors put before the name of a field."""

    path: ClassVar[str] = ""
    json_schema: Any = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: Any = None
    structured_outputs: StructuredOutputs | None = None

    def sampling(self) -> SamplingParams:
        """The sampling parameters alone."""
        fields = SamplingParams.__struct_fields__
        return SamplingParams(**{name: getattr(self, name) for name in fields})

    def constraints(self) -> Iterator[Constraint]:
        """Every constraint that is set. Raises RequestError."""
        for kind in _SGLANG_KINDS:
            value = getattr(self, kind)
            if value is not None:
                yield Constraint(kind, _text(value), param=f"{self.path}{kind}")
        if self.structured_outputs is not None:
            yield from self.structured_outputs.constraints(f"{self.path}structured_outputs")

    def constraint(self) -> Constraint | None:
        """The constraint, if there is one. Raises RequestError: two of them, or one beside what
        cannot go with it."""
        given = list(self.constraints())
        if not given:
            return None
        if len(given) > 1:
            names = " and ".join(str(one.param) for one in given)
            text = f"an answer follows one constraint; {names} were given"
            raise refusal("invalid_combination", text, given[1].param)
        if self.ignore_eos:
            text = f"ignore_eos cannot go with {given[0].param}, which says where the answer ends"
            raise refusal("invalid_combination", text, f"{self.path}ignore_eos")
        return given[0]


def _text(value: Any) -> str:
    """`value` as JSON; a string stays as it is."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
