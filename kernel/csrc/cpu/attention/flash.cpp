// Flash attention, one tile of query rows against its KV, for one ISA level.
//
//   for each part of the KV (512 tokens, cut at fixed positions):
//     scores   s[r][t] = q[r] . k[t]             K rows are read once for all rows of the tile
//     softmax  each row over its own visible range; m, sum, p in place
//     values   part[r] = sum_t p[r][t] v[t]      V rows are read once for the range that all rows see
//     combine  running (m, l, o) with the part, in the order of positions
//
// Decode is bound by reading K and V once; prefill by FMA. Every sum of a row runs in an order that its own position
// and visible range fix, whichever rows share the tile.
#include "cpu/attention/entries.h"
#include "cpu/attention/products.h"
#include "cpu/attention/softmax.h"

namespace radix::cpu::RK_ISA {
namespace {

constexpr int W = Vec::width;

// The tile's working set, on the stack of its thread.
struct State {
  alignas(64) float q[kMaxTaskRows * kMaxHeadDim];
  alignas(64) float o[kMaxTaskRows * kMaxHeadDim];
  alignas(64) float part[kMaxTaskRows * kMaxHeadDim];
  alignas(64) float s[kMaxTaskRows * kSplitTokens];
  RunningSoftmax running[kMaxTaskRows];
  const char* k[kSplitTokens];  // rows of the current part
  const char* v[kSplitTokens];
};

// Scores of all rows at the first `tokens` of the part.
template <class K>
void scores(State& st, int64_t rows, int64_t tokens, int64_t dim) {
  each_row_block(rows, [&](auto count, int64_t r) {
    for (int64_t t = 0; t < tokens; t += kTokenBlock) {
      const char* k[kTokenBlock];
      for (int i = 0; i < kTokenBlock; i++) k[i] = st.k[lesser(t + i, tokens - 1)];
      dots<decltype(count)::value, K>(st.q + r * dim, k, 0, dim, st.s + r * kSplitTokens + t, kSplitTokens);
    }
  });
}

// Rows [first, first + rows) of the tile, which all see tokens [begin, end) of the part.
template <class K>
void values(State& st, int64_t first, int64_t rows, int64_t begin, int64_t end, int64_t dim) {
  if (begin >= end) return;
  each_row_block(rows, [&](auto count, int64_t r) {
    value_rows<decltype(count)::value, K>(st.s + (first + r) * kSplitTokens + begin, kSplitTokens, st.v + begin, 0,
                                          end - begin, dim, st.part + (first + r) * dim);
  });
}

template <class T, class K>
class Tile {
 public:
  Tile(const AttentionTask& task, const AttentionTile& tile) : task_(task), tile_(tile), dim_(task.head_dim) {
    const int64_t b = tile.batch;
    const int64_t kv_len = task.page_table ? task.kv_lens[b] : task.cu_seqlens_k[b + 1] - task.cu_seqlens_k[b];
    const int64_t q_len = task.cu_seqlens_q[b + 1] - task.cu_seqlens_q[b];
    const int64_t position = kv_len - q_len + tile.token - task.cu_seqlens_q[b];
    for (int64_t i = 0; i < tile.tokens; i++) seen_[i] = visible(task.options, kv_len, position + i);
  }

  void run() {
    load_queries();
    // Visible ranges move forward with the token, so the first and the last one bound them all.
    const Range all{seen_[0].begin, seen_[tile_.tokens - 1].end};
    if (!all.empty())
      for (int64_t base = all.begin / kSplitTokens * kSplitTokens; base < all.end; base += kSplitTokens)
        run_part(intersect(all, {base, base + kSplitTokens}));
    finish();
  }

 private:
  int64_t rows() const { return tile_.tokens * tile_.group; }

  void load_queries() {
    for (int64_t r = 0; r < rows(); r++) {
      const int64_t t = tile_.token + r / tile_.group, h = tile_.head + r % tile_.group;
      const T* from = reinterpret_cast<const T*>(task_.q.data + t * task_.q.token_stride + h * task_.q.head_stride);
      for (int64_t d = 0; d < dim_; d += W) {
        store(st_.q + r * dim_ + d, load(from + d));
        store(st_.o + r * dim_ + d, zero());
      }
      st_.running[r] = {};
    }
  }

  // Token indices of a part count from its first visible token.
  void run_part(Range part) {
    find_rows(task_, tile_.batch, tile_.kv_head, part.begin, part.end, st_.k, st_.v);
    const int64_t tokens = part.end - part.begin;
    scores<K>(st_, rows(), tokens, dim_);
    float scale[kSplitTokens];
    if (task_.k_scale.data) {
      find_scales(task_, task_.k_scale, tile_.batch, tile_.kv_head, part.begin, part.end, scale);
      scale_rows(st_.s, rows(), kSplitTokens, scale, tokens);
    }
    float m[kMaxTaskRows], l[kMaxTaskRows];
    Range range[kMaxTaskRows], common{0, kSplitTokens};
    for (int64_t i = 0; i < tile_.tokens; i++) {
      const Range own = intersect(seen_[i], part);
      range[i] = {own.begin - part.begin, own.end - part.begin};
      common = intersect(common, range[i]);
      for (int64_t r = i * tile_.group; r < (i + 1) * tile_.group; r++) {
        m[r] = kNegInf;
        l[r] = 0;
        if (!own.empty()) softmax(task_.options, st_.s + r * kSplitTokens, range[i].begin, range[i].end, m[r], l[r]);
        for (int64_t d = 0; d < dim_; d += W) store(st_.part + r * dim_ + d, zero());
      }
    }
    if (task_.v_scale.data) {
      find_scales(task_, task_.v_scale, tile_.batch, tile_.kv_head, part.begin, part.end, scale);
      scale_rows(st_.s, rows(), kSplitTokens, scale, tokens);
    }
    add_values(range, common);
    for (int64_t r = 0; r < rows(); r++)
      st_.running[r].combine(st_.o + r * dim_, st_.part + r * dim_, dim_, m[r], l[r]);
  }

  // Each row adds its values in ascending order: what only it sees before the common range, the common range (all rows
  // together), what only it sees after.
  void add_values(const Range* range, Range common) {
    const int64_t group = tile_.group;
    if (common.empty()) {
      for (int64_t i = 0; i < tile_.tokens; i++) values<K>(st_, i * group, group, range[i].begin, range[i].end, dim_);
      return;
    }
    for (int64_t i = 0; i < tile_.tokens; i++) values<K>(st_, i * group, group, range[i].begin, common.begin, dim_);
    values<K>(st_, 0, rows(), common.begin, common.end, dim_);
    for (int64_t i = 0; i < tile_.tokens; i++) values<K>(st_, i * group, group, common.end, range[i].end, dim_);
  }

  void finish() {
    for (int64_t r = 0; r < rows(); r++)
      st_.running[r].template finish<T>(task_, tile_.token + r / tile_.group, tile_.head + r % tile_.group,
                                        st_.o + r * dim_);
  }

  const AttentionTask& task_;
  const AttentionTile& tile_;
  const int64_t dim_;
  Range seen_[kMaxTaskRows];
  State st_;
};

void tile(const AttentionTask& task, const AttentionTile& tile) {
  dispatch_types(task, [&](auto t, auto k) {
    Tile<typename decltype(t)::type, typename decltype(k)::type> work(task, tile);
    work.run();
  });
}

}  // namespace

const AttentionKernels attention_table = {tile, prefill_tile, decode_part, decode_combine, merge_state};

}  // namespace radix::cpu::RK_ISA
