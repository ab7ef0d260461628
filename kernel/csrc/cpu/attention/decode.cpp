// Attention of one query token over a part of its KV: at most 512 tokens, cut at fixed positions, for some of the
// heads.
//
// Bound by reading K and V once. A task walks the tokens in order and, at each, the rows of its KV heads, which lie
// side by side in the cache, so that it reads memory in long runs; all query heads of a KV head use a row while it is
// in registers. Software prefetch runs a fixed number of bytes ahead, across pages and from the last keys into the
// values. A part's result goes to scratch; the task that ends a row last combines its parts in the order of positions.
#include "cpu/attention/entries.h"
#include "cpu/attention/products.h"
#include "cpu/attention/softmax.h"

namespace radix::cpu::RK_ISA {
namespace {

constexpr int W = Vec::width;
constexpr int64_t kPrefetchBytes = 12 * 1024;
constexpr int64_t kValueTokens = 16;  // tokens of a KV head whose values are summed at once: they fit L1

// The working set of a task, on the stack of its thread.
struct State {
  alignas(64) float q[kMaxTaskRows * kMaxKeyDim];
  alignas(64) float o[kMaxTaskRows * kMaxValueDim];
  alignas(64) float s[kMaxTaskRows * kSplitTokens];
  const char* rows[2 * kSplitTokens];  // of K, then of V; of the first KV head
};

template <class T, class K>
class DecodePart {
 public:
  DecodePart(const AttentionTask& task, const DecodeItem& item)

      : task_(task), item_(item), key_dim_(task.key_dim), value_dim_(task.value_dim), tokens_(item.end - item.begin) {}

  void run() {
    load_queries();
    find_rows(task_, item_.batch, item_.kv_head, item_.begin, item_.end, st_.rows, st_.rows + tokens_);
    const int64_t token_bytes = item_.kv_heads * key_dim_ * static_cast<int64_t>(sizeof(K));
    ahead_ = (kPrefetchBytes / token_bytes + kTokenBlock) / kTokenBlock * kTokenBlock;
    scores();
    if (task_.k_scale.data) scale_heads(task_.k_scale);
    for (int64_t r = 0; r < rows(); r++) {
      float* to = item_.partial + r * partial_stride(value_dim_);
      softmax(task_.options, st_.s + r * kSplitTokens, 0, tokens_, to[0], to[1]);
    }
    if (task_.v_scale.data) scale_heads(task_.v_scale);
    values();
    for (int64_t r = 0; r < rows(); r++)
      for (int64_t d = 0; d < value_dim_; d += W)
        store(item_.partial + r * partial_stride(value_dim_) + kPartialHead + d, load(st_.o + r * value_dim_ + d));
  }

 private:
  int64_t rows() const { return item_.kv_heads * item_.group; }

  void load_queries() {
    for (int64_t r = 0; r < rows(); r++) {
      const T* from = reinterpret_cast<const T*>(task_.q.data + item_.token * task_.q.token_stride +
                                                 (item_.head + r) * task_.q.head_stride);
      for (int64_t d = 0; d < key_dim_; d += W) store(st_.q + r * key_dim_ + d, load(from + d));
      for (int64_t d = 0; d < value_dim_; d += W) store(st_.o + r * value_dim_ + d, zero());
    }
  }

  // Rows `first` to `first + count` of the task's walk through K and then V, for one KV head.
  void prefetch(int64_t first, int64_t count, int64_t kv_head) const {
    for (int64_t t = first; t < lesser(first + count, 2 * tokens_); t++) {
      const bool key = t < tokens_;
      const char* row = st_.rows[t] + kv_head * (key ? task_.k : task_.v).head_stride;
      const int64_t bytes = (key ? key_dim_ : value_dim_) * static_cast<int64_t>(sizeof(K));
      for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(row + byte);
    }
  }

  void scores() {
    for (int64_t t = 0; t < tokens_; t += kTokenBlock) {
      const char* k[kTokenBlock];
      for (int i = 0; i < kTokenBlock; i++) k[i] = st_.rows[lesser(t + i, tokens_ - 1)];
      for (int64_t h = 0; h < item_.kv_heads; h++) {
        prefetch(t + ahead_, kTokenBlock, h);
        each_row_block(item_.group, [&](auto count, int64_t r) {
          const int64_t row = h * item_.group + r;
          dots<decltype(count)::value, K>(st_.q + row * key_dim_, k, h * task_.k.head_stride, key_dim_,
                                          st_.s + row * kSplitTokens + t, kSplitTokens);
        });
      }
    }
  }

  void scale_heads(const ScaleView& view) {
    float scale[kSplitTokens];
    for (int64_t h = 0; h < item_.kv_heads; h++) {
      find_scales(task_, view, item_.batch, item_.kv_head + h, item_.begin, item_.end, scale);
      scale_rows(st_.s + h * item_.group * kSplitTokens, item_.group, kSplitTokens, scale, tokens_);
    }
  }

  void values() {
    for (int64_t t = 0; t < tokens_; t += kValueTokens) {
      const int64_t count = lesser(kValueTokens, tokens_ - t);
      for (int64_t h = 0; h < item_.kv_heads; h++) {
        prefetch(tokens_ + t + greater(ahead_, kValueTokens), kValueTokens, h);
        each_row_block(item_.group, [&](auto block, int64_t r) {
          const int64_t row = h * item_.group + r;
          value_rows<decltype(block)::value, K>(st_.s + row * kSplitTokens + t, kSplitTokens, st_.rows + tokens_ + t,
                                                h * task_.v.head_stride, count, value_dim_, st_.o + row * value_dim_);
        });
      }
    }
  }

  const AttentionTask& task_;
  const DecodeItem& item_;
  const int64_t key_dim_, value_dim_, tokens_;
  int64_t ahead_ = 0;
  State st_;
};

}  // namespace

void decode_part(const AttentionTask& task, const DecodeItem& item) {
  dispatch_types(task, [&](auto t, auto k) {
    DecodePart<typename decltype(t)::type, typename decltype(k)::type> work(task, item);
    work.run();
  });
}

void decode_combine(const AttentionTask& task, const DecodeRow& row) {
  alignas(64) float o[kMaxValueDim];
  const int64_t stride = partial_stride(task.value_dim);
  for (int64_t h = 0; h < task.heads; h++) {
    RunningSoftmax running;
    for (int64_t d = 0; d < task.value_dim; d += W) store(o + d, zero());
    for (int64_t i = 0; i < row.parts; i++) {
      const float* part = row.partial + (i * task.heads + h) * stride;
      running.combine(o, part + kPartialHead, task.value_dim, part[0], part[1]);
    }
    dispatch_float(task.dtype,
                   [&](auto type) { running.finish<typename decltype(type)::type>(task, row.token, h, o); });
  }
}

}  // namespace radix::cpu::RK_ISA
