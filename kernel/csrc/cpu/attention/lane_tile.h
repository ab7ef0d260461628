// What the prefill kernels share. Query rows of one KV head lie across the lanes of registers, so that a softmax runs
// down a lane and no product needs a sum across lanes. Scores are exponents of 2.
#pragma once

#include <cstdlib>
#include <new>

#include "cpu/attention/products.h"
#include "cpu/attention/softmax.h"

namespace radix::cpu::RK_ISA {

constexpr float kLog2E = 1.44269504088896341f, kLn2 = 0.693147180559945309f;

// Scratch of one thread, allocated when it is first needed. get() throws std::bad_alloc.
template <class State>
class ThreadState {
 public:
  ~ThreadState() { std::free(state_); }
  State& get() {
    if (!state_) state_ = static_cast<State*>(std::aligned_alloc(64, sizeof(State)));
    if (!state_) throw std::bad_alloc();
    return *state_;
  }

 private:
  static_assert(sizeof(State) % 64 == 0);
  State* state_ = nullptr;
};

// Lanes: query rows of a group, which are worked on together. Block: tokens that are loaded at once, cut at fixed
// positions. Step: tokens that are masked as one.
template <int Lanes, int64_t Block, int64_t Step>
class LaneTile {
 protected:
  static_assert(kSplitTokens % Block == 0 && Block % Step == 0);

  LaneTile(const AttentionTask& task, const AttentionTile& tile)
      : task_(task), tile_(tile), key_dim_(task.key_dim), value_dim_(task.value_dim) {
    const int64_t b = tile.batch;
    kv_len_ = task.page_table ? task.kv_lens[b] : task.cu_seqlens_k[b + 1] - task.cu_seqlens_k[b];
    const int64_t q_len = task.cu_seqlens_q[b + 1] - task.cu_seqlens_q[b];
    position_ = kv_len_ - q_len + tile.token - task.cu_seqlens_q[b];
    rows_ = tile.tokens * tile.group;
    groups_ = (rows_ + Lanes - 1) / Lanes;
  }

  // What row r sees; rows past the last see what it sees.
  Range seen(int64_t r) const {
    return visible(task_.options, kv_len_, position_ + lesser(r, rows_ - 1) / tile_.group);
  }
  Range seen_by_any() const { return {seen(0).begin, seen(rows_ - 1).end}; }  // ranges move forward with the token

  int64_t token_of(int64_t r) const {
    return tile_.token + static_cast<uint32_t>(r) / static_cast<uint32_t>(tile_.group);
  }
  int64_t head_of(int64_t r) const {
    return tile_.head + static_cast<uint32_t>(r) % static_cast<uint32_t>(tile_.group);
  }
  const char* query(int64_t r) const {
    return task_.q.data + token_of(r) * task_.q.token_stride + head_of(r) * task_.q.head_stride;
  }
  char* output(int64_t r) const {
    return task_.out.data + token_of(r) * task_.out.token_stride + head_of(r) * task_.out.head_stride;
  }
  // Writes row r's lse; returns what its values are to be multiplied with.
  float close(int64_t r, float m, float l) const {
    RunningSoftmax running{m * kLn2, l};
    return running.close(task_, token_of(r), head_of(r));
  }
  template <class T>
  void write(int64_t r, float m, float l, const float* o) const {
    RunningSoftmax running{m * kLn2, l};
    running.finish<T>(task_, token_of(r), head_of(r), o);
  }

  // Calls fn(base, end) for the blocks that hold what some row sees. The first one's rows have been found; fn finds
  // those of the next, so that it can fetch them while it works.
  template <class Fn>
  void each_block(const Fn& fn) {
    const Range all = seen_by_any();
    if (all.empty()) return;
    const int64_t begin = all.begin / Block * Block;
    find_block(begin, all.end);
    for (int64_t base = begin; base < all.end; base += Block) fn(base, all.end);
  }

  // The rows of the block that begins at `base`.
  void find_block(int64_t base, int64_t end) {
    found_ = greater(0, lesser(Block, end - base));
    find_rows(task_, tile_.batch, tile_.kv_head, base, base + found_, k_rows_, v_rows_);
  }

