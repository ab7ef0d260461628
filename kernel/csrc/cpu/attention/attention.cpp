// Attention on the CPU: checks the values that the border cannot see, cuts the batch into tiles, runs them on the pool.
#include "cpu/attention/attention.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <vector>

#include "api/attention.h"
#include "api/merge_state.h"
#include "api/mla.h"
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

ScaleView scale_view(const rk_tensor* t) {
  if (!t) return {};
  return {data_ptr<float>(*t), t->strides[0], t->strides[1], t->strides[2]};
}

// A table without columns has no memory, but NULL is for keys and values that are not paged.
const int32_t* table_data(const rk_tensor& t) {
  static constexpr int32_t kNothing = 0;
  const int32_t* data = data_ptr<int32_t>(t);
  return data ? data : &kNothing;
}

template <class Args>
AttentionTask common_task(const char* op, const Args& a, const rk_tensor& k, const rk_tensor& v) {
  if (dtype_of(k) == DType::f8e4m3) fail(RK_UNSUPPORTED, "%s: the CPU has no kernel for FP8 KV", op);
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
  t.key_dim = a.q->shape[2];
  t.value_dim = v.shape[v.ndim - 1];
  t.dtype = dtype_of(*a.q);
  t.options = a.options;
  return t;
}

// The queries of latent attention as one tensor, [T, H, latent + rotary], of which each thread keeps the memory.
HeadsView joined_queries(const rk_tensor& nope, const rk_tensor& rope) {
  static thread_local std::vector<char> joined;
  const HeadsView parts[] = {heads_view(nope), heads_view(rope)};
  const int64_t item = element_size(nope), tokens = nope.shape[0], heads = nope.shape[1];
  const int64_t sizes[] = {nope.shape[2] * item, rope.shape[2] * item}, row = sizes[0] + sizes[1];
  if (joined.size() < static_cast<size_t>(tokens * heads * row)) joined.resize(tokens * heads * row);
  char* to = joined.data();
  for (int64_t t = 0; t < tokens; t++)
    for (int64_t h = 0; h < heads; h++)
      for (int i = 0; i < 2; to += sizes[i], i++)
        std::memcpy(to, parts[i].data + t * parts[i].token_stride + h * parts[i].head_stride, sizes[i]);
  return {joined.data(), heads * row, row};
}

void check_offsets(const char* op, const char* name, const int32_t* cu, int64_t batch, int64_t total) {
  if (cu[0] != 0) fail(RK_INVALID, "%s: %s[0] is %d, expected 0", op, name, cu[0]);
  for (int64_t b = 0; b < batch; b++)
    if (cu[b + 1] < cu[b])
      fail(RK_INVALID, "%s: %s[%lld] is %d, less than the one before (%d)", op, name, (long long)b + 1, cu[b + 1],
           cu[b]);
  if (cu[batch] != total) fail(RK_INVALID, "%s: %s ends at %d, expected %lld", op, name, cu[batch], (long long)total);
}

void check_pages(const char* op, const AttentionTask& t, int64_t batch, int64_t max_pages, const char* cache,
                 int64_t num_pages) {
  for (int64_t b = 0; b < batch; b++) {
    const int64_t used = (int64_t{t.kv_lens[b]} + t.page_size - 1) / t.page_size;
    if (t.kv_lens[b] < 0 || used > max_pages)
      fail(RK_INVALID, "%s: kv_lens[%lld] is %d, expected 0 to %lld (columns of page_table x page size)", op,
           (long long)b, t.kv_lens[b], (long long)(max_pages * t.page_size));
    for (int64_t i = 0; i < used; i++) {
      const int32_t page = t.page_table[b * t.page_table_stride + i];
      if (page < 0 || page >= num_pages)
        fail(RK_INVALID, "%s: page_table[%lld, %lld] is %d, expected 0 to %lld (pages of %s)", op, (long long)b,
             (long long)i, page, (long long)num_pages - 1, cache);
    }
  }
}

