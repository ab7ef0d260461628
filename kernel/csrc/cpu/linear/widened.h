// What linear.cpp puts into the level's table for products that keep x (rk_linear_args::keep_x).
#pragma once

#include <memory>

#include "cpu/linear/jobs.h"
#include "cpu/linear/kernels.h"

namespace radix::cpu::RK_ISA {

// Whether rk_linear_args::keep_x has an effect on a product of a weight and x of a dtype.
bool keeps_x(const rk_packed_desc& desc, DType x);
// Where it does.
std::unique_ptr<Job> widened_job(const rk_linear_args& args, RowMaxima* maxima);

}  // namespace radix::cpu::RK_ISA
