// What every kernel of the family shares: the problem, and how sums leave the registers: + bias, gate, + residual in
// float32, rounded once; or only the largest sum of a row is kept. jobs.h cuts it into tasks.
#pragma once

#include <cstring>

#include "common/tensor.h"
#include "cpu/activation/functions.h"
#include "cpu/linear/kernels.h"
#include "cpu/linear/layout.h"
#include "cpu/tiles.h"
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

struct Problem {
  Rows x, out, residual;
  DType type;  // of x, residual and, unless out_f32, out
  bool has_residual, out_f32;
  int gate;  // RK_GATE_*
  rk_gating gating;
  const uint8_t* packed;
  const float* bias;  // [blocks of n][16], or NULL
  RowMaxima* maxima;  // instead of `out`, or NULL
  int64_t m, n, k;
  int64_t blocks;       // packed blocks whose sums are outputs, or gates of outputs
  int64_t block_bytes;  // of a packed block
};

// Without the bias, which wants memory.
inline Problem make_problem(const rk_linear_args& a, RowMaxima* maxima, int64_t block_bytes) {
  Problem p{Rows(*a.x), Rows(), Rows(), dtype_of(*a.x), a.residual != nullptr};
  p.maxima = maxima;
  if (a.out) {
    p.out = Rows(*a.out);
    p.out_f32 = dtype_of(*a.out) == DType::f32;
  }
  if (a.residual) p.residual = Rows(*a.residual);
  p.gate = a.gate;
  p.gating = a.gating;
  p.packed = data_ptr<uint8_t>(*a.packed);
  p.m = p.x.count;
  p.n = a.desc->n;
  p.k = a.desc->k;
  p.blocks = linear_layout::num_blocks(p.gate == RK_GATE_HALVES ? p.n / 2 : p.n);
  p.block_bytes = block_bytes;
  return p;
}

// Of activations other than SiLU; one copy of their code.
[[gnu::noinline]] inline Vec rarely_gated(const rk_gating& gating, Vec gate, Vec up) {
  return with_activation(gating, [&](const auto& act) { return act(gate, up); });
}

inline Vec gated(const rk_gating& gating, Vec gate, Vec up) {
  return gating.activation == RK_ACTIVATION_SILU ? Silu(gating)(gate, up) : rarely_gated(gating, gate, up);
}

// Where the outputs of row m from column n on go.
template <class T>
struct OutputRow {
  T* out;
  float* out_f32;     // instead of `out`, or NULL
  const T* residual;  // or NULL
  int64_t left;       // columns up to the row's end

  OutputRow(const Problem& p, int64_t m, int64_t n, int64_t columns)
      : out(p.out_f32 ? nullptr : p.out.at<T>(m) + n),
        out_f32(p.out_f32 ? p.out.at<float>(m) + n : nullptr),
        residual(p.has_residual ? p.residual.at<T>(m) + n : nullptr),
        left(columns - n) {}

  void put(int64_t i, Vec v) const {
    if (left - i >= Vec::width) {
      if (residual) v = v + load(residual + i);
      out_f32 ? store(out_f32 + i, v) : store(out + i, v);
    } else if (left > i) {
      const int count = static_cast<int>(left - i);
      if (residual) v = v + load(residual + i, count);
      out_f32 ? store(out_f32 + i, v, count) : store(out + i, v, count);
    }
  }
};

// Sums with bias and gate, 16 / Vec::width of which make a block. Gated: `up` has those of the up rows, whose bias is
// `up_bias` further.
template <bool Gated>
inline Vec finished(const rk_gating& gating, const float* sums, const float* up, const float* bias, int64_t up_bias) {
  Vec v = load(sums);
  if (bias) v = v + load(bias);
  if constexpr (Gated) {
    Vec u = load(up);
    if (bias) u = u + load(bias + up_bias);
    v = gated(gating, v, u);
  }
  return v;
}

// The sums of `count` packed blocks for row m -> outputs.
template <class T, bool Gated>
void finish_row(const Problem& p, const float* sums, const float* up, int64_t m, int64_t block, int64_t count) {
  const float* bias = p.bias ? p.bias + block * kBlockN : nullptr;
  const OutputRow<T> row(p, m, block * kBlockN, Gated ? p.n / 2 : p.n);
  for (int64_t i = 0; i < count * kBlockN; i += Vec::width)
    row.put(i, finished<Gated>(p.gating, sums + i, up + i, bias ? bias + i : nullptr, p.blocks * kBlockN));
}

