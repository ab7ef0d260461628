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
#include "cpu/attention/attention.h"
#include "cpu/attention/merge_state.h"

namespace radix::cpu::RK_ISA {
namespace {

constexpr int W = Vec::width;
constexpr float kNegInf = -__builtin_inff();
#if RK_ISA_LEVEL >= 2
constexpr int kRowBlock = 4;  // 4 rows x 4 vectors of accumulators out of 32 registers
#else
constexpr int kRowBlock = 2;
#endif
constexpr int kVecBlock = 4;
constexpr int kTokenBlock = 4;

struct Range {
  int64_t begin, end;
  bool empty() const { return begin >= end; }
};

inline int64_t lesser(int64_t a, int64_t b) {
  return a < b ? a : b;
}
inline int64_t greater(int64_t a, int64_t b) {
  return a > b ? a : b;
}
inline Range intersect(Range a, Range b) {
  return {greater(a.begin, b.begin), lesser(a.end, b.end)};
}

// The tile's working set, on the stack of its thread.
template <class T>
struct State {
  alignas(64) float q[kMaxTaskRows * kMaxHeadDim];
  alignas(64) float o[kMaxTaskRows * kMaxHeadDim];
  alignas(64) float part[kMaxTaskRows * kMaxHeadDim];
  alignas(64) float s[kMaxTaskRows * kSplitTokens];
  float m[kMaxTaskRows], l[kMaxTaskRows];
  const T* k[kSplitTokens];  // rows of the current part, by position in it
  const T* v[kSplitTokens];
};

inline Vec tanh(Vec x) {
  const Vec t = exp(set1(-2.f) * abs(x));
  return copysign((set1(1.f) - t) / (set1(1.f) + t), x);
}

// The KV positions that query token i of the tile sees.
Range visible(const AttentionTask& task, int64_t kv_len, int64_t position) {
  const auto& o = task.options;
  Range r{0, kv_len};
  if (o.causal || o.window_right == 0) r.end = lesser(kv_len, position + 1);
  if (o.window_left >= 0) r.begin = greater(0, position - o.window_left);
  return r;
}

template <class T>
void find_rows(const AttentionTask& task, const AttentionTile& tile, Range part, int64_t base, State<T>& st) {
  for (int64_t t = part.begin; t < part.end; t++) {
    int64_t k = tile.kv_head * task.k.head_stride, v = tile.kv_head * task.v.head_stride;
    if (task.page_table) {
      const int64_t page = task.page_table[tile.batch * task.page_table_stride + t / task.page_size];
      const int64_t slot = t % task.page_size;
      k += page * task.k.page_stride + slot * task.k.token_stride;
      v += page * task.v.page_stride + slot * task.v.token_stride;
    } else {
      k += (task.cu_seqlens_k[tile.batch] + t) * task.k.token_stride;
      v += (task.cu_seqlens_k[tile.batch] + t) * task.v.token_stride;
    }
    st.k[t - base] = reinterpret_cast<const T*>(task.k.data + k);
    st.v[t - base] = reinterpret_cast<const T*>(task.v.data + v);
  }
}

template <int Rows, int Tokens, class T>
inline void dots(const float* q, const T* const* k, int64_t dim, float* s) {
  Vec acc[Rows][Tokens];
  for (auto& row : acc)
    for (Vec& a : row) a = zero();
  for (int64_t d = 0; d < dim; d += W) {
    Vec key[Tokens];
    for (int t = 0; t < Tokens; t++) key[t] = load(k[t] + d);
    for (int r = 0; r < Rows; r++) {
      const Vec query = load(q + r * dim + d);
      for (int t = 0; t < Tokens; t++) acc[r][t] = fma(query, key[t], acc[r][t]);
    }
  }
  for (int r = 0; r < Rows; r++)
    for (int t = 0; t < Tokens; t++) s[r * kSplitTokens + t] = reduce_sum(acc[r][t]);
}

template <int Rows, class T>
void score_rows(const float* q, const T* const* k, int64_t begin, int64_t end, int64_t dim, float* s) {
  int64_t t = begin;
  for (; t + kTokenBlock <= end; t += kTokenBlock) dots<Rows, kTokenBlock>(q, k + t, dim, s + t);
  for (; t < end; t++) dots<Rows, 1>(q, k + t, dim, s + t);
}

template <class T>
void scores(State<T>& st, int64_t rows, int64_t begin, int64_t end, int64_t dim) {
  int64_t r = 0;
  for (; r + kRowBlock <= rows; r += kRowBlock)
    score_rows<kRowBlock>(st.q + r * dim, st.k, begin, end, dim, st.s + r * kSplitTokens);
  for (; r < rows; r++) score_rows<1>(st.q + r * dim, st.k, begin, end, dim, st.s + r * kSplitTokens);
}

// s[begin, end) becomes exp(score - m); returns m and the sum.
void softmax(const rk_attention_options& o, float* s, int64_t begin, int64_t end, float& m, float& sum) {
  const Vec scale = set1(o.softmax_scale), cap = set1(o.softcap);
  Vec top = set1(kNegInf);
  float tail_top = kNegInf;
  int64_t t = begin;
  const auto scaled = [&](Vec x) {
    x = x * scale;
    return o.softcap > 0 ? cap * tanh(x / cap) : x;
  };
  for (; t + W <= end; t += W) {
    const Vec x = scaled(load(s + t));
    store(s + t, x);
    top = max(top, x);
  }
  if (t < end) {
    const int n = static_cast<int>(end - t);
    store(s + t, scaled(load(s + t, n)), n);
    for (int i = 0; i < n; i++) tail_top = s[t + i] > tail_top ? s[t + i] : tail_top;
  }
  m = reduce_max(top);
  m = m > tail_top ? m : tail_top;
  // All scores -inf: nothing to see after all. (NaN scores stay NaN through exp.)
  const Vec shift = set1(m == kNegInf ? 0.f : m);
  Vec total = zero();
  for (t = begin; t + W <= end; t += W) {
    const Vec p = exp(load(s + t) - shift);
    store(s + t, p);
    total = total + p;
  }
  sum = reduce_sum(total);
  if (t < end) {
    const int n = static_cast<int>(end - t);
    store(s + t, exp(load(s + t, n) - shift), n);
    for (int i = 0; i < n; i++) sum += s[t + i];
  }
}

// out[r] += sum over t of p[r][t] v[t], Vecs vectors at column d.
template <int Rows, int Vecs, class T>
inline void value_block(const float* p, const T* const* v, int64_t begin, int64_t end, int64_t dim, int64_t d,
                        float* out) {
  Vec acc[Rows][Vecs];
  for (int r = 0; r < Rows; r++)
    for (int c = 0; c < Vecs; c++) acc[r][c] = load(out + r * dim + d + c * W);
  for (int64_t t = begin; t < end; t++) {
    Vec value[Vecs];
    for (int c = 0; c < Vecs; c++) value[c] = load(v[t] + d + c * W);
    for (int r = 0; r < Rows; r++) {
      const Vec weight = set1(p[r * kSplitTokens + t]);
      for (int c = 0; c < Vecs; c++) acc[r][c] = fma(weight, value[c], acc[r][c]);
    }
  }
  for (int r = 0; r < Rows; r++)
    for (int c = 0; c < Vecs; c++) store(out + r * dim + d + c * W, acc[r][c]);
}

template <int Rows, class T>
void value_rows(const float* p, const T* const* v, int64_t begin, int64_t end, int64_t dim, float* out) {
  int64_t d = 0;
  for (; d + kVecBlock * W <= dim; d += kVecBlock * W) value_block<Rows, kVecBlock>(p, v, begin, end, dim, d, out);
  for (; d < dim; d += W) value_block<Rows, 1>(p, v, begin, end, dim, d, out);
}

// Rows [first, first + rows) of the tile, which all see positions [begin, end) of the part.
template <class T>
void values(State<T>& st, int64_t first, int64_t rows, int64_t begin, int64_t end, int64_t dim) {
  if (begin >= end) return;
  int64_t r = first;
  for (; r + kRowBlock <= first + rows; r += kRowBlock)
    value_rows<kRowBlock>(st.s + r * kSplitTokens, st.v, begin, end, dim, st.part + r * dim);
  for (; r < first + rows; r++) value_rows<1>(st.s + r * kSplitTokens, st.v, begin, end, dim, st.part + r * dim);
}

// (m, l, o) of row r with a part whose maximum and sum are given.
void combine(float* m, float* l, float* o, const float* part, int64_t dim, float part_m, float part_l) {
  if (part_m == kNegInf) return;
  const float top = *m > part_m ? *m : part_m;
  const float keep = *m == kNegInf ? 0.f : exp_scalar(*m - top), add = exp_scalar(part_m - top);
  const Vec vk = set1(keep), va = set1(add);
  for (int64_t d = 0; d < dim; d += W) store(o + d, fma(load(part + d), va, load(o + d) * vk));
  *l = *l * keep + part_l * add;
  *m = top;
}

template <class T>
class Tile {
 public:
  Tile(const AttentionTask& task, const AttentionTile& tile) : task_(task), tile_(tile), dim_(task.head_dim) {
    const int64_t b = tile.batch;
    const int64_t kv_len = task.page_table ? task.kv_lens[b] : task.cu_seqlens_k[b + 1] - task.cu_seqlens_k[b];
    const int64_t q_len = task.cu_seqlens_q[b + 1] - task.cu_seqlens_q[b];
    const int64_t position = kv_len - q_len + tile.token - task.cu_seqlens_q[b];
    for (int64_t i = 0; i < tile.tokens; i++) seen_[i] = visible(task, kv_len, position + i);
  }

