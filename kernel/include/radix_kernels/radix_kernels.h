/* The whole C ABI of libradix_kernels.so. */
#ifndef RADIX_KERNELS_H
#define RADIX_KERNELS_H

#include "radix_kernels/activation.h"
#include "radix_kernels/all_reduce.h"
#include "radix_kernels/attention.h"
#include "radix_kernels/comm.h"
#include "radix_kernels/decoder.h"
#include "radix_kernels/experts.h"
#include "radix_kernels/fused_rope.h"
#include "radix_kernels/gemm.h"
#include "radix_kernels/hip.h"
#include "radix_kernels/kv_cache.h"
#include "radix_kernels/layernorm.h"
#include "radix_kernels/library.h"
#include "radix_kernels/linear.h"
#include "radix_kernels/mla.h"
#include "radix_kernels/mla_kv.h"
#include "radix_kernels/moe.h"
#include "radix_kernels/norm.h"
#include "radix_kernels/packed_experts.h"
#include "radix_kernels/packed_heads.h"
#include "radix_kernels/persistent_decoder.h"
#include "radix_kernels/quantize.h"
#include "radix_kernels/rope.h"
#include "radix_kernels/sampling.h"
#include "radix_kernels/sampling_shards.h"
#include "radix_kernels/scaled_mm.h"
#include "radix_kernels/step.h"
#include "radix_kernels/threads.h"
#include "radix_kernels/types.h"

#endif
