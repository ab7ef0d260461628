// Reading the disassembler's text.
#pragma once

#include <charconv>
#include <cstdint>
#include <string>
#include <string_view>

#include "fault.h"
#include "program.h"

namespace gcn {

using std::string_view;

inline string_view trim(string_view s) {
  while (!s.empty() && (s.front() == ' ' || s.front() == '\t')) s.remove_prefix(1);
  while (!s.empty() && (s.back() == ' ' || s.back() == '\t')) s.remove_suffix(1);
  return s;
}

inline bool take_prefix(string_view& s, string_view prefix) {
  if (s.substr(0, prefix.size()) != prefix) return false;
  s.remove_prefix(prefix.size());
  return true;
}

inline bool take_suffix(string_view& s, string_view suffix) {
  if (s.size() < suffix.size() || s.substr(s.size() - suffix.size()) != suffix) return false;
  s.remove_suffix(suffix.size());
  return true;
}

inline bool read_integer(string_view s, int64_t& value) {
  const bool negative = take_prefix(s, "-");
  const int base = take_prefix(s, "0x") ? 16 : 10;
  uint64_t magnitude = 0;
  const auto end = std::from_chars(s.data(), s.data() + s.size(), magnitude, base);
  value = negative ? -static_cast<int64_t>(magnitude) : static_cast<int64_t>(magnitude);
  return end.ec == std::errc() && end.ptr == s.data() + s.size() && !s.empty();
}

inline int64_t integer_of(string_view s) {
  int64_t value = 0;
  if (!read_integer(s, value)) fault("a number was expected: %.*s", static_cast<int>(s.size()), s.data());
  return value;
}

// v12, s[4:7], -|v3|, vcc, 0x10, 1.0, off. A literal's bits are set once its instruction is known.
Operand read_operand(string_view s);

// The bits of a literal, which depend on the instruction; of a 32-bit one the upper word is nothing.
uint64_t literal_bits(const Operand& op, const std::string& instruction);

}  // namespace gcn
