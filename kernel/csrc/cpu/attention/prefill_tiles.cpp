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
#include "cpu/attention/entries.h"
#include "cpu/attention/lane_tile.h"
#include "cpu/attention/tiles.h"

#if RK_HAS_TILES

namespace radix::cpu::RK_ISA {
namespace {

constexpr int W = Vec::width;
constexpr int kLanes = 32;  // query rows that are worked on together
constexpr int kLaneVecs = kLanes / W;
constexpr int64_t kBlock = 256;  // tokens that are loaded at once
constexpr int64_t kChunk = 64;   // tokens whose scores are in flight: they stay in L1

static_assert(kLanes == 2 * kTile && kLanes % W == 0, "2 x 2 tiles of accumulators, whole registers of queries");
static_assert(kBlock % kChunk == 0 && kChunk % (2 * kTile) == 0, "chunks are pairs of tiles");
static_assert(kMaxKeyDim % 32 == 0 && kMaxValueDim % 32 == 0 && kMaxTileRows % kLanes == 0, "room for whole tiles");

// 2^x with a relative error of 2e-7, 0 below -150: 2^(x - floor(x)) by a polynomial that is 1 at 0 and 2 at 1.
inline Vec exp2(Vec x) {
#if RK_ISA_LEVEL >= 2
  const Vec r = {_mm512_reduce_ps(x.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)};
#else
  x = max(set1(-160.f), x);
  const Vec n = round_nearest(x - set1(0.5f)), r = x - n;
#endif
  Vec p = set1(0.00187931862f);
  p = fma(p, r, set1(0.00899099465f));
  p = fma(p, r, set1(0.0558186769f));
  p = fma(p, r, set1(0.240159273f));
  p = fma(p, r, set1(0.693151712f));
  p = fma(p, r, set1(1.f));
#if RK_ISA_LEVEL >= 2
  return scale2(p, x);  // takes the floor of x
#else
  return scale2(p, n);
#endif
}

// 2 x 2 tiles of sums += two tiles of A x two of B.
struct TileStep {
  enum Begin : int { kKeep, kZero, kLoad };
  const void *a0, *a1, *b0, *b1;
  float* sums;  // [32 rows, 16 of them used if not `both`][kLanes]
  Begin begin;
  bool end, both;  // end: the sums are stored
};
constexpr int kMaxSteps = (kChunk + kBlock) / 32 * kMaxKeyDim / 32;

// The working set, kept by each thread. At 128 dims about 0.95 MiB of it are used: it stays in L2.
struct State {
  alignas(64) bf16 q[kMaxTileRows * kMaxKeyDim];     // [16 rows][32 dims] tiles of words: [dim pair][row]
  alignas(64) bf16 k[kBlock * kMaxKeyDim];           // [16 tokens][32 dims]
  alignas(64) bf16 v[kBlock * kMaxValueDim];         // [16 dims][32 tokens]
  alignas(64) float s[2][kChunk * kLanes];           // [token][query], of the present and the next chunk
  alignas(64) uint32_t p[2][kBlock / 2 * kLanes];    // tiles of words: [token pair][query]; of the present and the last
  alignas(64) float o[kMaxTileRows * kMaxValueDim];  // [32 queries] of [dim][query]
  alignas(64) float m[kMaxTileRows], l[kMaxTileRows];
  alignas(64) TileStep steps[kMaxSteps];
};

template <int N>
struct Count {
  static constexpr int value = N;
};

class PrefillTile : LaneTile<kLanes, kBlock, 2 * kTile> {
 public:
  PrefillTile(const AttentionTask& task, const AttentionTile& tile, State& state)
      : LaneTile(task, tile), st_(state), k_tiles_((task.key_dim + 31) / 32) {}

  void run() {
    load_queries();
    each_block([&](int64_t base, int64_t end) { run_block(base, end); });
    finish();
  }

 private:
  float* group_o(int64_t g) const { return st_.o + g * kLanes * value_dim_; }

