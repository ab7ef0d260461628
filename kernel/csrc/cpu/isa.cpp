#include "cpu/isa.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "common/error.h"

namespace radix::cpu {
namespace {

struct Leaf {
  uint32_t a = 0, b = 0, c = 0, d = 0;
  Leaf(uint32_t leaf, uint32_t sub) { __get_cpuid_count(leaf, sub, &a, &b, &c, &d); }
};

bool has(uint32_t word, std::initializer_list<int> bits) {
  for (int bit : bits)
    if (!(word >> bit & 1)) return false;
  return true;
}

// Which register files the operating system saves (XCR0).
uint64_t os_state() {
  uint32_t lo, hi;
  __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
  return uint64_t{hi} << 32 | lo;
}

// Linux hands out the AMX tile registers on request, once a process.
bool request_tiles() {
  constexpr long kReqXcompPerm = 0x1023, kXfeatureTileData = 18;
  return syscall(SYS_arch_prctl, kReqXcompPerm, kXfeatureTileData) == 0;
}

Isa detect() {
  const Leaf l1(1, 0), l7(7, 0), l71(7, 1);
  const bool osxsave = has(l1.c, {27});
  const uint64_t state = osxsave ? os_state() : 0;
  const bool avx2 = (state & 0x6) == 0x6 && has(l1.c, {12 /*fma*/, 28 /*avx*/, 29 /*f16c*/}) && has(l7.b, {5});
  if (!avx2) return Isa::portable;
  const bool avx512 = (state & 0xE6) == 0xE6 && has(l7.b, {16 /*f*/, 17 /*dq*/, 30 /*bw*/, 31 /*vl*/});
  if (!avx512) return Isa::avx2;
  if (!has(l71.a, {5 /*avx512-bf16*/}) || !has(l7.c, {11 /*avx512-vnni*/})) return Isa::avx512;
  const bool tiles = (state & 0x60000) == 0x60000 && has(l7.d, {22 /*amx-bf16*/, 24 /*amx-tile*/, 25 /*amx-int8*/});
  const bool amx = tiles && request_tiles();
  return amx ? Isa::amx : Isa::avx512_bf16;
}

Isa choose() {
  const Isa best = detect();
  const char* wanted = std::getenv("RADIX_CPU_ISA");
  if (!wanted || !*wanted) return best;
  for (Isa isa : {Isa::portable, Isa::avx2, Isa::avx512, Isa::avx512_bf16, Isa::amx}) {
    if (std::strcmp(wanted, isa_name(isa)) != 0) continue;
    if (isa > best) fail(RK_UNSUPPORTED, "RADIX_CPU_ISA=%s: this machine has %s at most", wanted, isa_name(best));
    return isa;
  }
  fail(RK_INVALID, "RADIX_CPU_ISA=%s: expected portable, avx2, avx512, avx512_bf16 or amx", wanted);
}

}  // namespace

Isa active_isa() {
  static const Isa isa = choose();
  return isa;
}

const char* isa_name(Isa isa) {
  constexpr const char* names[] = {"portable", "avx2", "avx512", "avx512_bf16", "amx"};
  return names[static_cast<int>(isa)];
}

}  // namespace radix::cpu
