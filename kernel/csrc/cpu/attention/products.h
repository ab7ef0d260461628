// The two products of attention in registers: q . k for a few queries and tokens, and sums of p times v.
//
// Rows of K and V are byte pointers, one a token. Each sum runs in an order that does not depend on the blocking.
#pragma once

#include "cpu/attention/attention.h"
#include "cpu/simd.h"

namespace radix::cpu::RK_ISA {

#if RK_ISA_LEVEL >= 2
constexpr int kRowBlock = 4;  // 4 rows x 4 vectors of accumulators out of 32 registers
#else
constexpr int kRowBlock = 2;
#endif
constexpr int kVecBlock = 4;
constexpr int kTokenBlock = 4;

// Byte pointers of the K and V rows of one KV head at positions [begin, end) of batch row b, from k[0], v[0] on.
inline void find_rows(const AttentionTask& task, int64_t b, int64_t kv_head, int64_t begin, int64_t end, const char** k,
                      const char** v) {
  const char* k_base = task.k.data + kv_head * task.k.head_stride;
  const char* v_base = task.v.data + kv_head * task.v.head_stride;
  if (!task.page_table) {
    for (int64_t t = begin; t < end; t++) {
      const int64_t token = task.cu_seqlens_k[b] + t;
      k[t - begin] = k_base + token * task.k.token_stride;
      v[t - begin] = v_base + token * task.v.token_stride;
    }
    return;
  }
  const int32_t* table = task.page_table + b * task.page_table_stride;
  int64_t page = begin / task.page_size, slot = begin % task.page_size;
  for (int64_t t = begin; t < end; t++) {
    k[t - begin] = k_base + table[page] * task.k.page_stride + slot * task.k.token_stride;
    v[t - begin] = v_base + table[page] * task.v.page_stride + slot * task.v.token_stride;
    if (++slot == task.page_size) {
      slot = 0;
      page++;
    }
  }
}

// The scales of one KV head's K or V at positions [begin, end) of batch row b.
inline void find_scales(const AttentionTask& task, const ScaleView& view, int64_t b, int64_t kv_head, int64_t begin,
                        int64_t end, float* scale) {
  const int32_t* table = task.page_table + b * task.page_table_stride;
  for (int64_t t = begin; t < end; t++)
    scale[t - begin] = view.data[table[t / task.page_size] * view.page_stride + t % task.page_size * view.token_stride +
                                 kv_head * view.head_stride];
}

// x[r] *= scale, element by element.
inline void scale_rows(float* x, int64_t rows, int64_t stride, const float* scale, int64_t tokens) {
  constexpr int W = Vec::width;
  for (int64_t r = 0; r < rows; r++, x += stride) {
    int64_t t = 0;
    for (; t + W <= tokens; t += W) store(x + t, load(x + t) * load(scale + t));
    for (; t < tokens; t++) x[t] *= scale[t];
  }
}

// Calls fn(Type<T>, Type<K>) with the types of q and of K and V.
template <class Fn>
inline void dispatch_types(const AttentionTask& task, const Fn& fn) {
  dispatch_float(task.dtype, [&](auto t) {
    if (task.k_scale.data) {
      fn(t, Type<int8_t>{});
    } else {
      fn(t, t);
    }
  });
}

// s[r][t] = q[r] . k[t] for kTokenBlock tokens, whose rows begin `offset` bytes after k[t].
template <int Rows, class K>
inline void dots(const float* q, const char* const* k, int64_t offset, int64_t dim, float* s, int64_t stride) {
  Vec acc[Rows][kTokenBlock];
  for (auto& row : acc)
    for (Vec& a : row) a = zero();
  for (int64_t d = 0; d < dim; d += Vec::width) {
    Vec key[kTokenBlock];
    for (int t = 0; t < kTokenBlock; t++) key[t] = load(reinterpret_cast<const K*>(k[t] + offset) + d);
    for (int r = 0; r < Rows; r++) {
      const Vec query = load(q + r * dim + d);
      for (int t = 0; t < kTokenBlock; t++) acc[r][t] = fma(query, key[t], acc[r][t]);
    }
  }
  for (int r = 0; r < Rows; r++) store_sums(s + r * stride, acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
}

// out[r][d..] += sum over t of p[r][t] v[t], Vecs vectors at column d.
template <int Rows, int Vecs, class V>
inline void value_block(const float* p, int64_t stride, const char* const* v, int64_t offset, int64_t tokens,
                        int64_t dim, int64_t d, float* out) {
  constexpr int W = Vec::width;
  Vec acc[Rows][Vecs];
  for (int r = 0; r < Rows; r++)
    for (int c = 0; c < Vecs; c++) acc[r][c] = load(out + r * dim + d + c * W);
  for (int64_t t = 0; t < tokens; t++) {
    const V* row = reinterpret_cast<const V*>(v[t] + offset) + d;
    Vec value[Vecs];
    for (int c = 0; c < Vecs; c++) value[c] = load(row + c * W);
    for (int r = 0; r < Rows; r++) {
      const Vec weight = set1(p[r * stride + t]);
      for (int c = 0; c < Vecs; c++) acc[r][c] = fma(weight, value[c], acc[r][c]);
    }
  }
  for (int r = 0; r < Rows; r++)
    for (int c = 0; c < Vecs; c++) store(out + r * dim + d + c * W, acc[r][c]);
}

// out[r] += sum over `tokens` of p[r][t] v[t].
template <int Rows, class V>
inline void value_rows(const float* p, int64_t stride, const char* const* v, int64_t offset, int64_t tokens,
                       int64_t dim, float* out) {
  int64_t d = 0;
  for (; d + kVecBlock * Vec::width <= dim; d += kVecBlock * Vec::width)
    value_block<Rows, kVecBlock, V>(p, stride, v, offset, tokens, dim, d, out);
  for (; d < dim; d += Vec::width) value_block<Rows, 1, V>(p, stride, v, offset, tokens, dim, d, out);
}

// Calls fn(integral_constant<Rows>, first row) over `rows` rows in register blocks.
template <int Rows>
struct RowCount {
  static constexpr int value = Rows;
};
template <class Fn>
inline void each_row_block(int64_t rows, const Fn& fn) {
  int64_t r = 0;
  for (; r + kRowBlock <= rows; r += kRowBlock) fn(RowCount<kRowBlock>{}, r);
  if (kRowBlock > 2 && r + 2 <= rows) {
    fn(RowCount<2>{}, r);
    r += 2;
  }
  if (r < rows) fn(RowCount<1>{}, r);
}

}  // namespace radix::cpu::RK_ISA
