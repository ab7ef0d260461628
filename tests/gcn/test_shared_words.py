"""Memory in which other GPUs are at work while the executor reads it."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tests.gcn.assembly import LANES, run
from tests.gcn.marks import needs_executor

pytestmark = [
    pytest.mark.builds(),
    needs_executor,
]

READ_PAIRS = """
  v_lshlrev_b32_e32 v1, 3, v0
  v_mov_b32_e32 v5, 0
  s_mov_b32 s8, 100000
1:
  global_load_dwordx2 v[2:3], v1, s[6:7]
  s_waitcnt vmcnt(0)
  v_xor_b32_e32 v4, v2, v3
  v_or_b32_e32 v5, v5, v4
  s_sub_u32 s8, s8, 1
  s_cmp_lg_u32 s8, 0
  s_cbranch_scc1 1b
  global_store_dword v63, v5, s[4:5]
"""


def test_words_of_64_bits_are_read_whole():
    """While another thread, as another GPU, writes them."""
    pairs = np.zeros(LANES, np.uint64)
    mixed = np.zeros(LANES, np.uint32)
    done = threading.Event()

    def write() -> None:
        while not done.is_set():
            pairs.fill(0xFFFFFFFFFFFFFFFF)
            pairs.fill(0)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        run(READ_PAIRS, pairs, mixed)
    finally:
        done.set()
        writer.join()
    assert not mixed.any()
