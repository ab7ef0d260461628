#include "cuda/experts/many.h"

namespace radix::experts {

void many_bf16(const Problem& problem, const Scratch& scratch) {
  many<bf16, false>(problem, scratch);
}

}  // namespace radix::experts