  void load_queries() {
    for (int64_t first = 0; first < groups_ * kLanes; first += kTile) {
      const char* rows[kTile];
      for (int64_t i = 0; i < kTile; i++) {
        rows[i] = first + i < rows_ ? query(first + i) : nullptr;
        if (first + i + 2 * kTile < rows_) fetch_row(query(first + i + 2 * kTile), key_dim_);
      }
      for (int64_t c = 0; c < k_tiles_; c++) {
        uint32_t* to = reinterpret_cast<uint32_t*>(st_.q) + (first / kTile * k_tiles_ + c) * kTileWords;
        if (first + kTile <= rows_ && 32 * c + 32 <= key_dim_) {
          transpose_words(to, [&](int64_t i) { return rows[i] + 64 * c; });
          continue;
        }
        alignas(64) bf16 part[kTile][32];
        for (int64_t i = 0; i < kTile; i++) copy_dims<bf16>(part[i], rows[i], c);
        transpose_words(to, [&](int64_t i) { return part[i]; });
      }
    }
    for (int64_t r = 0; r < groups_ * kLanes; r++) {
      st_.m[r] = kNegInf;
      st_.l[r] = 0;
    }
  }

  // A row of queries or outputs.
  static void fetch_row(const char* row, int64_t dim) {
    for (int64_t byte = 0; byte < 2 * dim; byte += 64) __builtin_prefetch(row + byte, 0, 2);
  }

  // Dims [32 c, 32 c + 32) of a query or key, zeros past its end and for NULL.
  template <class K>
  void copy_dims(bf16* to, const char* row, int64_t c) const {
    if (sizeof(K) == 2 && row && 32 * c + 32 <= key_dim_) {
      std::memcpy(to, row + 64 * c, 64);
      return;
    }
    const K* from = reinterpret_cast<const K*>(row) + 32 * c;
    const int64_t dims = row ? lesser(32, key_dim_ - 32 * c) : 0;
    if constexpr (sizeof(K) == 1) {
      for (int64_t d = 0; d < dims; d += W) store(to + d, load(from + d));  // exact
    } else {
      std::memcpy(to, from, static_cast<size_t>(dims) * 2);
    }
    std::memset(to + dims, 0, static_cast<size_t>(32 - dims) * 2);
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
    Part last{}, part = visible_part(0, base, tokens);
    Products(*this, first_chunk(part), s_, last, 0, 0).finish();
    for (int64_t g = 0; g < groups_; g++) {
      if (base + kBlock < end) {
        prefetch_share(g);
      } else {
        for (int64_t r = g * kLanes; r < lesser((g + 1) * kLanes, rows_); r++) fetch_row(output(r), value_dim_);
      }
      const Part next = visible_part(g + 1, base, tokens);
      run_group(part, base, next, last);
      note_sums(last);
      last = part;
      part = next;
    }
    Products(*this, part, s_, last, 0, value_dim_).finish();
    note_sums(last);
  }
  // o of the group holds sums from now on.
  void note_sums(const Part& values) {
    if (values.begin < values.end) summed_[values.group] = true;
  }

  // Under each chunk of a group run the scores of the chunk after it and a share of the values of the group before it.
  void run_group(const Part& part, int64_t base, const Part& next, const Part& last) {
    const int64_t count = chunks(part), columns = (value_dim_ + 2 * kTile - 1) / (2 * kTile);
    Part chunk = first_chunk(part);
    for (int64_t c = 0; c < greater(count, 1); c++) {
      const Part ahead = c + 1 < count ? chunk_from(part, chunk.end) : first_chunk(next);
      const int64_t d = columns * c / greater(count, 1) * 2 * kTile,
                    end = columns * (c + 1) / greater(count, 1) * 2 * kTile;
      Products products(*this, ahead, other_s(), last, d, lesser(end, value_dim_));
      if (count > 0) {
        softmax(chunk, part.begin, base, products);
      } else {
        products.finish();
      }
      s_ = other_s();
      chunk = ahead;
    }
  }

  // Chunks are cut at fixed positions.
  static int64_t chunks(const Part& part) {
    return part.begin < part.end ? (part.end - 1) / kChunk - part.begin / kChunk + 1 : 0;
  }
  static Part chunk_from(const Part& part, int64_t begin) {
    return {part.group, begin, lesser(part.end, begin / kChunk * kChunk + kChunk), part.masked};
  }
  static Part first_chunk(const Part& part) { return chunk_from(part, part.begin); }
  float* other_s() const { return s_ == st_.s[0] ? st_.s[1] : st_.s[0]; }

  template <class K>
  void load_keys(int64_t tokens, int64_t padded) {
    for (int64_t t = 0; t < padded; t++)
      for (int64_t c = 0; c < k_tiles_; c++)
        copy_dims<K>(st_.k + (t / kTile * k_tiles_ + c) * 2 * kTileWords + t % kTile * 32,
                     t < tokens ? k_rows_[t] : nullptr, c);
  }

