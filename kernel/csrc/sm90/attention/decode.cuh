// The launcher of paged decode.
#pragma once

#include "sm90/common/cache_offsets.cuh"
#include "sm90/common/split_plan.cuh"

namespace radix::attention::decode {

using namespace sm90;
using namespace split_kv;

struct Args : split_kv::Args {
  CacheStrides k_strides, v_strides;
};

// KV: of the cache, bf16, f16 or e4m3 (decode_kernel.cuh; sources.cmake instantiates it).
template <class KV>
void launch(const Args& args, rk_stream stream);

}  // namespace radix::attention::decode
