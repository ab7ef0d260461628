// What a process has executed, for tests and their tables.
#include <set>

#include "hip_state.h"

using namespace gcn;
using namespace gcn::hip;

namespace {

void append_list(std::string& out, const std::set<std::string>& names) {
  out += '[';
  for (const std::string& name : names) out += (out.back() == '[' ? "\"" : ", \"") + name + '"';
  out += ']';
}

}  // namespace

// JSON: launches, wave instructions, seconds, instructions by kernel, opcodes that ran, and those of the loaded code
// that the executor does not know. The text is the caller's until its next call in this thread.
GCN_API const char* gcn_report() {
  static thread_local std::string out;
  State& s = state();
  const std::lock_guard lock(s.mutex);
  std::set<std::string> executed, unknown;
  const auto look = [&](const Program& program) {
    for (const Instruction& in : program.code) {
      if (__atomic_load_n(&in.executed, __ATOMIC_RELAXED)) executed.insert(in.name);
      if (!in.problem.empty()) unknown.insert(in.problem);
    }
  };
  for (const auto& entry : s.programs)
    if (entry.second) look(*entry.second);
  for (const Function* function : s.module_functions) look(*function->program);
  out = "{\"launches\": " + std::to_string(s.totals.launches);
  out += ", \"instructions\": " + std::to_string(s.totals.instructions);
  out += ", \"seconds\": " + std::to_string(s.totals.seconds) + ", \"kernels\": {";
  const char* comma = "";
  for (const auto& [name, count] : s.kernels) {
    out += comma + ("\"" + name + "\": ") + std::to_string(count);
    comma = ", ";
  }
  out += "}, \"last\": \"" + s.last + "\", \"executed\": ";
  append_list(out, executed);
  out += ", \"unknown\": ";
  for (const std::string& text : unknown)
    if (text.find('"') != text.npos) return out += "[\"?\"]}", out.c_str();
  append_list(out, unknown);
  out += '}';
  return out.c_str();
}