  template <class K>
  void load_values(int64_t tokens, int64_t padded) {
    for (int64_t t = 0; t < padded; t += 2 * kTile)
      for (int64_t d = 0; d < value_dim_; d += kTile) {
        if (sizeof(K) == 2 && t + 2 * kTile <= tokens) {
          transpose_pairs(value_tile(d, t),
                          [&](int64_t i) { return reinterpret_cast<const bf16*>(v_rows_[t + i]) + d; });
          continue;
        }
        alignas(64) bf16 rows[2 * kTile][kTile];
        for (int64_t i = 0; i < 2 * kTile; i++)
          for (int64_t lane = 0; lane < kTile; lane += W)
            store(rows[i] + lane,
                  t + i < tokens ? load(reinterpret_cast<const K*>(v_rows_[t + i]) + d + lane) : zero());
        transpose_pairs(value_tile(d, t), [&](int64_t i) { return rows[i]; });
      }
  }
  uint32_t* value_tile(int64_t d, int64_t t) const {
    return reinterpret_cast<uint32_t*>(st_.v) + (d / kTile * (kBlock / 32) + t / 32) * kTileWords;
  }

  // The products that AMX does while the softmax of a chunk keeps the vector units busy: the scores of a chunk, then
  // the values of a group for dims [d, d_end), listed as steps. Sums stay in tiles 0..3 from one step to the next;
  // tiles 4, 5 (A) and 6, 7 (B) are loaded for the next step as soon as they are free.
  class Products {
   public:
    Products(const PrefillTile& tile, const Part& scores, float* s, const Part& values, int64_t d, int64_t d_end)
        : at_(tile.st_.steps), end_(at_) {
      add_scores(tile, scores, s);
      add_values(tile, values, d, d_end);
      if (at_ == end_) return;
      tile_load<6>(at_->b0, 64);
      tile_stream_load<4>(at_->a0, 64);
      tile_stream_load<5>(at_->a1, 64);
      tile_load<7>(at_->b1, 64);
    }

    // Spreads the steps evenly over so many turns.
    void pace(int64_t turns) {
      turns_ = turns;
      paced_ = end_ - at_;
    }
    // One turn: the four quarters of some work of the vector units, quarter(Count<0 .. 3>), and the steps that are due.
    template <class Quarter>
    inline __attribute__((always_inline)) void turn(const Quarter& quarter) {
      due_ += paced_;
      if (due_ < turns_) {
        quarter(Count<0>{});
        quarter(Count<1>{});
        quarter(Count<2>{});
        quarter(Count<3>{});
        return;
      }
      step(quarter);
      for (due_ -= turns_; due_ >= turns_; due_ -= turns_) step();
    }
    void finish() {
      while (at_ != end_) step();
    }

   private:
    // The quarters are put between the tile instructions: one that finds no free register to be renamed to holds up
    // all that follow it.
    template <class Quarter>
    inline __attribute__((always_inline)) void step(const Quarter& quarter) {
      const TileStep& now = *at_++;
      const bool more = at_ != end_;
      if (now.begin == TileStep::kZero) {
        tile_zero<0>();
        tile_zero<1>();
        tile_zero<2>();
        tile_zero<3>();
      } else if (now.begin == TileStep::kLoad) {
        move_sums(now, [](auto tile, float* at) { tile_load<tile.value>(at, kRow); });
      }
      tile_dot<0, 4, 6>();
      quarter(Count<0>{});
      tile_dot<2, 5, 6>();
      if (more) tile_load<6>(at_->b0, 64);
      quarter(Count<1>{});
      tile_dot<1, 4, 7>();
      if (more) tile_stream_load<4>(at_->a0, 64);
      quarter(Count<2>{});
      tile_dot<3, 5, 7>();
      if (more) tile_stream_load<5>(at_->a1, 64);
      quarter(Count<3>{});
      if (more) tile_load<7>(at_->b1, 64);
      if (now.end) move_sums(now, [](auto tile, float* at) { tile_store<tile.value>(at, kRow); });
    }
    void step() {
      step([](auto) {});
    }

    // S' [32 tokens][32 queries] = K Q', 32 dims a step.
    void add_scores(const PrefillTile& tile, const Part& part, float* s) {
      const int64_t tile_row = tile.k_tiles_ * 2 * kTileWords;
      const bf16* q = tile.st_.q + 2 * part.group * tile_row;
      for (int64_t t = part.begin; t < part.end; t += 2 * kTile) {
        const bf16* k = tile.st_.k + t / kTile * tile_row;
        for (int64_t c = 0; c < tile.k_tiles_; c++) {
          const int64_t at = c * 2 * kTileWords;
          *end_++ = {k + at,
                     k + tile_row + at,
                     q + at,
                     q + tile_row + at,
                     s + (t - part.begin) * kLanes,
                     c == 0 ? TileStep::kZero : TileStep::kKeep,
                     c == tile.k_tiles_ - 1,
                     true};
        }
      }
    }

