"""I13: what the fake engine's memory holds is what the tree says."""

from __future__ import annotations

import numpy as np

from radix_runtime.cache_spec import WindowPagesSpec
from radix_runtime.memory.radix_cache import RadixCache
from tests.runtime.fake_engine import FakeEngine
from tests.runtime.fake_model import START_STATE, kv_of, token_hashes


def check_content(engine: FakeEngine, cache: RadixCache) -> None:
    """I13: everything that the tree holds is of its tokens: KV on the device and on the host, pages
    of the window, snapshots."""
    if engine.host_pages:
        engine.run_until(engine.last_step)  # the tree is ahead of copies in flight
    stack = [(node, np.zeros(0, np.int32)) for node in cache.root.children.values()]
    while stack:
        node, before = stack.pop()
        ids = np.concatenate([before, node.key])
        kv = engine.kv.reshape(-1, engine.page_size)
        pages = engine.host_kv[node.pages] if node.on_host else kv[node.pages]
        wanted = kv_of(ids)[len(before) :]
        assert np.array_equal(pages.reshape(-1), wanted), "I13: wrong KV in tree"
        _check_handles(engine, node.handles, ids, len(before))
        stack += [(child, ids) for child in node.children.values()]


def _check_handles(
    engine: FakeEngine, handles: tuple[np.ndarray, ...], ids: np.ndarray, start: int
) -> None:
    size = engine.page_size
    for spec, own in zip(engine.cache_groups[1:], handles, strict=True):
        for page, handle in enumerate(own.tolist()):
            end = start + (page + 1) * size
            if handle < 0:
                continue
            if isinstance(spec, WindowPagesSpec):
                content = engine.window_kv[handle * size : (handle + 1) * size]
                wanted = token_hashes(ids[end - size : end], end - size)
                assert np.array_equal(content, wanted), "I13: wrong window page in tree"
            else:
                state = engine.model.advance(START_STATE, token_hashes(ids[:end], 0))
                assert engine.snapshots[handle] == state, "I13: wrong snapshot in tree"
