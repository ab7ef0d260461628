// LDS, and the exchanges between lanes that go through its hardware.
#include <algorithm>

#include "lanes.h"

namespace gcn {
namespace {

enum class Part { kWhole, kLowHalf, kHighHalf };

template <class F>
inline void each_lane(u64 lanes, F f) {
  for (; lanes; lanes &= lanes - 1) f(static_cast<unsigned>(std::countr_zero(lanes)));
}

void put_words(Wave& w, unsigned index, unsigned lane, const uint8_t* data, unsigned words) {
  for (unsigned i = 0; i < words; i++) std::memcpy(w.vector(index + i) + lane, data + 4 * i, 4);
}
void get_words(Wave& w, unsigned index, unsigned lane, uint8_t* data, unsigned words) {
  for (unsigned i = 0; i < words; i++) std::memcpy(data + 4 * i, w.vector(index + i) + lane, 4);
}

// LDS addresses must be aligned to what is accessed, as the compiler promises: 8 bytes and more to 8, 16 to 16.
u64 aligned(u64 address, unsigned bytes) {
  const unsigned step = bytes == 12 ? 4 : bytes;
  if (address % step) fault("LDS access of %u bytes at %lu, which is not aligned", bytes, address);
  return address;
}

template <unsigned bytes, bool sign = false, Part part = Part::kWhole>
void read(Wave& w, const Instruction& in) {
  const u32* address = w.vector(in.op[1].index);
  Lanes at;
  std::copy_n(address, kLanes, at.data());  // the result may go where the address is
  each_lane(w.exec(), [&](unsigned l) {
    uint8_t data[16] = {};
    w.block.lds.load(aligned(u64{at[l]} + in.offset, bytes), data, bytes, w.number);
    if (bytes >= 4) return put_words(w, in.op[0].index, l, data, bytes / 4);
    u32 value = 0;
    std::memcpy(&value, data, std::min(bytes, 4u));
    constexpr unsigned shift = bytes < 4 ? 32 - 8 * bytes : 0;
    if (sign) value = static_cast<u32>(static_cast<i32>(value << shift) >> shift);
    u32& out = w.vector(in.op[0].index)[l];
    if (part == Part::kWhole) out = value;
    if (part == Part::kLowHalf) out = (out & 0xffff0000) | (value & 0xffff);
    if (part == Part::kHighHalf) out = (out & 0xffff) | value << 16;
  });
  w.issued(Wave::Queue::kLds, &in.op[0], (bytes + 3) / 4);
}

template <unsigned bytes, bool upper = false>
void write(Wave& w, const Instruction& in) {
  const u32* address = w.vector(in.op[0].index);
  each_lane(w.exec(), [&](unsigned l) {
    uint8_t data[16];
    get_words(w, in.op[1].index, l, data, (bytes + 3) / 4);
    w.block.lds.store(aligned(u64{address[l]} + in.offset, bytes), data + (upper ? 2 : 0), bytes, w.number);
  });
  w.issued(Wave::Queue::kLds, nullptr, 0);
}

// Two accesses, whose offsets count elements or 64 of them.
template <unsigned bytes, unsigned scale>
void read_two(Wave& w, const Instruction& in) {
  Lanes at;
  std::copy_n(w.vector(in.op[1].index), kLanes, at.data());
  each_lane(w.exec(), [&](unsigned l) {
    for (unsigned k = 0; k < 2; k++) {
      uint8_t data[8];
      const unsigned step = static_cast<unsigned>(k ? in.offset1 : in.offset0) * bytes * scale;
      w.block.lds.load(aligned(u64{at[l]} + step, bytes), data, bytes, w.number);
      put_words(w, in.op[0].index + k * (bytes / 4), l, data, bytes / 4);
    }
  });
  w.issued(Wave::Queue::kLds, &in.op[0], bytes / 2);
}

template <unsigned bytes, unsigned scale>
void write_two(Wave& w, const Instruction& in) {
  const u32* address = w.vector(in.op[0].index);
  each_lane(w.exec(), [&](unsigned l) {
    for (unsigned k = 0; k < 2; k++) {
      uint8_t data[8];
      const unsigned step = static_cast<unsigned>(k ? in.offset1 : in.offset0) * bytes * scale;
      get_words(w, in.op[1 + k].index, l, data, bytes / 4);
      w.block.lds.store(aligned(u64{address[l]} + step, bytes), data, bytes, w.number);
    }
  });
  w.issued(Wave::Queue::kLds, nullptr, 0);
}

// Lanes go in their order.
template <class T, auto F, bool returns>
void atomic(Wave& w, const Instruction& in) {
  const unsigned first = returns ? 1 : 0;
  Lanes at;
  std::copy_n(w.vector(in.op[first].index), kLanes, at.data());
  each_lane(w.exec(), [&](unsigned l) {
    T operand, before;
    get_words(w, in.op[first + 1].index, l, reinterpret_cast<uint8_t*>(&operand), sizeof(T) / 4);
    uint8_t* memory = w.block.lds.atomic(aligned(u64{at[l]} + in.offset, sizeof(T)), sizeof(T), w.number);
    std::memcpy(&before, memory, sizeof(T));
    const T after = F(before, operand);
    std::memcpy(memory, &after, sizeof(T));
    if (returns) put_words(w, in.op[0].index, l, reinterpret_cast<const uint8_t*>(&before), sizeof(T) / 4);
  });
  w.issued(Wave::Queue::kLds, returns ? &in.op[0] : nullptr, returns ? sizeof(T) / 4 : 0);
}

// Lane l gets the value of lane from(l), or 0 where that is not in EXEC.
template <class From>
void exchange(Wave& w, const Instruction& in, const Operand& value, From from) {
  Lanes hold, out;
  const u32* row = w.source(value, 0, hold);
  for (unsigned l = 0; l < kLanes; l++) {
    const unsigned k = from(l) & 63;
    out[l] = row[k] & w.live[k];
  }
  set_lanes(w, in.op[0], out.data());
  w.issued(Wave::Queue::kLds, &in.op[0], 1);
}

void backward_permute(Wave& w, const Instruction& in) {
  Lanes hold;
  const u32* address = w.source(in.op[1], 0, hold);
  exchange(w, in, in.op[2], [&](unsigned l) { return (address[l] + static_cast<u32>(in.offset)) >> 2; });
}

void forward_permute(Wave& w, const Instruction& in) {
  Lanes out{};
  const u32* address = w.vector(in.op[1].index);
  const u32* value = w.vector(in.op[2].index);
  each_lane(w.exec(), [&](unsigned l) { out[(address[l] + static_cast<u32>(in.offset)) >> 2 & 63] = value[l]; });
  set_lanes(w, in.op[0], out.data());
  w.issued(Wave::Queue::kLds, &in.op[0], 1);
}

void swizzle(Wave& w, const Instruction& in) {
  const unsigned s = in.swizzle;
  exchange(w, in, in.op[1], [&](unsigned l) {
    if (s & 0x8000) return (l & ~3u) | (s >> (2 * (l & 3)) & 3);
    return (l & 32) | ((((l & 31) & (s & 31)) | (s >> 5 & 31)) ^ (s >> 10 & 31));
  });
}

#define ATOMICS(name, T, f) {"ds_" name, atomic<T, [](T a, T b) -> T f, false>}
#define RETURNING(name, T, f) {"ds_" name, atomic<T, [](T a, T b) -> T f, true>}

}  // namespace

void add_lds(Table& t) {
  const Entry entries[] = {
      {"ds_read_b32", read<4>},
      {"ds_read_b64", read<8>},
      {"ds_read_b96", read<12>},
      {"ds_read_b128", read<16>},
      {"ds_read_u8", read<1>},
      {"ds_read_i8", read<1, true>},
      {"ds_read_u16", read<2>},
      {"ds_read_i16", read<2, true>},
      {"ds_read_u16_d16", read<2, false, Part::kLowHalf>},
      {"ds_read_u16_d16_hi", read<2, false, Part::kHighHalf>},
      {"ds_read_u8_d16", read<1, false, Part::kLowHalf>},
      {"ds_read_u8_d16_hi", read<1, false, Part::kHighHalf>},
      {"ds_write_b8", write<1>},
      {"ds_write_b16", write<2>},
      {"ds_write_b16_d16_hi", write<2, true>},
      {"ds_write_b8_d16_hi", write<1, true>},
      {"ds_write_b32", write<4>},
      {"ds_write_b64", write<8>},
      {"ds_write_b96", write<12>},
      {"ds_write_b128", write<16>},
      {"ds_read2_b32", read_two<4, 1>},
      {"ds_read2_b64", read_two<8, 1>},
      {"ds_read2st64_b32", read_two<4, 64>},
      {"ds_read2st64_b64", read_two<8, 64>},
      {"ds_write2_b32", write_two<4, 1>},
      {"ds_write2_b64", write_two<8, 1>},
      {"ds_write2st64_b32", write_two<4, 64>},
      {"ds_write2st64_b64", write_two<8, 64>},
      ATOMICS("add_u32", u32, { return a + b; }),
      ATOMICS("sub_u32", u32, { return a - b; }),
      ATOMICS("max_u32", u32, { return std::max(a, b); }),
      ATOMICS("min_u32", u32, { return std::min(a, b); }),
      ATOMICS("max_i32", i32, { return std::max(a, b); }),
      ATOMICS("or_b32", u32, { return a | b; }),
      ATOMICS("and_b32", u32, { return a & b; }),
      ATOMICS("add_u64", u64, { return a + b; }),
      ATOMICS("max_u64", u64, { return std::max(a, b); }),
      ATOMICS("add_f32", float, { return a + b; }),
      RETURNING("add_rtn_u32", u32, { return a + b; }),
      RETURNING("max_rtn_u32", u32, { return std::max(a, b); }),
      RETURNING("max_rtn_u64", u64, { return std::max(a, b); }),
      {"ds_bpermute_b32", backward_permute},
      {"ds_permute_b32", forward_permute},
      {"ds_swizzle_b32", swizzle},
  };
  t.insert(t.end(), std::begin(entries), std::end(entries));
}

}  // namespace gcn
