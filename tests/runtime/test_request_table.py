from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radix_runtime.errors import InvariantViolation
from radix_runtime.memory.request_table import RequestTable


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


changes = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 3), st.booleans()), max_size=40
)


@given(changes)
def test_a_mirror_that_follows_the_changes_is_equal(
    script: list[tuple[int, int, int, bool]],
) -> None:
    table = RequestTable(4, 8)
    for _ in range(4):
        table.alloc()
    mirror = np.full((4, 8), -1, np.int32)
    fresh = iter(range(10_000))
    seen: set[tuple[int, int]] = set()
    for row, index, n, send in script:
        if any((row, i) in seen for i in range(index, index + n)):
            continue  # between two plans an entry changes once
        seen |= {(row, i) for i in range(index, index + n)}
        table.assign(row, index, i32(*(next(fresh) for _ in range(n))))
        if send:
            rows, indices, pages = table.take_changes()
            assert rows.dtype == np.int32
            mirror[rows, indices] = pages
            seen.clear()
    rows, indices, pages = table.take_changes()
    mirror[rows, indices] = pages
    for row in range(4):
        np.testing.assert_array_equal(mirror[row], table.pages(row, 8))
    assert table.take_changes().shape == (3, 0)


def test_changes_of_a_row_given_back_are_not_sent() -> None:
    table = RequestTable(2, 4)
    a, b = table.alloc(), table.alloc()
    table.assign(a, 0, i32(7, 8))
    table.assign(b, 1, i32(9))
    table.free(a)
    assert table.alloc() == a
    table.assign(a, 0, i32(5))
    rows, indices, pages = table.take_changes().tolist()
    assert (rows, indices, pages) == ([b, a], [1, 0], [9, 5])


def test_rows_are_unique_and_a_row_freed_twice_is_refused() -> None:
    table = RequestTable(3, 1)
    assert sorted(table.alloc() for _ in range(3)) == [0, 1, 2]
    assert table.free_rows == []
    table.free(1)
    with pytest.raises(InvariantViolation, match="I5: .*freed twice"):
        table.free(1)
