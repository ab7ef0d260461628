// Programmatic dependent launch: a kernel may start while the one before it in the stream still runs.
//
// Everything that an earlier kernel may have written is read, and everything is written, after pdl_wait(). Before it a
// kernel may set up barriers and fetch what no kernel in flight writes (weights). pdl_trigger() lets the next kernel's
// blocks take their places; its own pdl_wait() still waits for this whole grid.
#pragma once

#include "gpu/device/launch.h"

namespace radix::sm90 {

__device__ inline void pdl_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ inline void pdl_trigger() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

using gpu::launch_dependent;
using gpu::LaunchShape;

}  // namespace radix::sm90
