// y = x W^T + b on packed weights: how the work is cut, for one ISA level.
//
//   stage     x -> float [m][kp] (bf16 with AVX-512-BF16 or AMX: as it is, rows padded), zero beyond k
//   tasks     (chunk of rows) x (group of packed blocks), the blocks innermost: a chunk of x stays in L2
//             while the weights stream past it; with few rows there is one chunk and every weight is
//             read once
//   epilogue  + bias in float32, rounded once
#include <cstdlib>
#include <cstring>

#include "common/tensor.h"
#include "cpu/linear/kernel_amx.h"
#include "cpu/linear/kernel_dot.h"
#include "cpu/linear/kernel_lanes.h"
#include "cpu/linear/kernels.h"
#include "cpu/simd.h"
#include "cpu/thread_pool.h"

namespace radix::cpu::RK_ISA {
namespace {

using linear_layout::kBlockN;

constexpr int64_t kChunkRows = 64;
#if defined(__AVX512F__)
constexpr int kBlocks = 4;  // 4 rows x 4 blocks + 8 lines of 32 registers
#else
constexpr int kBlocks = 1;  // 4 rows x 1 block (two ymm) + 4 lines of 16 registers
#endif
constexpr int kRows = 4;

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
  void* get(int64_t bytes) {
    if (bytes > capacity_) {
      std::free(data_);
      capacity_ = (bytes + 63) / 64 * 64;
      data_ = std::aligned_alloc(64, capacity_);
      if (!data_) {
        capacity_ = 0;
        fail(RK_RUNTIME, "linear: out of host memory (%lld bytes of scratch)", (long long)bytes);
      }
    }
    return data_;
  }

