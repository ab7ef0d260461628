// Flash attention of many bf16 query rows of one KV head on AMX tiles. Everything is transposed, so that a query is a
// lane and no product needs a horizontal sum:
//
//   for each block of 256 tokens (cut at fixed positions), copied into tiles: K as it is, V transposed
//     for each 32 query rows
//       S' [token][query] = K Q'          2 x 2 tiles of accumulators
//       softmax down each lane            running maximum and sum, in float32; P' in bf16, two tokens a word
//       O' [dim][query] = O' * factor + V' P'
//
// Bound by AMX and the exponentials together. A row's sums have one order: masked tokens add exact zeros, whichever
// rows share the tile.
#include <cstdlib>

#include "cpu/attention/entries.h"
#include "cpu/attention/products.h"
#include "cpu/attention/softmax.h"
#include "cpu/attention/tiles.h"

#if RK_HAS_TILES

namespace radix::cpu::RK_ISA {
namespace {

constexpr int W = Vec::width;
constexpr int kLanes = 32;  // query rows that are worked on together
constexpr int kLaneVecs = kLanes / W;
constexpr int64_t kBlock = 256;  // tokens
static_assert(kSplitTokens % kBlock == 0);

// 2^x to about 2e-6, 0 below -150.
inline Vec exp2(Vec x) {
  x = max(set1(-160.f), x);
  const Vec n = round_nearest(x), r = x - n;
  Vec p = set1(0.0013333558f);
  p = fma(p, r, set1(0.0096181291f));
  p = fma(p, r, set1(0.0555041087f));
  p = fma(p, r, set1(0.2402265070f));
  p = fma(p, r, set1(0.6931471806f));
  p = fma(p, r, set1(1.f));
  return scale2(p, n);
}

constexpr float kLog2E = 1.44269504088896341f, kLn2 = 0.693147180559945309f;

// The working set, kept by each thread. At 128 dims about 0.6 MiB of it are used: it stays in L2.
struct State {
  alignas(64) bf16 q[kMaxTileRows * kMaxHeadDim];   // [16 rows][32 dims] tiles of words: [dim pair][row]
  alignas(64) bf16 k[kBlock * kMaxHeadDim];         // [16 tokens][32 dims]
  alignas(64) bf16 v[kBlock * kMaxHeadDim];         // [16 dims][32 tokens]
  alignas(64) float s[2][kBlock * kLanes];          // [token][query], of the present and the next 32 queries
  alignas(64) uint32_t p[kBlock / 2 * kLanes];      // [32 tokens][16 queries] tiles of words: [token pair][query]
  alignas(64) float o[kMaxTileRows * kMaxHeadDim];  // [32 queries] of [dim][query]
  alignas(64) float m[kMaxTileRows], l[kMaxTileRows];
  alignas(64) float k_scale[kBlock], v_scale[kBlock];  // of INT8 K and V
  const char* k_rows[kBlock];
  const char* v_rows[kBlock];
};

class ThreadState {
 public:
  ~ThreadState() { std::free(state_); }
  State* get() {
    if (!state_) state_ = static_cast<State*>(std::aligned_alloc(64, sizeof(State)));
    return state_;
  }

 private:
  static_assert(sizeof(State) % 64 == 0);
  State* state_ = nullptr;
};

class PrefillTile {
 public:
  PrefillTile(const AttentionTask& task, const AttentionTile& tile, State& state)
      : task_(task), tile_(tile), st_(state), dim_(task.head_dim), k_tiles_((task.head_dim + 31) / 32) {
    const int64_t b = tile.batch;
    kv_len_ = task.page_table ? task.kv_lens[b] : task.cu_seqlens_k[b + 1] - task.cu_seqlens_k[b];
    const int64_t q_len = task.cu_seqlens_q[b + 1] - task.cu_seqlens_q[b];
    position_ = kv_len_ - q_len + tile.token - task.cu_seqlens_q[b];
    rows_ = tile.tokens * tile.group;
    groups_ = (rows_ + kLanes - 1) / kLanes;
  }

  void run() {
    load_queries();
    const Range all{seen(0).begin, seen(rows_ - 1).end};
    if (!all.empty()) {
      const int64_t begin = all.begin / kBlock * kBlock;
      find_block(begin, all.end);
      for (int64_t base = begin; base < all.end; base += kBlock) run_block(base, all.end);
    }
    finish();
  }

