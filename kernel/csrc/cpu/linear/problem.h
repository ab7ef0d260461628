// What every kernel of the family shares: the problem, how it is cut into tasks, and how sums leave the registers.
//
//   stage     x -> scratch in the form that the kernel reads, zero beyond k
//   tasks     (chunk of rows) x (group of packed blocks), the blocks innermost: a chunk of x stays in L2 while the
//             weights stream past it; with few rows there is one chunk and every weight is read once
//   epilogue  + bias, gate, + residual in float32, rounded once
#pragma once

#include <cstdlib>
#include <cstring>

#include "common/tensor.h"
#include "cpu/linear/layout.h"
#include "cpu/simd_math.h"
#include "cpu/thread_pool.h"
#include "radix_kernels/linear.h"

namespace radix::cpu::RK_ISA {

using linear_layout::kBlockN;
using linear_layout::round_up;

constexpr int64_t lesser(int64_t a, int64_t b) {
  return a < b ? a : b;
}
constexpr int64_t greater(int64_t a, int64_t b) {
  return a > b ? a : b;
}

// Grow-only, 64-byte aligned; the calling thread owns it until its op returns.
class Scratch {
 public:
  ~Scratch() { std::free(data_); }
  char* get(int64_t bytes) {
    if (bytes > capacity_) {
      std::free(data_);
      capacity_ = round_up(bytes, 64);
      data_ = std::aligned_alloc(64, capacity_);
      if (!data_) {
        capacity_ = 0;
        fail(RK_RUNTIME, "linear: out of host memory (%lld bytes of scratch)", (long long)bytes);
      }
    }
    return static_cast<char*>(data_);
  }

