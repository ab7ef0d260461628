// Scalar instructions: one value a wave.
#include <time.h>

#include "lanes.h"

namespace gcn {
namespace {

// What becomes of SCC.
enum class Scc { kKeep, kNotZero };

template <auto F, Scc scc = Scc::kKeep>
void word(Wave& w, const Instruction& in) {
  u32 result;
  if constexpr (SignatureOf<decltype(F)>::kCount == 2)
    result = static_cast<u32>(F(w.scalar(in.op[1]), w.scalar(in.op[2])));
  else
    result = static_cast<u32>(F(w.scalar(in.op[1])));
  w.set_scalar(in.op[0], result);
  if (scc == Scc::kNotZero) w.scc = result != 0;
}

template <auto F, Scc scc = Scc::kKeep>
void pair(Wave& w, const Instruction& in) {
  u64 result;
  if constexpr (SignatureOf<decltype(F)>::kCount == 2)
    result = static_cast<u64>(F(w.scalar_pair(in.op[1]), w.scalar_pair(in.op[2])));
  else
    result = static_cast<u64>(F(w.scalar_pair(in.op[1])));
  w.set_scalar_pair(in.op[0], result);
  if (scc == Scc::kNotZero) w.scc = result != 0;
}

// A result of 33 bits and more: SCC is the carry or the borrow.
template <auto F>
void carry(Wave& w, const Instruction& in) {
  const u64 result = F(u64{w.scalar(in.op[1])}, u64{w.scalar(in.op[2])}, u64{w.scc});
  w.set_scalar(in.op[0], static_cast<u32>(result));
  w.scc = result >> 32 != 0;
}

template <auto F>
void signed_overflow(Wave& w, const Instruction& in) {
  const i64 result = F(i64{static_cast<i32>(w.scalar(in.op[1]))}, i64{static_cast<i32>(w.scalar(in.op[2]))});
  w.set_scalar(in.op[0], static_cast<u32>(result));
  w.scc = result != static_cast<i32>(result);
}

template <auto F>
void compare(Wave& w, const Instruction& in) {
  w.scc = F(w.scalar(in.op[0]), w.scalar(in.op[1]));
}
template <auto F>
void compare_pair(Wave& w, const Instruction& in) {
  w.scc = F(w.scalar_pair(in.op[0]), w.scalar_pair(in.op[1]));
}
i32 constant16(const Operand& op) {
  return static_cast<int16_t>(op.integer);
}
template <auto F>
void compare_signed16(Wave& w, const Instruction& in) {
  w.scc = F(static_cast<i32>(w.scalar(in.op[0])), constant16(in.op[1]));
}
template <auto F>
void compare_unsigned16(Wave& w, const Instruction& in) {
  w.scc = F(w.scalar(in.op[0]), static_cast<u32>(in.op[1].integer & 0xffff));
}

template <auto F>
void save_exec(Wave& w, const Instruction& in) {
  const u64 source = w.scalar_pair(in.op[1]), before = w.exec();
  w.set_scalar_pair(in.op[0], before);
  w.set_exec(F(source, before));
  w.scc = w.exec() != 0;
}

template <class T, bool larger>
void choose(Wave& w, const Instruction& in) {
  const T a = static_cast<T>(w.scalar(in.op[1])), b = static_cast<T>(w.scalar(in.op[2]));
  const bool first = larger ? a >= b : a < b;
  w.set_scalar(in.op[0], static_cast<u32>(first ? a : b));
  w.scc = first;
}

void nothing(Wave&, const Instruction&) {}

template <auto F>
void branch(Wave& w, const Instruction& in) {
  if (F(w)) w.jump_to(in.target);
}
u64 vcc(const Wave& w) {
  return w.s[kVcc] | u64{w.s[kVcc + 1]} << 32;
}

void call(Wave& w, const Instruction& in) {
  const u64 to = w.scalar_pair(in.op[1]);
  w.set_scalar_pair(in.op[0], w.image_address(in.address + 4));
  w.jump(to);
}

// Both counters run at 100 MHz, as the constant one of the hardware does.
void clock(Wave& w, const Instruction& in) {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  w.set_scalar_pair(in.op[0], static_cast<u64>(now.tv_sec) * 100'000'000 + static_cast<u64>(now.tv_nsec) / 10);
  w.issued(Wave::Queue::kScalar, &in.op[0], 2);
  w.poll();
}

template <unsigned words>
void load(Wave& w, const Instruction& in) {
  const i64 offset = i64{in.offset} + w.scalar(in.op[2]);
  const u64 address = (w.scalar_pair(in.op[1]) + static_cast<u64>(offset)) & ~u64{3};
  u32 value[words];
  std::memcpy(value, w.memory.at(address, sizeof value, false), sizeof value);
  for (unsigned i = 0; i < words; i++) {
    Operand to = in.op[0];
    to.index = static_cast<uint16_t>(to.index + i);
    w.set_scalar(to, value[i]);
  }
  w.issued(Wave::Queue::kScalar, &in.op[0], words);
}

u64 reverse(u64 x, unsigned bits) {
  u64 out = 0;
  for (unsigned i = 0; i < bits; i++) out |= (x >> i & 1) << (bits - 1 - i);
  return out;
}

// A field's offset and width are in one operand.
template <unsigned bits, bool sign>
u64 field(u64 x, u32 where) {
  const unsigned offset = where & (bits - 1), width = where >> 16 & 127;
  if (!width) return 0;
  u64 out = x >> offset;
  if (width < 64) out &= (u64{1} << width) - 1;
  if (sign && width < bits && out >> (width - 1) & 1) out |= ~u64{0} << width;
  return out;
}

template <bool sign>
void field_of_pair(Wave& w, const Instruction& in) {
  const u64 out = field<64, sign>(w.scalar_pair(in.op[1]), w.scalar(in.op[2]));
  w.set_scalar_pair(in.op[0], out);
  w.scc = out != 0;
}

template <auto F>
void count_pair(Wave& w, const Instruction& in) {
  w.set_scalar(in.op[0], F(w.scalar_pair(in.op[1])));
}

template <auto F>
void shift_pair(Wave& w, const Instruction& in) {
  const u64 out = F(w.scalar_pair(in.op[1]), w.scalar(in.op[2]) & 63);
  w.set_scalar_pair(in.op[0], out);
  w.scc = out != 0;
}

template <unsigned shift>
void shift_add(Wave& w, const Instruction& in) {
  const u64 out = (u64{w.scalar(in.op[1])} << shift) + w.scalar(in.op[2]);
  w.set_scalar(in.op[0], static_cast<u32>(out));
  w.scc = out >> 32 != 0;
}

void add_arithmetic(Table& t) {
  const Entry entries[] = {
      {"s_add_u32", carry<[](u64 a, u64 b, u64) { return a + b; }>},
      {"s_addc_u32", carry<[](u64 a, u64 b, u64 c) { return a + b + c; }>},
      {"s_sub_u32", carry<[](u64 a, u64 b, u64) { return a - b; }>},
      {"s_subb_u32", carry<[](u64 a, u64 b, u64 c) { return a - b - c; }>},
      {"s_add_i32", signed_overflow<[](i64 a, i64 b) { return a + b; }>},
      {"s_sub_i32", signed_overflow<[](i64 a, i64 b) { return a - b; }>},
      {"s_mul_i32", word<[](u32 a, u32 b) { return a * b; }>},
      {"s_mul_hi_u32", word<[](u32 a, u32 b) { return (u64{a} * b >> 32); }>},
      {"s_mul_hi_i32", word<[](u32 a, u32 b) { return (i64{static_cast<i32>(a)} * static_cast<i32>(b) >> 32); }>},
      {"s_min_u32", choose<u32, false>},
      {"s_max_u32", choose<u32, true>},
      {"s_min_i32", choose<i32, false>},
      {"s_max_i32", choose<i32, true>},
      {"s_abs_i32", word<[](u32 a) { return static_cast<i32>(a) < 0 ? 0 - a : a; }, Scc::kNotZero>},
      {"s_lshl1_add_u32", shift_add<1>},
      {"s_lshl2_add_u32", shift_add<2>},
      {"s_lshl3_add_u32", shift_add<3>},
      {"s_lshl4_add_u32", shift_add<4>},
      {"s_movk_i32", [](Wave& w, const Instruction& in) { w.set_scalar(in.op[0], constant16(in.op[1])); }},
      {"s_mulk_i32",
       [](Wave& w, const Instruction& in) { w.set_scalar(in.op[0], w.scalar(in.op[0]) * constant16(in.op[1])); }},
      {"s_addk_i32",
       [](Wave& w, const Instruction& in) {
         const i64 sum = i64{static_cast<i32>(w.scalar(in.op[0]))} + constant16(in.op[1]);
         w.set_scalar(in.op[0], static_cast<u32>(sum));
         w.scc = sum != static_cast<i32>(sum);
       }},
  };
  t.insert(t.end(), std::begin(entries), std::end(entries));
}

void add_logic(Table& t) {
  const Entry entries[] = {
      {"s_and_b32", word<[](u32 a, u32 b) { return a & b; }, Scc::kNotZero>},
      {"s_or_b32", word<[](u32 a, u32 b) { return a | b; }, Scc::kNotZero>},
      {"s_xor_b32", word<[](u32 a, u32 b) { return a ^ b; }, Scc::kNotZero>},
      {"s_andn2_b32", word<[](u32 a, u32 b) { return a & ~b; }, Scc::kNotZero>},
      {"s_orn2_b32", word<[](u32 a, u32 b) { return a | ~b; }, Scc::kNotZero>},
      {"s_nand_b32", word<[](u32 a, u32 b) { return ~(a & b); }, Scc::kNotZero>},
      {"s_nor_b32", word<[](u32 a, u32 b) { return ~(a | b); }, Scc::kNotZero>},
      {"s_xnor_b32", word<[](u32 a, u32 b) { return ~(a ^ b); }, Scc::kNotZero>},
      {"s_not_b32", word<[](u32 a) { return ~a; }, Scc::kNotZero>},
      {"s_and_b64", pair<[](u64 a, u64 b) { return a & b; }, Scc::kNotZero>},
      {"s_or_b64", pair<[](u64 a, u64 b) { return a | b; }, Scc::kNotZero>},
      {"s_xor_b64", pair<[](u64 a, u64 b) { return a ^ b; }, Scc::kNotZero>},
      {"s_andn2_b64", pair<[](u64 a, u64 b) { return a & ~b; }, Scc::kNotZero>},
      {"s_orn2_b64", pair<[](u64 a, u64 b) { return a | ~b; }, Scc::kNotZero>},
      {"s_nand_b64", pair<[](u64 a, u64 b) { return ~(a & b); }, Scc::kNotZero>},
      {"s_nor_b64", pair<[](u64 a, u64 b) { return ~(a | b); }, Scc::kNotZero>},
      {"s_xnor_b64", pair<[](u64 a, u64 b) { return ~(a ^ b); }, Scc::kNotZero>},
      {"s_not_b64", pair<[](u64 a) { return ~a; }, Scc::kNotZero>},
      {"s_lshl_b32", word<[](u32 a, u32 b) { return a << (b & 31); }, Scc::kNotZero>},
      {"s_lshr_b32", word<[](u32 a, u32 b) { return (a >> (b & 31)); }, Scc::kNotZero>},
      {"s_ashr_i32", word<[](u32 a, u32 b) { return (static_cast<i32>(a) >> (b & 31)); }, Scc::kNotZero>},
      {"s_lshl_b64", shift_pair<[](u64 a, u32 b) { return a << b; }>},
      {"s_lshr_b64", shift_pair<[](u64 a, u32 b) { return (a >> b); }>},
      {"s_ashr_i64", shift_pair<[](u64 a, u32 b) { return (static_cast<u64>(static_cast<i64>(a) >> b)); }>},
      {"s_bfe_u32", word<[](u32 a, u32 b) { return (field<32, false>(a, b)); }, Scc::kNotZero>},
      {"s_bfe_i32", word<[](u32 a, u32 b) { return (field<32, true>(a, b)); }, Scc::kNotZero>},
      {"s_bfe_u64", field_of_pair<false>},
      {"s_bfe_i64", field_of_pair<true>},
      {"s_bfm_b32", word<[](u32 a, u32 b) { return ((1u << (a & 31)) - 1) << (b & 31); }>},
      {"s_brev_b32", word<[](u32 a) { return reverse(a, 32); }>},
      {"s_brev_b64", pair<[](u64 a) { return reverse(a, 64); }>},
      {"s_bcnt1_i32_b32", word<[](u32 a) { return std::popcount(a); }, Scc::kNotZero>},
      {"s_bcnt1_i32_b64",
       [](Wave& w, const Instruction& in) {
         const u32 ones = std::popcount(w.scalar_pair(in.op[1]));
         w.set_scalar(in.op[0], ones);
         w.scc = ones != 0;
       }},
      {"s_ff1_i32_b32", word<[](u32 a) { return a ? std::countr_zero(a) : -1; }>},
      {"s_ff1_i32_b64", count_pair<[](u64 a) { return static_cast<u32>(a ? std::countr_zero(a) : -1); }>},
      {"s_flbit_i32_b32", word<[](u32 a) { return a ? std::countl_zero(a) : -1; }>},
      {"s_flbit_i32_b64", count_pair<[](u64 a) { return static_cast<u32>(a ? std::countl_zero(a) : -1); }>},
      {"s_flbit_i32", word<[](u32 a) {
         const u32 x = static_cast<i32>(a) < 0 ? ~a : a;
         return x ? std::countl_zero(x) : -1;
       }>},
      {"s_sext_i32_i8", word<[](u32 a) { return static_cast<int8_t>(a); }>},
      {"s_sext_i32_i16", word<[](u32 a) { return static_cast<int16_t>(a); }>},
      {"s_bitcmp0_b32", compare<[](u32 a, u32 b) { return (!(a >> (b & 31) & 1)); }>},
      {"s_bitcmp1_b32", compare<[](u32 a, u32 b) { return ((a >> (b & 31) & 1) != 0); }>},
      {"s_pack_ll_b32_b16", word<[](u32 a, u32 b) { return (a & 0xffff) | b << 16; }>},
      {"s_mov_b32", word<[](u32 a) { return a; }>},
      {"s_mov_b64", pair<[](u64 a) { return a; }>},
      {"s_cselect_b32", [](Wave& w, const Instruction& in) { w.set_scalar(in.op[0], w.scalar(in.op[w.scc ? 1 : 2])); }},
      {"s_cselect_b64",
       [](Wave& w, const Instruction& in) { w.set_scalar_pair(in.op[0], w.scalar_pair(in.op[w.scc ? 1 : 2])); }},
      {"s_and_saveexec_b64", save_exec<[](u64 s, u64 e) { return s & e; }>},
      {"s_or_saveexec_b64", save_exec<[](u64 s, u64 e) { return s | e; }>},
      {"s_xor_saveexec_b64", save_exec<[](u64 s, u64 e) { return s ^ e; }>},
      {"s_andn2_saveexec_b64", save_exec<[](u64 s, u64 e) { return s & ~e; }>},
      {"s_orn2_saveexec_b64", save_exec<[](u64 s, u64 e) { return s | ~e; }>},
  };
  t.insert(t.end(), std::begin(entries), std::end(entries));
}

#define COMPARES(name, sign)                                                                                        \
  {"s_cmp_" name "_u32", compare<[](u32 a, u32 b) { return (a sign b); }>},                                         \
      {"s_cmp_" name "_i32", compare<[](u32 a, u32 b) { return (static_cast<i32>(a) sign static_cast<i32>(b)); }>}, \
      {"s_cmp_" name "_u64", compare_pair<[](u64 a, u64 b) { return (a sign b); }>},                                \
      {"s_cmpk_" name "_i32", compare_signed16<[](i32 a, i32 b) { return (a sign b); }>}, {                         \
    "s_cmpk_" name "_u32", compare_unsigned16<[](u32 a, u32 b) { return (a sign b); }>                              \
  }

void add_control(Table& t) {
  const Entry entries[] = {
      COMPARES("eq", ==),
      COMPARES("lg", !=),
      COMPARES("gt", >),
      COMPARES("ge", >=),
      COMPARES("lt", <),
      COMPARES("le", <=),
      {"s_branch", branch<[](const Wave&) { return true; }>},
      {"s_cbranch_scc0", branch<[](const Wave& w) { return !w.scc; }>},
      {"s_cbranch_scc1", branch<[](const Wave& w) { return w.scc; }>},
      {"s_cbranch_vccz", branch<[](const Wave& w) { return vcc(w) == 0; }>},
      {"s_cbranch_vccnz", branch<[](const Wave& w) { return vcc(w) != 0; }>},
      {"s_cbranch_execz", branch<[](const Wave& w) { return w.exec() == 0; }>},
      {"s_cbranch_execnz", branch<[](const Wave& w) { return w.exec() != 0; }>},
      {"s_getpc_b64",
       [](Wave& w, const Instruction& in) { w.set_scalar_pair(in.op[0], w.image_address(in.address + 4)); }},
      {"s_setpc_b64", [](Wave& w, const Instruction& in) { w.jump(w.scalar_pair(in.op[0])); }},
      {"s_swappc_b64", call},
      {"s_endpgm", [](Wave& w, const Instruction&) { w.end(); }},
      {"s_barrier", [](Wave& w, const Instruction&) { w.stop_at_barrier(); }},
      {"s_waitcnt", [](Wave& w, const Instruction& in) { w.wait(in.vmcnt, in.lgkmcnt); }},
      {"s_trap", [](Wave&, const Instruction&) { fault("s_trap: a failed assert, or code that cannot be reached"); }},
      {"s_memrealtime", clock},
      {"s_memtime", clock},
      {"s_sleep", [](Wave& w, const Instruction&) { w.poll(); }},
      {"s_nop", nothing},
      {"s_setprio", nothing},
      {"s_sethalt", nothing},
      {"s_icache_inv", nothing},
      {"s_dcache_wb", nothing},
      {"s_dcache_inv", nothing},
      {"buffer_wbl2", nothing},
      {"buffer_inv", nothing},
      {"buffer_invl2", nothing},
      {"buffer_wbinvl1", nothing},
      {"buffer_wbinvl1_vol", nothing},
      {"s_load_dword", load<1>},
      {"s_load_dwordx2", load<2>},
      {"s_load_dwordx4", load<4>},
      {"s_load_dwordx8", load<8>},
      {"s_load_dwordx16", load<16>},
  };
  t.insert(t.end(), std::begin(entries), std::end(entries));
}

}  // namespace

void add_scalar(Table& table) {
  add_arithmetic(table);
  add_logic(table);
  add_control(table);
}

}  // namespace gcn
