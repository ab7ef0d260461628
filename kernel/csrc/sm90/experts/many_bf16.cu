#include "sm90/experts/grouped.cuh"

namespace radix::experts {

void many_bf16(const Problem& problem, const Scratch& scratch) {
  many<bf16, Format::half>(problem, scratch);
}

void grouped_bf16(const Grouped& g) {
  grouped<bf16, Format::half>(g);
}

}  // namespace radix::experts
