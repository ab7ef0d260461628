#include "radix_kernels/scaled_mm.h"

#include "bindings/scaled_mm.h"

namespace radix::bind {

void bind_scaled_mm(py::module_& m) {
  def_int8_scaled_mm(m, "int8_scaled_mm_sm80", rk_int8_scaled_mm_sm80);
  def_fp8_scaled_mm(m, "fp8_scaled_mm_sm89", rk_fp8_scaled_mm_sm89);
  def_fp8_scaled_mm(m, "fp8_scaled_mm_sm100", rk_fp8_scaled_mm_sm100);
}

}  // namespace radix::bind
