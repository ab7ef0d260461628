// From a line of the disassembly to an Instruction.
#include <algorithm>
#include <cstring>

#include "text.h"

namespace gcn {
namespace {

using Kind = Operand::Kind;
struct Choice {
  string_view name;
  Permutation value;
};
constexpr Choice kNumbered[] = {
    {"row_shl", Permutation::kRowShiftLeft},   {"row_shr", Permutation::kRowShiftRight},
    {"row_ror", Permutation::kRowRotate},      {"row_newbcast", Permutation::kNewBroadcast},
    {"wave_shl", Permutation::kWaveShiftLeft}, {"wave_shr", Permutation::kWaveShiftRight},
    {"wave_ror", Permutation::kWaveRotate},
};

Selection selection(string_view s) {
  if (s == "DWORD") return {};
  if (take_prefix(s, "WORD_")) return {static_cast<uint8_t>(16 * (s[0] - '0')), 16};
  if (take_prefix(s, "BYTE_")) return {static_cast<uint8_t>(8 * (s[0] - '0')), 8};
  fault("SDWA selection %.*s", static_cast<int>(s.size()), s.data());
}

uint8_t bit_list(string_view s) {  // [1,0,1]
  uint8_t bits = 0;
  for (size_t i = 1; i + 1 < s.size(); i += 2) bits |= (s[i] == '1') << (i / 2);
  return bits;
}

// ds_swizzle's permutation as the offset field has it.
uint16_t swizzle_of(string_view s) {
  const auto number_after = [&](char c, int which) {
    size_t at = 0;
    for (int i = 0; i <= which; i++) at = s.find(c, at) + 1;
    return std::atoi(s.data() + at);
  };
  if (s.find("BITMASK_PERM") != s.npos) {
    const string_view p = s.substr(s.find('"') + 1, 5);
    unsigned keep = 0, set = 0, flip = 0;
    for (int i = 0; i < 5; i++) {
      const unsigned bit = 16u >> i;
      if (p[i] == '1') set |= bit;
      if (p[i] == 'p') keep |= bit;
      if (p[i] == 'i') keep |= bit, flip |= bit;
    }
    return static_cast<uint16_t>(keep | set << 5 | flip << 10);
  }
  if (s.find("SWAP") != s.npos) return static_cast<uint16_t>(0x1f | number_after(',', 0) << 10);
  if (s.find("QUAD_PERM") != s.npos) {
    unsigned bits = 0x8000;
    for (int i = 0; i < 4; i++) bits |= number_after(',', i) << (2 * i);
    return static_cast<uint16_t>(bits);
  }
  fault("%.*s", static_cast<int>(s.size()), s.data());
}

class LineDecoder {
 public:
  LineDecoder(Program& program, Instruction& instruction, Rearrangement& around)
      : program_(program), in_(instruction), around_(around) {}

  // True when the instruction has SDWA or DPP around it.
  bool decode(string_view mnemonic, string_view rest) {
    name(mnemonic);
    if (in_.name == "s_waitcnt") {
      wait(rest);
      return false;
    }
    static constexpr string_view kBare[] = {"s_nop",        "s_endpgm",     "s_sleep",
                                            "s_getreg_b32", "s_setreg_b32", "s_setreg_imm32_b32",
                                            "s_setprio",    "s_sethalt",    "s_code_end"};
    if (std::find(std::begin(kBare), std::end(kBare), in_.name) != std::end(kBare)) return false;
    operands(modifiers(rest));
    const auto has = [&](const char* part) { return in_.name.find(part) != in_.name.npos; };
    if (in_.op_sel && !has("_pk_") && !has("_mix")) fault("op_sel");
    if (special_) rearrange();
    return special_;
  }

 private:
  void name(string_view s) {
    dpp_ = take_suffix(s, "_dpp");
    around_.sdwa = take_suffix(s, "_sdwa");
    if (!take_suffix(s, "_e32")) take_suffix(s, "_e64");
    special_ = dpp_ || around_.sdwa;
    in_.name = std::string(s);
    for (const char* load : {"global_load", "buffer_load", "scratch_load", "ds_read"})
      if (in_.name.rfind(load, 0) == 0) in_.in_order = true;
    if (in_.name.find("_mix") != in_.name.npos) in_.op_sel_hi = 0;
  }

  void wait(string_view rest) {
    const auto count = [&](string_view what, uint8_t none) {
      const size_t at = rest.find(what);
      return at == rest.npos ? none : static_cast<uint8_t>(std::atoi(rest.data() + at + what.size()));
    };
    in_.vmcnt = count("vmcnt(", 255);
    in_.lgkmcnt = count("lgkmcnt(", 255);
  }

