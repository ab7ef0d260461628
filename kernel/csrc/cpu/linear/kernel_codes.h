// The product with quantized weights on vector registers, any ISA level, for up to 4 rows x kCodeBlocks packed blocks.
//
// Within a group of K the codes are summed alone: exactly, in int32, when x is quantized too; in float32 in ascending k
// otherwise. Then sum += (codes - zero * (sum of x)) * scale and sum += minimum * (sum of x), groups ascending: what a
// row's sum is depends on neither the other rows nor the blocks beside it.
#pragma once

#include "cpu/linear/dots16.h"
#include "cpu/linear/floats4.h"
#include "cpu/linear/floats8.h"
#include "cpu/linear/ints16.h"
#include "cpu/linear/problem.h"
#include "cpu/linear/shared_sums.h"

namespace radix::cpu::RK_ISA {

using linear_layout::kLine;
using linear_layout::Quantized;

#if defined(__AVX512F__)
constexpr int kCodeBlocks = 4;  // 4 rows x 4 blocks of accumulators, 4 lines of codes
#else
constexpr int kCodeBlocks = 1;  // 4 rows x 1 block (two ymm)
#endif

// x as the kernels read it. `values`: int8 codes or float32; 64 bytes number c of row m are at `at(m, c)`.
struct StagedX {
  char* values;
  int64_t row16, row, chunk;  // steps in bytes: of 16 rows, of a row within them, of 64 bytes
  float* scales;              // [m][groups], of int8 codes
  void* sums;                 // [m][groups] of the group's codes (int32) or values (float)