  void run() {
    load_queries();
    // Visible ranges move forward with the token, so the first and the last one bound them all.
    const Range all{seen_[0].begin, seen_[tile_.tokens - 1].end};
    if (!all.empty())
      for (int64_t base = all.begin / kSplitTokens * kSplitTokens; base < all.end; base += kSplitTokens)
        run_part(base, intersect(all, {base, base + kSplitTokens}));
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
      st_.m[r] = kNegInf;
      st_.l[r] = 0;
    }
  }

  void run_part(int64_t base, Range part) {
    find_rows(task_, tile_, part, base, st_);
    scores(st_, rows(), part.begin - base, part.end - base, dim_);
    float m[kMaxTaskRows], l[kMaxTaskRows];
    Range range[kMaxTaskRows], common{0, kSplitTokens};
    for (int64_t i = 0; i < tile_.tokens; i++) {
      const Range own = intersect(seen_[i], part);
      range[i] = {own.begin - base, own.end - base};
      common = intersect(common, range[i]);
      for (int64_t r = i * tile_.group; r < (i + 1) * tile_.group; r++) {
        m[r] = kNegInf;
        l[r] = 0;
        if (!own.empty()) softmax(task_.options, st_.s + r * kSplitTokens, range[i].begin, range[i].end, m[r], l[r]);
        for (int64_t d = 0; d < dim_; d += W) store(st_.part + r * dim_ + d, zero());
      }
    }
    add_values(range, common);
    for (int64_t r = 0; r < rows(); r++)
      combine(st_.m + r, st_.l + r, st_.o + r * dim_, st_.part + r * dim_, dim_, m[r], l[r]);
  }

