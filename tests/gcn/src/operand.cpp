// An operand as the disassembler writes it.
#include <cstring>

#include "text.h"

namespace gcn {
namespace {

using Kind = Operand::Kind;

struct Special {
  string_view name;
  uint16_t index, count;
};
constexpr Special kSpecial[] = {{"vcc", kVcc, 2},
                                {"vcc_lo", kVcc, 1},
                                {"vcc_hi", kVcc + 1, 1},
                                {"exec", kExec, 2},
                                {"exec_lo", kExec, 1},
                                {"exec_hi", kExec + 1, 1},
                                {"m0", kM0, 1},
                                {"flat_scratch", kFlatScratch, 2},
                                {"flat_scratch_lo", kFlatScratch, 1},
                                {"flat_scratch_hi", kFlatScratch + 1, 1}};

// The apertures that flat addresses of LDS and of scratch memory lie in; memory.cpp tells them by the upper bits.
constexpr Special kApertures[] = {{"src_shared_base", 1, 2}, {"src_private_base", 2, 2}};

// v12, v[12:15], s7, a3; false for anything else.
bool read_register(string_view s, Operand& out) {
  if (s.empty() || (s[0] != 'v' && s[0] != 's' && s[0] != 'a')) return false;
  const char file = s[0];
  s.remove_prefix(1);
  int64_t first = 0, last = 0;
  if (take_prefix(s, "[") && take_suffix(s, "]")) {
    const size_t colon = s.find(':');
    if (colon == s.npos) {
      if (!read_integer(s, first)) return false;
      last = first;
    } else if (!read_integer(s.substr(0, colon), first) || !read_integer(s.substr(colon + 1), last)) {
      return false;
    }
  } else {
    if (!read_integer(s, first) || s[0] == '-') return false;
    last = first;
  }
  out.kind = file == 's' ? Kind::kScalar : Kind::kVector;
  out.index = static_cast<uint16_t>(first + (file == 'a' ? kAgprs : 0));
  out.count = static_cast<uint16_t>(last - first + 1);
  return true;
}

bool read_named(string_view s, Operand& out) {
  if (s == "off" || s == "null") return true;
  if (s == "scc" || s == "src_scc") {
    out.kind = Kind::kScc;
    return true;
  }
  for (const Special& special : kSpecial) {
    if (special.name != s) continue;
    out.kind = Kind::kScalar;
    out.index = special.index;
    out.count = special.count;
    return true;
  }
  for (const Special& aperture : kApertures) {
    if (aperture.name != s) continue;
    out.kind = Kind::kLiteral;
    out.integer = int64_t{aperture.index} << 48;
    return true;
  }
  return false;
}

void read_literal(string_view s, Operand& out) {
  out.kind = Kind::kLiteral;
  if (read_integer(s, out.integer)) return;
  const auto end = std::from_chars(s.data(), s.data() + s.size(), out.number);
  if (end.ec != std::errc() || end.ptr != s.data() + s.size())
    fault("operand %.*s", static_cast<int>(s.size()), s.data());
  if (s == "0.15915494") out.number = 0.15915494309189532;
  out.real = true;
}

}  // namespace

Operand read_operand(string_view s) {
  Operand out;
  if (take_prefix(s, "sext(")) out.extended = take_suffix(s, ")");
  if (take_prefix(s, "neg(")) {
    out.negated = take_suffix(s, ")");
  } else if (s.size() > 1 && s[0] == '-' && (s[1] < '0' || s[1] > '9')) {
    out.negated = true;
    s.remove_prefix(1);
  }
  if (s.size() > 1 && s.front() == '|' && s.back() == '|') {
    out.magnitude = true;
    s = s.substr(1, s.size() - 2);
  }
  if (!read_register(s, out) && !read_named(s, out)) read_literal(s, out);
  return out;
}

namespace {

// What the bits of a literal mean depends on the instruction.
enum class Type { kWord, kHalf, kDouble, kLong };

Type type_of(const std::string& name) {
  const auto ends = [&](string_view suffix) {
    string_view s = name;
    return take_suffix(s, suffix);
  };
  if (name.find("_mix") != name.npos) return Type::kWord;
  if (name == "v_ldexp_f64" || name == "v_cvt_f64_f32") return Type::kWord;
  if (ends("_f64") && name.find("cvt_f64") == name.npos) return Type::kDouble;
  if (ends("_f16") && name.find("cvt_f16") == name.npos) return Type::kHalf;
  if (ends("64")) return Type::kLong;
  return Type::kWord;
}

}  // namespace

uint64_t literal_bits(const Operand& op, const std::string& instruction) {
  const Type type = type_of(instruction);
  uint64_t bits = 0;
  if (op.real && type == Type::kHalf) {
    const _Float16 half = static_cast<_Float16>(op.number);
    std::memcpy(&bits, &half, sizeof half);
  } else if (op.real && (type == Type::kDouble || type == Type::kLong)) {
    std::memcpy(&bits, &op.number, sizeof bits);
  } else if (op.real) {
    const float single = static_cast<float>(op.number);
    std::memcpy(&bits, &single, sizeof single);
  } else {
    bits = static_cast<uint64_t>(op.integer);
    // Of a double a written-out constant is the upper half.
    if (type == Type::kDouble && (op.integer < -16 || op.integer > 64)) bits <<= 32;
  }
  return bits;
}

}  // namespace gcn
