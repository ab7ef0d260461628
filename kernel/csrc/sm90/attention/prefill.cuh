// Prefill: what its kernel, its scheduler and its host side share.
//
// A tile is a few query tokens of one row with all query heads of one KV head: kBlockM packed rows, a token's heads one
// below the other, so that keys and values are read once for the group and short chunks still fill the tile. A block
// stays on its SM and works through tiles, the longest first (prefill_schedule.cuh).
#pragma once

#include "sm90/common/attention_params.cuh"
#include "sm90/common/cache_offsets.cuh"

namespace radix::attention::prefill {

constexpr int kMaxFp8Dim = 128;

struct Args {
  Params p;
  int tokens_per_tile = 0;
  int tokens_per_step = 0;  // of a cluster's tiles together
  int box_tokens = 0;       // keys that one copy brings, a divisor of the page size; 0: keys are gathered one by one
  int page_shift = -1;      // log2 of the page size, or -1
  float scale_log2 = 0;     // softmax_scale * log2(e); with a soft cap 1, and scores arrive scaled
  float cap_in = 0, cap_out = 0;            // score -> cap_out * tanh(score * cap_in)
  sm90::CacheStrides k_strides, v_strides;  // where keys are gathered
};

// One tile, as the producer hands it to the consumers. Blocks of keys n_begin .. n_end - 1 are visible to some query.
struct Tile {
  int row;  // of the batch; -1: no more tiles
  int kv_head;
  int first;    // query token of the row
  int q_begin;  // the row's first token in q
  int q_len;
  int kv_len;
  int kv_begin;  // the row's first token in k, when contiguous
  int n_begin, n_end;
};

// T: of q, k and v, bf16, f16 or e4m3 (prefill_launch.cuh; sources.cmake instantiates it).
template <class T>
void launch(const Args& args, rk_stream stream);

}  // namespace radix::attention::prefill
