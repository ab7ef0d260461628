#include "sm90/experts/grouped.cuh"

namespace radix::experts {

void many_f16(const Problem& problem, const Scratch& scratch) {
  many<f16, Format::half>(problem, scratch);
}

void grouped_f16(const Grouped& g) {
  grouped<f16, Format::half>(g);
}

}  // namespace radix::experts
