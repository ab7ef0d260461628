// y = x W^T + b on quantized weights, for one ISA level: how x is staged, and which product runs.
//
// x in int8 (W8A8, W4A8): for each row and group scale = max|x| / 127 and code = round(x / scale) to the nearest even;
// a group with a NaN or an infinity has scale NaN, and so has every output of its row. Otherwise x is float32.
#include "cpu/linear/quantized.h"

#include "cpu/linear/kernel_amx.h"
#include "cpu/linear/kernel_codes.h"
#include "cpu/linear/kernel_float8.h"
#include "cpu/linear/quantize_x.h"

namespace radix::cpu::RK_ISA {
namespace {

constexpr int W = Vec::width;
// For how many rows a tile is not worth its 16.
[[maybe_unused]] constexpr int64_t kFewInt8Rows = 8, kFewBf16Rows = 4;
// Groups of fewer int8 inputs fill no tile, and the sums of each go through memory: on an AMX Xeon prompts of a Q4_1
// file (groups of 32) took 1.3 to 1.9 times as long on tiles as on vectors.
[[maybe_unused]] constexpr int64_t kLeastTileGroup = kLine;

// Group g of row m -> its codes, their sum and their scale.
template <class T>
void quantize_group(const Problem& p, const Quantized& q, const StagedX& x, int64_t m, int64_t g) {
  const T* row = p.x.at<T>(m);
  const int64_t begin = g * q.group, end = begin + q.group;
  const XScale scale = find_scale(row, begin, end, p.k);
  Ints16 total = no_ints();
  for (int64_t k = begin; k < end; k += 16) add(total, store_codes(x, row, m, k, p.k, scale));
  const int64_t at = m * q.groups + g;
  static_cast<int32_t*>(x.sums)[at] = reduce_sum(total);
  x.scales[at] = scale.value;
}

template <class T>
void widen_group(const Problem& p, const Quantized& q, const StagedX& x, int64_t m, int64_t g) {
  const T* row = p.x.at<T>(m);
  float* to = reinterpret_cast<float*>(x.at(m, 0));
  Vec sum = zero();
  for (int64_t k = g * q.group; k < (g + 1) * q.group; k += W) {
    const Vec v = load_at(row, k, p.k);
    store(to + k, v);
    sum = sum + v;
  }
  static_cast<float*>(x.sums)[m * q.groups + g] = reduce_sum(sum);
}

// bf16 as it is.
void copy_group(const Problem& p, const Quantized& q, const StagedX& x, int64_t m, int64_t g) {
  const bf16* row = p.x.at<bf16>(m);
  constexpr int64_t kPerLine = kLine / 2;
  Vec sum = zero();
  for (int64_t k = g * q.group; k < (g + 1) * q.group; k += W) {
    const Vec v = load_at(row, k, p.k);
    store(reinterpret_cast<bf16*>(x.at(m, k / kPerLine)) + k % kPerLine, v);  // exact
    sum = sum + v;
  }
  static_cast<float*>(x.sums)[m * q.groups + g] = reduce_sum(sum);
}

// Product: CodesOnVectors, Float8Dots, or CodesAmx, which takes x in tiles.
template <class Product>
class CodesJob final : public Job {
 public:
  CodesJob(const rk_linear_args& args, const Quantized& q, RowMaxima* maxima)
      : Job(args, maxima, q.block, staged_bytes(args, q)), q_(q), x_(staged_x(nullptr)) {
    stage_by(1, 2 * q_.kp);
    cut_for(product());
  }

  void stage(int64_t begin, int64_t end) const noexcept override {
    dispatch_float(p_.type, [&](auto type) {
      using T = typename decltype(type)::type;
      for (int64_t m = begin; m < end; m++)
        for (int64_t g = 0; g < q_.groups; g++) stage_group<T>(m, g);
    });
  }
  void run(int64_t task, const Ahead& ahead, LaneMaxima* largest) const noexcept override {
    run_product(product(), task, ahead, largest);
  }

 private:
  static constexpr bool kTiles = Product::kOnTiles;

