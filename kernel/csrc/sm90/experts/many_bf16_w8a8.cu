#include "sm90/experts/grouped.cuh"

namespace radix::experts {

void many_bf16_w8a8(const Problem& problem, const Scratch& scratch) {
  many<bf16, Format::fp8>(problem, scratch);
}

void grouped_fp8(const Grouped& g) {
  grouped<bf16, Format::fp8>(g);
}

}  // namespace radix::experts
