// Registers move between the warpgroups of a block (PTX setmaxnreg): producers release some, consumers claim them.
//
// All warps of a warpgroup make the same calls, in the one branch that is its role, with a barrier of the warpgroup
// between two of them. The kernel needs __launch_bounds__(threads, 1); what the warpgroups hold afterwards must not
// exceed what they had at entry. A claim waits until so many registers are free, for whoever asks first: a warpgroup
// that released some and wants them back waits until those they were meant for have them.
#pragma once

namespace radix::sm90 {

template <int kRegisters>
__device__ inline void setmaxnreg_dec() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256, "setmaxnreg takes 24 to 256 in eights");
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void setmaxnreg_inc() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256, "setmaxnreg takes 24 to 256 in eights");
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace radix::sm90