  static int64_t row_bytes(const Quantized& q) { return q.kp * (q.int8_x ? 1 : Product::kTakesBf16 ? 2 : 4); }
  static int64_t value_bytes(int64_t rows, const Quantized& q) { return round_up(rows, 16) * row_bytes(q); }
  // Values, then a scale and a sum of each group.
  static int64_t staged_bytes(const rk_linear_args& args, const Quantized& q) {
    const int64_t rows = Rows(*args.x).count;
    return value_bytes(rows, q) + 2 * rows * q.groups * int64_t{sizeof(float)};
  }

  StagedX staged_x(char* scratch) const {
    const int64_t bytes = row_bytes(q_);
    StagedX x{scratch, 16 * bytes, bytes, kLine, nullptr, nullptr};
#if RK_HAS_PRODUCT_TILES
    if (kTiles) x = tiled_x(scratch, bytes);
#endif
    return x;
  }
  void place_x(char* scratch) override {
    x_ = staged_x(scratch);
    x_.scales = reinterpret_cast<float*>(scratch + value_bytes(p_.m, q_));
    x_.sums = x_.scales + p_.m * q_.groups;
  }

  template <class T>
  void stage_group(int64_t m, int64_t g) const {
    if (q_.int8_x) {
      quantize_group<T>(p_, q_, x_, m, g);
    } else if (Product::kTakesBf16) {
      copy_group(p_, q_, x_, m, g);
    } else {
      widen_group<T>(p_, q_, x_, m, g);
    }
  }
  Product product() const { return Product(q_, x_); }

  const Quantized q_;
  StagedX x_;
};

template <class Product>
std::unique_ptr<Job> job(const rk_linear_args& args, const Quantized& q, RowMaxima* maxima) {
  return std::make_unique<CodesJob<Product>>(args, q, maxima);
}

template <template <int, bool> class Product>
std::unique_ptr<Job> job_of_kind(const rk_linear_args& args, const Quantized& q, RowMaxima* maxima) {
  if (q.int8_x) return q.bits == 8 ? job<Product<8, true>>(args, q, maxima) : job<Product<4, true>>(args, q, maxima);
  return q.bits == 8 ? job<Product<8, false>>(args, q, maxima) : job<Product<4, false>>(args, q, maxima);
}

std::unique_ptr<Job> float8_job(const rk_linear_args& args, const Quantized& q, RowMaxima* maxima) {
#if defined(__AVX512BF16__)
  if (dtype_of(*args.x) == DType::bf16) {
#if RK_HAS_PRODUCT_TILES
    if (Rows(*args.x).count > kFewBf16Rows) return job<Float8Amx>(args, q, maxima);
    return job<CodesOnVectors<8, false, true, true>>(args, q, maxima);
#else
    return job<Float8Dots>(args, q, maxima);
#endif
  }
#endif
  return job<Float8Product>(args, q, maxima);
}

}  // namespace

std::unique_ptr<Job> quantized_job(const rk_linear_args& args, RowMaxima* maxima) {
  const Quantized q(*args.desc);
  if (q.floats && q.bits == 8) return float8_job(args, q, maxima);
#if RK_HAS_PRODUCT_TILES
  // Integer sums are the same on tiles and on vectors; float32 sums where the vectors add in a tile's order.
  const int64_t m = Rows(*args.x).count;
  const bool bf16_x = !q.int8_x && dtype_of(*args.x) == DType::bf16;
  const bool int8_tiles = q.int8_x && !q.floats && q.group >= kLeastTileGroup && m > kFewInt8Rows;
  const bool bf16_tiles = bf16_x && m > kFewBf16Rows;
  if (int8_tiles || bf16_tiles) return job_of_kind<CodesAmx>(args, q, maxima);
  if (bf16_x && q.bits == 8) return job<CodesOnVectors<8, false, true>>(args, q, maxima);
  if (bf16_x) return job<CodesOnVectors<4, false, true>>(args, q, maxima);
#endif
  if (q.floats) return job<FloatsProduct>(args, q, maxima);
  return job_of_kind<CodesProduct>(args, q, maxima);
}

}  // namespace radix::cpu::RK_ISA
