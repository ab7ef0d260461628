"""KV pools without a model."""

from __future__ import annotations

import itertools
import random

import numpy as np
import torch

from radix_runtime.batch import ForwardBatch
from radix_runtime.device import Device
from radix_runtime.memory.kv_layout import KvLayout, KvPart
from radix_runtime.memory.kv_pool import KVPool
from radix_runtime.step_plan import StepPlan

CPU = Device.resolve("cpu")


def gqa_layout(
    *, num_layers: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> KvLayout:
    """Keys and values of one shape in every layer."""
    parts = tuple(
        KvPart(name=name, shape=(num_kv_heads, head_dim), dtype=dtype) for name in ("k", "v")
    )
    return KvLayout(page_size=page_size, query_dtype=dtype, layers=(parts,) * num_layers)


def gqa_pool(
    device: Device,
    *,
    num_layers: int,
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
) -> KVPool:
    """A pool of them."""
    layout = gqa_layout(
        num_layers=num_layers,
        page_size=page_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
    )
    return KVPool(layout, num_pages=num_pages, device=device)


def random_batch(lengths: list[tuple[int, int]], layout: KvLayout) -> ForwardBatch:
    """A batch of (query tokens, KV tokens) over random pages of random numbers; rows of one query
    token that come first decode. Every slot that belongs to no row is NaN."""
    pool = KVPool(layout, num_pages=400, device=CPU)
    page_size = layout.page_size
    batch = ForwardBatch(CPU, pool, max_tokens=200, max_batch=8, max_rows=8, max_context=128)
    free = random.Random(7).sample(range(400), 400)
    deltas = []
    for row, (_, kv) in enumerate(lengths):
        deltas += [(row, i, free.pop()) for i in range(-(-kv // page_size))]
    query = np.array([q for q, _ in lengths], np.int32)
    columns = np.array(deltas, np.int32).T
    num_decode = len(list(itertools.takewhile(lambda entry: entry[0] == 1, lengths)))
    plan = StepPlan(
        step_id=0,
        num_decode=num_decode,
        rows=np.arange(len(lengths), dtype=np.int32),
        query_len=query,
        kv_len=np.array([kv for _, kv in lengths], np.int32),
        num_samples=np.ones(len(lengths), np.int32),
        input_ids=np.zeros(query[num_decode:].sum(), np.int32),
        page_rows=columns[0],
        page_index=columns[1],
        page_ids=columns[2],
    )
    committed = torch.zeros(10, dtype=torch.int32)
    committed[: len(lengths)] = torch.from_numpy(plan.kv_len - query)
    batch.upload(plan)
    batch.fill(torch.zeros((10, 1), dtype=torch.int32), committed)
    generator = torch.Generator().manual_seed(3)
    for cache in pool.tensors():
        cache.fill_(float("nan"))
        for row, (_, kv) in enumerate(lengths):
            for t in range(kv):
                page = int(batch.page_table[row, t // page_size])
                value = torch.randn(cache.shape[2:], generator=generator)
                cache[page, t % page_size] = value.to(cache.dtype)
    return batch