// The same for a block whose gate and up rows alternate: 8 outputs.
template <class T>
void finish_pairs(const Problem& p, const float* sums, int64_t m, int64_t block) {
  constexpr int kHalf = kBlockN / 2;
  alignas(64) float gate[kBlockN] = {}, up[kBlockN] = {};
  for (int i = 0; i < kHalf; i++) {
    const float* bias = p.bias ? p.bias + block * kBlockN + 2 * i : nullptr;
    gate[i] = sums[2 * i] + (bias ? bias[0] : 0.f);
    up[i] = sums[2 * i + 1] + (bias ? bias[1] : 0.f);
  }
  OutputRow<T> row(p, m, block * kHalf, p.n / 2);
  row.left = lesser(row.left, kHalf);
  for (int i = 0; i < kHalf; i += Vec::width) row.put(i, gated(p.gating, load(gate + i), load(up + i)));
}

// sums: [rows][stride] with the 16 sums of block + b at 16 b.
inline void finish(const Problem& p, const float* sums, const float* up_sums, int64_t stride, int64_t m, int64_t rows,
                   int64_t block, int64_t count) {
  dispatch_float(p.type, [&](auto type) {
    using T = typename decltype(type)::type;
    for (int64_t r = 0; r < rows; r++) {
      const float* line = sums + r * stride;
      switch (p.gate) {
        case RK_GATE_NONE: finish_row<T, false>(p, line, line, m + r, block, count); break;
        case RK_GATE_HALVES: finish_row<T, true>(p, line, up_sums + r * stride, m + r, block, count); break;
        default:
          for (int64_t b = 0; b < count; b++) finish_pairs<T>(p, line + b * kBlockN, m + r, block + b);
      }
    }
  });
}

// The rows of a thread, before their first sum; NULL: all are taken.
inline LaneMaxima* claim(const Problem& p) {
  const int64_t number = __atomic_fetch_add(&p.maxima->claimed, 1, __ATOMIC_RELAXED);
  if (number >= p.maxima->most) return nullptr;
  LaneMaxima* rows = p.maxima->parts + number * p.m;
  for (int64_t m = 0; m < p.m; m++)
    for (int i = 0; i < kBlockN; i += Vec::width) {
      store(rows[m].value + i, set1(-__builtin_inff()));
      store(rows[m].block + i, zero());
    }
  return rows;
}

// The sums of `count` packed blocks into the maxima of their row.
inline void keep_largest(const Problem& p, LaneMaxima& row, const float* sums, int64_t block, int64_t count) {
  const Vec most = set1(__builtin_inff());
  for (int64_t b = 0; b < count; b++) {
    const float* from = sums + b * kBlockN;
    alignas(64) float tail[kBlockN];
    if (const int64_t left = p.n - (block + b) * kBlockN; left < kBlockN) {
      for (int64_t i = 0; i < kBlockN; i++) tail[i] = i < left ? from[i] : -__builtin_inff();
      from = tail;
    }
    const Vec number = set1(static_cast<float>(block + b));
    for (int i = 0; i < kBlockN; i += Vec::width) {
      const Vec v = min(load(from + i), most), before = load(row.value + i);
      const Vec kept = load(row.block + i), of_equal = select(lt(v, before), kept, min(number, kept));
      const Mask larger = lt(before, v);
      store(row.value + i, select(larger, v, before));
      store(row.block + i, select(larger, number, of_equal));
    }
  }
}

// Whether outputs go past the caches, in whole lines: more of them than stay there. Rows of a matrix tend to lie a
// multiple of 4 KiB apart, so that its lines of one column would push each other out anyway.
inline bool streams_outputs(const Problem& p) {
  constexpr int64_t kLeast = 1 << 20;
  const int64_t columns = p.gate == RK_GATE_HALVES ? p.n / 2 : p.n;
  const bool lines = !p.maxima && columns % 32 == 0 && p.out.dims <= 1 && p.out.stride[0] % linear_layout::kLine == 0 &&
                     reinterpret_cast<uintptr_t>(p.out.data) % linear_layout::kLine == 0;
  return lines && p.m * columns * 2 >= kLeast && p.type != DType::f32 && !p.out_f32 && p.gate != RK_GATE_INTERLEAVED;
}