  char* at(int64_t m, int64_t c) const { return values + (m / 16) * row16 + (m % 16) * row + c * chunk; }
};

[[gnu::always_inline]] inline Lanes16 load_scales(const uint8_t* p, int64_t index, DType type) {
  Lanes16 r;
  switch (type) {
    case DType::f32: r.load_line(reinterpret_cast<const float*>(p) + index); break;
    case DType::f16: r.load_line(reinterpret_cast<const f16*>(p) + index); break;
    case DType::u8: return half_powers(p + index);
    default: r.load_line(reinterpret_cast<const bf16*>(p) + index);
  }
  return r;
}

// Fetches what group g has beside its codes in the B blocks that are read after those at w.
template <int B>
inline void fetch_numbers(const Quantized& q, const uint8_t* w, int64_t g) {
  const uint8_t* numbers = w + B * q.block + q.scales + g * q.group_numbers;
  for (int b = 0; b < B; b++) __builtin_prefetch(numbers + b * q.block, 0, 3);
}

// sum (+)= values * scale
inline void add_scaled(float* sum, const Lanes16& values, const Lanes16& scale, bool first) {
  for (int i = 0; i < Lanes16::kParts; i++) {
    float* to = sum + i * Vec::width;
    store(to, fma(values.part[i], scale.part[i], first ? zero() : load(to)));
  }
}
inline Lanes16 times(const Lanes16& a, float b) {
  Lanes16 r;
  for (int i = 0; i < Lanes16::kParts; i++) r.part[i] = a.part[i] * set1(b);
  return r;
}

// Whether 4-bit codes stand for 0 with another number than the one that is taken from all of them.
inline bool has_offsets(const Quantized& q) {
  return q.has_zeros || (q.has_mins && q.bits == 4);
}
// What is still to be taken from sums of codes that nibble_lanes() made, where there are offsets.
inline Lanes16 group_offsets(const Quantized& q, const uint8_t* block, int64_t g) {
  Lanes16 r = to_lanes(q.has_zeros ? load_zeros(block + q.zeros + g * kBlockN) : no_ints());
  for (Vec& part : r.part) part = part - set1(kNibbleZero);
  return r;
}
// values -= offset * (sum of x)
inline void take_zeros(Lanes16& values, const Lanes16& offset, float sum) {
  for (int i = 0; i < Lanes16::kParts; i++) values.part[i] = fnma(offset.part[i], set1(sum), values.part[i]);
}

// sum += minimum of group g * (sum of x)
inline void add_minima(Lanes16& sum, const Quantized& q, const uint8_t* block, int64_t g, float x_sum) {
  const Lanes16 mins = load_scales(block + q.mins, g * kBlockN, q.scale_type);
  for (int i = 0; i < Lanes16::kParts; i++) sum.part[i] = fma(mins.part[i], set1(x_sum), sum.part[i]);
}

inline void add_stored_minima(float* sum, const Quantized& q, const uint8_t* block, int64_t g, float x_sum) {
  Lanes16 line;
  line.load_line(sum);
  add_minima(line, q, block, g, x_sum);
  line.store_line(sum);
}

template <int R, int B>
inline void clear(Lanes16 (&acc)[R][B]) {
  for (auto& row : acc)
    for (Lanes16& a : row) a.clear();
}

// What 4-bit codes are multiplied as: unsigned, counted from what zero_of_codes() says.
template <bool Floats>
inline Bytes64 small_factors(Bytes64 codes) {
  if constexpr (Floats) return raised_floats(codes);
  return codes;
}
template <int Bits, bool Floats>
inline int zero_of_codes(const Quantized& q) {
  if (Bits == 8) return kSignedBias;
  if (Floats) return kFloatZero;
  return q.has_mins ? 0 : kNibbleZero;
}

// Which products of 4-bit codes have sums of their own for a while.
enum class Apart {
  kNone,
  kHigh,  // those of high halves, which stay where they are: their sums are shifted once, where instructions are dear
  kAll,   // in int16, which is widened after several lines
};

// The products of a line of codes and the inputs of a row that it has.
template <int Bits, bool Floats, Apart kApart>
inline void add_products(const Bytes64& line, const int32_t (&x)[2], Ints16& acc, [[maybe_unused]] Ints16& apart) {
  if constexpr (Bits == 8) {
    dot_signed(acc, line, x[0]);
  } else if constexpr (kApart == Apart::kHigh) {
    dot_small(acc, small_factors<Floats>(low_nibbles(line)), x[0]);
    dot_small(apart, high_halves(line), x[1]);
  } else if constexpr (kApart == Apart::kAll) {
    add_dots(apart, small_factors<Floats>(low_nibbles(line)), x[0]);
    add_dots(apart, small_factors<Floats>(high_nibbles(line)), x[1]);
  } else {
    dot_small(acc, small_factors<Floats>(low_nibbles(line)), x[0]);
    dot_small(acc, small_factors<Floats>(high_nibbles(line)), x[1]);
  }
}

// Which of them do, of so many rows at a time.
template <bool Floats>
constexpr Apart apart_of_few(int rows) {
  if (!Floats && kDotsAnyByte && rows <= 2) return Apart::kHigh;
  return kDotsInPairs && rows == 1 ? Apart::kAll : Apart::kNone;
}

// Sums of int8 x codes, k0 <= k < k0 + size, a multiple of kRun.
template <int Bits, bool Floats, int kRun, int R, int B>
inline void int_group(const Quantized& q, const uint8_t* w, const int8_t* const* x, int64_t k0, int64_t size,
                      Ints16 (&acc)[R][B]) {
#if RK_ISA_LEVEL == 1
  if constexpr (Bits == 4 && R > 1) return sum_halves<Floats>(q, w, x, k0, size, acc);
#endif
  constexpr int kPerLine = 32 / Bits, kLines = kRun / kPerLine, kSharing = lines_sharing<Floats>();
  constexpr Apart kApart = Bits == 4 ? apart_of_few<Floats>(R) : Apart::kNone;
  static_assert(kApart != Apart::kAll || kLines % kSharing == 0);
  Ints16 apart[R][B];
  for (int r = 0; r < R; r++)
    for (int b = 0; b < B; b++) acc[r][b] = apart[r][b] = no_ints();
  for (int64_t k = k0; k < k0 + size; k += kRun) {
    const int64_t at = k / kPerLine * kLine;
    const int64_t ahead = q.ahead(at, B);
#pragma GCC unroll 8
    for (int i = 0; i < kLines; i++) {
      Bytes64 line[B];
      for (int b = 0; b < B; b++) {
        const uint8_t* p = w + b * q.block + at + i * kLine;
        __builtin_prefetch(p + ahead, 0, 3);
        line[b] = load_bytes(p);
      }
      for (int r = 0; r < R; r++) {
        int32_t quads[2];
        std::memcpy(quads, x[r] + k + i * kPerLine, kPerLine);
        for (int b = 0; b < B; b++) add_products<Bits, Floats, kApart>(line[b], quads, acc[r][b], apart[r][b]);
      }
      if (kApart != Apart::kAll || (i + 1) % kSharing != 0) continue;
      for (int b = 0; b < B; b++) {
        add_sums(acc[0][b], apart[0][b]);
        apart[0][b] = no_ints();
      }
    }
  }
  if constexpr (kApart == Apart::kHigh)
    for (int r = 0; r < R; r++)
      for (int b = 0; b < B; b++) add(acc[r][b], sixteenth(apart[r][b]));
}

template <int Bits, bool Floats, int R, int B>
inline void int_tile(const Quantized& q, const StagedX& x, int64_t m, const uint8_t* w, float* sums) {
  constexpr int kLeastRun = Bits == 8 ? 16 : 32;  // the smallest group
  const int8_t* rows[R];
  for (int r = 0; r < R; r++) rows[r] = reinterpret_cast<const int8_t*>(x.at(m + r, 0));
  const auto* row_sums = static_cast<const int32_t*>(x.sums);
  Lanes16 total[R][B];
  clear(total);
  for (int64_t g = 0; g < q.groups; g++) {
    Ints16 acc[R][B];
    if (kLeastRun < 32 && q.group < 32) {
      int_group<Bits, Floats, kLeastRun>(q, w, rows, g * q.group, q.group, acc);
    } else {
      int_group<Bits, Floats, 32>(q, w, rows, g * q.group, q.group, acc);
    }
    Lanes16 scales[B];
    fetch_numbers<B>(q, w, g);
    for (int b = 0; b < B; b++) scales[b] = load_scales(w + b * q.block + q.scales, g * kBlockN, q.scale_type);
    for (int r = 0; r < R; r++) {
      const int64_t at = (m + r) * q.groups + g;
      const int32_t zero_sum = row_sums[at] * zero_of_codes<Bits, Floats>(q);
      for (int b = 0; b < B; b++) {
        const uint8_t* block = w + b * q.block;
        const Lanes16 scale = times(scales[b], x.scales[at]);
        const Lanes16 codes = q.has_zeros
                                  ? corrected(acc[r][b], load_zeros(block + q.zeros + g * kBlockN), row_sums[at])
                                  : lowered(acc[r][b], zero_sum);
        for (int i = 0; i < Lanes16::kParts; i++)
          total[r][b].part[i] = fma(codes.part[i], scale.part[i], total[r][b].part[i]);
        if (q.has_mins) add_minima(total[r][b], q, block, g, static_cast<float>(row_sums[at]) * x.scales[at]);
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int b = 0; b < B; b++) total[r][b].store_line(sums + (r * kCodeBlocks + b) * kBlockN);
}

// The k of a line of codes from I on, ascending; with two sets of sums the even ones go to the first, the odd ones to
// the second.
template <int Bits, bool Floats, int I, int Sets, int R, int B>
inline void float_step(const Bytes64 (&line)[B], const float* const* x, int64_t k, Lanes16 (&sums)[Sets][R][B]) {
  for (int b = 0; b < B; b++) {
    Lanes16 codes;
    if constexpr (Bits == 8 && Floats) {
      codes = float8_lanes<I>(line[b]);
    } else if constexpr (Bits == 8) {
      codes = signed_lanes<I>(line[b]);
    } else {
      codes = nibble_lanes<(I % 4) * 2 + I / 4>(line[b]);
    }
    for (int r = 0; r < R; r++) sums[I % Sets][r][b].accumulate(x[r][k + I], codes);
  }
  if constexpr (I + 1 < 32 / Bits) float_step<Bits, Floats, I + 1>(line, x, k, sums);
}

// Sums of float x times codes, k0 <= k < k1.
template <int Bits, bool Floats, int Sets, int R, int B>
inline void float_run(const Quantized& q, const uint8_t* w, const float* const* x, int64_t k0, int64_t k1,
                      Lanes16 (&sums)[Sets][R][B]) {
  constexpr int kPerLine = 32 / Bits;
  for (auto& set : sums) clear(set);
  for (int64_t k = k0; k < k1; k += kPerLine) {
    const int64_t at = k / kPerLine * kLine;
    const int64_t ahead = q.ahead(at, B);
    Bytes64 line[B];
    for (int b = 0; b < B; b++) {
      const uint8_t* p = w + b * q.block + at;
      __builtin_prefetch(p + ahead, 0, 3);
      line[b] = load_bytes(p);
    }
    float_step<Bits, Floats, 0>(line, x, k, sums);
  }
}

// Subnormal operands and results count as zero, as they do on tiles.
class FlushScope {
 public:
  FlushScope() : before_(__builtin_ia32_stmxcsr()) { set(before_ | 0x8040); }
  ~FlushScope() { set(before_); }
  FlushScope(const FlushScope&) = delete;
  FlushScope& operator=(const FlushScope&) = delete;

 private:
  static void set(unsigned to) {
    asm volatile("" ::: "memory");  // nothing that reads or writes memory crosses
    __builtin_ia32_ldmxcsr(to);
    asm volatile("" ::: "memory");
  }
  unsigned before_;
};

// A tile of bf16 adds to C, for 32 k at a time, the sum of the even ones plus the sum of the odd ones.
constexpr int64_t kTileK = 32;

// InTiles: sums with the bits of tiles.
template <int Bits, bool Floats, bool InTiles, int R, int B>
inline void float_tile(const Quantized& q, const StagedX& x, int64_t m, const uint8_t* w, float* sums) {
  const float* rows[R];
  for (int r = 0; r < R; r++) rows[r] = reinterpret_cast<const float*>(x.at(m + r, 0));
  const auto* row_sums = static_cast<const float*>(x.sums);
  for (int64_t g = 0; g < q.groups; g++) {
    const int64_t begin = g * q.group, end = begin + q.group;
    Lanes16 acc[1][R][B];
    if constexpr (InTiles) {
      clear(acc[0]);
      for (int64_t k = begin; k < end; k += kTileK) {
        Lanes16 part[2][R][B];
        float_run<Bits, Floats>(q, w, rows, k, lesser(k + kTileK, end), part);
        for (int r = 0; r < R; r++)
          for (int b = 0; b < B; b++)
            for (int i = 0; i < Lanes16::kParts; i++)
              acc[0][r][b].part[i] = acc[0][r][b].part[i] + (part[0][r][b].part[i] + part[1][r][b].part[i]);
      }
    } else {
      float_run<Bits, Floats>(q, w, rows, begin, end, acc);
    }
    fetch_numbers<B>(q, w, g);
    for (int b = 0; b < B; b++) {
      const uint8_t* block = w + b * q.block;
      const Lanes16 scale = load_scales(block + q.scales, g * kBlockN, q.scale_type);
      for (int r = 0; r < R; r++) {
        const float x_sum = row_sums[(m + r) * q.groups + g];
        if constexpr (Bits == 8 && Floats) restore_float8(acc[0][r][b]);
        if (has_offsets(q)) take_zeros(acc[0][r][b], group_offsets(q, block, g), x_sum);
        float* sum = sums + (r * kCodeBlocks + b) * kBlockN;
        add_scaled(sum, acc[0][r][b], scale, g == 0);
        if (q.has_mins) add_stored_minima(sum, q, block, g, x_sum);
      }
    }
  }
}

template <int Bits, bool Int8X, bool InTiles, bool Floats = false>
struct CodesOnVectors : VectorProduct {
  static constexpr int kBlocks = kCodeBlocks, kRows = InTiles ? 2 : VectorProduct::kRows;
  const Quantized& q;
  const StagedX& x;
  CodesOnVectors(const Quantized& layout, const StagedX& staged) : q(layout), x(staged) {}

  template <int R>
  void blocks(int64_t m, const uint8_t* w, int count, float* sums) const {
    if constexpr (kBlocks > 1) {
      if (count == kBlocks) return tile_of<R, kBlocks>(m, w, sums);
    }
    for (int b = 0; b < count; b++) tile_of<R, 1>(m, w + b * q.block, sums + b * kBlockN);
  }
  template <int R, int B>
  void tile_of(int64_t m, const uint8_t* w, float* sums) const {
    if constexpr (Int8X) {
      int_tile<Bits, Floats, R, B>(q, x, m, w, sums);
    } else if constexpr (InTiles) {
      const FlushScope flush;
      float_tile<Bits, Floats, true, R, B>(q, x, m, w, sums);
    } else {
      float_tile<Bits, Floats, false, R, B>(q, x, m, w, sums);
    }
  }
  void tile(int64_t m, int rows, const uint8_t* w, int count, float* sums) const {
    if constexpr (kRows > 2) {
      if (rows == 4) return blocks<4>(m, w, count, sums);
      if (rows == 3) return blocks<3>(m, w, count, sums);
    }
    rows == 2 ? blocks<2>(m, w, count, sums) : blocks<1>(m, w, count, sums);
  }
};
template <int Bits, bool Int8X>
using CodesProduct = CodesOnVectors<Bits, Int8X, false>;
using FloatsProduct = CodesOnVectors<4, true, false, true>;
using Float8Product = CodesOnVectors<8, false, false, true>;

}  // namespace radix::cpu::RK_ISA
