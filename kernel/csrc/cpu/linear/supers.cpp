// y = x W^T + b on weights in super-blocks, for one ISA level: how x is staged, and which product runs.
//
// x in int8: for each row and 256 inputs scale = max|x| / 127 and code = round(x / scale) to the nearest even; a row
// with a NaN or an infinity there has scale NaN, and so are all of its outputs.
#include "cpu/linear/supers.h"

#include "cpu/linear/kernel_supers.h"
#include "cpu/linear/kernel_supers_amx.h"
#include "cpu/linear/quantize_x.h"

namespace radix::cpu::RK_ISA {
namespace {

// For how many rows a tile is not worth its 16.
[[maybe_unused]] constexpr int64_t kFewRows = 8;

// Super-block s of row m -> its codes, their scale, and what is kept of its groups.
template <class T>
void stage_super(const Problem& p, const SuperBlocks& q, const StagedSupers& staged, int64_t m, int64_t s) {
  const T* row = p.x.at<T>(m);
  const int64_t begin = s * SuperBlocks::kInputs;
  const XScale scale = find_scale(row, begin, begin + SuperBlocks::kInputs, p.k);
  staged.x.scales[m * q.supers + s] = scale.value;
  for (int64_t k = begin; k < begin + SuperBlocks::kInputs; k += q.group) {
    Ints16 total = no_ints();
    for (int64_t at = k; at < k + q.group; at += 16) add(total, store_codes(staged.x, row, m, at, p.k, scale));
    const int32_t sum = reduce_sum(total);
    const int64_t group = m * q.groups + k / q.group;
    staged.sums[group] = static_cast<int16_t>(sum);
    if (q.zero()) staged.beginning[group] = begin_word(-q.zero() * sum);
  }
}

// Product: SupersOnVectors or SupersAmx, which takes x in tiles.
template <class Product>
class SupersJob final : public Job {
 public:
  SupersJob(const rk_linear_args& args, const SuperBlocks& q, RowMaxima* maxima)
      : Job(args, maxima, q.block, staged_bytes(args, q)), q_(q), staged_{values(nullptr), nullptr, nullptr} {
    stage_by(1, 2 * q_.kp);
    cut_for(product());
  }

  void stage(int64_t begin, int64_t end) const noexcept override {
    dispatch_float(p_.type, [&](auto type) {
      using T = typename decltype(type)::type;
      for (int64_t m = begin; m < end; m++)
        for (int64_t s = 0; s < q_.supers; s++) stage_super<T>(p_, q_, staged_, m, s);
    });
  }
  void run(int64_t task, const Ahead& ahead, LaneMaxima* largest) const noexcept override {
    run_product(product(), task, ahead, largest);
  }

 private:
  static int64_t value_bytes(int64_t rows, const SuperBlocks& q) { return round_up(rows, 16) * q.kp; }
  // Values; then a scale of each super-block; of each group what its zero takes, and its sum.
  static int64_t staged_bytes(const rk_linear_args& args, const SuperBlocks& q) {
    const int64_t rows = Rows(*args.x).count;
    return value_bytes(rows, q) + rows * (q.supers * 4 + q.groups * (4 + 2));
  }

  StagedX values(char* scratch) const {
    StagedX x{scratch, 16 * q_.kp, q_.kp, kLine, nullptr, nullptr};
#if RK_HAS_PRODUCT_TILES
    if (Product::kOnTiles) x = tiled_x(scratch, q_.kp);
#endif
    return x;
  }
  void place_x(char* scratch) override {
    staged_.x = values(scratch);
    staged_.x.scales = reinterpret_cast<float*>(scratch + value_bytes(p_.m, q_));
    staged_.beginning = reinterpret_cast<int32_t*>(staged_.x.scales + p_.m * q_.supers);
    staged_.sums = reinterpret_cast<int16_t*>(staged_.beginning + p_.m * q_.groups);
  }
  Product product() const { return Product(q_, staged_); }

  const SuperBlocks q_;
  StagedSupers staged_;
};

template <template <int> class Product>
std::unique_ptr<Job> job_of_bits(const rk_linear_args& args, const SuperBlocks& q, RowMaxima* maxima) {
  switch (q.bits) {
    case 4: return std::make_unique<SupersJob<Product<4>>>(args, q, maxima);
    case 5: return std::make_unique<SupersJob<Product<5>>>(args, q, maxima);
    default: return std::make_unique<SupersJob<Product<6>>>(args, q, maxima);
  }
}

}  // namespace

std::unique_ptr<Job> supers_job(const rk_linear_args& args, RowMaxima* maxima) {
  const SuperBlocks q(*args.desc);
#if RK_HAS_PRODUCT_TILES
  // Integer sums are the same on tiles and on vectors.
  if (Rows(*args.x).count > kFewRows) return job_of_bits<SupersAmx>(args, q, maxima);
#endif
  return job_of_bits<SupersOnVectors>(args, q, maxima);
}

}  // namespace radix::cpu::RK_ISA