// What a call is cut into. One a calling thread, kept, so that a decode step allocates nothing.
struct Plan {
  std::vector<AttentionTile> tiles;
  std::vector<DecodeItem> items;
  std::vector<DecodeRow> rows;
  std::vector<float> partials;
  std::unique_ptr<std::atomic<int32_t>[]> items_left;  // of each row
  size_t items_left_size = 0;
};

// Query rows of a tile: as many as the kernel takes, fewer where the threads would not have enough of them, which is
// soon where tiles are so large that half of one costs little more.
int64_t rows_of_tile(const AttentionTask& t, int64_t batch, int64_t rows) {
  int64_t tokens = 0;
  for (int64_t b = 0; b < batch; b++)
    if (const int64_t n = t.cu_seqlens_q[b + 1] - t.cu_seqlens_q[b]; n > 1) tokens += n;
  while (rows >= 64 && tokens * t.heads / rows < (rows > 512 ? 12 : 3) * num_threads()) rows /= 2;
  return rows;
}

// KV tokens that the q token at `position` of a row of kv_len tokens sees.
int64_t seen_by(const rk_attention_options& o, int64_t kv_len, int64_t position) {
  const int64_t end = o.causal || o.window_right == 0 ? std::min(kv_len, position + 1) : kv_len;
  return std::max<int64_t>(0, end - (o.window_left >= 0 ? std::max<int64_t>(0, position - o.window_left) : 0));
}

// One tile a few tokens of one KV head.
void add_tiles(const AttentionTask& t, int64_t b, int64_t rows, std::vector<AttentionTile>& tiles) {
  const int64_t group = t.heads / t.kv_heads, begin = t.cu_seqlens_q[b], end = t.cu_seqlens_q[b + 1];
  const int64_t per_tile = std::min<int64_t>(group, kMaxTaskRows), tokens = std::max<int64_t>(1, rows / per_tile);
  const int64_t kv_len = t.page_table ? t.kv_lens[b] : t.cu_seqlens_k[b + 1] - t.cu_seqlens_k[b];
  for (int64_t h = 0; h < t.kv_heads; h++)
    for (int64_t g = 0; g < group; g += per_tile)
      for (int64_t q = begin; q < end; q += tokens) {
        const int64_t n = std::min<int64_t>(tokens, end - q), heads = std::min(per_tile, group - g);
        const int64_t seen = seen_by(t.options, kv_len, kv_len - end + q + n - 1);
        tiles.push_back({b, q, n, h, h * group + g, heads, n * heads * seen});
      }
}

// The part of row b's KV that its one q token sees.
struct Seen {
  int64_t begin, end;
  int64_t first_part() const { return begin / kSplitTokens; }
  int64_t parts() const { return end > begin ? (end - 1) / kSplitTokens + 1 - first_part() : 0; }
};

Seen seen_by_last(const AttentionTask& t, int64_t b) {
  const int64_t end = t.page_table ? t.kv_lens[b] : t.cu_seqlens_k[b + 1] - t.cu_seqlens_k[b];
  const int64_t left = t.options.window_left;
  return {left >= 0 ? std::max<int64_t>(0, end - 1 - left) : 0, end};
}

