// y = x W^T + b for one ISA level: dense packed weights, and the products of a call together.
#include "cpu/linear/jobs.h"
#include "cpu/linear/kernel_amx.h"
#include "cpu/linear/kernel_dot.h"
#include "cpu/linear/kernel_lanes.h"
#include "cpu/linear/kernels.h"
#include "cpu/linear/problem.h"
#include "cpu/linear/quantized.h"
#include "cpu/linear/supers.h"
#include "cpu/linear/tiles_job.h"
#include "cpu/linear/widened.h"

namespace radix::cpu::RK_ISA {
namespace {

using linear_layout::SuperBlocks;

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
class DenseJob final : public Job {
 public:
  DenseJob(const rk_linear_args& args, RowMaxima* maxima)
      : Job(args, maxima, kBlockN * padded_k(args) * int64_t{sizeof(W)},
            Rows(*args.x).count * padded_k(args) * int64_t{sizeof(S)}),
        kp_(padded_k(args)) {
    stage_by(1, kp_);
    cut_for(product());
  }

  void stage(int64_t begin, int64_t end) const noexcept override {
    for (int64_t m = begin; m < end; m++) stage_row<S, W>(p_, m, kp_, x_ + m * kp_);
  }
  void run(int64_t task, const Ahead& ahead, LaneMaxima* largest) const noexcept override {
    run_product(product(), task, ahead, largest);
  }

 private:
  using S = typename DenseProduct<W>::S;
  static int64_t padded_k(const rk_linear_args& args) { return linear_layout::padded_k(args.desc->k); }
  void place_x(char* scratch) override { x_ = reinterpret_cast<S*>(scratch); }
  DenseProduct<W> product() const { return DenseProduct<W>(x_, kp_); }

  int64_t kp_;
  S* x_ = nullptr;
};

std::unique_ptr<Job> dense_bf16_job(const rk_linear_args& args, RowMaxima* maxima) {
#if RK_HAS_PRODUCT_TILES
  return std::make_unique<TilesJob<DenseAmx, DenseBlocks>>(args, DenseBlocks(*args.desc), maxima);
#else
  return std::make_unique<DenseJob<bf16>>(args, maxima);
#endif
}

std::unique_ptr<Job> dense_job(const rk_linear_args& args, RowMaxima* maxima) {
  switch (dtype_of(*args.x)) {
    case DType::bf16: return dense_bf16_job(args, maxima);
    case DType::f16: return std::make_unique<DenseJob<f16>>(args, maxima);
    default: return std::make_unique<DenseJob<float>>(args, maxima);
  }
}

std::unique_ptr<Job> job_of(const rk_linear_args& args, RowMaxima* maxima) {
  if (args.desc->kind == RK_WEIGHT_DENSE) return dense_job(args, maxima);
  if (args.keep_x && keeps_x(*args.desc, dtype_of(*args.x))) return widened_job(args, maxima);
  if (SuperBlocks::holds(*args.desc)) return supers_job(args, maxima);
  return quantized_job(args, maxima);
}

void products(const rk_linear_args* args, int64_t count, RowMaxima* maxima) {
  Jobs jobs(count);
  for (int64_t i = 0; i < count; i++) jobs.add(job_of(args[i], maxima));
  jobs.run();
}

void pack(const rk_pack_weight_args& args) {
  SuperBlocks::holds(*args.desc) ? pack_supers(args) : pack_quantized(args);
}
void unpack(const rk_unpack_weight_args& args) {
  SuperBlocks::holds(*args.desc) ? unpack_supers(args) : unpack_quantized(args);
}
void gather(const rk_embedding_args& args) {
  SuperBlocks::holds(*args.desc) ? gather_supers(args) : gather_quantized(args);
}

}  // namespace

const LinearKernels linear_table = {products, keeps_x, pack, unpack, gather};

}  // namespace radix::cpu::RK_ISA
