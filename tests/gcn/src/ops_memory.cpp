// Vector memory: global, flat and scratch.
#include <algorithm>

#include "lanes.h"

namespace gcn {
namespace {

using Kind = Operand::Kind;

enum class Part { kWhole, kLowHalf, kHighHalf };  // where a 16-bit value lies in its register ("d16")

struct Shape {
  unsigned bytes;
  bool sign = false;
  Part part = Part::kWhole;
};

// Where flat addresses stop being of memory: what src_shared_base and src_private_base say in their upper bits.
constexpr u64 kSharedAperture = 1, kPrivateAperture = 2;

template <unsigned bytes>
void put(Wave& w, const Operand& to, unsigned lane, const uint8_t* data, Shape shape) {
  if constexpr (bytes >= 4) {
    for (unsigned i = 0; i < bytes / 4; i++) std::memcpy(w.vector(to.index + i) + lane, data + 4 * i, 4);
  } else {
    u32 value = 0;
    std::memcpy(&value, data, bytes);
    if (shape.sign) value = static_cast<u32>(static_cast<i32>(value << (32 - 8 * bytes)) >> (32 - 8 * bytes));
    u32& out = w.vector(to.index)[lane];
    if (shape.part == Part::kWhole) out = value;
    if (shape.part == Part::kLowHalf) out = (out & 0xffff0000) | (value & 0xffff);
    if (shape.part == Part::kHighHalf) out = (out & 0xffff) | value << 16;
  }
}

template <unsigned bytes>
void get(Wave& w, const Operand& from, unsigned lane, uint8_t* data, Shape shape) {
  if constexpr (bytes >= 4) {
    for (unsigned i = 0; i < bytes / 4; i++) std::memcpy(data + 4 * i, w.vector(from.index + i) + lane, 4);
  } else {
    u32 value = w.vector(from.index)[lane];
    if (shape.part == Part::kHighHalf) value >>= 16;
    std::memcpy(data, &value, bytes);
  }
}

// Between a lane's registers and memory in which other GPUs may be at the same words. Aligned ones of 64 bits are read
// and written whole, as on the chip, where an atomic access of 64 bits is no other instruction.
template <unsigned bytes>
void copy_shared(uint8_t* to, const uint8_t* from) {
  if (bytes % 8 || (reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % 8) {
    std::memcpy(to, from, bytes);
    return;
  }
  for (unsigned i = 0; i < bytes; i += 8) {
    const u64 word = __atomic_load_n(reinterpret_cast<const u64*>(from + i), __ATOMIC_RELAXED);
    __atomic_store_n(reinterpret_cast<u64*>(to + i), word, __ATOMIC_RELAXED);
  }
}

template <class F>
inline void each_lane(u64 lanes, F f) {
  for (; lanes; lanes &= lanes - 1) f(static_cast<unsigned>(std::countr_zero(lanes)));
}

// A lane's address: 64 bits in a pair of registers, or a scalar base and 32 bits.
struct Addresses {
  Addresses(Wave& w, const Operand& address, const Operand& base, int offset) {
    const u32* low = w.vector(address.index);
    if (base.kind == Kind::kScalar) {
      const u64 from = w.scalar_pair(base) + static_cast<i64>(offset);
      for (unsigned l = 0; l < kLanes; l++) at[l] = from + low[l];
    } else {
      const u32* high = w.vector(address.index + 1);
      for (unsigned l = 0; l < kLanes; l++) at[l] = (low[l] | u64{high[l]} << 32) + static_cast<i64>(offset);
    }
  }
  u64 at[kLanes];
};

template <Shape shape>
void global_load(Wave& w, const Instruction& in) {
  const Addresses addresses(w, in.op[1], in.op[2], in.offset);
  each_lane(w.exec(), [&](unsigned l) {
    alignas(8) uint8_t data[16];
    copy_shared<shape.bytes>(data, w.memory.at(addresses.at[l], shape.bytes, false));
    put<shape.bytes>(w, in.op[0], l, data, shape);
  });
  w.issued(Wave::Queue::kVector, &in.op[0], (shape.bytes + 3) / 4);
}

template <Shape shape>
void global_store(Wave& w, const Instruction& in) {
  const Addresses addresses(w, in.op[0], in.op[2], in.offset);
  each_lane(w.exec(), [&](unsigned l) {
    alignas(8) uint8_t data[16];
    get<shape.bytes>(w, in.op[1], l, data, shape);
    copy_shared<shape.bytes>(w.memory.at(addresses.at[l], shape.bytes, true), data);
  });
  w.issued(Wave::Queue::kVector, nullptr, 0);
}

template <Shape shape>
void flat_load(Wave& w, const Instruction& in) {
  const Addresses addresses(w, in.op[1], {}, in.offset);
  each_lane(w.exec(), [&](unsigned l) {
    const u64 address = addresses.at[l];
    const auto low = static_cast<u32>(address);
    alignas(8) uint8_t data[16];
    if (address >> 48 == kSharedAperture) {
      w.block.lds.load(low, data, shape.bytes, w.number);
      put<shape.bytes>(w, in.op[0], l, data, shape);
    } else if (address >> 48 == kPrivateAperture) {
      put<shape.bytes>(w, in.op[0], l, w.scratch(l, low, shape.bytes), shape);
    } else {
      copy_shared<shape.bytes>(data, w.memory.at(address, shape.bytes, false));
      put<shape.bytes>(w, in.op[0], l, data, shape);
    }
  });
  w.issued(Wave::Queue::kVector, &in.op[0], (shape.bytes + 3) / 4);
  w.issued(Wave::Queue::kLds, &in.op[0], (shape.bytes + 3) / 4);
}

template <Shape shape>
void flat_store(Wave& w, const Instruction& in) {
  const Addresses addresses(w, in.op[0], {}, in.offset);
  each_lane(w.exec(), [&](unsigned l) {
    const u64 address = addresses.at[l];
    const auto low = static_cast<u32>(address);
    alignas(8) uint8_t data[16];
    get<shape.bytes>(w, in.op[1], l, data, shape);
    if (address >> 48 == kSharedAperture)
      w.block.lds.store(low, data, shape.bytes, w.number);
    else if (address >> 48 == kPrivateAperture)
      std::memcpy(w.scratch(l, low, shape.bytes), data, shape.bytes);
    else
      copy_shared<shape.bytes>(w.memory.at(address, shape.bytes, true), data);
  });
  w.issued(Wave::Queue::kVector, nullptr, 0);
  w.issued(Wave::Queue::kLds, nullptr, 0);
}

i64 scratch_offset(Wave& w, const Instruction& in, const Operand& address, const Operand& base, unsigned lane) {
  i64 offset = in.offset;
  if (address.kind == Kind::kVector) offset += w.vector(address.index)[lane];
  if (base.kind == Kind::kScalar) offset += w.scalar(base);
  return offset;
}

template <Shape shape>
void scratch_load(Wave& w, const Instruction& in) {
  each_lane(w.exec(), [&](unsigned l) {
    const i64 offset = scratch_offset(w, in, in.op[1], in.op[2], l);
    put<shape.bytes>(w, in.op[0], l, w.scratch(l, offset, shape.bytes), shape);
  });
  w.issued(Wave::Queue::kVector, &in.op[0], (shape.bytes + 3) / 4);
}

template <Shape shape>
void scratch_store(Wave& w, const Instruction& in) {
  each_lane(w.exec(), [&](unsigned l) {
    uint8_t data[16];
    get<shape.bytes>(w, in.op[1], l, data, shape);
    const i64 offset = scratch_offset(w, in, in.op[0], in.op[2], l);
    std::memcpy(w.scratch(l, offset, shape.bytes), data, shape.bytes);
  });
  w.issued(Wave::Queue::kVector, nullptr, 0);
}

// Atomics are the host's, for other GPUs (threads or processes here) may be at the same word. Lanes go in their order.
template <class T, auto F>
void global_atomic(Wave& w, const Instruction& in) {
  const unsigned first = in.returns_old ? 1 : 0;
  const Addresses addresses(w, in.op[first], in.op[first + 2], in.offset);
  each_lane(w.exec(), [&](unsigned l) {
    using Word = std::conditional_t<sizeof(T) == 8, u64, u32>;
    if (addresses.at[l] % sizeof(T)) fault("an atomic at 0x%lx, which is not aligned", addresses.at[l]);
    Word operand;
    get<sizeof(T)>(w, in.op[first + 1], l, reinterpret_cast<uint8_t*>(&operand), {sizeof(T)});
    auto* word = reinterpret_cast<Word*>(w.memory.at(addresses.at[l], sizeof(T), true));
    Word before = __atomic_load_n(word, __ATOMIC_RELAXED);
    Word after;
    do {
      after = std::bit_cast<Word>(static_cast<T>(F(std::bit_cast<T>(before), std::bit_cast<T>(operand))));
    } while (!__atomic_compare_exchange_n(word, &before, after, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
    if (in.returns_old) put<sizeof(T)>(w, in.op[0], l, reinterpret_cast<const uint8_t*>(&before), {sizeof(T)});
  });
  w.issued(Wave::Queue::kVector, in.returns_old ? &in.op[0] : nullptr, in.returns_old ? sizeof(T) / 4 : 0);
}

#define SHAPES(prefix, direction, function)                                                           \
  {prefix direction "_dword", function<Shape{4}>}, {prefix direction "_dwordx2", function<Shape{8}>}, \
      {prefix direction "_dwordx3", function<Shape{12}>}, {                                           \
    prefix direction "_dwordx4", function<Shape{16}>                                                  \
  }
#define LOADS(prefix, function)                                                                    \
  SHAPES(prefix, "load", function), {prefix "load_ubyte", function<Shape{1}>},                     \
      {prefix "load_sbyte", function<Shape{1, true}>}, {prefix "load_ushort", function<Shape{2}>}, \
      {prefix "load_sshort", function<Shape{2, true}>},                                            \
      {prefix "load_ubyte_d16", function<Shape{1, false, Part::kLowHalf}>},                        \
      {prefix "load_ubyte_d16_hi", function<Shape{1, false, Part::kHighHalf}>},                    \
      {prefix "load_short_d16", function<Shape{2, false, Part::kLowHalf}>}, {                      \
    prefix "load_short_d16_hi", function<Shape{2, false, Part::kHighHalf}>                         \
  }
#define STORES(prefix, function)                                                  \
  SHAPES(prefix, "store", function), {prefix "store_byte", function<Shape{1}>},   \
      {prefix "store_short", function<Shape{2}>},                                 \
      {prefix "store_byte_d16_hi", function<Shape{1, false, Part::kHighHalf}>}, { \
    prefix "store_short_d16_hi", function<Shape{2, false, Part::kHighHalf}>       \
  }

}  // namespace

void add_memory(Table& t) {
  const Entry entries[] = {
      LOADS("global_", global_load),
      STORES("global_", global_store),
      LOADS("flat_", flat_load),
      STORES("flat_", flat_store),
      LOADS("scratch_", scratch_load),
      STORES("scratch_", scratch_store),
      {"global_atomic_add", global_atomic<u32, [](u32 a, u32 b) { return a + b; }>},
      {"global_atomic_sub", global_atomic<u32, [](u32 a, u32 b) { return a - b; }>},
      {"global_atomic_umax", global_atomic<u32, [](u32 a, u32 b) { return std::max(a, b); }>},
      {"global_atomic_umin", global_atomic<u32, [](u32 a, u32 b) { return std::min(a, b); }>},
      {"global_atomic_smax", global_atomic<i32, [](i32 a, i32 b) { return std::max(a, b); }>},
      {"global_atomic_smin", global_atomic<i32, [](i32 a, i32 b) { return std::min(a, b); }>},
      {"global_atomic_and", global_atomic<u32, [](u32 a, u32 b) { return a & b; }>},
      {"global_atomic_or", global_atomic<u32, [](u32 a, u32 b) { return a | b; }>},
      {"global_atomic_swap", global_atomic<u32, [](u32, u32 b) { return b; }>},
      {"global_atomic_add_f32", global_atomic<float, [](float a, float b) { return a + b; }>},
      {"global_atomic_add_x2", global_atomic<u64, [](u64 a, u64 b) { return a + b; }>},
      {"global_atomic_umax_x2", global_atomic<u64, [](u64 a, u64 b) { return std::max(a, b); }>},
      {"global_atomic_or_x2", global_atomic<u64, [](u64 a, u64 b) { return a | b; }>},
  };
  t.insert(t.end(), std::begin(entries), std::end(entries));
}

}  // namespace gcn
