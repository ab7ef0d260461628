"""What may have been meant by a name that there is not."""

from __future__ import annotations

from radix_runtime.suggestions import did_you_mean

KNOWN = ("temperature", "top_p", "max_new_tokens")


def test_the_nearest_name_is_suggested() -> None:
    assert did_you_mean("temprature", KNOWN) == "; did you mean temperature?"
    assert did_you_mean("topp", KNOWN, "--") == "; did you mean --top_p?"
    assert did_you_mean("heat", KNOWN) == ""
    assert did_you_mean("", KNOWN) == ""