    // O' [32 dims][32 queries] += V' P', 32 tokens a step.
    void add_values(const PrefillTile& tile, const Part& part, int64_t d, int64_t d_end) {
      for (; d < d_end; d += 2 * kTile) {
        const bool both = d + kTile < tile.value_dim_;
        for (int64_t t = part.begin; t < part.end; t += 2 * kTile)
          *end_++ = {tile.value_tile(d, t),
                     tile.value_tile(both ? d + kTile : d, t),
                     tile.probability_tile(part.group, t, 0),
                     tile.probability_tile(part.group, t, 1),
                     tile.group_o(part.group) + d * kLanes,
                     t > part.begin             ? TileStep::kKeep
                     : tile.summed_[part.group] ? TileStep::kLoad
                                                : TileStep::kZero,
                     t + 2 * kTile >= part.end,
                     both};
      }
    }

    // Calls move(tile, address) for the sums.
    template <class Move>
    static void move_sums(const TileStep& step, const Move& move) {
      move(Count<0>{}, step.sums);
      move(Count<1>{}, step.sums + kTile);
      if (!step.both) return;
      move(Count<2>{}, step.sums + kTile * kLanes);
      move(Count<3>{}, step.sums + kTile * kLanes + kTile);
    }

    static constexpr int kRow = kLanes * 4;
    TileStep *at_, *end_;
    int64_t turns_ = 1, paced_ = 0, due_ = 0;
  };

  float* score_row(const Part& chunk, int64_t t) const { return s_ + (t - chunk.begin) * kLanes; }

  // Scores times unit() are exponents of 2: they are left as the product made them where a positive scale is all.
  bool direct() const { return task_.options.softcap == 0 && task_.options.softmax_scale > 0; }
  float unit() const { return direct() ? task_.options.softmax_scale * kLog2E : kLog2E; }

  // part: a chunk; its group's tokens of the block begin at `begin`.
  void softmax(const Part& part, int64_t begin, int64_t base, Products& products) {
    Vec top[2][kLaneVecs];
    for (auto& chain : top)
      for (Vec& x : chain) x = set1(kNegInf);
    if ((part.masked && masks(part.group, part.begin, part.end, base)) || !direct() || task_.k_scale.data)
      limit_scores(part, base);
    products.pace((part.end - part.begin) / kTile + (part.end - part.begin) / 4);
    for (int64_t t = part.begin; t < part.end; t += kTile)
      products.turn([&](auto at) __attribute__((always_inline)) {
        for (int64_t row = t + at.value * kTile / 4; row < t + (at.value + 1) * kTile / 4; row += 2)
          for (int i = 0; i < kLaneVecs; i++) {
            top[0][i] = max(top[0][i], load(score_row(part, row) + i * W));
            top[1][i] = max(top[1][i], load(score_row(part, row + 1) + i * W));
          }
      });
    Vec shift[kLaneVecs], factor[kLaneVecs];
    for (int i = 0; i < kLaneVecs; i++) top[0][i] = max(top[0][i], top[1][i]) * set1(unit());
    float* m = st_.m + part.group * kLanes;
    if (raise_maximum<kLaneVecs>(m, top[0], shift, factor, [](Vec x) { return exp2(x); })) {
      rescale(part.group, factor);
      rescale_probabilities(part.group, begin, part.begin, factor);
    }
    if (task_.v_scale.data) {
      exponentials<true>(part, shift, factor, products);
    } else {
      exponentials<false>(part, shift, factor, products);
    }
  }

