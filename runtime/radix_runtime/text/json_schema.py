"""JSON Schemas in the words that grammars have: a schema is rewritten exactly, or refused."""

# A grammar backend knows a part of draft 2020-12 and refuses the rest. Much of the rest can be said
# in that part: an `if` is a choice of two, a `not` of simple things can be turned round
# (schema_negation.py), `oneOf` of branches that exclude each other is `anyOf`
# (schema_exclusion.py). Nothing here makes a schema accept more than it did.

from collections.abc import Callable
from typing import Any, NamedTuple

from ..errors import RequestError, refusal
from .schema_exclusion import are_disjoint
from .schema_formats import CHECKED, PATTERNS, UNCHECKED
from .schema_negation import absent, conjunction, disjunction, negation
from .schema_patterns import safe_pattern
from .schema_walk import Schema, children, nodes, place, resolve

MAX_DEPTH = 64
MAX_NODES = 2_000
MAX_PROPERTIES = 1_000
MAX_ENUM = 10_000
MAX_ONE_OF = 16  # branches that may have to be told apart by negation
MAX_PATTERN = 16_384  # characters
MAX_WARNINGS = 10

# Keywords that apply other schemas to the same instance.
_IN_PLACE = ("$ref", "allOf", "anyOf", "oneOf", "if", "not", "dependentSchemas", "dependencies")
_CONTENT = ("contentEncoding", "contentMediaType", "contentSchema")

# What may be refused, and why.
REFUSALS = {
    "$dynamicRef": "references are static",
    "$recursiveRef": "references are static",
    "contains": "items cannot be counted by what they are",
    "dependentSchemas": "a schema in it is no object",
    "format": "texts of this format have no grammar",
    "if": "it cannot be negated exactly",
    "not": "it cannot be turned round exactly",
    "oneOf": "its branches cannot be told apart exactly",
    "pattern": "a class of it cannot be told in JSON",
    "propertyNames": "names follow a pattern, an enum or a length",
    "unevaluatedItems": "it stands beside keywords that apply other schemas",
    "unevaluatedProperties": "it stands beside keywords that apply other schemas",
    "uniqueItems": "items cannot be compared with each other",
}


class NormalSchema(NamedTuple):
    """A schema that means the same, and warnings about what was left out."""

    schema: dict[str, Any]
    warnings: list[str]


def normalise(schema: Any) -> NormalSchema:
    """`schema` in the keywords that grammars have. Raises RequestError 400: `invalid_schema`, or
    `unsupported_schema` for what cannot be kept, with the JSON Pointer of the place."""
    if not isinstance(schema, dict):
        raise refusal("invalid_schema", "a JSON Schema is an object")
    _check(schema)
    rewriter = _Rewriter(schema)
    return NormalSchema(rewriter.rewrite(schema, ""), rewriter.warnings)


def _check(schema: dict[str, Any]) -> None:
    """Raises RequestError `invalid_schema` for more than anybody needs, and for references that
    lead nowhere."""
    counts = {"schemas": 0, "properties": 0, "values in enum": 0}
    most = {"schemas": MAX_NODES, "properties": MAX_PROPERTIES, "values in enum": MAX_ENUM}
    names: set[str] = set()
    references = []
    for node, pointer in nodes(schema):
        counts["schemas"] += 1
        counts["properties"] += _length(node.get("properties"), dict)
        counts["values in enum"] += _length(node.get("enum"), list)
        for what, count in counts.items():
            if count > most[what]:
                raise refusal("invalid_schema", f"more than {most[what]} {what}", pointer[:500])
        if pointer.count("/") > 2 * MAX_DEPTH:  # a level is a keyword and a name
            raise refusal("invalid_schema", f"more than {MAX_DEPTH} levels", pointer[:500])
        names |= {node[key] for key in ("$id", "id") if isinstance(node.get(key), str)}
        if "$ref" in node:
            references.append((node, pointer))
    for node, pointer in references:
        problem = _reference_problem(node, schema, names)
        if problem is not None:
            raise refusal("invalid_schema", problem, place(pointer, "$ref"))


def _length(value: Any, kind: type[dict[str, Any]] | type[list[Any]]) -> int:
    return len(value) if isinstance(value, kind) else 0