 private:
  // What row r sees; rows past the last see what it sees.
  Range seen(int64_t r) const {
    return visible(task_.options, kv_len_, position_ + lesser(r, rows_ - 1) / tile_.group);
  }
  float* group_o(int64_t g) const { return st_.o + g * kLanes * dim_; }

  void load_queries() {
    for (int64_t r = 0; r < groups_ * kLanes; r++) {
      const int64_t t = tile_.token + r / tile_.group, h = tile_.head + r % tile_.group;
      const char* from = task_.q.data + t * task_.q.token_stride + h * task_.q.head_stride;
      for (int64_t c = 0; c < k_tiles_; c++) {
        bf16* to = st_.q + (r / kTile * k_tiles_ + c) * 2 * kTileWords + r % kTile * 32;
        copy_dims<bf16>(to, r < rows_ ? from : nullptr, c);
      }
    }
    for (int64_t i = 0; i < groups_ * 2 * k_tiles_; i++)
      transpose16(reinterpret_cast<uint32_t*>(st_.q + i * 2 * kTileWords));
    for (int64_t i = 0; i < groups_ * kLanes * dim_; i += W) store(st_.o + i, zero());
    for (int64_t r = 0; r < groups_ * kLanes; r++) {
      st_.m[r] = kNegInf;
      st_.l[r] = 0;
    }
  }

  // Dims [32 c, 32 c + 32) of a row, zeros past its end and for NULL.
  template <class K>
  void copy_dims(bf16* to, const char* row, int64_t c) const {
    if (sizeof(K) == 2 && row && 32 * c + 32 <= dim_) {
      std::memcpy(to, row + 64 * c, 64);
      return;
    }
    const K* from = reinterpret_cast<const K*>(row) + 32 * c;
    const int64_t dims = row ? lesser(32, dim_ - 32 * c) : 0;
    if constexpr (sizeof(K) == 1) {
      for (int64_t d = 0; d < dims; d += W) store(to + d, load(from + d));  // exact
    } else {
      std::memcpy(to, from, static_cast<size_t>(dims) * 2);
    }
    std::memset(to + dims, 0, static_cast<size_t>(32 - dims) * 2);
  }

  // The rows of the block that begins at `base`.
  void find_block(int64_t base, int64_t end) {
    found_ = greater(0, lesser(kBlock, end - base));
    find_rows(task_, tile_.batch, tile_.kv_head, base, base + found_, st_.k_rows, st_.v_rows);
  }

  // The block's rows were found; those of the next are found here and fetched while this one is worked on.
  void run_block(int64_t base, int64_t end) {
    const int64_t tokens = found_, padded = (tokens + 31) / 32 * 32;
    load_scales(base, tokens);
    if (task_.k_scale.data) {
      load_keys<int8_t>(tokens, padded);
      load_values<int8_t>(tokens, padded);
    } else {
      load_keys<bf16>(tokens, padded);
      load_values<bf16>(tokens, padded);
    }
    find_block(base + kBlock, end);
    Part part = visible_part(0, base, padded);
    for (int64_t t = part.begin; t < part.end; t += 2 * kTile) scores(part, t);
    for (int64_t g = 0; g < groups_; g++) {
      prefetch(g * found_ / groups_, (g + 1) * found_ / groups_);
      const Part next = visible_part(g + 1, base, padded);
      softmax(part, base, next);
      values(part);
      part = next;
    }
  }

  // The tokens of the block that some row of a group sees, in tiles; none for a group past the last.
  struct Part {
    int64_t group, begin, end;
    bool masked;  // some row does not see all of them
  };
  Part visible_part(int64_t g, int64_t base, int64_t padded) const {
    if (g >= groups_) return {g, 0, 0, false};
    // Visible ranges move forward with the token.
    const Range first = seen(g * kLanes), last = seen(g * kLanes + kLanes - 1);
    const int64_t begin = greater(0, (first.begin - base) / 32 * 32);
    const int64_t end = greater(begin, lesser(padded, (last.end - base + 31) / 32 * 32));
    return {g, begin, end, last.begin > base + begin || first.end < base + end};
  }
  float* score_row(int64_t g, int64_t t) const { return st_.s[g % 2] + t * kLanes; }

