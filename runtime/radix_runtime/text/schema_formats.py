"""The formats of draft 2020-12: what a grammar backend checks, what patterns check, the rest."""

# A format that is not of the draft is an annotation, as all formats may be; one that is has a
# meaning which clients rely on.

# Of llguidance. `unknown` accepts everything.
CHECKED = frozenset(
    {
        "duration", "email", "hostname", "ipv4", "ipv6", "unknown", "uri", "uuid",
    }
)  # fmt: skip
UNCHECKED = frozenset({"idn-email", "idn-hostname", "regex", "uri-template"})

_WIDE = "\\u00A0-\\uD7FF\\uF900-\\uFDCF\\uFDF0-\\uFFEF"  # of IRIs beyond URIs


def _reference(more: str, scheme: str) -> str:
    """RFC 3986 (RFC 3987 with `more` characters): a URI, or a reference where `scheme` is "?"."""
    name = f"A-Za-z0-9._~!$&'()*+,;={more}\\-"
    plain = f"@{name}"
    quoted = "%[0-9A-Fa-f]{2}"
    char = f"(?:[{plain}:]|{quoted})"
    user = f"(?:(?:[{name}:]|{quoted})*@)?"
    authority = f"//{user}(?:[{name}]|{quoted})*(?::[0-9]*)?"
    if scheme == "?":
        first = f"(?:[{plain}]|{quoted})"  # no colon before the first slash
        rest = f"(?:/{char}*)*"
        relative = f"(?:{authority}{rest}|/(?:{char}+{rest})?|{first}+{rest}|)"
    absolute = f"[A-Za-z][A-Za-z0-9+.-]*:(?:{authority}(?:/{char}*)*|/?(?:{char}+(?:/{char}*)*)?)"
    body = f"(?:{absolute}|{relative})" if scheme == "?" else absolute
    tail = f"(?:[{plain}:/?]|{quoted})*"
    return f"^{body}(?:\\?{tail})?(?:#{tail})?$"


# RFC 3339, without year 0 and leap seconds: few readers of dates take either, and a pattern cannot
# say which minutes in which time zone may have one.
_LONG = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
_SHORT = "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
_FEBRUARY = "02-(?:0[1-9]|1[0-9]|2[0-8])"
_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_FOURTH = "0[48]|[2468][048]|[13579][26]"  # two digits of what four divides, but for 00
_LEAP_YEAR = f"(?:[0-9]{{2}}(?:{_FOURTH})|(?:{_FOURTH})00)"
_DATE = f"(?:{_YEAR}-(?:{_LONG}|{_SHORT}|{_FEBRUARY})|{_LEAP_YEAR}-02-29)"
_HOUR = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = f"{_HOUR}:[0-5][0-9](?:\\.[0-9]+)?(?:[Zz]|[+-]{_HOUR})"

_POINTER = "(?:/(?:[^~/]|~[01])*)*"
PATTERNS = {
    "date": f"^{_DATE}$",
    "date-time": f"^{_DATE}[Tt]{_TIME}$",
    "time": f"^{_TIME}$",
    "iri": _reference(_WIDE, ""),
    "iri-reference": _reference(_WIDE, "?"),
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": f"^(?:0|[1-9][0-9]*)(?:#|{_POINTER})$",
    "uri-reference": _reference("", "?"),
}
