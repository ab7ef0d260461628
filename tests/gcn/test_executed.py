"""The table of what ran on the executor."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gcn import executed


def run_of(target: str, names: dict[str, tuple[int, float]], group: str = "op") -> dict[str, Any]:
    return {
        "target": target,
        "group": group,
        "names": names,
        "launches": 1234,
        "kernels": 7,
        "instructions": 5_600_000,
        "unknown": 0,
    }


def test_a_row_an_op_two_columns_a_chip() -> None:
    text = executed.table(
        [
            run_of("gfx950", {"rope": (3, 0.25), "norm": (1200, 2.04)}),
            run_of("gfx942", {"norm": (10, 1.0)}),
            run_of("gfx942", {"_decode": (2, 0.5)}, group="kernel of Triton"),
        ]
    )
    lines = text.splitlines()
    assert "| op | gfx942: cases | CPU s | gfx950: cases | CPU s |" in lines
    assert "| `norm` | 10 | 1.0 | 1,200 | 2.0 |" in lines
    assert "| `rope` | | | 3 | 0.2 |" in lines
    assert "| all | 10 | 1.0 | 1,203 | 2.3 |" in lines
    assert "| `_decode` | 2 | 0.5 |" in lines
    assert "gfx942: 1,234 launches of 7 kernels, 6 million wave instructions, 0 unknown." in text


def test_the_table_is_put_between_its_marks() -> None:
    document = f"before\n{executed.BEGIN}old\n{executed.END}after\n"
    once = executed.put_into(document, "new\n")
    assert once == f"before\n{executed.BEGIN}\nnew\n\n{executed.END}after\n"
    assert executed.put_into(once, "new\n") == once
    with pytest.raises(ValueError, match="no place"):
        executed.put_into("nothing here\n", "new\n")
    assert executed.BEGIN in executed.DOCUMENT.read_text()


def test_a_call_that_raises_is_no_case(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = executed._calls.copy()
    monkeypatch.setattr(executed, "_calls", counts)
    with executed.counted("a"):
        pass
    with pytest.raises(RuntimeError), executed.counted("a"):
        raise RuntimeError
    assert counts["a"] == 1