  void prefetch(int64_t begin, int64_t end) const {
    const int64_t bytes = dim_ * (task_.k_scale.data ? 1 : 2);
    for (int64_t t = begin; t < end; t++)
      for (int64_t byte = 0; byte < bytes; byte += 64) {
        __builtin_prefetch(st_.k_rows[t] + byte, 0, 2);
        __builtin_prefetch(st_.v_rows[t] + byte, 0, 2);
      }
  }

  void load_scales(int64_t base, int64_t tokens) {
    for (int64_t t = 0; t < kBlock; t++) st_.k_scale[t] = st_.v_scale[t] = 1.f;
    if (task_.k_scale.data) {
      find_scales(task_, task_.k_scale, tile_.batch, tile_.kv_head, base, base + tokens, st_.k_scale);
      find_scales(task_, task_.v_scale, tile_.batch, tile_.kv_head, base, base + tokens, st_.v_scale);
    }
  }

  template <class K>
  void load_keys(int64_t tokens, int64_t padded) {
    for (int64_t t = 0; t < padded; t++)
      for (int64_t c = 0; c < k_tiles_; c++)
        copy_dims<K>(st_.k + (t / kTile * k_tiles_ + c) * 2 * kTileWords + t % kTile * 32,
                     t < tokens ? st_.k_rows[t] : nullptr, c);
  }

  template <class K>
  void load_values(int64_t tokens, int64_t padded) {
    const auto read = [&](bf16* to, int64_t t, int64_t d) {
      if (t >= tokens) {
        std::memset(to, 0, 32);
      } else {
        for (int64_t i = 0; i < kTile; i += W) store(to + i, load(reinterpret_cast<const K*>(st_.v_rows[t]) + d + i));
      }
    };
    for (int64_t t = 0; t < padded; t += 32)
      for (int64_t d = 0; d < dim_; d += kTile) {
        uint32_t* tile = value_tile(d, t);
        for (int64_t i = 0; i < kTile; i++) {
          if (sizeof(K) == 2 && t + 2 * i + 1 < tokens) {
            const auto row = [&](int64_t at) { return reinterpret_cast<const bf16*>(st_.v_rows[at]) + d; };
            interleave16(tile + i * kTile, row(t + 2 * i), row(t + 2 * i + 1));
          } else {
            bf16 pair[2][kTile];
            read(pair[0], t + 2 * i, d);
            read(pair[1], t + 2 * i + 1, d);
            interleave16(tile + i * kTile, pair[0], pair[1]);
          }
        }
        transpose16(tile);
      }
  }
  uint32_t* value_tile(int64_t d, int64_t t) const {
    return reinterpret_cast<uint32_t*>(st_.v) + (d / kTile * (kBlock / 32) + t / 32) * kTileWords;
  }

  // Of the group's rows with tokens [t, t + 32) of the block.
  void scores(const Part& part, int64_t t) {
    const int64_t tile_row = k_tiles_ * 2 * kTileWords;
    const bf16* q = st_.q + 2 * part.group * tile_row;
    const bf16* k = st_.k + t / kTile * tile_row;
    tile_zero<0>();
    tile_zero<1>();
    tile_zero<2>();
    tile_zero<3>();
    for (int64_t c = 0; c < k_tiles_; c++) {
      tile_load<4>(k + c * 2 * kTileWords, 64);
      tile_load<5>(k + tile_row + c * 2 * kTileWords, 64);
      tile_load<6>(q + c * 2 * kTileWords, 64);
      tile_load<7>(q + tile_row + c * 2 * kTileWords, 64);
      tile_dot<0, 4, 6>();
      tile_dot<1, 4, 7>();
      tile_dot<2, 5, 6>();
      tile_dot<3, 5, 7>();
    }
    float* s = score_row(part.group, t);
    tile_store<0>(s, kLanes * 4);
    tile_store<1>(s + kTile, kLanes * 4);
    tile_store<2>(s + kTile * kLanes, kLanes * 4);
    tile_store<3>(s + kTile * kLanes + kTile, kLanes * 4);
  }