// A part of the KV is one item with all heads, which reads memory in the longest runs; with few parts for the threads,
// or too many query heads for an item, it is several items of a few KV heads each, and at last of a part of the query
// heads of one.
void plan_decode(const AttentionTask& t, int64_t batch, Plan& plan) {
  const auto one_token = [&](int64_t b) { return t.cu_seqlens_q[b + 1] - t.cu_seqlens_q[b] == 1; };
  int64_t parts = 0;
  for (int64_t b = 0; b < batch; b++)
    if (one_token(b)) parts += seen_by_last(t, b).parts();
  const int64_t wanted = num_threads() > 1 && parts > 0 ? (2 * num_threads() + parts - 1) / parts : 1;
  const int64_t group = t.heads / t.kv_heads, cuts = (wanted + t.kv_heads - 1) / t.kv_heads;
  const int64_t group_cut = std::min<int64_t>(std::max<int64_t>(kMinTaskRows, (group + cuts - 1) / cuts),
                                              std::min<int64_t>(group, kMaxTaskRows));
  const int64_t heads = std::max<int64_t>(1, std::min(t.kv_heads / wanted, kMaxTaskRows / group_cut));

  const int64_t stride = partial_stride(t.value_dim);
  if (plan.partials.size() < static_cast<size_t>(parts * t.heads * stride))
    plan.partials.resize(parts * t.heads * stride);
  float* partial = plan.partials.data();
  for (int64_t b = 0; b < batch; b++) {
    if (!one_token(b)) continue;
    const Seen seen = seen_by_last(t, b);
    const int64_t token = t.cu_seqlens_q[b], row = static_cast<int64_t>(plan.rows.size());
    plan.rows.push_back({token, seen.parts(), partial});
    for (int64_t i = 0; i < seen.parts(); i++, partial += t.heads * stride) {
      const int64_t base = (seen.first_part() + i) * kSplitTokens;
      const int64_t begin = std::max(seen.begin, base), end = std::min(seen.end, base + kSplitTokens);
      for (int64_t h = 0; h < t.kv_heads; h += heads)
        for (int64_t g = 0; g < group; g += group_cut) {
          const int64_t head = h * group + g;
          plan.items.push_back({b, token, h, std::min(heads, t.kv_heads - h), head, std::min(group_cut, group - g),
                                begin, end, row, partial + head * stride});
        }
    }
  }
}

void count_items(Plan& plan) {
  if (plan.items_left_size < plan.rows.size()) {
    plan.items_left_size = 2 * plan.rows.size();
    plan.items_left = std::make_unique<std::atomic<int32_t>[]>(plan.items_left_size);
  }
  for (size_t row = 0; row < plan.rows.size(); row++) plan.items_left[row].store(0, std::memory_order_relaxed);
  for (const DecodeItem& item : plan.items) plan.items_left[item.row].fetch_add(1, std::memory_order_relaxed);
}

// Threads take the next piece of work as they get free. Whoever ends a row's last item combines the row.
void run(const AttentionTask& task, int64_t batch) {
  static thread_local Plan plan;
  plan.tiles.clear();
  plan.items.clear();
  plan.rows.clear();
  const AttentionKernels& kernels = attention_kernels();
  const bool amx = kernels.prefill_tile && task.dtype == DType::bf16;
  const auto tile = amx ? kernels.prefill_tile : kernels.tile;
  const int64_t rows = rows_of_tile(task, batch, amx ? kMaxTileRows : kMaxLaneRows);
  for (int64_t b = 0; b < batch; b++)
    if (task.cu_seqlens_q[b + 1] - task.cu_seqlens_q[b] > 1) add_tiles(task, b, rows, plan.tiles);
  std::sort(plan.tiles.begin(), plan.tiles.end(),
            [](const AttentionTile& a, const AttentionTile& b) { return a.work > b.work; });
  plan_decode(task, batch, plan);
  count_items(plan);
  for (const DecodeRow& row : plan.rows)
    if (row.parts == 0) kernels.decode_combine(task, row);

  Plan* const shared = &plan;  // a thread_local by name would be another one on the pool's threads
  const int64_t tiles = static_cast<int64_t>(plan.tiles.size()), n = tiles + static_cast<int64_t>(plan.items.size());
  std::atomic<int64_t> next{0};
  parallel_for(std::min<int64_t>(n, num_threads()), 1, [&](int64_t, int64_t) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) {
      if (i < tiles) {
        tile(task, shared->tiles[i]);
        continue;
      }
      const DecodeItem& item = shared->items[i - tiles];
      kernels.decode_part(task, item);
      if (shared->items_left[item.row].fetch_sub(1, std::memory_order_acq_rel) == 1)
        kernels.decode_combine(task, shared->rows[item.row]);
    }
  });
}

}  // namespace

