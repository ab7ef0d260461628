"""`python -m bench.dispatch`: what a call of an op costs on the host, part by part.

Nanoseconds on tiny tensors, the fastest of ten rounds. `kernel` is the function of the native
binding: exchange of the tensors, checks of the arguments and the kernel itself; `choose` is how the
op finds it.
"""

from __future__ import annotations

import argparse
import timeit
from collections.abc import Callable

import torch

import radix_kernels as rk
from radix_kernels import _arrays, _dispatch

_ROUNDS = 10


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.dispatch", description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--calls", type=int, default=20_000, help="of a round")
    args = parser.parse_args()
    x = torch.randn(1, 64, device=args.device)
    weight = torch.ones(64, device=args.device)
    out = torch.empty_like(x)
    kernel = _dispatch.native("rmsnorm", x)
    if kernel is None:
        raise SystemExit(f"no kernel of rmsnorm for {args.device}")
    parts: dict[str, Callable[[], object]] = {
        "choose": lambda: _dispatch.native("rmsnorm", x),
        "dtype's name": lambda: _arrays.dtype_name(x),
        "kernel": lambda: kernel(x, weight, 1e-6, out),
        "rmsnorm into out": lambda: rk.rmsnorm(x, weight, out=out),
        "rmsnorm": lambda: rk.rmsnorm(x, weight),
        "torch.empty_like": lambda: torch.empty_like(x),
        "torch x + x": lambda: x + x,
    }
    for name, call in parts.items():
        call()
        seconds = min(timeit.repeat(call, number=args.calls, repeat=_ROUNDS)) / args.calls
        print(f"{name:18} {1e9 * seconds:8.0f} ns")


if __name__ == "__main__":
    main()
