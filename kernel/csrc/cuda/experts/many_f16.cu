#include "cuda/experts/many.h"

namespace radix::experts {

void many_f16(const Problem& problem, const Scratch& scratch) {
  many<f16, false>(problem, scratch);
}

}  // namespace radix::experts