  // Scores times unit() are exponents of 2: they are left as the product made them where a positive scale is all.
  bool direct() const { return task_.options.softcap == 0 && task_.options.softmax_scale > 0; }
  float unit() const { return direct() ? task_.options.softmax_scale * kLog2E : kLog2E; }

  // The scores of the next group are computed on the way: AMX works while the exponentials keep the vector units busy.
  void softmax(const Part& part, int64_t base, const Part& next) {
    Vec top[kLaneVecs];
    for (Vec& x : top) x = set1(kNegInf);
    if (part.masked || !direct() || task_.k_scale.data) {
      limit_scores(part, base, top);
    } else {
      for (int64_t t = part.begin; t < part.end; t++)
        for (int i = 0; i < kLaneVecs; i++) top[i] = max(top[i], load(score_row(part.group, t) + i * W));
    }
    Vec shift[kLaneVecs], factor[kLaneVecs];
    if (raise_maximum(part.group, top, shift, factor)) rescale(part.group, factor);
    if (task_.v_scale.data) {
      exponentials<true>(part, shift, factor, next);
    } else {
      exponentials<false>(part, shift, factor, next);
    }
  }

  // What a lane subtracts follows its maximum only when that has grown by 2^8, so that most blocks rescale nothing.
  bool raise_maximum(int64_t g, const Vec* top, Vec* shift, Vec* factor) {
    float* m = st_.m + g * kLanes;
    Vec grown = zero();
    for (int i = 0; i < kLaneVecs; i++) {
      const Vec before = load(m + i * W), x = top[i] * set1(unit());
      const Mask grows = lt(before + set1(8.f), x);
      const Vec now = select(grows, x, before);
      grown = select(grows, set1(1.f), grown);
      store(m + i * W, now);
      shift[i] = select(lt(set1(kNegInf), now), now, zero());  // a lane that has seen nothing: any finite shift does
      factor[i] = exp2(before - shift[i]);
    }
    return reduce_max(grown) > 0;
  }

  template <bool Scaled>
  void exponentials(const Part& part, const Vec* shift, const Vec* factor, const Part& next) {
    float* l = st_.l + part.group * kLanes;
    const Vec scale = set1(unit());
    Vec even_sum[kLaneVecs], odd_sum[kLaneVecs], down[kLaneVecs];
    for (int i = 0; i < kLaneVecs; i++) {
      even_sum[i] = load(l + i * W) * factor[i];
      odd_sum[i] = zero();
      down[i] = zero() - shift[i];
    }
    int64_t ahead = next.begin;
    for (int64_t first = part.begin; first < part.end; first += 2 * kTile) {
      if (ahead < next.end) scores(next, ahead);
      ahead += 2 * kTile;
      for (int64_t t = first; t < first + 2 * kTile; t += 2)
        for (int i = 0; i < kLaneVecs; i++) {
          const float* s = score_row(part.group, t) + i * W;
          Vec even = exp2(fma(load(s), scale, down[i])), odd = exp2(fma(load(s + kLanes), scale, down[i]));
          even_sum[i] = even_sum[i] + even;
          odd_sum[i] = odd_sum[i] + odd;
          if (Scaled) {
            even = even * set1(st_.v_scale[t]);
            odd = odd * set1(st_.v_scale[t + 1]);
          }
          store_pairs(probability_tile(t, i * W / kTile) + t % 32 / 2 * kTile + i * W % kTile, even, odd);
        }
    }
    for (; ahead < next.end; ahead += 2 * kTile) scores(next, ahead);
    for (int i = 0; i < kLaneVecs; i++) store(l + i * W, even_sum[i] + odd_sum[i]);
  }
  uint32_t* probability_tile(int64_t t, int64_t half) const { return st_.p + (t / 32 * 2 + half) * kTileWords; }