namespace backend {

void flash_attn_with_kvcache(const rk_flash_attn_with_kvcache_args& args, rk_stream) {
  const char* op = "flash_attn_with_kvcache";
  AttentionTask task = common_task(op, args, *args.k_cache, *args.v_cache);
  const int64_t batch = args.page_table->shape[0];
  task.page_table = table_data(*args.page_table);
  task.page_table_stride = args.page_table->strides[0];
  task.page_size = args.k_cache->shape[1];
  task.kv_lens = data_ptr<int32_t>(*args.kv_lens);
  task.k_scale = scale_view(args.k_scale);
  task.v_scale = scale_view(args.v_scale);
  check_offsets(op, "cu_seqlens_q", task.cu_seqlens_q, batch, args.q->shape[0]);
  check_pages(op, task, batch, args.page_table->shape[1], "k_cache", args.k_cache->shape[0]);
  run(task, batch);
}

void flash_attn_varlen(const rk_flash_attn_varlen_args& args, rk_stream) {
  const char* op = "flash_attn_varlen";
  AttentionTask task = common_task(op, args, *args.k, *args.v);
  const int64_t batch = args.cu_seqlens_q->shape[0] - 1;
  task.cu_seqlens_k = data_ptr<int32_t>(*args.cu_seqlens_k);
  check_offsets(op, "cu_seqlens_q", task.cu_seqlens_q, batch, args.q->shape[0]);
  check_offsets(op, "cu_seqlens_k", task.cu_seqlens_k, batch, args.k->shape[0]);
  run(task, batch);
}

int64_t flash_attn_workspace_size(const rk_flash_attn_sizes&) {
  return 0;  // scratch is on the threads' stacks
}

// Attention with one KV head, whose values are the first values of its keys.
void mla_decode(const rk_mla_decode_args& args, rk_stream) {
  const char* op = "mla_decode";
  const rk_tensor& cache = *args.kv_cache;
  if (dtype_of(cache) == DType::u8) fail(RK_UNSUPPORTED, "%s: the CPU has no kernel for the FP8 form", op);
  const int64_t item = element_size(cache), batch = args.page_table->shape[0];
  AttentionTask task{};
  task.k = task.v = {data_ptr<char>(cache), cache.strides[0] * item, cache.strides[1] * item, 0};
  task.out = heads_view(*args.out);
  task.page_table = table_data(*args.page_table);
  task.page_table_stride = args.page_table->strides[0];
  task.page_size = cache.shape[1];
  task.kv_lens = data_ptr<int32_t>(*args.kv_lens);
  task.cu_seqlens_q = data_ptr<int32_t>(*args.cu_seqlens_q);
  if (args.lse) {
    task.lse = data_ptr<float>(*args.lse);
    task.lse_token_stride = args.lse->strides[0];
    task.lse_head_stride = args.lse->strides[1];
  }
  task.heads = args.q_nope->shape[1];
  task.kv_heads = 1;
  task.key_dim = cache.shape[2];
  task.value_dim = args.q_nope->shape[2];
  task.dtype = dtype_of(cache);
  task.options = {args.softmax_scale, 0, args.causal, -1, -1};
  check_offsets(op, "cu_seqlens_q", task.cu_seqlens_q, batch, args.q_nope->shape[0]);
  check_pages(op, task, batch, args.page_table->shape[1], "kv_cache", cache.shape[0]);
  task.q = joined_queries(*args.q_nope, *args.q_rope);
  run(task, batch);
}

int64_t mla_decode_workspace_size(const rk_mla_decode_sizes&) {
  return 0;
}

void merge_state(const rk_merge_state_args& args, rk_stream) {
  const int64_t rows = args.out_a->shape[0] * args.out_a->shape[1];
  const auto kernel = attention_kernels().merge_state;
  parallel_for(rows, 1 + 16 * 1024 / args.out_a->shape[2],
               [&](int64_t begin, int64_t end) noexcept { kernel(args, begin, end); });
}

}  // namespace backend
}  // namespace radix
