// The front of Hopper's MLA: a checked call becomes Args, and the kernel that serves it is chosen.
#include "sm90/mla/mla.cuh"

#include <algorithm>

#include "api/mla.h"
#include "common/tensor.h"
#include "gpu/device/launch.h"
#include "sm90/mla/combine.cuh"

namespace radix {
namespace {

using namespace mla;
using attention::Shape;
using split_kv::kMaxBlocks;
using split_kv::kMaxRows;
using split_kv::levels_of;
using split_kv::nodes_of_block;

constexpr int kChunkLog2 = 9;

Shape shape_of(const rk_mla_decode_sizes& s) {
  Shape shape;
  shape.tokens = s.tokens;
  shape.batch = s.batch;
  shape.heads = static_cast<int>(s.heads);
  shape.kv_heads = 1;
  shape.head_dim = kLatent;
  shape.page_size = static_cast<int>(s.page_size);
  shape.max_pages = s.max_pages;
  // Without a hint a batch with as many tokens as rows has one each.
  const int64_t guess = s.tokens == s.batch ? 1 : s.tokens;
  shape.max_seqlen_q = s.max_seqlen_q > 0 ? std::min(s.max_seqlen_q, s.tokens) : guess;
  return shape;
}

int tile_rows(const Shape& s) {
  return s.heads * s.max_seqlen_q > 16 ? 32 : 16;
}

// At most as many query rows in a row as the kernel for few serves at once.
bool at_most_16_rows(const Shape& s) {
  return s.heads * s.max_seqlen_q <= 16;
}

int cluster_of(const Shape& s) {
  return cluster_h16::blocks_of_row(s.batch, s.heads * s.max_seqlen_q);
}

enum class Kernel { kClusterH16, kSwapQkH16, kWgmmaH64, kSplitFixed };

// What serves a call: the size of the workspace and the launch follow from it.
Kernel kernel_for(const Shape& s, bool any_split, bool fp8) {
  if (!any_split) return Kernel::kSplitFixed;
  if (!fp8 && cluster_of(s) > 0) return Kernel::kClusterH16;
  if (!at_most_16_rows(s)) return Kernel::kWgmmaH64;
  return fp8 ? Kernel::kSplitFixed : Kernel::kSwapQkH16;  // few rows of the FP8 form are quicker where all warps copy
}

int64_t workspace_size(const Shape& s, bool any_split, bool fp8) {
  switch (kernel_for(s, any_split, fp8)) {
    case Kernel::kClusterH16: return cluster_h16::workspace_bytes(cluster_of(s));
    case Kernel::kSwapQkH16: return kWorkspaceBytes<swap_qk_h16::kRows>;
    case Kernel::kWgmmaH64: return kWorkspaceBytes<wgmma_h64::kRows>;
    case Kernel::kSplitFixed: break;
  }
  return int64_t{kMaxBlocks} * nodes_of_block(levels_of(s, kChunkLog2)) * split_fixed_node_bytes(tile_rows(s));
}

void run_any_split(const Args& args, Kernel kernel, rk_stream stream) {
  WgmmaArgs a;
  static_cast<Args&>(a) = args;
  const attention::Params& p = a.p;
  const bool fp8 = p.kv_dtype == DType::u8, bf = p.dtype == DType::bf16;
  a.box_tokens = std::min(64, p.page_size & -p.page_size);
  if (a.box_tokens < 8 || p.kv_pages == 0 || fp8) a.box_tokens = 0;  // a map of nothing does not exist
  if (kernel == Kernel::kClusterH16)
    return bf ? cluster_h16::launch<bf16, 8>(a, stream) : cluster_h16::launch<f16, 8>(a, stream);
  const bool swapped = kernel == Kernel::kSwapQkH16;
  if (swapped) {
    // Fewer rows than blocks: what two of them have of one row is joined without a way through the workspace.
    if (p.batch < gpu::multiprocessors(p.device)) a.halves = 2;
  } else if (p.heads * p.max_seqlen_q > 64 && (a.box_tokens > 0 || fp8)) {
    // Two blocks of rows that read the same tokens share the copies, or the widening of FP8.
    a.cluster = a.sharing = 2;
  }
  a.box_tokens = std::min(a.box_tokens, 64 / a.sharing);
  if (swapped) return bf ? swap_qk_h16::launch<bf16>(a, stream) : swap_qk_h16::launch<f16>(a, stream);
  if (fp8) return wgmma_h64::launch<bf16, e4m3>(a, stream);
  bf ? wgmma_h64::launch<bf16, bf16>(a, stream) : wgmma_h64::launch<f16, f16>(a, stream);
}

}  // namespace

namespace backend {

int64_t mla_decode_workspace_size(const rk_mla_decode_sizes& sizes) {
  const Shape s = shape_of(sizes);
  if (s.tokens < 1 || s.batch < 1) return 0;
  const auto size = [&](bool fp8) { return workspace_size(s, sizes.any_split != 0, fp8); };
  return sizes.kv_item_size == 0 ? std::max(size(false), size(true)) : size(sizes.kv_item_size == 1);
}

void mla_decode(const rk_mla_decode_args& a, rk_stream stream) {
  if (dtype_of(*a.q_nope) == DType::f32) fail(RK_UNSUPPORTED, "mla_decode: float32 has no kernel on Hopper");
  if (a.q_nope->shape[2] != kLatent || a.q_rope->shape[2] != kKey - kLatent)
    fail(RK_UNSUPPORTED, "mla_decode: Hopper's kernels have %d latent and %d rotary values", kLatent, kKey - kLatent);
  if (dtype_of(*a.kv_cache) == DType::u8 && dtype_of(*a.q_nope) != DType::bf16)
    fail(RK_UNSUPPORTED, "mla_decode: the FP8 cache is served for bf16 queries");
  const rk_mla_decode_sizes sizes = {sizeof sizes,       a.q_nope->shape[0],   a.page_table->shape[0],
                                     a.q_nope->shape[1], a.kv_cache->shape[1], a.page_table->shape[1],
                                     a.max_seqlen_q,     a.any_split,          element_size(*a.kv_cache)};
  Args args;
  attention::Params& p = args.p;
  static_cast<Shape&>(p) = shape_of(sizes);
  p.dtype = dtype_of(*a.q_nope);
  p.kv_dtype = dtype_of(*a.kv_cache);
  p.q = data_ptr<void>(*a.q_nope);
  p.q_token = a.q_nope->strides[0], p.q_head = a.q_nope->strides[1];
  args.q_rope = data_ptr<void>(*a.q_rope);
  args.rope_token = a.q_rope->strides[0], args.rope_head = a.q_rope->strides[1];
  p.k = data_ptr<void>(*a.kv_cache);
  p.k_page = a.kv_cache->strides[0], p.k_token = a.kv_cache->strides[1];
  p.kv_pages = a.kv_cache->shape[0];
  p.out = data_ptr<void>(*a.out);
  p.out_token = a.out->strides[0], p.out_head = a.out->strides[1];
  if (a.lse) p.lse = data_ptr<float>(*a.lse), p.lse_token = a.lse->strides[0], p.lse_head = a.lse->strides[1];
  p.page_table = data_ptr<const int32_t>(*a.page_table);
  p.table_row = a.page_table->strides[0];
  p.kv_lens = data_ptr<const int32_t>(*a.kv_lens);
  p.cu_q = data_ptr<const int32_t>(*a.cu_seqlens_q);
  p.scale = a.softmax_scale;
  p.causal = a.causal != 0;
  p.device = a.q_nope->device;
  args.group = p.heads;
  args.groups = kMaxBlocks;
  args.chunk_log2 = kChunkLog2;
  args.levels = levels_of(p, kChunkLog2);
  if ((p.page_size & (p.page_size - 1)) == 0) args.page_shift = __builtin_ctz(p.page_size);
  if (a.workspace) args.nodes = data_ptr<char>(*a.workspace);
  const Kernel kernel = kernel_for(p, a.any_split != 0, p.kv_dtype == DType::u8);
  if (kernel == Kernel::kWgmmaH64 && !(p.scale > 0))
    fail(RK_UNSUPPORTED, "mla_decode: more than 16 query rows want softmax_scale above 0, got %g", p.scale);
  if (kernel != Kernel::kSplitFixed) return run_any_split(args, kernel, stream);
  for (int64_t row = 0; row < p.batch; row += kMaxRows) {
    args.first_row = static_cast<int>(row);
    args.rows = static_cast<int>(std::min<int64_t>(kMaxRows, p.batch - row));
    launch_split_fixed(args, tile_rows(p), stream);
  }
}

}  // namespace backend
}  // namespace radix
