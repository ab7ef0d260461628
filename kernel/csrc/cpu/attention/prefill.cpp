// Flash attention of many query rows of one KV head by FMA, for every type; bf16 on AMX is prefill_tiles.cpp.
//
//   for each block of 128 tokens (cut at fixed positions), widened to float
//     for each group of query rows, one a lane
//       S [token][query] = K Q'               Q' [dim][query]; a key's element is broadcast
//       softmax down each lane                P in place of S
//       O' [dim][query] = O' * factor + V' P  V in panels of a few dims, so that their broadcasts are neighbours
//
// Both products hold kPanel x kLaneVecs registers of sums. A row's sums have one order: masked tokens add exact zeros,
// whichever rows share the tile.
#include "cpu/attention/entries.h"
#include "cpu/attention/lane_tile.h"
#include "cpu/attention/transpose.h"

namespace radix::cpu::RK_ISA {
namespace {

constexpr int W = Vec::width;
constexpr int kLaneVecs = RK_ISA_LEVEL == 0 ? 1 : 3;
constexpr int kLanes = kLaneVecs * W;
constexpr int kPanel = RK_ISA_LEVEL >= 2 ? 8 : 4;  // 24 sums of 32 registers, 12 of 16
constexpr int64_t kBlock = 128;                    // tokens
constexpr int64_t kStep = 8;
static_assert(kStep % kPanel == 0 && kMaxLaneRows % kLanes == 0);

// 2^x with a relative error of 1.3e-7 for -125 <= x <= 127, 0 below; NaN stays NaN.
inline Vec exp2(Vec x) {
  const Mask vanishes = lt(x, set1(-125.f));
  const Vec at = max(set1(-125.f), x), n = round_nearest(at), r = at - n;
  Vec p = set1(1.5403530e-4f);
  p = fma(p, r, set1(1.3333558e-3f));
  p = fma(p, r, set1(9.6181291e-3f));
  p = fma(p, r, set1(5.5504109e-2f));
  p = fma(p, r, set1(2.4022651e-1f));
  p = fma(p, r, set1(6.9314718e-1f));
  p = fma(p, r, set1(1.f));
#if RK_ISA_LEVEL == 1
  p.v = _mm256_mul_ps(p.v, power2(_mm256_cvtps_epi32(n.v)));  // results are normal: one factor is enough
#else
  p = scale2(p, n);
#endif
  return select(vanishes, zero(), p);
}

// The working set, kept by each thread: at 128 dims about 0.35 MiB of it are used and stay in L2.
struct State {
  alignas(64) float q[kMaxLaneRows * kMaxKeyDim];    // [group][dim][query], times the scale
  alignas(64) float o[kMaxLaneRows * kMaxValueDim];  // [group][dim][query]
  alignas(64) float k[kBlock * kMaxKeyDim];          // [token][dim]
  alignas(64) float v[kBlock * kMaxValueDim];        // [panel][token][kPanel dims]
  alignas(64) float s[kBlock * kLanes];              // [token][query]
  alignas(64) float m[kMaxLaneRows], l[kMaxLaneRows];
};

template <int N>
struct Count {
  static constexpr int value = N;
};

template <class T, class K>
class PrefillTile : LaneTile<kLanes, kBlock, kStep> {
 public:
  PrefillTile(const AttentionTask& task, const AttentionTile& tile, State& state) : LaneTile(task, tile), st_(state) {}

  void run() {
    load_queries();
    each_block([&](int64_t base, int64_t end) { run_block(base, end); });
    finish();
  }

 private:
  // Scores come out as exponents of 2, or, with a soft cap, as what it bends.
  float unit() const {
    const rk_attention_options& o = task_.options;
    return o.softcap > 0 ? o.softmax_scale / o.softcap : o.softmax_scale * kLog2E;
  }

  void load_queries() {
    const Vec scale = set1(unit());
    for (int64_t r = 0; r < groups_ * kLanes; r += W) {
      float* to = st_.q + r / kLanes * kLanes * key_dim_ + r % kLanes;
      for (int64_t d = 0; d < key_dim_; d += W) {
        Vec x[W];
        for (int i = 0; i < W; i++)
          x[i] = r + i < rows_ ? load(reinterpret_cast<const T*>(query(r + i)) + d) * scale : zero();
        transpose(x);
        for (int i = 0; i < W; i++) store(to + (d + i) * kLanes, x[i]);
      }
      store(st_.m + r, set1(kNegInf));
      store(st_.l + r, zero());
    }
    for (int64_t i = 0; i < groups_ * kLanes * value_dim_; i += W) store(st_.o + i, zero());
  }

