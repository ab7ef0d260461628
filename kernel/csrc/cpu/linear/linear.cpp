// y = x W^T + b on dense packed weights, for one ISA level.
#include "cpu/linear/kernel_amx.h"
#include "cpu/linear/kernel_dot.h"
#include "cpu/linear/kernel_lanes.h"
#include "cpu/linear/kernels.h"
#include "cpu/linear/problem.h"
#include "cpu/linear/quantized.h"

namespace radix::cpu::RK_ISA {
namespace {

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

// Row m of x as S, zero from k to kp.
template <class S, class W>
void stage_row(const Problem& p, int64_t m, int64_t kp, S* to) {
  const W* from = p.x.at<W>(m);
  if constexpr (sizeof(S) == sizeof(W)) {
    std::memcpy(to, from, p.k * sizeof(S));
  } else {
    for (int64_t k = 0; k < p.k; k++) to[k] = to_float(from[k]);
  }
  std::memset(to + p.k, 0, (kp - p.k) * sizeof(S));
}

template <class W>
struct DenseProduct : VectorProduct {
  using S = typename Staged<W>::type;
#if defined(__AVX512F__)
  static constexpr int kBlocks = 4;  // 4 rows x 4 blocks + 8 lines of 32 registers
#else
  static constexpr int kBlocks = 1;  // 4 rows x 1 block (two ymm) + 4 lines of 16 registers
#endif
  const S* x;  // [m][kp]
  int64_t kp;
  DenseProduct(const S* staged, int64_t padded_k) : x(staged), kp(padded_k) {}

  template <int R>
  void blocks(int64_t m, const W* w, int count, float* sums) const {
    const S* rows[R];
    for (int r = 0; r < R; r++) rows[r] = x + (m + r) * kp;
    if (count == kBlocks) return RK_ISA::tile<R, kBlocks>(rows, w, kp, sums);
    for (int b = 0; b < count; b++) {
      alignas(64) float one[R * kBlockN];
      RK_ISA::tile<R, 1>(rows, w + b * kBlockN * kp, kp, one);
      for (int r = 0; r < R; r++)
        std::memcpy(sums + (r * kBlocks + b) * kBlockN, one + r * kBlockN, kBlockN * sizeof(float));
    }
  }
  void tile(int64_t m, int rows, const uint8_t* packed, int count, float* sums) const {
    const W* w = reinterpret_cast<const W*>(packed);
    switch (rows) {
      case 4: return blocks<4>(m, w, count, sums);
      case 3: return blocks<3>(m, w, count, sums);
      case 2: return blocks<2>(m, w, count, sums);
      default: return blocks<1>(m, w, count, sums);
    }
  }
};

template <class W>
void dense_rows(const rk_linear_args& args, RowMaxima* maxima) {
  using S = typename DenseProduct<W>::S;
  const int64_t kp = linear_layout::padded_k(args.desc->k);
  const Problem p = make_problem(args, maxima, kBlockN * kp * sizeof(W), Rows(*args.x).count * kp * sizeof(S));
  S* x = reinterpret_cast<S*>(p.staged);
  parallel_for(p.m, greater(1, (1 << 16) / kp), [&](int64_t begin, int64_t end) noexcept {
    for (int64_t m = begin; m < end; m++) stage_row<S, W>(p, m, kp, x + m * kp);
  });
  run_product(p, DenseProduct<W>(x, kp));
}

#if defined(__AMX_BF16__)

// Rows of x as tiles, zero from k on. Four tiles of 16 rows at a time, so that what is written is contiguous.
void stage_tiles(const Problem& p, const StagedX& x, int64_t lines) {
  constexpr int64_t kRun = 4;
  const int64_t whole = p.k * 2 / kLine, tail = p.k * 2 % kLine;
  parallel_for((p.m + 15) / 16, greater(1, (1 << 16) / (lines * kLine * 8)), [&](int64_t begin, int64_t end) noexcept {
    for (int64_t group = begin; group < end; group++) {
      const int64_t m0 = group * 16, m1 = lesser(p.m, m0 + 16);
      for (int64_t c0 = 0; c0 < whole; c0 += kRun)
        for (int64_t m = m0; m < m1; m++)
          for (int64_t c = c0; c < lesser(c0 + kRun, whole); c++)
            std::memcpy(x.at(m, c), p.x.at<char>(m) + c * kLine, kLine);
      for (int64_t m = m0; m < m1 && tail; m++) {
        std::memcpy(x.at(m, whole), p.x.at<char>(m) + whole * kLine, tail);
        std::memset(x.at(m, whole) + tail, 0, kLine - tail);
      }
    }
  });
}

void dense_amx(const rk_linear_args& args, RowMaxima* maxima) {
  const int64_t kp = linear_layout::padded_k(args.desc->k), row_bytes = kp * 2, m = Rows(*args.x).count;
  const Problem p = make_problem(args, maxima, kBlockN * row_bytes, round_up(m, kTileRows) * row_bytes);
  const StagedX x = tiled_x(p.staged, row_bytes);
  stage_tiles(p, x, row_bytes / kLine);
  run_product(p, DenseAmx(x, row_bytes / kLine));
}

#endif

void dense(const rk_linear_args& args, RowMaxima* maxima) {
  switch (dtype_of(*args.x)) {
#if defined(__AMX_BF16__)
    case DType::bf16: return dense_amx(args, maxima);
#else
    case DType::bf16: return dense_rows<bf16>(args, maxima);
#endif
    case DType::f16: return dense_rows<f16>(args, maxima);
    default: return dense_rows<float>(args, maxima);
  }
}

}  // namespace

const LinearKernels linear_table = {dense, quantized, pack_quantized, unpack_quantized, gather_quantized};

}  // namespace radix::cpu::RK_ISA