#if RK_HAS_PRODUCT_TILES
// finish_row() of two blocks into a line that is not fetched first.
template <class T, bool Gated>
void stream_row(const Problem& p, const float* sums, const float* up, int64_t m, int64_t block) {
  const float* bias = p.bias ? p.bias + block * kBlockN : nullptr;
  const T* residual = p.has_residual ? p.residual.at<T>(m) + block * kBlockN : nullptr;
  const auto half = [&](int64_t i) {
    Vec v = finished<Gated>(p.gating, sums + i, up + i, bias ? bias + i : nullptr, p.blocks * kBlockN);
    if (residual) v = v + load(residual + i);
    return narrow(v.v, T{});
  };
  const __m512i line = _mm512_inserti64x4(_mm512_castsi256_si512(half(0)), half(kBlockN), 1);
  _mm512_stream_si512(reinterpret_cast<__m512i*>(p.out.at<T>(m) + block * kBlockN), line);
}

inline void stream(const Problem& p, const float* sums, const float* up_sums, int64_t stride, int64_t m, int64_t rows,
                   int64_t block) {
  dispatch_float(p.type, [&](auto type) {
    using T = typename decltype(type)::type;
    if constexpr (sizeof(T) == 2) {
      for (int64_t r = 0; r < rows; r++) {
        const float *line = sums + r * stride, *up = up_sums + r * stride;
        p.gate == RK_GATE_HALVES ? stream_row<T, true>(p, line, up, m + r, block)
                                 : stream_row<T, false>(p, line, up, m + r, block);
      }
    }
  });
}
#endif

// What becomes of the sums of a task's blocks while they are computed, a few rows at a time.
struct GateEnds {  // they wait for those of the up rows
  void fetch(int64_t, int64_t) const {}
  void begin(int64_t, int64_t) const {}
  void finish(int64_t, int64_t, const float*) const {}
};
struct OutputEnds {
  static constexpr int kSteps = 1;
  const Problem& p;
  const float* gate_sums;  // of all rows, where those of the up rows come later, or NULL
  int64_t stride, m, block, count;
  bool streaming;
  LaneMaxima* largest;  // of all rows, instead of outputs, or NULL

  // Into L2, from wherever it is, what outputs that go past the caches add to.
  void fetch(int64_t row, int64_t rows) const {
    if (!streaming || !p.has_residual) return;
    for (int64_t r = row; r < row + rows; r++)
      __builtin_prefetch(p.residual.at<char>(m + r) + block * kBlockN * 2, 0, 2);
  }
  // Into L1 the lines that other outputs will be written to.
  void begin(int64_t row, int64_t rows) const {
    if (streaming || largest) return;
    const int64_t item = p.out_f32 || p.type == DType::f32 ? 4 : 2;
    const int64_t width = (p.gate == RK_GATE_INTERLEAVED ? kBlockN / 2 : kBlockN) * item;
    for (int64_t r = row; r < row + rows; r++) {
      const char* out = p.out.at<char>(m + r) + block * width;
      for (int64_t at = 0; at < count * width; at += linear_layout::kLine) __builtin_prefetch(out + at, 1, 3);
    }
  }
  // sums: [rows][stride], of the up rows if the gates' were kept.
  void finish(int64_t row, int64_t rows, const float* sums) const {
    finish(row, rows, gate_sums ? gate_sums + row * stride : sums, sums);
  }
  void finish(int64_t row, int64_t rows, const float* sums, const float* up_sums) const {
    if (largest) {
      for (int64_t r = 0; r < rows; r++) keep_largest(p, largest[m + row + r], sums + r * stride, block, count);
      return;
    }
#if RK_HAS_PRODUCT_TILES
    if (streaming) return stream(p, sums, up_sums, stride, m + row, rows, block);
#endif
    RK_ISA::finish(p, sums, up_sums, stride, m + row, rows, block, count);
  }
};

// What products on vector registers share: a chunk of x for L2, nothing to hold.
struct VectorProduct {
  static constexpr int kRows = 4;
  static constexpr bool kOnTiles = false;
  static constexpr bool kTakesBf16 = false;  // x that is not quantized is staged as bf16, not as float32
  int64_t chunk_rows(int64_t) const { return 64; }
  int scope(int64_t) const { return 0; }
};

}  // namespace radix::cpu::RK_ISA
