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
static_assert(kKey % 64 == 0 && kLatent == 512, "blocks of 64 dimensions; two halves of 256 latent ones");
constexpr int kFp8Bytes = kLatent + 16 + 2 * kRope;  // of a token: e4m3, 4 float32 scales, bf16

// p.q is q_nope [tokens, heads, kLatent]; p.k the cache [pages, page_size, kKey]; p.head_dim kLatent, p.kv_heads 1.
struct Args : split_kv::Args {
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

// T: of the queries; Cache: T, or e4m3 for the FP8 form. sources.cmake names what is instantiated.
//
// Up to 16 query rows as the columns of wgmma's products: bound by bytes.
namespace swap_qk_h16 {
constexpr int kRows = 16;
template <class T>
void launch(const WgmmaArgs& args, rk_stream stream);
}  // namespace swap_qk_h16

// The same for so few rows of the batch that a cluster of blocks has each: bound by latency.
namespace cluster_h16 {
constexpr int kRows = 16, kMostBlocks = 256;
constexpr int kMostClusters = 8;  // an H200 runs more at once, but not 16
// Blocks of the cluster that has a row of up to `query_rows`, or 16 of them; 0: the call is not for this kernel.
constexpr int blocks_of_row(int64_t batch, int64_t query_rows) {
  const int64_t clusters =
      query_rows > kRows ? 2 * batch : batch;  // two read a row of up to 32, each all of its tokens
  return query_rows <= 2 * kRows && clusters <= kMostClusters ? 8 : 0;
}
// Of each block a word, and its dimensions of the query rows' O with m and l.
constexpr int64_t workspace_bytes(int cluster) {
  return kMostBlocks * int64_t{8 + kRows * (kLatent / cluster * 4 + 8)};
}
template <class T, int kCluster>
void launch(const WgmmaArgs& args, rk_stream stream);
}  // namespace cluster_h16

// 64 query rows of a block on wgmma: bound by the tensor cores.
namespace wgmma_h64 {
constexpr int kRows = 64;
template <class T, class Cache>
void launch(const WgmmaArgs& args, rk_stream stream);
}  // namespace wgmma_h64

}  // namespace radix::mla
