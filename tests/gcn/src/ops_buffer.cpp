// Buffer loads and stores: addresses are offsets into what a resource in four scalar registers describes.
#include <algorithm>

#include "lanes.h"

namespace gcn {
namespace {

// Of a resource: base address (48 bits), stride and swizzling (16 bits), bytes, format. Known are raw buffers, whose
// stride is 0, and the one that a gfx90a's kernels start with, the scratch of their lanes.
struct Resource {
  Resource(Wave& w, const Operand& op) {
    const u32* words = &w.s[op.index];
    base = words[0] | u64{words[1] & 0xffff} << 32;
    is_scratch = words[1] >> 16 == kScratchBuffer >> 16;
    if (words[1] >> 16 && !is_scratch) fault("a buffer with a stride or swizzling");
    bytes = words[2];
  }
  u64 base;
  u64 bytes;
  bool is_scratch;
};

// A lane's offset: the instruction's and, with "offen", a register's. What lies at it or past the buffer's end, less
// the scalar offset, is out of range: it is loaded as 0 and not stored.
struct Offsets {
  Offsets(Wave& w, const Instruction& in)
      : resource(w, in.op[2]), scalar(w.scalar(in.op[3])), fixed(static_cast<u32>(in.offset)) {
    registers = in.offset_in_register ? w.vector(in.op[1].index) : nullptr;
  }
  // The sum wraps at 32 bits before it is compared, as compilers expect of a register below 0.
  u64 of(unsigned lane) const { return fixed + (registers ? registers[lane] : 0); }
  bool contains(u64 offset, unsigned size) const { return offset + size + scalar <= resource.bytes; }
  u64 address(u64 offset) const { return resource.base + scalar + offset; }
  // Where `size` bytes at an offset lie; nullptr out of range. A scalar offset into scratch counts all lanes' bytes.
  uint8_t* find(Wave& w, unsigned lane, u64 offset, unsigned size, bool writes) const {
    if (resource.is_scratch) return w.scratch(lane, static_cast<i64>(offset + scalar / kLanes), size);
    return contains(offset, size) ? w.memory.at(address(offset), size, writes) : nullptr;
  }

  Resource resource;
  u64 scalar;
  u32 fixed;
  const u32* registers;
};

template <class F>
void each_lane(u64 lanes, F f) {
  for (; lanes; lanes &= lanes - 1) f(static_cast<unsigned>(std::countr_zero(lanes)));
}

enum class Part { kWhole, kLowHalf, kHighHalf };  // where a 16-bit value lies in its register ("d16")

template <unsigned bytes, bool sign = false, Part part = Part::kWhole>
void load(Wave& w, const Instruction& in) {
  const Offsets offsets(w, in);
  Lanes at{};  // the result may go where the offsets are
  each_lane(w.exec(), [&](unsigned l) { at[l] = static_cast<u32>(offsets.of(l)); });
  constexpr unsigned unit = std::min(bytes, 4u);
  each_lane(w.exec(), [&](unsigned l) {
    for (unsigned i = 0; i < bytes; i += unit) {
      const u64 offset = u64{at[l]} + i;
      u32 value = 0;
      if (const uint8_t* from = offsets.find(w, l, offset, unit, false)) std::memcpy(&value, from, unit);
      if (sign) value = static_cast<u32>(static_cast<i32>(value << (32 - 8 * unit)) >> (32 - 8 * unit));
      u32& out = w.vector(in.op[0].index + i / 4)[l];
      if (part == Part::kWhole) out = value;
      if (part == Part::kLowHalf) out = (out & 0xffff0000) | (value & 0xffff);
      if (part == Part::kHighHalf) out = (out & 0xffff) | value << 16;
    }
  });
  w.issued(Wave::Queue::kVector, &in.op[0], (bytes + 3) / 4);
}

template <unsigned bytes, Part part = Part::kWhole>
void store(Wave& w, const Instruction& in) {
  const Offsets offsets(w, in);
  constexpr unsigned unit = std::min(bytes, 4u);
  each_lane(w.exec(), [&](unsigned l) {
    for (unsigned i = 0; i < bytes; i += unit) {
      const u64 offset = offsets.of(l) + i;
      u32 value = w.vector(in.op[0].index + i / 4)[l];
      if (part == Part::kHighHalf) value >>= 16;
      if (uint8_t* to = offsets.find(w, l, offset, unit, true)) std::memcpy(to, &value, unit);
    }
  });
  w.issued(Wave::Queue::kVector, nullptr, 0);
}

}  // namespace

void add_buffer(Table& t) {
  const Entry entries[] = {
      {"buffer_load_dword", load<4>},
      {"buffer_load_dwordx2", load<8>},
      {"buffer_load_dwordx3", load<12>},
      {"buffer_load_dwordx4", load<16>},
      {"buffer_load_ubyte", load<1>},
      {"buffer_load_sbyte", load<1, true>},
      {"buffer_load_ushort", load<2>},
      {"buffer_load_sshort", load<2, true>},
      {"buffer_load_ubyte_d16", load<1, false, Part::kLowHalf>},
      {"buffer_load_ubyte_d16_hi", load<1, false, Part::kHighHalf>},
      {"buffer_load_short_d16", load<2, false, Part::kLowHalf>},
      {"buffer_load_short_d16_hi", load<2, false, Part::kHighHalf>},
      {"buffer_store_byte", store<1>},
      {"buffer_store_short", store<2>},
      {"buffer_store_byte_d16_hi", store<1, Part::kHighHalf>},
      {"buffer_store_short_d16_hi", store<2, Part::kHighHalf>},
      {"buffer_store_dword", store<4>},
      {"buffer_store_dwordx2", store<8>},
      {"buffer_store_dwordx3", store<12>},
      {"buffer_store_dwordx4", store<16>},
  };
  t.insert(t.end(), std::begin(entries), std::end(entries));
}

}  // namespace gcn