  // Each row adds its values in ascending order: what only it sees before the common range, the common range (all rows
  // together), what only it sees after.
  void add_values(const Range* range, Range common) {
    const int64_t group = tile_.group;
    if (common.empty()) {
      for (int64_t i = 0; i < tile_.tokens; i++) values(st_, i * group, group, range[i].begin, range[i].end, dim_);
      return;
    }
    for (int64_t i = 0; i < tile_.tokens; i++) values(st_, i * group, group, range[i].begin, common.begin, dim_);
    values(st_, 0, rows(), common.begin, common.end, dim_);
    for (int64_t i = 0; i < tile_.tokens; i++) values(st_, i * group, group, common.end, range[i].end, dim_);
  }

  void finish() {
    for (int64_t r = 0; r < rows(); r++) {
      const int64_t t = tile_.token + r / tile_.group, h = tile_.head + r % tile_.group;
      float m = st_.m[r], l = st_.l[r], scale = 1.f;
      if (task_.sinks) {
        const float sink = task_.sinks[h], top = m > sink ? m : sink;
        scale = m == kNegInf ? 0.f : exp_scalar(m - top);
        l = l * scale + exp_scalar(sink - top);
        m = top;
      }
      T* out = reinterpret_cast<T*>(task_.out.data + t * task_.out.token_stride + h * task_.out.head_stride);
      const Vec factor = set1(l == 0.f ? 0.f : scale / l);  // l 0: nothing seen
      for (int64_t d = 0; d < dim_; d += W) store(out + d, load(st_.o + r * dim_ + d) * factor);
      if (task_.lse)
        task_.lse[t * task_.lse_token_stride + h * task_.lse_head_stride] = l == 0.f ? kNegInf : m + __builtin_logf(l);
    }
  }

  const AttentionTask& task_;
  const AttentionTile& tile_;
  const int64_t dim_;
  Range seen_[kMaxTaskRows];
  State<T> st_;
};

void tile(const AttentionTask& task, const AttentionTile& tile) {
  dispatch_float(task.dtype, [&](auto type) {
    Tile<typename decltype(type)::type> work(task, tile);
    work.run();
  });
}

}  // namespace

const AttentionKernels attention_table = {tile, merge_state};

}  // namespace radix::cpu::RK_ISA
