// Attention on the CPU: checks the values that the border cannot see, cuts the batch into tiles, runs them on the pool.
#include "cpu/attention/attention.h"

#include <algorithm>
#include <vector>

#include "api/attention.h"
#include "cpu/thread_pool.h"

namespace radix {
namespace {

using namespace cpu;

HeadsView heads_view(const rk_tensor& t) {
  const int64_t item = element_size(t);
  return {data_ptr<char>(t), t.strides[0] * item, t.strides[1] * item};
}

KvView kv_view(const rk_tensor& t) {
  const int64_t item = element_size(t);
  if (t.ndim == 3) return {data_ptr<char>(t), 0, t.strides[0] * item, t.strides[1] * item};
  return {data_ptr<char>(t), t.strides[0] * item, t.strides[1] * item, t.strides[2] * item};
}

template <class Args>
AttentionTask common_task(const Args& a, const rk_tensor& k, const rk_tensor& v) {
  AttentionTask t{};
  t.q = heads_view(*a.q);
  t.out = heads_view(*a.out);
  t.k = kv_view(k);
  t.v = kv_view(v);
  t.cu_seqlens_q = data_ptr<int32_t>(*a.cu_seqlens_q);
  if (a.sinks) t.sinks = data_ptr<float>(*a.sinks);
  if (a.lse) {
    t.lse = data_ptr<float>(*a.lse);
    t.lse_token_stride = a.lse->strides[0];
    t.lse_head_stride = a.lse->strides[1];
  }
  t.heads = a.q->shape[1];
  t.kv_heads = k.shape[k.ndim - 2];
  t.head_dim = a.q->shape[2];
  t.dtype = dtype_of(*a.q);
  t.options = a.options;
  return t;
}

void check_offsets(const char* op, const char* name, const int32_t* cu, int64_t batch, int64_t total) {
  if (cu[0] != 0) fail(RK_INVALID, "%s: %s[0] is %d, expected 0", op, name, cu[0]);
  for (int64_t b = 0; b < batch; b++)
    if (cu[b + 1] < cu[b])
      fail(RK_INVALID, "%s: %s[%lld] is %d, less than the one before (%d)", op, name, (long long)b + 1, cu[b + 1],
           cu[b]);
  if (cu[batch] != total) fail(RK_INVALID, "%s: %s ends at %d, expected %lld", op, name, cu[batch], (long long)total);
}

void check_pages(const char* op, const AttentionTask& t, int64_t batch, int64_t max_pages, int64_t num_pages) {
  for (int64_t b = 0; b < batch; b++) {
    const int64_t used = (int64_t{t.kv_lens[b]} + t.page_size - 1) / t.page_size;
    if (t.kv_lens[b] < 0 || used > max_pages)
      fail(RK_INVALID, "%s: kv_lens[%lld] is %d, expected 0 to %lld (columns of page_table x page size)", op,
           (long long)b, t.kv_lens[b], (long long)(max_pages * t.page_size));
    for (int64_t i = 0; i < used; i++) {
      const int32_t page = t.page_table[b * t.page_table_stride + i];
      if (page < 0 || page >= num_pages)
        fail(RK_INVALID, "%s: page_table[%lld, %lld] is %d, expected 0 to %lld (pages of k_cache)", op, (long long)b,
             (long long)i, page, (long long)num_pages - 1);
    }
  }
}

// One tile a few tokens of one KV head. A head's tiles lie together, so that a thread's contiguous share mixes the
// short and the long rows of causal attention.
std::vector<AttentionTile> make_tiles(const AttentionTask& t, int64_t batch) {
  const int64_t group = t.heads / t.kv_heads;
  const int64_t per_tile = std::min<int64_t>(group, kMaxTaskRows);
  const int64_t tokens = std::max<int64_t>(1, kMaxTaskRows / 2 / group);
  std::vector<AttentionTile> tiles;
  for (int64_t b = 0; b < batch; b++)
    for (int64_t h = 0; h < t.kv_heads; h++)
      for (int64_t g = 0; g < group; g += per_tile)
        for (int64_t q = t.cu_seqlens_q[b]; q < t.cu_seqlens_q[b + 1]; q += tokens)
          tiles.push_back({b, q, std::min<int64_t>(tokens, t.cu_seqlens_q[b + 1] - q), h, h * group + g,
                           std::min(per_tile, group - g)});
  return tiles;
}

void run(const AttentionTask& task, int64_t batch) {
  const auto tiles = make_tiles(task, batch);
  const auto kernel = attention_kernels().tile;
  parallel_for(static_cast<int64_t>(tiles.size()), 1, [&](int64_t begin, int64_t end) noexcept {
    for (int64_t i = begin; i < end; i++) kernel(task, tiles[i]);
  });
}

}  // namespace

namespace backend {

void flash_attn_with_kvcache(const rk_flash_attn_with_kvcache_args& args, rk_stream) {
  const char* op = "flash_attn_with_kvcache";
  if (dtype_of(*args.k_cache) == DType::f8e4m3) fail(RK_UNSUPPORTED, "%s: the CPU has no kernel for FP8 KV", op);
  AttentionTask task = common_task(args, *args.k_cache, *args.v_cache);
  const int64_t batch = args.page_table->shape[0];
  task.page_table = data_ptr<int32_t>(*args.page_table);
  task.page_table_stride = args.page_table->strides[0];
  task.page_size = args.k_cache->shape[1];
  task.kv_lens = data_ptr<int32_t>(*args.kv_lens);
  check_offsets(op, "cu_seqlens_q", task.cu_seqlens_q, batch, args.q->shape[0]);
  check_pages(op, task, batch, args.page_table->shape[1], args.k_cache->shape[0]);
  run(task, batch);
}

void flash_attn_varlen(const rk_flash_attn_varlen_args& args, rk_stream) {
  const char* op = "flash_attn_varlen";
  AttentionTask task = common_task(args, *args.k, *args.v);
  const int64_t batch = args.cu_seqlens_q->shape[0] - 1;
  task.cu_seqlens_k = data_ptr<int32_t>(*args.cu_seqlens_k);
  check_offsets(op, "cu_seqlens_q", task.cu_seqlens_q, batch, args.q->shape[0]);
  check_offsets(op, "cu_seqlens_k", task.cu_seqlens_k, batch, args.k->shape[0]);
  run(task, batch);
}

int64_t flash_attn_workspace_size(const rk_flash_attn_sizes&) {
  return 0;  // scratch is on the threads' stacks
}

void merge_state(const rk_merge_state_args& args, rk_stream) {
  const int64_t rows = args.out_a->shape[0] * args.out_a->shape[1];
  const auto kernel = attention_kernels().merge_state;
  parallel_for(rows, 1 + 16 * 1024 / args.out_a->shape[2],
               [&](int64_t begin, int64_t end) noexcept { kernel(args, begin, end); });
}

}  // namespace backend
}  // namespace radix
