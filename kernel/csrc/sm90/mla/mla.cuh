// MLA decode on Hopper: attention of many query heads over one latent head, absorbed form (DeepSeek-V2,
// arXiv:2405.04434).
//
// A token of the cache is kLatent latent values followed by kRope rotary ones; all of it is the key, the latent part
// also the value. The plan, the tree of chunks and combine_kernel are those of paged decode (split_plan.cuh)
// with one KV head.
#pragma once

#include "sm90/common/split_plan.cuh"

namespace radix::mla {

constexpr int kLatent = 512, kRope = 64, kKey = kLatent + kRope;
constexpr int kFp8Bytes = kLatent + 16 + 2 * kRope;  // of a token: e4m3, 4 float32 scales, bf16

// p.q is q_nope [tokens, heads, kLatent]; p.k the cache [pages, page_size, kKey]; p.head_dim kLatent, p.kv_heads 1.
struct Args : attention::decode::Args {
  const void* q_rope = nullptr;  // [tokens, heads, kRope]
  int64_t rope_token = 0, rope_head = 0;
};

// Of the kernel for many query rows.
struct WgmmaArgs : Args {
  int cluster = 1;     // blocks of a run, each with 64 of the query rows
  int sharing = 1;     // of them that copy for each other
  int halves = 1;      // 2: two blocks may have half of a run's tiles each (run.cuh); cluster is 1
  int box_tokens = 0;  // of a box of the tensor map; 0: no map, tokens are copied one by one
};

// Up to 32 query rows (heads x tokens) at once on mma.sync: bound by bytes.
int64_t split_fixed_node_bytes(int tile_rows);
void launch_split_fixed(const Args& args, int tile_rows, rk_stream stream);

// Up to 16 query rows as the columns of wgmma's products: bound by bytes.
int64_t swap_qk_h16_workspace_size();
void launch_swap_qk_h16_bf16(const WgmmaArgs& args, rk_stream stream);
void launch_swap_qk_h16_f16(const WgmmaArgs& args, rk_stream stream);

// 64 query rows of a block on wgmma: bound by the tensor cores.
int64_t wgmma_h64_workspace_size();
void launch_wgmma_h64_bf16(const WgmmaArgs& args, rk_stream stream);
void launch_wgmma_h64_f16(const WgmmaArgs& args, rk_stream stream);
void launch_wgmma_h64_fp8(const WgmmaArgs& args, rk_stream stream);  // bf16 queries

}  // namespace radix::mla
