// For tests of the tests: other code in the place of what a library registered.
#include "fault.h"
#include "hip_state.h"

using namespace gcn;
using namespace gcn::hip;

// Every registered function that this code object has a kernel for runs that from now on; the number of them, or -1
// where it is no code object.
GCN_API int gcn_replace(const void* elf, size_t bytes) {
  State& s = state();
  int count = 0;
  try {
    const std::shared_ptr<Program> program = load_program(elf, bytes);
    const std::lock_guard lock(s.mutex);
    for (auto& entry : s.functions) {
      if (!program->object.kernels.count(entry.second.name)) continue;
      entry.second.program = program;
      count++;
    }
  } catch (const Fault& problem) {
    last_fault() = problem.what();
    return -1;
  }
  return count;
}
