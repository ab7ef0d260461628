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

// The working set, kept by each thread. At 128 dims about 0.6 MiB of it are used: it stays in L2.
struct State {
  alignas(64) bf16 q[kMaxTileRows * kMaxHeadDim];   // [16 rows][32 dims] tiles of words: [dim pair][row]
  alignas(64) bf16 k[kBlock * kMaxHeadDim];         // [16 tokens][32 dims]
  alignas(64) bf16 v[kBlock * kMaxHeadDim];         // [16 dims][32 tokens]
  alignas(64) float s[2][kChunk * kLanes];          // [token][query], of the present and the next chunk
  alignas(64) uint32_t p[2][kBlock / 2 * kLanes];   // tiles of words: [token pair][query]; of the present and the last
  alignas(64) float o[kMaxTileRows * kMaxHeadDim];  // [32 queries] of [dim][query]
  alignas(64) float m[kMaxTileRows], l[kMaxTileRows];
};

class PrefillTile : LaneTile<kLanes, kBlock, 2 * kTile> {
 public:
  PrefillTile(const AttentionTask& task, const AttentionTile& tile, State& state)
      : LaneTile(task, tile), st_(state), k_tiles_((task.head_dim + 31) / 32) {}

  void run() {
    load_queries();
    each_block([&](int64_t base, int64_t end) { run_block(base, end); });
    finish();
  }

 private:
  float* group_o(int64_t g) const { return st_.o + g * kLanes * dim_; }

