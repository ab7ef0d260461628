"""The formats of draft 2020-12: what a grammar backend checks, what patterns check, the rest."""

# A format that is not of the draft is an annotation, as all formats may be; one that is has a
# meaning which clients rely on.

# Of llguidance. `unknown` accepts everything.
CHECKED = frozenset(
    {
        "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown",
        "uri", "uuid",
    }
)  # fmt: skip
UNCHECKED = frozenset({"idn-email", "idn-hostname", "regex", "uri-template"})

_WIDE = "\\u00A0-\\uD7FF\\uF900-\\uFDCF\\uFDF0-\\uFFEF"  # of IRIs beyond URIs


def _reference(more: str, scheme: str) -> str:
    """RFC 3986 (RFC 3987 with `more` characters): a URI, or a reference where `scheme` is "?"."""
    plain = f"A-Za-z0-9._~!$&'()*+,;=@{more}\\-"
    quoted = "%[0-9A-Fa-f]{2}"
    char = f"(?:[{plain}:]|{quoted})"
    authority = f"//(?:[{plain}:]|{quoted})*"
    if scheme == "?":
        first = f"(?:[{plain}]|{quoted})"  # no colon before the first slash
        rest = f"(?:/{char}*)*"
        relative = f"(?:{authority}{rest}|/(?:{char}+{rest})?|{first}+{rest}|)"
    absolute = f"[A-Za-z][A-Za-z0-9+.-]*:(?:{authority}(?:/{char}*)*|/?(?:{char}+(?:/{char}*)*)?)"
    body = f"(?:{absolute}|{relative})" if scheme == "?" else absolute
    tail = f"(?:[{plain}:/?]|{quoted})*"
    return f"^{body}(?:\\?{tail})?(?:#{tail})?$"


_POINTER = "(?:/(?:[^~/]|~[01])*)*"
PATTERNS = {
    "iri": _reference(_WIDE, ""),
    "iri-reference": _reference(_WIDE, "?"),
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": f"^(?:0|[1-9][0-9]*)(?:#|{_POINTER})$",
    "uri-reference": _reference("", "?"),
}
