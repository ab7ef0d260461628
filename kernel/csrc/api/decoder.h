// What the CPU implements for the decoder family. What the ops share was checked by api/decoder.cpp.
#pragma once

#include <vector>

#include "radix_kernels/decoder.h"

namespace radix {

// Where everything lies in the workspace: offsets in bytes. offsets: of each buffer but the first.
struct DecoderPlan {
  int64_t tokens;
  std::vector<int64_t> offsets;
  int64_t scratch, scratch_bytes;  // what one op at a time needs
  int64_t bytes;
};

namespace backend {

// The most that an op of the list needs beside its buffers.
int64_t decoder_scratch_bytes(const rk_decoder_args& args);
// memory: plan.bytes.
void decoder(const rk_decoder_args& args, const DecoderPlan& plan, char* memory);

}  // namespace backend
}  // namespace radix
