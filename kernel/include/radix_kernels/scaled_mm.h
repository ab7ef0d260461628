/* INT8 and FP8 products for NVIDIA chips beside Hopper, with the arguments of the gemm family's: INT8 from sm_80 on,
 * FP8 from sm_89 on, which newer chips run too, through PTX; FP8 for sm_100 alone, where scales of rows and columns lie
 * next to each other. There is no gate; what is not there is RK_UNSUPPORTED. static_weight and fast_accum, which allow
 * more speed, change nothing. A row's bits do not depend on the other rows. */
#ifndef RADIX_KERNELS_SCALED_MM_H
#define RADIX_KERNELS_SCALED_MM_H

#include "radix_kernels/gemm.h"

RK_API rk_status rk_int8_scaled_mm_sm80(const rk_int8_scaled_mm_args* args, rk_stream stream);
RK_API rk_status rk_fp8_scaled_mm_sm89(const rk_fp8_scaled_mm_args* args, rk_stream stream);
RK_API rk_status rk_fp8_scaled_mm_sm100(const rk_fp8_scaled_mm_args* args, rk_stream stream);

#endif
