"""The recorded answers of the demo model are those of its weights."""

from __future__ import annotations

from tests.runtime.demo_tokens import answers, differences, load


def test_the_recording_is_current():
    rows = load()[::12]
    found = answers([row["prompt"] for row in rows], dtype="float32", num_threads=1)
    assert not differences(rows, found)


def test_a_difference_is_found():
    rows = load()[:2]
    changed = [{**rows[0], "tokens": [*rows[0]["tokens"][:-1], -1]}, rows[1]]
    (text,) = differences(rows, changed)
    assert text.startswith(f"prompt 0 parts at token {len(rows[0]['tokens']) - 1}")
    shorter = [{**rows[0], "tokens": rows[0]["tokens"][:-1]}, rows[1]]
    assert differences(rows, shorter)[0].endswith("inf")
