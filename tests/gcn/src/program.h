// Decoded instructions. The decoder is LLVM's own: its disassembly is read, once for a code object.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

#include "code_object.h"

namespace gcn {

constexpr unsigned kLanes = 64;
using Lanes = std::array<uint32_t, kLanes>;

// Scalar registers by the number that the instruction word has for them.
constexpr uint16_t kFlatScratch = 102, kVcc = 106, kM0 = 124, kExec = 126, kScalars = 128;
// Rows of the vector registers behind the 512 real ones: operands that SDWA or DPP has rearranged, and their result.
constexpr uint16_t kAgprs = 256;  // accumulation registers, apart from the others
constexpr uint16_t kRearranged = 512, kUnplaced = 516, kVectorRows = 520;

struct Operand {
  enum class Kind : uint8_t { kNone, kVector, kScalar, kLiteral, kScc };
  Kind kind = Kind::kNone;  // kNone: "off", "null"
  bool negated = false, magnitude = false, extended = false;
  bool real = false;  // the literal is written as a real number
  uint16_t index = 0;
  uint16_t count = 1;             // registers
  int64_t integer = 0;            // of a literal
  double number = 0;              // of one written as a real number
  const uint32_t* low = nullptr;  // a literal's bits in every lane: of 32 bits, or the low word of 64
  const uint32_t* high = nullptr;
};

struct Selection {  // SDWA: which bytes of a register
  uint8_t shift = 0, bits = 32;
};

enum class Permutation : uint8_t {
  kNone,
  kQuad,
  kRowShiftLeft,
  kRowShiftRight,
  kRowRotate,
  kRowMirror,
  kHalfMirror,
  kBroadcast15,
  kBroadcast31,
  kNewBroadcast,
  kWaveShiftLeft,
  kWaveShiftRight,
  kWaveRotate
};

// What SDWA and DPP do around an instruction.
struct Rearrangement {
  bool sdwa = false;
  Selection from[2], to;
  bool keeps_rest = false;  // dst_unused:UNUSED_PRESERVE
  bool writes_vector = true;
  Operand source[2], target;  // where the instruction, which sees the rows behind, reads and writes
  Permutation permutation = Permutation::kNone;
  uint8_t quad[4] = {0, 1, 2, 3};
  uint8_t distance = 0, row_mask = 15, bank_mask = 15;
  bool zero_outside = false;  // bound_ctrl
};

class Wave;
struct Instruction;
using Handler = void (*)(Wave&, const Instruction&);

struct Instruction {
  Handler run = nullptr;
  uint8_t operands = 0;
  bool clamped = false, returns_old = false;
  bool in_order = false;   // a load: it may follow another into the same register
  uint8_t multiplier = 0;  // log2 of mul:, 3 for div:2
  uint8_t op_sel = 0, op_sel_hi = 7, neg_lo = 0, neg_hi = 0;
  uint8_t broadcast = 0;  // MFMA's cbsz, abid or blgp
  int32_t offset = 0, offset0 = 0, offset1 = 0;
  Operand op[6];
  const Rearrangement* around = nullptr;
  uint32_t next = 0;                // index of what follows
  uint32_t target = 0;              // of a branch
  uint16_t swizzle = 0;             // of ds_swizzle: as in the instruction word
  uint8_t truth_table = 0;          // of v_bitop3
  bool offset_in_register = false;  // of a buffer access: "offen"
  uint8_t vmcnt = 255, lgkmcnt = 255;
  uint64_t address = 0;
  std::string name;     // without _e32 and the like
  std::string problem;  // why it cannot run
  mutable uint8_t executed = 0;
};

struct Program {
  CodeObject object;
  std::vector<Instruction> code;
  std::unordered_map<uint64_t, uint32_t> at;  // address -> index
  std::deque<Lanes> constants;
  std::deque<Rearrangement> rearrangements;

  uint32_t index_of(uint64_t address) const;  // Fault where no instruction begins
  std::string name_of(const Instruction& instruction) const;
};

// What llvm-objdump prints of a code object, or what gcn_listing() gave instead of it. LLVM_OBJDUMP names the program;
// the text is kept in the folder GCN_CACHE, where that is set.
std::string disassemble(const CodeObject& object);
// For code that no disassembler at hand knows: the text that stands for it, of llvm-objdump's form.
void keep_listing(const std::vector<uint8_t>& elf, const char* text);

// The same of gfx950's code by a disassembler that knows gfx942 alone.
using Disassembler = std::function<std::string(const std::vector<uint8_t>&)>;
std::string disassemble_gfx950(std::vector<uint8_t> elf, const Disassembler& as_gfx942);

void decode(Program& program, const std::string& text);

// The handler of an instruction by its name, or NULL.
Handler find_handler(const std::string& name);
size_t count_handlers();

}  // namespace gcn
