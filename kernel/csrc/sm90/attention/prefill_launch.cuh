// Launching prefill_kernel: tensor maps, the grid, and the configuration for a head dimension.
#pragma once

#include <algorithm>
#include <climits>
#include <numeric>

#include "sm90/attention/prefill_kernel.cuh"

namespace radix::attention::prefill {

template <class C>
constexpr CUtensorMapDataType kElementType = C::kFp8                     ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                             : C::kType == Operand::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                                         : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;

// Queries as [tokens, heads, dim]; a box is a tile's tokens with one group of heads.
template <class C>
TensorMap query_map(const Args& a) {
  constexpr int kSize = sizeof(typename C::T);
  const Params& p = a.p;
  const TileShape shape = {
      3,
      {static_cast<uint64_t>(p.head_dim), static_cast<uint64_t>(p.heads), static_cast<uint64_t>(p.tokens)},
      {map_stride(p.q_head * kSize, p.heads), map_stride(p.q_token * kSize, p.tokens)},
      {C::kRowElements, static_cast<uint32_t>(p.group()), static_cast<uint32_t>(a.tokens_per_tile)}};
  return make_tensor_map(p.q, kElementType<C>, shape, CU_TENSOR_MAP_SWIZZLE_128B);
}

// Keys or values as [pages, heads, tokens of a page, dim]; contiguous ones are a single page.
template <class C>
TensorMap key_map(const Args& a, const void* data, int dim, int64_t page, int64_t token, int64_t head) {
  constexpr int kSize = sizeof(typename C::T);
  const Params& p = a.p;
  const int64_t tokens = p.page_table ? p.page_size : p.kv_tokens, pages = p.page_table ? p.kv_pages : 1;
  const auto size = [](int64_t n) { return static_cast<uint64_t>(std::max<int64_t>(n, 1)); };
  const TileShape shape = {
      4,
      {size(dim), size(tokens), size(p.kv_heads), size(pages)},
      {map_stride(token * kSize, tokens), map_stride(head * kSize, p.kv_heads), map_stride(page * kSize, pages)},
      {C::kRowElements, static_cast<uint32_t>(a.box_tokens), 1, 1}};
  // Without any keys nothing is copied, but a map needs an address.
  return make_tensor_map(tokens > 0 && pages > 0 ? data : p.q, kElementType<C>, shape, CU_TENSOR_MAP_SWIZZLE_128B);
}

// Keys that one copy brings; 0 where a page is too small: swizzled rows are copied eight at a time.
template <class C>
int box_tokens(const Params& p) {
  const int most = C::kBlockN / C::kCluster, tokens = p.page_table ? std::gcd(p.page_size, most) : most;
  return tokens % 8 == 0 ? tokens : 0;
}

// Of strides in elements.
template <class C>
CacheStrides gather_strides(const Params& p, int64_t page, int64_t token) {
  constexpr int kSize = sizeof(typename C::T);
  return cache_strides("flash_attn_with_kvcache", p.kv_pages, p.page_size, page * kSize, token * kSize);
}

template <class C>
void launch_config(Args a, rk_stream stream) {
  const Params& p = a.p;
  a.tokens_per_tile = C::kBlockM / p.group();
  a.tokens_per_step = a.tokens_per_tile * C::kCluster;
  a.box_tokens = C::kGather ? 0 : box_tokens<C>(p);
  if (C::kGather) {
    a.k_strides = gather_strides<C>(p, p.k_page, p.k_token);
    a.v_strides = gather_strides<C>(p, p.v_page, p.v_token);
  }
  const int sms = gpu::multiprocessors(p.device);
  const int64_t steps = (p.tokens / a.tokens_per_step + p.batch) * p.kv_heads;
  if (steps > INT_MAX) fail(RK_UNSUPPORTED, "flash_attn: prefill cannot count %lld tiles", (long long)steps);
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(std::min<int64_t>(steps, sms / C::kCluster)) * C::kCluster);
  shape.cluster = C::kCluster;
  shape.threads = C::kThreads;
  static_assert(sizeof(Shared<C>) <= kMaxSharedBytes);
  shape.shared_bytes = sizeof(Shared<C>);
  const TensorMap none{};
  launch_dependent("flash_attn prefill", p.device, stream, &prefill_kernel<C>, shape, a, query_map<C>(a),
                   a.box_tokens ? key_map<C>(a, p.k, p.head_dim, p.k_page, p.k_token, p.k_head) : none,
                   a.box_tokens ? key_map<C>(a, p.v, p.v_dim, p.v_page, p.v_token, p.v_head) : none);
}

// A block to a tile.
template <class T, int kDim, int kVDim, int kBlockN, int kConsumers, int kHeld, int kStages>
void launch_alone(const Args& a, rk_stream stream) {
  using Copied = Config<T, kDim, kVDim, kBlockN, kConsumers, 1, kHeld, kStages>;
  using Gathered = Config<T, kDim, kVDim, kBlockN, kConsumers, 1, kHeld, kStages, true>;
  box_tokens<Copied>(a.p) > 0 ? launch_config<Copied>(a, stream) : launch_config<Gathered>(a, stream);
}

// A pair of blocks shares its keys where rows fill both tiles and TMA can bring them.
template <class T, int kDim, int kVDim, int kBlockN, int kHeld, int kStages>
void launch_alone_or_paired(const Args& a, rk_stream stream) {
  using Pair = Config<T, kDim, kVDim, kBlockN, 2, 2, kHeld, kStages>;
  const bool pair = a.p.max_seqlen_q > Pair::kBlockM / a.p.group() && box_tokens<Pair>(a.p) > 0;
  pair ? launch_config<Pair>(a, stream) : launch_alone<T, kDim, kVDim, kBlockN, 2, kHeld, kStages>(a, stream);
}

template <class T>
void launch(const Args& a, rk_stream stream) {
  if constexpr (__is_same(T, e4m3)) {
    launch_alone_or_paired<T, kMaxFp8Dim, kMaxFp8Dim, 160, 128, 3>(a, stream);
  } else {
    const int dim = a.p.head_dim, v_dim = a.p.v_dim, larger = std::max(dim, v_dim);
    if (larger <= 64) return launch_alone<T, 64, 64, 128, 3, 0, 2>(a, stream);
    if (larger <= 128) return launch_alone_or_paired<T, 128, 128, 128, 128, 3>(a, stream);
    if (dim <= 192 && v_dim <= 128) return launch_alone_or_paired<T, 192, 128, 128, 128, 2>(a, stream);
    if (larger <= 192) return launch_alone<T, 192, 192, 96, 2, 0, 2>(a, stream);
    launch_alone<T, 256, 256, 80, 2, 0, 2>(a, stream);
  }
}

}  // namespace radix::attention::prefill