  // Takes the modifiers off; what is left are the operands.
  string_view modifiers(string_view rest) {
    const size_t swizzled = rest.find("offset:swizzle(");
    if (swizzled != rest.npos) {
      in_.swizzle = swizzle_of(rest.substr(swizzled));
      return rest.substr(0, swizzled);
    }
    size_t end = rest.size();
    size_t at = 0;
    while (at < rest.size()) {  // words behind the last operand; an operand is followed by a comma
      size_t stop = rest.find(' ', at);
      if (stop == rest.npos) stop = rest.size();
      string_view word = rest.substr(at, stop - at);
      if (word.substr(0, 10) == "quad_perm:" || word.find(':') == word.npos) {
        stop = std::max(stop, word.substr(0, 10) == "quad_perm:" ? rest.find(']', at) + 1 : stop);
        word = rest.substr(at, stop - at);
      }
      if (modifier(word)) end = std::min(end, at);
      at = stop + 1;
    }
    return trim(rest.substr(0, end));
  }

  bool modifier(string_view word) {
    const size_t colon = word.find(':');
    const bool bracketed = word.find('[') < colon;  // v[0:1] is an operand
    if (colon == word.npos || bracketed) return flag(word);
    const string_view key = word.substr(0, colon), value = word.substr(colon + 1);
    if (sdwa(key, value) || dpp(key, value)) return true;
    if (key == "op_sel") {
      in_.op_sel = bit_list(value);
    } else if (key == "op_sel_hi") {
      in_.op_sel_hi = bit_list(value);
    } else if (key == "neg_lo") {
      in_.neg_lo = bit_list(value);
    } else if (key == "neg_hi") {
      in_.neg_hi = bit_list(value);
    } else if (key == "offset") {
      in_.offset = static_cast<int32_t>(integer_of(value));
    } else if (key == "offset0") {
      in_.offset0 = static_cast<int32_t>(integer_of(value));
    } else if (key == "offset1") {
      in_.offset1 = static_cast<int32_t>(integer_of(value));
    } else if (key == "bitop3") {
      in_.truth_table = static_cast<uint8_t>(integer_of(value));
    } else if (key == "mul") {
      in_.multiplier = value == "2" ? 1 : 2;
    } else if (key == "div") {
      in_.multiplier = 3;
    } else if (key == "cbsz" || key == "abid" || key == "blgp") {
      in_.broadcast = 1;
    } else {
      fault("modifier %.*s", static_cast<int>(word.size()), word.data());
    }
    return true;
  }

  bool flag(string_view word) {
    if (word == "clamp") in_.clamped = true;
    if (word == "sc0" || word == "glc") in_.returns_old = true;
    if (word == "offen") in_.offset_in_register = true;
    if (word == "row_mirror") around_.permutation = Permutation::kRowMirror;
    if (word == "row_half_mirror") around_.permutation = Permutation::kHalfMirror;
    static constexpr string_view kFlags[] = {
        "clamp", "sc0", "sc1", "nt", "glc", "slc", "offen", "lds", "gds", "row_mirror", "row_half_mirror"};
    if (word == "lds" || word == "gds") fault("modifier %.*s", static_cast<int>(word.size()), word.data());
    return std::find(std::begin(kFlags), std::end(kFlags), word) != std::end(kFlags);
  }

  bool sdwa(string_view key, string_view value) {
    if (key == "src0_sel") {
      around_.from[0] = selection(value);
    } else if (key == "src1_sel") {
      around_.from[1] = selection(value);
    } else if (key == "dst_sel") {
      around_.to = selection(value);
    } else if (key == "dst_unused") {
      if (value == "UNUSED_SEXT") fault("dst_unused:UNUSED_SEXT");
      around_.keeps_rest = value == "UNUSED_PRESERVE";
    } else {
      return false;
    }
    return true;
  }

  bool dpp(string_view key, string_view value) {
    if (key == "quad_perm") {
      around_.permutation = Permutation::kQuad;
      for (int i = 0, at = 1; i < 4; i++, at++) {
        while (value[at] == ' ' || value[at] == ',') at++;
        around_.quad[i] = static_cast<uint8_t>(value[at] - '0');
      }
      return true;
    }
    if (key == "row_mask" || key == "bank_mask") {
      (key == "row_mask" ? around_.row_mask : around_.bank_mask) = static_cast<uint8_t>(integer_of(value));
      return true;
    }
    if (key == "bound_ctrl") return around_.zero_outside = true;
    if (key == "row_bcast") {
      around_.permutation = value == "15" ? Permutation::kBroadcast15 : Permutation::kBroadcast31;
      return true;
    }
    for (const Choice& choice : kNumbered) {
      if (choice.name != key) continue;
      around_.permutation = choice.value;
      around_.distance = static_cast<uint8_t>(integer_of(value));
      return true;
    }
    return false;
  }