  // The block's rows were found; those of the next are found here and fetched while this one is worked on.
  void run_block(int64_t base, int64_t end) {
    const int64_t tokens = found_;
    load_scales(base, tokens);
    for (int64_t t = 0; t < (tokens + kStep - 1) / kStep * kStep; t++) {
      const bool real = t < tokens;
      widen_row(real ? k_rows_[t] : nullptr, k_scale_[t], key_dim_,
                [&](int64_t d, Vec x) { store(st_.k + t * key_dim_ + d, x); });
      widen_row(real ? v_rows_[t] : nullptr, v_scale_[t], value_dim_, [&](int64_t d, Vec x) {
        float lanes[W];
        store(lanes, x);
        for (int i = 0; i < W; i += kPanel)
          std::memcpy(value_panel(d + i) + t * kPanel, lanes + i, sizeof(float[kPanel]));
      });
    }
    find_block(base + kBlock, end);
    for (int64_t g = 0; g < groups_; g++) {
      prefetch_share(g);
      const Part part = visible_part(g, base, tokens);
      if (part.begin < part.end) with_vecs(g, [&](auto vecs) { run_group<decltype(vecs)::value>(part, base); });
    }
  }

  // A row of K or V in registers, zeros for NULL.
  template <class Fn>
  void widen_row(const char* row, float scale, int64_t dim, const Fn& put) const {
    const K* from = reinterpret_cast<const K*>(row);
    for (int64_t d = 0; d < dim; d += W) {
      Vec x = row ? load(from + d) : zero();
      if (sizeof(K) == 1) x = x * set1(scale);
      put(d, x);
    }
  }
  float* value_panel(int64_t d) const { return st_.v + d * kBlock; }

  // Registers of lanes that the rows of group g fill.
  template <class Fn>
  void with_vecs(int64_t g, const Fn& fn) const {
    const int64_t rows = rows_ - g * kLanes;
    if constexpr (kLaneVecs > 1) {
      if (rows <= W) return fn(Count<1>{});
      if (rows <= 2 * W) return fn(Count<2>{});
    }
    fn(Count<kLaneVecs>{});
  }

  template <int Vecs>
  void run_group(const Part& part, int64_t base) {
    const int64_t first = part.group * kLanes;
    float* o = st_.o + first * value_dim_;
    // Few lanes: more tokens, or dims, at once, as FMA's latency wants.
    constexpr int kTokens = Vecs == 1 ? static_cast<int>(kStep) : kPanel, kPanels = Vecs == 1 ? 8 / kPanel : 1;
    for (int64_t t = part.begin; t < part.end; t += kTokens)
      score_block<kTokens, Vecs>(st_.q + first * key_dim_, st_.k + t * key_dim_, st_.s + t * kLanes);
    softmax<Vecs>(part, base, o);
    for (int64_t d = 0; d < value_dim_; d += kPanels * kPanel) value_block<kPanels, Vecs>(part, d, o + d * kLanes);
  }

  template <int Tokens, int Vecs>
  void score_block(const float* q, const float* k, float* s) const {
    Vec acc[Tokens][Vecs];
    for (auto& row : acc)
      for (Vec& a : row) a = zero();
    for (int64_t d = 0; d < key_dim_; d++, q += kLanes) {
      Vec query[Vecs];
      for (int i = 0; i < Vecs; i++) query[i] = load(q + i * W);
      for (int t = 0; t < Tokens; t++) {
        const Vec key = set1(k[t * key_dim_ + d]);
        for (int i = 0; i < Vecs; i++) acc[t][i] = fma(key, query[i], acc[t][i]);
      }
    }
    for (int t = 0; t < Tokens; t++)
      for (int i = 0; i < Vecs; i++) store(s + t * kLanes + i * W, acc[t][i]);
  }

