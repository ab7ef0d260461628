// What a backend implements for the persistent decoder. Tensors were checked by api/persistent_decoder.cpp.
#pragma once

#include "radix_kernels/persistent_decoder.h"

namespace radix::backend {

struct PersistentDecoderNeeds {
  int64_t workspace_bytes;
  int max_tokens;  // 0: no kernel serves these layers
};

PersistentDecoderNeeds persistent_decoder_needs(const rk_persistent_decoder& decoder);
void prepare_persistent_decoder(const rk_persistent_decoder& decoder, rk_stream stream);
void persistent_decode(const rk_persistent_decoder_args& args, rk_stream stream);

}  // namespace radix::backend