  void operands(string_view list) {
    while (!list.empty()) {
      const size_t comma = std::min(list.find(','), list.size());
      if (in_.operands == std::size(in_.op)) fault("too many operands");
      Operand& op = in_.op[in_.operands++] = read_operand(trim(list.substr(0, comma)));
      if (op.kind == Kind::kLiteral) constant(op, literal_bits(op, in_.name));
      list = trim(list.substr(std::min(comma + 1, list.size())));
    }
  }

  void constant(Operand& op, uint64_t bits) {
    op.integer = static_cast<int64_t>(bits);
    program_.constants.emplace_back().fill(static_cast<uint32_t>(bits));
    op.low = program_.constants.back().data();
    program_.constants.emplace_back().fill(static_cast<uint32_t>(bits >> 32));
    op.high = program_.constants.back().data();
  }

  // The instruction itself reads and writes the rows behind the registers.
  void rearrange() {
    const bool compares = in_.name.rfind("v_cmp", 0) == 0;
    const unsigned first = in_.name.find("_co_") != in_.name.npos ? 2 : 1;
    for (unsigned i = 0; i < 2 && first + i < in_.operands && i < (dpp_ ? 1u : 2u); i++) {
      Operand& op = in_.op[first + i];
      around_.source[i] = op;
      op = {};
      op.kind = Kind::kVector;
      op.index = static_cast<uint16_t>(kRearranged + i);
      op.negated = around_.source[i].negated;
      op.magnitude = around_.source[i].magnitude;
    }
    around_.writes_vector = !compares;
    if (compares || around_.to.bits == 32) return;
    around_.target = in_.op[0];
    in_.op[0].index = kUnplaced;
  }

  Program& program_;
  Instruction& in_;
  Rearrangement& around_;
  bool dpp_ = false, special_ = false;
};

uint64_t hex_after(string_view line, size_t at) {
  while (at < line.size() && line[at] == ' ') at++;
  uint64_t value = 0;
  std::from_chars(line.data() + at, line.data() + line.size(), value, 16);
  return value;
}

// `\tv_add_f32_e32 v0, v1, v2   // 000000001A00: 02000501`; the words behind the address give the length.
bool decode_line(Program& program, string_view line, uint64_t& bytes) {
  const size_t comment = line.find("//");
  if (line.empty() || line[0] != '\t' || comment == line.npos) return false;
  const string_view text = trim(line.substr(0, comment));
  const size_t colon = line.find(':', comment);
  string_view words = line.substr(colon + 1);
  words = trim(words.substr(0, words.find('<')));
  bytes = (words.size() + 1) / 9 * 4;
  Instruction& in = program.code.emplace_back();
  in.address = hex_after(line, comment + 2);
  const size_t space = std::min(text.find(' '), text.size());
  Rearrangement around;
  try {
    if (LineDecoder(program, in, around).decode(text.substr(0, space), trim(text.substr(space)))) {
      program.rearrangements.push_back(around);
      in.around = &program.rearrangements.back();
    }
    in.run = find_handler(in.name);
    if (!in.run) in.problem = "unknown instruction " + std::string(text);
  } catch (const Fault& problem) {
    in.problem = "instruction " + std::string(text) + ": " + problem.what();
  }
  return true;
}

}  // namespace

void decode(Program& program, const std::string& text) {
  std::vector<uint64_t> ends;
  size_t at = 0;
  while (at < text.size()) {
    const size_t stop = std::min(text.find('\n', at), text.size());
    uint64_t bytes = 0;
    if (decode_line(program, string_view(text).substr(at, stop - at), bytes))
      ends.push_back(program.code.back().address + bytes);
    at = stop + 1;
  }
  for (uint32_t i = 0; i < program.code.size(); i++) program.at[program.code[i].address] = i;
  for (uint32_t i = 0; i < program.code.size(); i++) {
    Instruction& in = program.code[i];
    in.next = i + 1;
    if (in.name.rfind("s_cbranch", 0) != 0 && in.name != "s_branch") continue;
    const auto step = static_cast<int16_t>(in.op[0].integer);
    const auto found = program.at.find(ends[i] + 4 * int64_t{step});
    if (found == program.at.end())
      in.problem = "branch to where no instruction begins";
    else
      in.target = found->second;
  }
}

uint32_t Program::index_of(uint64_t address) const {
  const auto found = at.find(address);
  if (found == at.end()) fault("no instruction begins at 0x%lx of the image", address);
  return found->second;
}

}  // namespace gcn
