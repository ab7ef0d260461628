// Instructions as functions of one lane: `lanes<[](float a, float b) { return a + b; }>` is a Handler that calls it for
// the 64 lanes, which the compiler makes vectors of. Types of 64 bits take two registers.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <utility>

#include "fault.h"
#include "machine.h"
#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace gcn {

using u32 = uint32_t;
using i32 = int32_t;
using u64 = uint64_t;
using i64 = int64_t;
using half = _Float16;

// A 16-bit operand is the lower half of a register.
template <class T>
inline T from_bits(u32 low, u32 high) {
  if constexpr (sizeof(T) == 8) {
    return std::bit_cast<T>(low | u64{high} << 32);
  } else if constexpr (sizeof(T) == 4) {
    return std::bit_cast<T>(low);
  } else {
    return std::bit_cast<T>(static_cast<uint16_t>(low));
  }
}

template <class T>
inline u32 low_bits(T value) {
  if constexpr (sizeof(T) == 8) {
    return static_cast<u32>(std::bit_cast<u64>(value));
  } else if constexpr (sizeof(T) == 4) {
    return std::bit_cast<u32>(value);
  } else {
    return std::bit_cast<uint16_t>(value);
  }
}

template <class T>
inline u32 high_bits(T value) {
  return static_cast<u32>(std::bit_cast<u64>(value) >> 32);
}

// A source operand in all lanes: the rows of its one or two words, with |x| and -x done.
struct From {
  Wave& wave;
  const Operand& op;
};

template <class T>
struct Source {
  Source(Wave& w, const Operand& op) : Source(From{w, op}) {}
  explicit Source(From from) {
    Wave& w = from.wave;
    const Operand& op = from.op;
    low = w.source(op, 0, hold[0]);
    high = sizeof(T) == 8 ? w.source(op, 1, hold[1]) : low;
    if (!op.negated && !op.magnitude) return;
    constexpr u32 sign = sizeof(T) == 2 ? 0x8000 : 0x80000000;
    const u32 keep = op.magnitude ? ~sign : ~0u, flip = op.negated ? sign : 0;
    const u32*& row = sizeof(T) == 8 ? high : low;
    Lanes& out = hold[sizeof(T) == 8];
    for (unsigned l = 0; l < kLanes; l++) out[l] = (row[l] & keep) ^ flip;
    row = out.data();
  }
  Source(const Source&) = delete;  // it may point into itself
  Source& operator=(const Source&) = delete;
  T operator[](unsigned lane) const { return from_bits<T>(low[lane], high[lane]); }

  const u32* low;
  const u32* high;
  alignas(64) Lanes hold[2];
};

template <class R>
inline void set_lanes(Wave& w, const Operand& op, const R* results) {
  u32* low = w.vector(op.index);
  const u32* live = w.live.data();
#pragma GCC ivdep
  for (unsigned l = 0; l < kLanes; l++) low[l] = live[l] ? low_bits(results[l]) : low[l];
  if constexpr (sizeof(R) == 8) {
    u32* high = w.vector(op.index + 1);
#pragma GCC ivdep
    for (unsigned l = 0; l < kLanes; l++) high[l] = live[l] ? high_bits(results[l]) : high[l];
  }
}

inline u64 mask_of(const u32* lanes) {
  u64 mask = 0;
#ifdef __AVX512F__
  for (unsigned k = 0; k < 4; k++) {
    const __m512i row = _mm512_loadu_si512(lanes + 16 * k);
    mask |= u64{_mm512_test_epi32_mask(row, row)} << (16 * k);
  }
#else
  for (unsigned l = 0; l < kLanes; l++) mask |= u64{lanes[l] != 0} << l;
#endif
  return mask;
}

inline void expand_mask(u64 mask, u32* lanes) {
  const u32 words[2] = {static_cast<u32>(mask), static_cast<u32>(mask >> 32)};
  for (unsigned k = 0; k < 2; k++)
    for (unsigned l = 0; l < 32; l++) lanes[32 * k + l] = -(words[k] >> l & 1);
}

template <class T>
struct SignatureOf : SignatureOf<decltype(&T::operator())> {};
template <class C, class R, class... A>
struct SignatureOf<R (C::*)(A...) const> {
  using Result = R;
  using Arguments = std::tuple<A...>;
  static constexpr size_t kCount = sizeof...(A);
};

namespace detail {

template <auto F, size_t... I>
inline void call_lanes(Wave& w, const Instruction& in, const Operand* const* from, std::index_sequence<I...>) {
  using Signature = SignatureOf<decltype(F)>;
  using R = typename Signature::Result;
  std::tuple<Source<std::tuple_element_t<I, typename Signature::Arguments>>...> sources{From{w, *from[I]}...};
  if constexpr (std::is_same_v<R, bool>) {  // a compare: a bit a lane, 0 where EXEC has no lane
    alignas(64) Lanes hits;
    for (unsigned l = 0; l < kLanes; l++) hits[l] = F(std::get<I>(sources)[l]...) ? ~0u : 0;
    w.set_scalar_pair(in.op[0], mask_of(hits.data()) & w.exec());
  } else {
    alignas(64) R results[kLanes];
    for (unsigned l = 0; l < kLanes; l++) results[l] = F(std::get<I>(sources)[l]...);
    set_lanes(w, in.op[0], results);
  }
}

}  // namespace detail

// Sources are the operands behind the destination.
template <auto F>
void lanes(Wave& w, const Instruction& in) {
  const Operand* const from[] = {&in.op[1], &in.op[2], &in.op[3]};
  detail::call_lanes<F>(w, in, from, std::make_index_sequence<SignatureOf<decltype(F)>::kCount>());
}

// The destination is the third source: v_fmac.
template <auto F>
void lanes_onto(Wave& w, const Instruction& in) {
  const Operand* const from[] = {&in.op[1], &in.op[2], &in.op[0]};
  detail::call_lanes<F>(w, in, from, std::make_index_sequence<3>());
}

struct Entry {
  const char* name;
  Handler handler;
};

using Table = std::vector<Entry>;
void add_scalar(Table& table);
void add_integer(Table& table);
void add_float(Table& table);
void add_double(Table& table);
void add_packed(Table& table);
void add_compare(Table& table);
void add_memory(Table& table);
void add_buffer(Table& table);
void add_lds(Table& table);
void add_matrix(Table& table);
void add_gfx950(Table& table);

}  // namespace gcn