  template <bool Scaled>
  void exponentials(const Part& part, const Vec* shift, const Vec* factor, Products& products) {
    float* l = st_.l + part.group * kLanes;
    const Vec scale = set1(unit());
    Vec even_sum[kLaneVecs], odd_sum[kLaneVecs], down[kLaneVecs];
    for (int i = 0; i < kLaneVecs; i++) {
      even_sum[i] = load(l + i * W) * factor[i];
      odd_sum[i] = zero();
      down[i] = zero() - shift[i];
    }
    for (int64_t t = part.begin; t < part.end; t += 4) {
      const float* s = score_row(part, t);
      uint32_t* p = probability_tile(part.group, t, 0) + t % 32 / 2 * kTile;
      products.turn([&](auto at) __attribute__((always_inline)) {
        constexpr int pair = at.value / 2, first = at.value % 2 * kLaneVecs / 2;
        for (int i = first; i < first + kLaneVecs / 2; i++) {
          const float* from = s + 2 * pair * kLanes + i * W;
          Vec even = exp2(fma(load(from), scale, down[i])), odd = exp2(fma(load(from + kLanes), scale, down[i]));
          even_sum[i] = even_sum[i] + even;
          odd_sum[i] = odd_sum[i] + odd;
          if (Scaled) {
            even = even * set1(v_scale_[t + 2 * pair]);
            odd = odd * set1(v_scale_[t + 2 * pair + 1]);
          }
          store_pairs(p + i * W / kTile * kTileWords + pair * kTile + i * W % kTile, even, odd);
        }
      });
    }
    products.finish();
    for (int i = 0; i < kLaneVecs; i++) store(l + i * W, even_sum[i] + odd_sum[i]);
  }
  uint32_t* probability_tile(int64_t g, int64_t t, int64_t half) const {
    return st_.p[g % 2] + (t / 32 * 2 + half) * kTileWords;
  }

  // Scales of INT8 keys, a scale that is not positive, soft cap, mask.
  void limit_scores(const Part& part, int64_t base) {
    const LaneRanges range = lane_ranges(part.group, base);
    const float softcap = task_.options.softcap;
    const Vec cap = set1(softcap), scale = set1(task_.options.softmax_scale);
    for (int64_t t = part.begin; t < part.end; t++) {
      const Vec at = set1(static_cast<float>(t)), key_scale = set1(k_scale_[t]);
      for (int i = 0; i < kLaneVecs; i++) {
        float* s = score_row(part, t) + i * W;
        Vec x = load(s) * key_scale;
        if (!direct()) x = softcap > 0 ? cap * tanh(x * scale / cap) : x * scale;
        x = masked(x, at, range.from + i * W, range.to + i * W);
        store(s, x);
      }
    }
  }

  void rescale(int64_t g, const Vec* factor) {
    if (!summed_[g]) return;
    float* o = group_o(g);
    for (int64_t d = 0; d < value_dim_; d++)
      for (int i = 0; i < kLaneVecs; i++) store(o + d * kLanes + i * W, load(o + d * kLanes + i * W) * factor[i]);
  }

  // Of the tokens [begin, end) of the block, whose values are not summed yet.
  void rescale_probabilities(int64_t g, int64_t begin, int64_t end, const Vec* factor) {
    for (int64_t t = begin; t < end; t += 2)
      for (int i = 0; i < kLaneVecs; i++) {
        uint32_t* pairs = probability_tile(g, t, i * W / kTile) + t % 32 / 2 * kTile + i * W % kTile;
        Vec even, odd;
        load_pairs(pairs, even, odd);
        store_pairs(pairs, even * factor[i], odd * factor[i]);
      }
  }

  void finish() {
    for (int64_t first = 0; first < rows_; first += kTile) {
      float* o = group_o(first / kLanes) + first % kLanes;
      const int64_t rows = lesser(kTile, rows_ - first);
      if (!summed_[first / kLanes])
        for (int64_t d = 0; d < value_dim_; d++) std::memset(o + d * kLanes, 0, sizeof(float[kTile]));
      char* out[kTile];
      alignas(64) float factor[kTile] = {};
      for (int64_t r = 0; r < rows; r++) {
        out[r] = output(first + r);
        factor[r] = close(first + r, st_.m[first + r], st_.l[first + r]);
      }
      for (int64_t d = 0; d < value_dim_; d += 2 * kTile)
        store_lanes(o + d * kLanes, kLanes, factor, lesser(2 * kTile, value_dim_ - d), rows,
                    [&](int64_t r) { return out[r] + 2 * d; });
    }
  }

  State& st_;
  const int64_t k_tiles_;
  float* s_ = st_.s[0];                      // scores of the present chunk
  bool summed_[kMaxTileRows / kLanes] = {};  // of each group: o holds sums
};

}  // namespace

void prefill_tile(const AttentionTask& task, const AttentionTile& tile) {
  static thread_local ThreadState<State> state;
  const TileScope scope;
  PrefillTile work(task, tile, state.get());
  work.run();
}

}  // namespace radix::cpu::RK_ISA

#endif