  // Fetches the share of group g in the rows that were found.
  void prefetch_share(int64_t g) const {
    const int64_t item = task_.k_scale.data ? 1 : task_.dtype == DType::f32 ? 4 : 2;
    for (int64_t t = g * found_ / groups_; t < (g + 1) * found_ / groups_; t++) {
      for (int64_t byte = 0; byte < key_dim_ * item; byte += 64) __builtin_prefetch(k_rows_[t] + byte, 0, 2);
      for (int64_t byte = 0; byte < value_dim_ * item; byte += 64) __builtin_prefetch(v_rows_[t] + byte, 0, 2);
    }
  }

  void load_scales(int64_t base, int64_t tokens) {
    for (int64_t t = 0; t < Block; t++) k_scale_[t] = v_scale_[t] = 1.f;
    if (task_.k_scale.data) {
      find_scales(task_, task_.k_scale, tile_.batch, tile_.kv_head, base, base + tokens, k_scale_);
      find_scales(task_, task_.v_scale, tile_.batch, tile_.kv_head, base, base + tokens, v_scale_);
    }
  }

  // The tokens of the block that some row of a group sees, in whole steps; none for a group past the last.
  struct Part {
    int64_t group, begin, end;
    bool masked;  // some row does not see all of them
  };
  Part visible_part(int64_t g, int64_t base, int64_t tokens) const {
    if (g >= groups_) return {g, 0, 0, false};
    const Range first = seen(g * Lanes), last = seen(g * Lanes + Lanes - 1);
    const int64_t begin = greater(0, (first.begin - base) / Step * Step);
    const int64_t end =
        greater(begin, lesser((tokens + Step - 1) / Step * Step, (last.end - base + Step - 1) / Step * Step));
    return {g, begin, end, last.begin > base + begin || first.end < base + end};
  }
  // Whether some row of group g does not see all of the block's tokens [begin, end).
  bool masks(int64_t g, int64_t begin, int64_t end, int64_t base) const {
    return seen(g * Lanes + Lanes - 1).begin > base + begin || seen(g * Lanes).end < base + end;
  }

  // The tokens of the block that each lane of a group sees: [from, to).
  struct LaneRanges {
    alignas(64) float from[Lanes], to[Lanes];
  };
  LaneRanges lane_ranges(int64_t g, int64_t base) const {
    LaneRanges x;
    for (int64_t r = 0; r < Lanes; r++) {
      const Range range = seen(g * Lanes + r);
      x.from[r] = static_cast<float>(greater(range.begin - base, 0));
      x.to[r] = static_cast<float>(greater(lesser(range.end - base, Block), 0));
    }
    return x;
  }

  const AttentionTask& task_;
  const AttentionTile& tile_;
  const int64_t key_dim_, value_dim_;
  int64_t kv_len_, position_, rows_, groups_, found_ = 0;
  const char* k_rows_[Block];
  const char* v_rows_[Block];
  float k_scale_[Block], v_scale_[Block];  // of INT8 K and V
};

// Scores at token `at` outside of the lanes' ranges become -inf.
inline Vec masked(Vec x, Vec at, const float* from, const float* to) {
  x = select(lt(at, load(to)), x, set1(kNegInf));
  return select(lt(at, load(from)), set1(kNegInf), x);
}

// What Vecs registers of lanes subtract from their exponents, and the factors of what they have summed so far. A lane's
// maximum m follows `top` only when that has grown by 2^8, so that most blocks rescale nothing; returns whether one
// has. exp2: of the kernel, exactly 1 at 0.
template <int Vecs, class Exp2>
inline bool raise_maximum(float* m, const Vec* top, Vec* shift, Vec* factor, const Exp2& exp2) {
  Vec grown = zero(), now[Vecs];
  for (int i = 0; i < Vecs; i++) {
    const Vec before = load(m + i * Vec::width);
    const Mask grows = lt(before + set1(8.f), top[i]);
    now[i] = select(grows, top[i], before);
    grown = select(grows, set1(1.f), grown);
    shift[i] =
        select(lt(set1(kNegInf), now[i]), now[i], zero());  // a lane that has seen nothing: any finite shift does
    factor[i] = set1(1.f);
  }
  if (!(reduce_max(grown) > 0)) return false;
  for (int i = 0; i < Vecs; i++) {
    factor[i] = exp2(load(m + i * Vec::width) - shift[i]);
    store(m + i * Vec::width, now[i]);
  }
  return true;
}

}  // namespace radix::cpu::RK_ISA