  // Scales of INT8 keys, a scale that is not positive, soft cap, mask.
  void limit_scores(const Part& part, int64_t base, Vec* top) {
    alignas(64) float from[kLanes], to[kLanes];
    for (int64_t r = 0; r < kLanes; r++) {
      const Range range = seen(part.group * kLanes + r);
      from[r] = static_cast<float>(greater(range.begin - base, 0));
      to[r] = static_cast<float>(greater(lesser(range.end - base, kBlock), 0));
    }
    const float softcap = task_.options.softcap;
    const Vec cap = set1(softcap), scale = set1(task_.options.softmax_scale);
    for (int64_t t = part.begin; t < part.end; t++) {
      const Vec at = set1(static_cast<float>(t)), key_scale = set1(st_.k_scale[t]);
      for (int i = 0; i < kLaneVecs; i++) {
        float* s = score_row(part.group, t) + i * W;
        Vec x = load(s) * key_scale;
        if (!direct()) x = softcap > 0 ? cap * tanh(x * scale / cap) : x * scale;
        x = select(lt(at, load(to + i * W)), x, set1(kNegInf));
        x = select(lt(at, load(from + i * W)), set1(kNegInf), x);
        store(s, x);
        top[i] = max(top[i], x);
      }
    }
  }

  void rescale(int64_t g, const Vec* factor) {
    float* o = group_o(g);
    for (int64_t d = 0; d < dim_; d++)
      for (int i = 0; i < kLaneVecs; i++) store(o + d * kLanes + i * W, load(o + d * kLanes + i * W) * factor[i]);
  }

  void values(const Part& part) {
    if (part.begin >= part.end) return;
    float* o = group_o(part.group);
    int64_t d = 0;
    for (; d + 2 * kTile <= dim_; d += 2 * kTile) value_tiles<2>(o + d * kLanes, d, part.begin, part.end);
    if (d < dim_) value_tiles<1>(o + d * kLanes, d, part.begin, part.end);
  }

  // o: [16 Tiles dims][32 queries] += V' P'.
  template <int Tiles>
  void value_tiles(float* o, int64_t d, int64_t begin, int64_t end) {
    constexpr int kRow = kLanes * 4;
    tile_load<0>(o, kRow);
    tile_load<1>(o + kTile, kRow);
    if constexpr (Tiles == 2) {
      tile_load<2>(o + kTile * kLanes, kRow);
      tile_load<3>(o + kTile * kLanes + kTile, kRow);
    }
    for (int64_t t = begin; t < end; t += 32) {
      tile_load<4>(value_tile(d, t), 64);
      tile_load<6>(probability_tile(t, 0), 64);
      tile_load<7>(probability_tile(t, 1), 64);
      tile_dot<0, 4, 6>();
      tile_dot<1, 4, 7>();
      if constexpr (Tiles == 2) {
        tile_load<5>(value_tile(d + kTile, t), 64);
        tile_dot<2, 5, 6>();
        tile_dot<3, 5, 7>();
      }
    }
    tile_store<0>(o, kRow);
    tile_store<1>(o + kTile, kRow);
    if constexpr (Tiles == 2) {
      tile_store<2>(o + kTile * kLanes, kRow);
      tile_store<3>(o + kTile * kLanes + kTile, kRow);
    }
  }

  void finish() {
    alignas(64) float row[kTile * kMaxHeadDim];
    for (int64_t first = 0; first < rows_; first += kTile) {
      untranspose(first, row);
      for (int64_t r = first; r < lesser(first + kTile, rows_); r++) {
        RunningSoftmax running{st_.m[r] * kLn2, st_.l[r]};
        running.finish<bf16>(task_, tile_.token + r / tile_.group, tile_.head + r % tile_.group,
                             row + (r - first) * dim_);
      }
    }
  }

  // o of 16 rows from row `first` on: [row][dim].
  void untranspose(int64_t first, float* out) const {
    alignas(64) uint32_t block[kTileWords];
    const float* o = group_o(first / kLanes) + first % kLanes;
    for (int64_t d = 0; d < dim_; d += kTile) {
      for (int i = 0; i < kTile; i++) std::memcpy(block + i * kTile, o + (d + i) * kLanes, 64);
      transpose16(block);
      for (int i = 0; i < kTile; i++) std::memcpy(out + i * dim_ + d, block + i * kTile, 64);
    }
  }

  const AttentionTask& task_;
  const AttentionTile& tile_;
  State& st_;
  const int64_t dim_, k_tiles_;
  int64_t kv_len_, position_, rows_, groups_, found_ = 0;
};

}  // namespace

void prefill_tile(const AttentionTask& task, const AttentionTile& tile) {
  static thread_local ThreadState state;
  const TileScope scope;
  PrefillTile work(task, tile, *state.get());
  work.run();
}

}  // namespace radix::cpu::RK_ISA

#endif
