// What linear.cpp puts into the level's table for weights in super-blocks.
#pragma once

#include <memory>

#include "cpu/linear/jobs.h"
#include "cpu/linear/kernels.h"

namespace radix::cpu::RK_ISA {

std::unique_ptr<Job> supers_job(const rk_linear_args& args, RowMaxima* maxima);
void pack_supers(const rk_pack_weight_args& args);
void unpack_supers(const rk_unpack_weight_args& args);
void gather_supers(const rk_embedding_args& args);

}  // namespace radix::cpu::RK_ISA
