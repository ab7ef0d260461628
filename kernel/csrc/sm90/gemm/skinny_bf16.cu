#include "cuda/gemm/skinny.h"

namespace radix::gemm {

void skinny_bf16(const Problem& problem) {
  skinny<HalfMma<bf16>>(problem);
}

}  // namespace radix::gemm