  void load_queries() {
    for (int64_t r = 0; r < groups_ * kLanes; r++) {
      const char* from = r < rows_ ? query(r) : nullptr;
      for (int64_t c = 0; c < k_tiles_; c++) {
        bf16* to = st_.q + (r / kTile * k_tiles_ + c) * 2 * kTileWords + r % kTile * 32;
        copy_dims<bf16>(to, from, c);
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
      prefetch_share(g);
      const Part next = visible_part(g + 1, base, tokens);
      run_group(part, base, next, last);
      last = part;
      part = next;
    }
    Products(*this, part, s_, last, 0, dim_).finish();
  }

  // Under each chunk of a group run the scores of the chunk after it and a share of the values of the group before it.
  void run_group(const Part& part, int64_t base, const Part& next, const Part& last) {
    const int64_t count = chunks(part), columns = (dim_ + 2 * kTile - 1) / (2 * kTile);
    Part chunk = first_chunk(part);
    for (int64_t c = 0; c < greater(count, 1); c++) {
      const Part ahead = c + 1 < count ? chunk_from(part, chunk.end) : first_chunk(next);
      const int64_t d = columns * c / greater(count, 1) * 2 * kTile,
                    end = columns * (c + 1) / greater(count, 1) * 2 * kTile;
      Products products(*this, ahead, other_s(), last, d, lesser(end, dim_));
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
    const auto read = [&](bf16* to, int64_t t, int64_t d) {
      if (t >= tokens) {
        std::memset(to, 0, 32);
      } else {
        for (int64_t i = 0; i < kTile; i += W) store(to + i, load(reinterpret_cast<const K*>(v_rows_[t]) + d + i));
      }
    };
    for (int64_t t = 0; t < padded; t += 32)
      for (int64_t d = 0; d < dim_; d += kTile) {
        uint32_t* tile = value_tile(d, t);
        for (int64_t i = 0; i < kTile; i++) {
          if (sizeof(K) == 2 && t + 2 * i + 1 < tokens) {
            const auto row = [&](int64_t at) { return reinterpret_cast<const bf16*>(v_rows_[at]) + d; };
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

  // The products that AMX does while the exponentials of a chunk keep the vector units busy: the scores of a chunk,
  // then the values of a group for dims [d, d_end). A step is at most four tile products; accumulators stay in tiles
  // from one step to the next.
  class Products {
   public:
    Products(const PrefillTile& tile, const Part& scores, float* s, const Part& values, int64_t d, int64_t d_end)
        : tile_(tile), scores_(scores), values_(values), s_(s), t_(scores.begin), d_(d), d_end_(d_end) {
      if (scores_.begin >= scores_.end) begin_values();
    }
    int64_t steps() const {
      const int64_t columns = (d_end_ - d_ + 2 * kTile - 1) / (2 * kTile);
      return ((scores_.end - scores_.begin) * tile_.k_tiles_ + (values_.end - values_.begin) * columns) / (2 * kTile);
    }
    void step() {
      if (scores_left_) {
        score_step();
      } else if (d_ + kTile < tile_.dim_) {
        value_step<2>();
      } else {
        value_step<1>();
      }
    }
    void finish() {
      for (int64_t left = steps(); left > 0; left--) step();
    }

   private:
    // Of 32 queries with 32 tokens: 32 dims.
    void score_step() {
      const int64_t tile_row = tile_.k_tiles_ * 2 * kTileWords;
      const bf16* q = tile_.st_.q + 2 * scores_.group * tile_row + c_ * 2 * kTileWords;
      const bf16* k = tile_.st_.k + t_ / kTile * tile_row + c_ * 2 * kTileWords;
      if (c_ == 0) {
        tile_zero<0>();
        tile_zero<1>();
        tile_zero<2>();
        tile_zero<3>();
      }
      tile_stream_load<4>(k, 64);
      tile_load<6>(q, 64);
      tile_dot<0, 4, 6>();
      tile_load<7>(q + tile_row, 64);
      tile_dot<1, 4, 7>();
      tile_stream_load<5>(k + tile_row, 64);
      tile_dot<2, 5, 6>();
      tile_dot<3, 5, 7>();
      if (++c_ < tile_.k_tiles_) return;
      move_sums<2>(s_ + (t_ - scores_.begin) * kLanes, [](auto tile, float* at) { tile_store<tile.value>(at, kRow); });
      c_ = 0;
      t_ += 2 * kTile;
      if (t_ == scores_.end) begin_values();
    }

    void begin_values() {
      scores_left_ = false;
      t_ = values_.begin;
    }

    // O' [16 Tiles dims][32 queries] += V' P' over 32 tokens.
    template <int Tiles>
    void value_step() {
      float* o = tile_.group_o(values_.group) + d_ * kLanes;
      if (t_ == values_.begin) move_sums<Tiles>(o, [](auto tile, float* at) { tile_load<tile.value>(at, kRow); });
      tile_stream_load<4>(tile_.value_tile(d_, t_), 64);
      tile_load<6>(tile_.probability_tile(values_.group, t_, 0), 64);
      tile_dot<0, 4, 6>();
      tile_load<7>(tile_.probability_tile(values_.group, t_, 1), 64);
      tile_dot<1, 4, 7>();
      if constexpr (Tiles == 2) {
        tile_stream_load<5>(tile_.value_tile(d_ + kTile, t_), 64);
        tile_dot<2, 5, 6>();
        tile_dot<3, 5, 7>();
      }
      t_ += 2 * kTile;
      if (t_ < values_.end) return;
      move_sums<Tiles>(o, [](auto tile, float* at) { tile_store<tile.value>(at, kRow); });
      t_ = values_.begin;
      d_ += Tiles * kTile;
    }

    // Calls move(tile, address) for the sums of 16 Rows rows of 32 queries.
    template <int N>
    struct Tile {
      static constexpr int value = N;
    };
    template <int Rows, class Move>
    static void move_sums(float* at, const Move& move) {
      move(Tile<0>{}, at);
      move(Tile<1>{}, at + kTile);
      if constexpr (Rows == 2) {
        move(Tile<2>{}, at + kTile * kLanes);
        move(Tile<3>{}, at + kTile * kLanes + kTile);
      }
    }

    static constexpr int kRow = kLanes * 4;
    const PrefillTile& tile_;
    const Part scores_, values_;
    float* const s_;
    bool scores_left_ = true;
    int64_t t_, c_ = 0, d_;
    const int64_t d_end_;
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
    if (part.masked || !direct() || task_.k_scale.data) limit_scores(part, base);
    for (int64_t t = part.begin; t < part.end; t += 2)
      for (int i = 0; i < kLaneVecs; i++) {
        top[0][i] = max(top[0][i], load(score_row(part, t) + i * W));
        top[1][i] = max(top[1][i], load(score_row(part, t + 1) + i * W));
      }
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
    const int64_t pairs = (part.end - part.begin) / 2;
    int64_t left = products.steps(), due = 0;
    const int64_t steps = left;
    for (int64_t t = part.begin; t < part.end; t += 2) {
      for (due += steps; due >= pairs; due -= pairs, left--) products.step();
      for (int i = 0; i < kLaneVecs; i++) {
        const float* s = score_row(part, t) + i * W;
        Vec even = exp2(fma(load(s), scale, down[i])), odd = exp2(fma(load(s + kLanes), scale, down[i]));
        even_sum[i] = even_sum[i] + even;
        odd_sum[i] = odd_sum[i] + odd;
        if (Scaled) {
          even = even * set1(v_scale_[t]);
          odd = odd * set1(v_scale_[t + 1]);
        }
        store_pairs(probability_tile(part.group, t, i * W / kTile) + t % 32 / 2 * kTile + i * W % kTile, even, odd);
      }
    }
    for (; left > 0; left--) products.step();
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
    float* o = group_o(g);
    for (int64_t d = 0; d < dim_; d++)
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
    alignas(64) float row[kTile * kMaxHeadDim];
    for (int64_t first = 0; first < rows_; first += kTile) {
      untranspose(first, row);
      for (int64_t r = first; r < lesser(first + kTile, rows_); r++)
        write<bf16>(r, st_.m[r], st_.l[r], row + (r - first) * dim_);
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

  State& st_;
  const int64_t k_tiles_;
  float* s_ = st_.s[0];  // scores of the present chunk
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