 private:
  void* data_ = nullptr;
  int64_t capacity_ = 0;
};

struct Problem {
  Rows x, out, residual;
  DType type;  // of x, residual and, unless out_f32, out
  bool has_residual, out_f32;
  int gate;  // RK_GATE_*
  const uint8_t* packed;
  const float* bias;  // [blocks of n][16], or NULL
  char* staged;       // what the kernel asked for
  int64_t m, n, k;
  int64_t blocks;       // packed blocks whose sums are outputs, or gates of outputs
  int64_t block_bytes;  // of a packed block
};

inline Problem make_problem(const rk_linear_args& a, int64_t block_bytes, int64_t staged_bytes) {
  static thread_local Scratch scratch;
  Problem p{Rows(*a.x), Rows(*a.out), Rows(), dtype_of(*a.x), a.residual != nullptr, dtype_of(*a.out) == DType::f32};
  if (a.residual) p.residual = Rows(*a.residual);
  p.gate = a.gate;
  p.packed = data_ptr<uint8_t>(*a.packed);
  p.m = p.x.count;
  p.n = a.desc->n;
  p.k = a.desc->k;
  p.blocks = linear_layout::num_blocks(p.gate == RK_GATE_HALVES ? p.n / 2 : p.n);
  p.block_bytes = block_bytes;
  const int64_t lanes = linear_layout::num_blocks(p.n) * kBlockN;
  staged_bytes = round_up(staged_bytes, 64);
  p.staged = scratch.get(staged_bytes + lanes * int64_t{sizeof(float)});
  if (a.bias) {
    float* bias = reinterpret_cast<float*>(p.staged + staged_bytes);
    std::memset(bias, 0, lanes * sizeof(float));
    dispatch_float(dtype_of(*a.bias), [&](auto type) {
      const auto* from = data_ptr<typename decltype(type)::type>(*a.bias);
      for (int64_t i = 0; i < p.n; i++) bias[i] = to_float(from[i]);
    });
    p.bias = bias;
  }
  return p;
}

// `count` outputs from column n of row m on: line + residual, rounded.
template <class T>
void store_outputs(const Problem& p, const float* line, int64_t m, int64_t n, int count) {
  constexpr int W = Vec::width;
  for (int i = 0; i < count; i += W) {
    const int left = count - i;
    Vec v = load(line + i);
    if (p.has_residual) {
      const T* residual = p.residual.at<T>(m) + n + i;
      v = v + (left >= W ? load(residual) : load(residual, left));
    }
    const auto put = [&](auto* out) { left >= W ? store(out, v) : store(out, v, left); };
    if (p.out_f32) {
      put(p.out.at<float>(m) + n + i);
    } else {
      put(p.out.at<T>(m) + n + i);
    }
  }
}

inline Vec silu_times(Vec gate, Vec up) {
  return gate / (set1(1.f) + exp(zero() - gate)) * up;
}

inline void add_bias(const Problem& p, float* line, int64_t block) {
  if (!p.bias) return;
  for (int i = 0; i < kBlockN; i += Vec::width) store(line + i, load(line + i) + load(p.bias + block * kBlockN + i));
}

// The sums of packed block `block` for row m (and of the block with the up rows, for RK_GATE_HALVES) -> outputs.
template <class T>
void finish_block(const Problem& p, const float* sums, const float* up_sums, int64_t m, int64_t block) {
  constexpr int W = Vec::width;
  alignas(64) float line[kBlockN], up[kBlockN];
  std::memcpy(line, sums, sizeof line);
  add_bias(p, line, block);
  if (p.gate == RK_GATE_NONE)
    return store_outputs<T>(p, line, m, block * kBlockN, static_cast<int>(lesser(kBlockN, p.n - block * kBlockN)));
  if (p.gate == RK_GATE_HALVES) {
    std::memcpy(up, up_sums, sizeof up);
    add_bias(p, up, block + p.blocks);
    for (int i = 0; i < kBlockN; i += W) store(line + i, silu_times(load(line + i), load(up + i)));
    return store_outputs<T>(p, line, m, block * kBlockN, kBlockN);
  }
  constexpr int kHalf = kBlockN / 2;
  alignas(64) float gate[kBlockN] = {};
  std::memset(up, 0, sizeof up);
  for (int i = 0; i < kHalf; i++) {
    gate[i] = line[2 * i];
    up[i] = line[2 * i + 1];
  }
  for (int i = 0; i < kHalf; i += W) store(line + i, silu_times(load(gate + i), load(up + i)));
  const int64_t first = block * kHalf;
  store_outputs<T>(p, line, m, first, static_cast<int>(lesser(kHalf, p.n / 2 - first)));
}

// sums: [rows][stride] with the 16 sums of block + b at 16 b.
inline void finish(const Problem& p, const float* sums, const float* up_sums, int64_t stride, int64_t m, int64_t rows,
                   int64_t block, int64_t count) {
  dispatch_float(p.type, [&](auto type) {
    using T = typename decltype(type)::type;
    const bool plain =
        !p.bias && !p.has_residual && !p.out_f32 && p.gate == RK_GATE_NONE && (block + count) * kBlockN <= p.n;
    for (int64_t r = 0; r < rows; r++) {
      const float* line = sums + r * stride;
      if (plain) {
        T* out = p.out.at<T>(m + r) + block * kBlockN;
        for (int64_t i = 0; i < count * kBlockN; i += Vec::width) store(out + i, load(line + i));
      } else {
        for (int64_t b = 0; b < count; b++)
          finish_block<T>(p, line + b * kBlockN, up_sums + r * stride + b * kBlockN, m + r, block + b);
      }
    }
  });
}

// Calls fn(first row, last row, first block, number of blocks) for each task. A thread gets neighbouring tasks, worth
// about 10 us or more, always the same ones for a shape.
template <class Fn>
void for_tasks(const Problem& p, int64_t chunk_rows, int64_t group, const Fn& fn) {
  const int64_t groups = (p.blocks + group - 1) / group;
  const int64_t chunks = (p.m + chunk_rows - 1) / chunk_rows;
  const int64_t weights = group * p.block_bytes * (p.gate == RK_GATE_HALVES ? 2 : 1);  // bytes of a task
  const int64_t ns = greater(weights / 16, lesser(p.m, chunk_rows) * group * kBlockN * p.k / 64);
  parallel_for(chunks * groups, greater(1, 10000 / greater(ns, 1)), [&](int64_t begin, int64_t end) noexcept {
    for (int64_t task = begin; task < end; task++) {
      const int64_t m0 = task / groups * chunk_rows, b0 = task % groups * group;
      fn(m0, lesser(m0 + chunk_rows, p.m), b0, lesser(group, p.blocks - b0));
    }
  });
}

// What products on vector registers share: a chunk of x for L2, nothing to hold.
struct VectorProduct {
  static constexpr int kRows = 4;
  int64_t chunk_rows() const { return 64; }
  int scope(int64_t) const { return 0; }
};

// Runs a product whose `tile` gives the sums of up to kRows rows and kBlocks neighbouring packed blocks:
//   tile(first row, rows, packed blocks, number of blocks, float sums [rows][kBlocks][16])
// always summing a row in the same way, whatever the rows and blocks beside it. scope(m) is held around a task's tiles.
template <class Product>
void run_product(const Problem& p, const Product& product) {
  constexpr int64_t kStride = Product::kBlocks * kBlockN;
  for_tasks(p, product.chunk_rows(), Product::kBlocks, [&](int64_t m0, int64_t m1, int64_t block, int64_t count) {
    [[maybe_unused]] const auto scope = product.scope(p.m);
    alignas(64) float sums[2][Product::kRows * kStride];
    const uint8_t* w = p.packed + block * p.block_bytes;
    for (int64_t m = m0; m < m1; m += Product::kRows) {
      const int rows = static_cast<int>(lesser(Product::kRows, m1 - m));
      product.tile(m, rows, w, static_cast<int>(count), sums[0]);
      if (p.gate == RK_GATE_HALVES)
        product.tile(m, rows, w + p.blocks * p.block_bytes, static_cast<int>(count), sums[1]);
      finish(p, sums[0], sums[1], kStride, m, rows, block, count);
    }
  });
}

}  // namespace radix::cpu::RK_ISA
