// y = x W^T + b on quantized weights, for one ISA level: how x is staged, and which product runs.
//
// x in int8 (W8A8, W4A8): for each row and group scale = max|x| / 127 and code = round(x / scale) to the nearest even;
// a group with a NaN or an infinity has scale NaN, and so has every output of its row. Otherwise x is float32.
#include "cpu/linear/quantized.h"

#include "cpu/linear/kernel_amx.h"
#include "cpu/linear/kernel_codes.h"

namespace radix::cpu::RK_ISA {
namespace {

constexpr int W = Vec::width;
constexpr float kLargestCode = 127;
// For how many rows a tile is not worth its 16.
[[maybe_unused]] constexpr int64_t kFewInt8Rows = 8, kFewBf16Rows = 4;

// W values of a row from k on, zero from its `size` on.
template <class T>
Vec load_at(const T* row, int64_t k, int64_t size) {
  const int64_t left = size - k;
  return left >= W ? load(row + k) : left > 0 ? load(row + k, static_cast<int>(left)) : zero();
}

// Group g of row m -> its codes, their sum and their scale.
template <class T>
void quantize_group(const Problem& p, const Quantized& q, const StagedX& x, int64_t m, int64_t g) {
  const T* row = p.x.at<T>(m);
  const int64_t begin = g * q.group, end = begin + q.group;
  Vec most = zero(), poison = zero();
  for (int64_t k = begin; k < end; k += W) {
    const Vec v = load_at(row, k, p.k);
    most = max(abs(v), most);
    poison = poison + (v - v);
  }
  const float largest = reduce_max(most), bad = reduce_sum(poison);  // bad: 0 or NaN
  const float inverse = largest > 0 && bad == 0 ? kLargestCode / largest : 0;
  const float factor = inverse < 3e38f ? inverse : 0;  // values that are subnormal all count as zero
  Ints16 total = no_ints();
  for (int64_t k = begin; k < end; k += 16) {
    int8_t* codes = reinterpret_cast<int8_t*>(x.at(m, k / kLine)) + k % kLine;
    Lanes16 scaled;
    for (int i = 0; i < Lanes16::kParts; i++) {
      const Vec v = load_at(row, k + i * W, p.k);
      scaled.part[i] = bad == 0 ? v * set1(factor) : zero();
    }
    add(total, store_rounded(codes, scaled));
  }
  const int64_t at = m * q.groups + g;
  static_cast<int32_t*>(x.sums)[at] = reduce_sum(total);
  x.scales[at] = bad == 0 ? largest / kLargestCode : bad;
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

// bf16 as it is, in tiles.
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

void stage(const Problem& p, const Quantized& q, const StagedX& x, bool tiles) {
  dispatch_float(p.type, [&](auto type) {
    using T = typename decltype(type)::type;
    parallel_for(p.m, greater(1, (1 << 15) / q.kp), [&](int64_t begin, int64_t end) noexcept {
      for (int64_t m = begin; m < end; m++)
        for (int64_t g = 0; g < q.groups; g++) {
          if (q.int8_x) {
            quantize_group<T>(p, q, x, m, g);
          } else if (tiles) {
            copy_group(p, q, x, m, g);
          } else {
            widen_group<T>(p, q, x, m, g);
          }
        }
    });
  });
}

template <template <int, bool> class Product>
void run_kind(const Problem& p, const Quantized& q, const StagedX& x) {
  if (q.int8_x) return q.bits == 8 ? run_product(p, Product<8, true>(q, x)) : run_product(p, Product<4, true>(q, x));
  return q.bits == 8 ? run_product(p, Product<8, false>(q, x)) : run_product(p, Product<4, false>(q, x));
}

}  // namespace

void quantized(const rk_linear_args& args, RowMaxima* maxima) {
  const Quantized q(*args.desc);
  const int64_t m = Rows(*args.x).count, sums = m * q.groups * int64_t{sizeof(float)};
#if defined(__AMX_BF16__)
  // Integer sums are the same on tiles and on vectors; float32 sums where the vectors add in a tile's order.
  const bool bf16_x = !q.int8_x && dtype_of(*args.x) == DType::bf16;
  const bool tiles = q.int8_x ? m > kFewInt8Rows : bf16_x && m > kFewBf16Rows;
#else
  const bool tiles = false;
#endif
  const int64_t row_bytes = q.kp * (q.int8_x ? 1 : tiles ? 2 : 4), values = round_up(m, 16) * row_bytes;
  const Problem p = make_problem(args, maxima, q.block, values + 2 * sums);
  StagedX x{p.staged, 16 * row_bytes, row_bytes, kLine, nullptr, nullptr};
#if defined(__AMX_BF16__)
  if (tiles) x = tiled_x(p.staged, row_bytes);
#endif
  x.scales = reinterpret_cast<float*>(p.staged + values);
  x.sums = x.scales + m * q.groups;
  stage(p, q, x, tiles);
#if defined(__AMX_BF16__)
  if (tiles) return run_kind<CodesAmx>(p, q, x);
  if (bf16_x && q.bits == 8) return run_product(p, CodesOnVectors<8, false, true>(q, x));
  if (bf16_x) return run_product(p, CodesOnVectors<4, false, true>(q, x));
#endif
  run_kind<CodesProduct>(p, q, x);
}

}  // namespace radix::cpu::RK_ISA