def _reference_problem(node: dict[str, Any], schema: Any, names: set[str]) -> str | None:
    """Why a schema with a reference cannot be followed."""
    reference = node["$ref"]
    if not isinstance(reference, str):
        return "$ref is a string"
    if not reference.startswith("#"):
        document = reference.partition("#")[0]
        if any(name.partition("#")[0].endswith(document) for name in names):
            return None
        return f"$ref leaves the document: {reference[:100]}"
    seen: set[int] = set()
    target: Any = node
    while isinstance(target, dict) and str(target.get("$ref", "")).startswith("#/"):
        if id(target) in seen:
            return "$ref leads to itself"
        seen.add(id(target))
        reference = target["$ref"]
        target = resolve(schema, reference)
        if target is None:
            return f"{reference[:100]} does not exist"
    return "$ref leads to itself" if node is schema and reference == "#" else None


class _Rewriter:
    """Rewrites the schemas of one document, innermost first."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.warnings: list[str] = []
        self._document = document
        # By keyword, in this order: what it becomes, beside the rest of its schema. None: nothing.
        self._rules: dict[str, Callable[[dict[str, Any], str], Schema | None]] = {
            "format": self._format,
            "if": self._if,
            "not": self._not,
            "oneOf": self._one_of,
            "dependencies": self._dependencies,
            "dependentRequired": self._dependencies,
            "dependentSchemas": self._dependencies,
            "propertyNames": self._property_names,
            "uniqueItems": self._unique_items,
            "contains": self._contains,
        }

    def rewrite(self, schema: dict[str, Any], pointer: str) -> dict[str, Any]:
        """A schema at this place."""
        node = self._rewrite_children(schema, pointer)
        node.pop("x-guidance", None)  # would speak to the backend
        for keyword in _CONTENT:
            if node.pop(keyword, None) is not None:
                self._warn(f"{place(pointer, keyword)} is not checked")
        for keyword in ("$dynamicRef", "$recursiveRef"):
            if keyword in node:
                raise _refused(keyword, pointer)
        self._unevaluated(node, pointer)
        self._patterns(node, pointer)
        parts: list[Schema] = []
        for keyword in self._rules.keys() & node.keys():
            part = self._rules[keyword](node, pointer)
            if part is not None and part is not True:
                parts.append(part)
        for keyword in (*self._rules, "then", "else", "minContains", "maxContains"):
            node.pop(keyword, None)
        if "format" in schema and schema["format"] in CHECKED:
            node["format"] = schema["format"]
        if parts:
            own = node.get("allOf")
            node["allOf"] = [*own, *parts] if isinstance(own, list) else parts
        return node

    def _rewrite_children(self, schema: dict[str, Any], pointer: str) -> dict[str, Any]:
        node = dict(schema)
        for keyword, name, child in children(schema):
            if not isinstance(child, dict):
                continue
            rewritten = self.rewrite(child, place(pointer, keyword, name))
            if name is None:
                node[keyword] = rewritten
                continue
            if node[keyword] is schema[keyword]:
                node[keyword] = schema[keyword].copy()
            node[keyword][name] = rewritten
        return node

    def _patterns(self, node: dict[str, Any], pointer: str) -> None:
        pattern = node.get("pattern")
        if isinstance(pattern, str):
            node["pattern"] = _safe(pattern, place(pointer, "pattern"))
        named = node.get("patternProperties")
        if isinstance(named, dict):
            where = place(pointer, "patternProperties")
            node["patternProperties"] = {
                _safe(name, place(where, name)): child for name, child in named.items()
            }

    def _warn(self, text: str) -> None:
        if len(self.warnings) < MAX_WARNINGS:
            self.warnings.append(text)

    # Keywords -----------------------------------------------------------------------------

    def _format(self, node: dict[str, Any], pointer: str) -> Schema | None:
        name = node["format"]
        if not isinstance(name, str):
            raise refusal("invalid_schema", "format is a string", place(pointer, "format"))
        if name in UNCHECKED and "string" in _types(node):
            raise _refused("format", pointer)
        if name in PATTERNS:
            return {"pattern": PATTERNS[name]}
        if name not in CHECKED and name not in UNCHECKED:
            self._warn(f"{place(pointer, 'format')}: {name[:50]!r} is not checked")
        return None

    def _if(self, node: dict[str, Any], pointer: str) -> Schema | None:
        if "then" not in node and "else" not in node:
            return None
        condition = node["if"]
        opposite = negation(condition, self._document)
        if opposite is None:
            raise _refused("if", pointer)
        holds = conjunction([condition, node.get("then", True)])
        return disjunction([holds, conjunction([opposite, node.get("else", True)])])

    def _not(self, node: dict[str, Any], pointer: str) -> Schema:
        opposite = negation(node["not"], self._document, node.get("type"))
        if opposite is None:
            raise _refused("not", pointer)
        return opposite

    def _one_of(self, node: dict[str, Any], pointer: str) -> Schema:
        branches = node["oneOf"]
        if not isinstance(branches, list) or not branches:
            text = "oneOf is a list that is not empty"
            raise refusal("invalid_schema", text, place(pointer, "oneOf"))
        # What stands beside it holds in every branch, and may tell them apart.
        beside = {key: node[key] for key in ("type", "properties", "required") if key in node}
        exclusive = []
        for number, branch in enumerate(branches):
            known: Any = {"allOf": [branch, beside]} if beside else branch
            others: list[Schema] = []
            for other_number, other in enumerate(branches):
                if other_number == number or are_disjoint(known, other, self._document):
                    continue
                opposite = negation(other, self._document, node.get("type"))
                if opposite is None or len(branches) > MAX_ONE_OF:
                    raise _refused("oneOf", pointer)
                others.append(opposite)
            exclusive.append(conjunction([branch, *others]))
        return disjunction(exclusive)

    def _dependencies(self, node: dict[str, Any], pointer: str) -> Schema | None:
        parts: list[Schema] = []
        for keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
            dependencies = node.pop(keyword, {})
            if not isinstance(dependencies, dict):
                raise refusal("invalid_schema", f"{keyword} is an object", place(pointer, keyword))
            for name, needs in dependencies.items():
                demand: Schema = {"required": needs} if isinstance(needs, list) else needs
                present = conjunction([{"required": [name]}, demand])
                parts.append(disjunction([absent(name), present]))
        return conjunction(parts)

    def _property_names(self, node: dict[str, Any], pointer: str) -> Schema | None:
        names = node["propertyNames"]
        if names is True:
            return None
        if not isinstance(names, dict) or names.get("type", "string") != "string":
            raise _refused("propertyNames", pointer)
        rules = names.keys() - {"type", "title", "description", "$comment"}
        if not rules:
            return None
        if rules == {"pattern"}:
            pattern = _safe(
                str(names["pattern"]), place(place(pointer, "propertyNames"), "pattern")
            )
            return _only_named(pattern)
        if rules in ({"enum"}, {"const"}):
            allowed = names.get("enum", [names.get("const")])
            named = {name: True for name in allowed if isinstance(name, str)}
            return {"properties": named, "additionalProperties": False}
        if rules <= {"minLength", "maxLength"}:
            least = names.get("minLength", 0)
            return _only_named(f"^[\\s\\S]{{{least},{names.get('maxLength', '')}}}$")
        raise _refused("propertyNames", pointer)

    def _unique_items(self, node: dict[str, Any], pointer: str) -> None:
        most = node.get("maxItems")
        is_short = isinstance(most, int) and most <= 1
        if node["uniqueItems"] and not is_short and "array" in _types(node):
            raise _refused("uniqueItems", pointer)

    def _contains(self, node: dict[str, Any], pointer: str) -> None:
        is_void = node.get("minContains") == 0 and "maxContains" not in node
        if not is_void and "array" in _types(node):
            raise _refused("contains", pointer)

    def _unevaluated(self, node: dict[str, Any], pointer: str) -> None:
        """Without others that apply schemas in place these mean what `additionalProperties` and
        `items` do."""
        for keyword, plain in (
            ("unevaluatedProperties", "additionalProperties"),
            ("unevaluatedItems", "items"),
        ):
            if keyword not in node:
                continue
            value = node.pop(keyword)
            if plain in node or value in (True, {}):
                continue
            beside = any(other in node for other in _IN_PLACE)
            if beside or (plain == "items" and "contains" in node):
                raise _refused(keyword, pointer)
            node[plain] = value


def _refused(keyword: str, pointer: str) -> RequestError:
    text = f"{keyword} cannot be kept here: {REFUSALS[keyword]}"
    return refusal("unsupported_schema", text, place(pointer, keyword))


def _safe(pattern: str, pointer: str) -> str:
    """A pattern that keeps its characters in JSON. Raises RequestError."""
    if len(pattern) > MAX_PATTERN:
        text = f"a pattern has at most {MAX_PATTERN} characters"
        raise refusal("invalid_schema", text, pointer)
    safe = safe_pattern(pattern)
    if safe is None:
        text = f"pattern cannot be kept here: {REFUSALS['pattern']}"
        raise refusal("unsupported_schema", text, pointer)
    return safe


def _types(node: dict[str, Any]) -> list[Any]:
    """The types that a schema names; all that matter here if it names none."""
    named = node.get("type", ["array", "string"])
    return named if isinstance(named, list) else [named]


def _only_named(pattern: Any) -> Schema:
    """Objects whose names all match."""
    return {"patternProperties": {pattern: True}, "additionalProperties": False}