 private:
  void* data_ = nullptr;
  int64_t capacity_ = 0;
};

struct Problem {
  Rows x, out;
  const void* packed;
  const float* bias;  // [n], or NULL
  void* staged;       // room for x as the kernel wants it
  int64_t m, n, k, kp;
  bool out_f32;
};

constexpr int64_t kRowPad = 16;  // staged rows are rounded up to this

Problem make_problem(const rk_linear_args& a) {
  static thread_local Scratch scratch;
  Problem p{Rows(*a.x), Rows(*a.out), data_ptr<void>(*a.packed), nullptr, nullptr, 0, a.desc->n, a.desc->k, 0, false};
  p.m = p.x.count;
  p.kp = linear_layout::padded_k(p.k);
  p.out_f32 = dtype_of(*a.out) == DType::f32;
  const int64_t x_bytes = (p.m + kRowPad - 1) / kRowPad * kRowPad * p.kp * int64_t{sizeof(float)};
  char* room = static_cast<char*>(scratch.get(x_bytes + p.n * int64_t{sizeof(float)}));
  p.staged = room;
  if (a.bias) {
    float* bias = reinterpret_cast<float*>(room + x_bytes);
    dispatch_float(dtype_of(*a.bias), [&](auto type) {
      const auto* from = data_ptr<typename decltype(type)::type>(*a.bias);
      for (int64_t i = 0; i < p.n; i++) bias[i] = to_float(from[i]);
    });
    p.bias = bias;
  }
  return p;
}

// acc: float [rows][stride]; the first kBlockN lanes of it are outputs n0.. of rows m0...
template <class T>
void store_block(const Problem& p, const float* acc, int64_t stride, int64_t m0, int64_t rows, int64_t n0) {
  const int64_t width = lesser(kBlockN, p.n - n0);
  for (int64_t r = 0; r < rows; r++) {
    alignas(64) float line[kBlockN];
    std::memcpy(line, acc + r * stride, sizeof line);
    if (p.bias)
      for (int64_t i = 0; i < width; i++) line[i] += p.bias[n0 + i];
    T* out = p.out.at<T>(m0 + r) + n0;
    for (int64_t i = 0; i < width; i++) from_float(line[i], out[i]);
  }
}

template <class W>
void store(const Problem& p, const float* acc, int64_t stride, int64_t m0, int64_t rows, int64_t n0) {
  if (p.out_f32) {
    store_block<float>(p, acc, stride, m0, rows, n0);
  } else {
    store_block<W>(p, acc, stride, m0, rows, n0);
  }
}

// What the rows of x are staged as for weights of type W, and the tile that takes them.
template <class W>
struct Staged {
  using type = float;
};
#if defined(__AVX512BF16__)
template <>
struct Staged<bf16> {
  using type = bf16;
};
template <int Rows, int Blocks>
void tile(const bf16* const* x, const bf16* w, int64_t kp, float* out) {
  dot_tile<Rows, Blocks>(x, w, kp, out);
}
#endif
template <int Rows, int Blocks, class W>
void tile(const float* const* x, const W* w, int64_t kp, float* out) {
  lanes_tile<Rows, Blocks>(x, w, kp, out);
}

template <class W, int R, int B>
void row_group(const Problem& p, int64_t m0, int64_t block) {
  using S = typename Staged<W>::type;
  alignas(64) float acc[R * B * 16];
  const S* rows[R];
  for (int r = 0; r < R; r++) rows[r] = static_cast<const S*>(p.staged) + (m0 + r) * p.kp;
  tile<R, B>(rows, static_cast<const W*>(p.packed) + block * kBlockN * p.kp, p.kp, acc);
  for (int b = 0; b < B; b++) store<W>(p, acc + b * 16, B * 16, m0, R, (block + b) * kBlockN);
}

template <class W, int B>
void row_chunk(const Problem& p, int64_t begin, int64_t end, int64_t block) {
  int64_t m = begin;
  for (; m + kRows <= end; m += kRows) row_group<W, kRows, B>(p, m, block);
  switch (end - m) {
    case 3: return row_group<W, 3, B>(p, m, block);
    case 2: return row_group<W, 2, B>(p, m, block);
    case 1: return row_group<W, 1, B>(p, m, block);
  }
}

// Calls fn(first row, last row, first block, number of blocks) for each task.
template <class Fn>
void for_tasks(const Problem& p, int64_t chunk_rows, int64_t group, const Fn& fn) {
  const int64_t blocks = linear_layout::num_blocks(p.n);
  const int64_t groups = (blocks + group - 1) / group;
  const int64_t chunks = (p.m + chunk_rows - 1) / chunk_rows;
  const int64_t work = lesser(p.m, chunk_rows) * group * kBlockN * p.kp;  // multiply-adds of a task
  const int64_t grain = greater(1, (1 << 20) / work);
  parallel_for(chunks * groups, grain, [&](int64_t begin, int64_t end) noexcept {
    for (int64_t task = begin; task < end; task++) {
      const int64_t m0 = task / groups * chunk_rows, b0 = task % groups * group;
      fn(m0, lesser(m0 + chunk_rows, p.m), b0, lesser(group, blocks - b0));
    }
  });
}

// Rows [0, count) of x into p.staged as S, zero beyond k and beyond the last row.
template <class S, class W>
void stage(const Problem& p, int64_t count) {
  parallel_for(count, greater(1, (1 << 16) / p.kp), [&](int64_t begin, int64_t end) noexcept {
    for (int64_t m = begin; m < end; m++) {
      S* to = static_cast<S*>(p.staged) + m * p.kp;
      const int64_t live = m < p.m ? p.k : 0;
      if constexpr (sizeof(S) == sizeof(W)) {
        if (live) std::memcpy(to, p.x.at<W>(m), live * sizeof(S));
      } else {
        const W* from = live ? p.x.at<W>(m) : nullptr;
        for (int64_t k = 0; k < live; k++) to[k] = to_float(from[k]);
      }
      std::memset(to + live, 0, (p.kp - live) * sizeof(S));
    }
  });
}

template <class W>
void linear_rows(const Problem& p) {
  stage<typename Staged<W>::type, W>(p, p.m);
  for_tasks(p, kChunkRows, kBlocks, [&](int64_t m0, int64_t m1, int64_t block, int64_t count) {
    if (count == kBlocks) return row_chunk<W, kBlocks>(p, m0, m1, block);
    for (int64_t b = 0; b < count; b++) row_chunk<W, 1>(p, m0, m1, block + b);
  });
}

#if defined(__AMX_BF16__)

constexpr int64_t kAmxChunkRows = 128;

void amx_group(const Problem& p, const bf16* x, int64_t m0, int64_t m1, int64_t block, int64_t count) {
  // A lone last block is computed twice, side by side.
  alignas(64) float acc[32 * 32];
  const bf16* w = static_cast<const bf16*>(p.packed) + block * kBlockN * p.kp;
  for (int64_t m = m0; m < m1; m += 32) {
    if (m1 - m > kTileRows) {
      amx_tile<2>(x + m * p.kp, w, count == 2 ? kBlockN * p.kp : 0, p.kp, acc);
    } else {
      amx_tile<1>(x + m * p.kp, w, count == 2 ? kBlockN * p.kp : 0, p.kp, acc);
    }
    for (int64_t b = 0; b < count; b++) store<bf16>(p, acc + b * 16, 32, m, lesser(32, m1 - m), (block + b) * kBlockN);
  }
}

void linear_amx(const Problem& p) {
  static_assert(kTileRows <= kRowPad);
  stage<bf16, bf16>(p, (p.m + kTileRows - 1) / kTileRows * kTileRows);
  const bf16* x = static_cast<const bf16*>(p.staged);
  static_assert(kAmxChunkRows % 32 == 0);
  for_tasks(p, kAmxChunkRows, 2, [&](int64_t m0, int64_t m1, int64_t block, int64_t count) {
    const AmxScope scope;
    amx_group(p, x, m0, m1, block, count);
  });
}

#endif

void linear(const rk_linear_args& args) {
  const Problem p = make_problem(args);
  switch (dtype_of(*args.x)) {
#if defined(__AMX_BF16__)
    case DType::bf16: return linear_amx(p);
#else
    case DType::bf16: return linear_rows<bf16>(p);
#endif
    case DType::f16: return linear_rows<f16>(p);
    default: return linear_rows<float>(p);
  }
}

}  // namespace

const LinearKernels linear_table = {linear};

}  // namespace radix::cpu::RK_ISA
