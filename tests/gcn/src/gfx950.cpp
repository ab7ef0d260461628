// gfx950's instructions in a disassembly by an LLVM that does not know them, 19.
//
// It reads the code as gfx942's and prints `.long` for the first word of such an instruction; from the second on it may
// be out of step. So the instruction is taken out, two s_nop put in its place, and the whole read anew, until nothing
// is found any more.
#include <elf.h>

#include <cstring>
#include <map>

#include "text.h"

namespace gcn {
namespace {

constexpr uint32_t kNop = 0xbf800000;

struct NewOpcode {
  uint32_t code;  // the upper half of the first word
  const char* name;
  unsigned sources;
  bool has_table;  // of three-input logic, where other instructions have modifiers
};
// All of the encoding VOP3: two words.
constexpr NewOpcode kOpcodes[] = {{0xd233, "v_bitop3_b16", 3, true},
                                  {0xd234, "v_bitop3_b32", 3, true},
                                  {0xd267, "v_cvt_pk_f16_f32", 2, false},
                                  {0xd268, "v_cvt_pk_bf16_f32", 2, false}};

std::string register_text(char letter, unsigned number) {
  std::string text(1, letter);
  return text += std::to_string(number);
}

std::string source_text(unsigned code) {
  static constexpr const char* kReals[] = {"0.5", "-0.5", "1.0", "-1.0", "2.0", "-2.0", "4.0", "-4.0", "0.15915494"};
  static const std::map<unsigned, const char*> kNamed = {
      {106, "vcc_lo"}, {107, "vcc_hi"}, {124, "m0"}, {126, "exec_lo"}, {127, "exec_hi"}};
  if (code >= 256) return register_text('v', code - 256);
  if (code < 102) return register_text('s', code);
  if (code >= 128 && code <= 192) return std::to_string(code - 128);
  if (code > 192 && code <= 208) return std::to_string(192 - static_cast<int>(code));
  if (code >= 240 && code <= 248) return kReals[code - 240];
  if (const auto named = kNamed.find(code); named != kNamed.end()) return named->second;
  fault("operand %u of an instruction of gfx950", code);
}

std::string text_of(const NewOpcode& opcode, uint32_t first, uint32_t second) {
  if (first >> 11 & 0xf) fault("op_sel of %s", opcode.name);
  if (!opcode.has_table && second >> 27 & 3) fault("a multiplier of %s", opcode.name);
  std::string text = "\t";
  text.append(opcode.name).append(" ").append(register_text('v', first & 0xff));
  for (unsigned i = 0; i < opcode.sources; i++) {
    const bool negated = !opcode.has_table && second >> (29 + i) & 1;
    const bool magnitude = !opcode.has_table && first >> (8 + i) & 1;
    const std::string source = source_text(second >> (9 * i) & 0x1ff);
    const char* bar = magnitude ? "|" : "";
    text.append(negated ? ", -" : ", ").append(bar).append(source).append(bar);
  }
  if (opcode.has_table) {
    const uint32_t table = (second >> 27 & 3) << 6 | (first >> 8 & 7) << 3 | second >> 29;
    text.append(" bitop3:").append(std::to_string(table));
  }
  return text.append(first >> 15 & 1 ? " clamp" : "");
}

// Where the bytes of an address lie in the file.
size_t file_offset(const std::vector<uint8_t>& elf, uint64_t address) {
  Elf64_Ehdr header;
  std::memcpy(&header, elf.data(), sizeof header);
  for (unsigned i = 0; i < header.e_phnum; i++) {
    Elf64_Phdr segment;
    std::memcpy(&segment, elf.data() + header.e_phoff + i * sizeof segment, sizeof segment);
    if (segment.p_type == PT_LOAD && address >= segment.p_vaddr && address + 8 <= segment.p_vaddr + segment.p_filesz)
      return segment.p_offset + (address - segment.p_vaddr);
  }
  fault("no code at 0x%lx", address);
}

// Calls visit(line, address) for the instructions of a disassembly, visit(line, -1) for its other lines.
template <class Visit>
void each_line(string_view text, Visit visit) {
  while (!text.empty()) {
    const size_t stop = std::min(text.find('\n'), text.size());
    const string_view line = text.substr(0, stop);
    text.remove_prefix(std::min(stop + 1, text.size()));
    const size_t comment = line.find("// ");
    uint64_t address = ~uint64_t{0};
    if (!line.empty() && line[0] == '\t' && comment != line.npos)
      std::from_chars(line.data() + comment + 3, line.data() + line.size(), address, 16);
    visit(line, address);
  }
}

using Found = std::map<uint64_t, std::string>;  // by address

// Takes the new instructions that the disassembly shows out of the code.
bool take_out(std::vector<uint8_t>& elf, const std::string& listing, Found& found) {
  const size_t before = found.size();
  each_line(listing, [&](string_view line, uint64_t address) {
    if (line.find(".long") == line.npos || found.count(address - 4)) return;
    uint8_t* at = elf.data() + file_offset(elf, address);
    uint32_t words[2];
    std::memcpy(words, at, sizeof words);
    for (const NewOpcode& opcode : kOpcodes) {
      if (opcode.code != words[0] >> 16) continue;
      char comment[64];
      std::snprintf(comment, sizeof comment, " // %012lX: %08X %08X", address, words[0], words[1]);
      found[address] = text_of(opcode, words[0], words[1]).append(comment);
      const uint32_t nops[2] = {kNop, kNop};
      std::memcpy(at, nops, sizeof nops);
    }
  });
  return found.size() != before;
}

}  // namespace

std::string disassemble_gfx950(std::vector<uint8_t> elf, const Disassembler& as_gfx942) {
  Found found;
  std::string listing = as_gfx942(elf);
  while (take_out(elf, listing, found)) listing = as_gfx942(elf);
  std::string text;
  each_line(listing, [&](string_view line, uint64_t address) {
    if (found.count(address - 4)) return;
    const auto instead = found.find(address);
    text += instead == found.end() ? std::string(line) : instead->second;
    text += '\n';
  });
  return text;
}

}  // namespace gcn