  // o: dims [d, d + Panels * kPanel).
  template <int Panels, int Vecs>
  void value_block(const Part& part, int64_t d, float* o) const {
    constexpr int kDims = Panels * kPanel;
    Vec acc[kDims][Vecs];
    for (int j = 0; j < kDims; j++)
      for (int i = 0; i < Vecs; i++) acc[j][i] = load(o + j * kLanes + i * W);
    const float* v = value_panel(d);
    for (int64_t t = part.begin; t < part.end; t++) {
      Vec p[Vecs];
      for (int i = 0; i < Vecs; i++) p[i] = load(st_.s + t * kLanes + i * W);
      for (int j = 0; j < kDims; j++) {
        const Vec value = set1(v[j / kPanel * kPanel * kBlock + t * kPanel + j % kPanel]);
        for (int i = 0; i < Vecs; i++) acc[j][i] = fma(value, p[i], acc[j][i]);
      }
    }
    for (int j = 0; j < kDims; j++)
      for (int i = 0; i < Vecs; i++) store(o + j * kLanes + i * W, acc[j][i]);
  }

  template <int Vecs>
  void softmax(const Part& part, int64_t base, float* o) {
    Vec top[Vecs], shift[Vecs], factor[Vecs], sum[Vecs];
    for (Vec& x : top) x = set1(kNegInf);
    if (part.masked || task_.options.softcap > 0) limit_scores<Vecs>(part, base);
    for (int64_t t = part.begin; t < part.end; t++)
      for (int i = 0; i < Vecs; i++) top[i] = max(top[i], load(st_.s + t * kLanes + i * W));
    float *m = st_.m + part.group * kLanes, *l = st_.l + part.group * kLanes;
    if (raise_maximum<Vecs>(m, top, shift, factor, [](Vec x) { return exp2(x); }))
      for (int64_t d = 0; d < value_dim_; d++)
        for (int i = 0; i < Vecs; i++) store(o + d * kLanes + i * W, load(o + d * kLanes + i * W) * factor[i]);
    for (int i = 0; i < Vecs; i++) sum[i] = load(l + i * W) * factor[i];
    for (int64_t t = part.begin; t < part.end; t++)
      for (int i = 0; i < Vecs; i++) {
        float* s = st_.s + t * kLanes + i * W;
        const Vec p = exp2(load(s) - shift[i]);
        store(s, p);
        sum[i] = sum[i] + p;
      }
    for (int i = 0; i < Vecs; i++) store(l + i * W, sum[i]);
  }

  // Soft cap and mask.
  template <int Vecs>
  void limit_scores(const Part& part, int64_t base) {
    const LaneRanges range = lane_ranges(part.group, base);
    const float softcap = task_.options.softcap;
    const Vec cap = set1(softcap * kLog2E);
    for (int64_t t = part.begin; t < part.end; t++)
      for (int i = 0; i < Vecs; i++) {
        float* s = st_.s + t * kLanes + i * W;
        Vec x = load(s);
        if (softcap > 0) x = cap * tanh(x);
        store(s, masked(x, set1(static_cast<float>(t)), range.from + i * W, range.to + i * W));
      }
  }

  void finish() {
    alignas(64) float rows[W * kMaxValueDim];
    for (int64_t first = 0; first < rows_; first += W) {
      const float* o = st_.o + first / kLanes * kLanes * value_dim_ + first % kLanes;
      for (int64_t d = 0; d < value_dim_; d += W) {
        Vec x[W];
        for (int i = 0; i < W; i++) x[i] = load(o + (d + i) * kLanes);
        transpose(x);
        for (int i = 0; i < W; i++) store(rows + i * value_dim_ + d, x[i]);
      }
      for (int64_t r = first; r < lesser(first + W, rows_); r++)
        write<T>(r, st_.m[r], st_.l[r], rows + (r - first) * value_dim_);
    }
  }

  State& st_;
};

void tile(const AttentionTask& task, const AttentionTile& tile) {
  static thread_local ThreadState<State> state;
  dispatch_types(task, [&](auto t, auto k) {
    PrefillTile<typename decltype(t)::type, typename decltype(k)::type> work(task, tile, state.get());
    work.run();
  });
}

}  // namespace

const AttentionKernels attention_table = {tile, prefill_tile, decode_part, decode_combine, merge_state};

}  // namespace radix::cpu::RK_ISA
