// Attention of a step: norm and rotation of q and k, store of k and v, and softmax(q k) v over the pages.
//
// An item is a part of one row's context for one KV head; a block takes items in turn, its warps tiles of 16 tokens.
// Everything stays in registers, loaded straight from the pages:
//
//   scores[token, head] = k q^T:  k is the 16 x 16 operand. A lane's 16 bytes of a token are the operands of two mma
//                                 steps; q is read in the same order.
//   out[dim, head] = v^T p^T:     lane (g, t) reads 16 bytes at dims 8 g and 64 + 8 g of tokens 2 t, 2 t + 1, 2 t + 8
//                                 and 2 t + 9, and pairs the tokens of a dim; p is transposed by movmatrix.
//
// The tiles' keys and values do not depend on this layer: a warp asks for its first tile before it waits for q. The
// token of this step, which is not in the pages yet, comes from the projections.
//
// Where a row is split, the blocks that have a KV head's parts hand them to each other, and each joins a share of the
// heads' dims.
#pragma once

#include "sm90/persistent_decoder/product.cuh"

namespace radix::persistent_decoder {

constexpr int kTile = 16;               // tokens
constexpr int kPieces = kHeadDim / 32;  // of 16 bytes that a lane has of a key
constexpr int kHalves = kHeadDim / 64;  // and of a value
constexpr int kOutStep = kHeadDim + 4;  // floats between heads in shared memory
constexpr int kPartTiles = 3;           // at least, of a part: more blocks read more at once
constexpr float kNegInf = -__builtin_inff();

// How a row's context is split. It follows from the step's number of tokens and the row's own length.
__device__ inline int most_splits(const Params& p) {
  return min(max(static_cast<int>(gridDim.x) / (p.tokens * p.kv_heads), 1), kMaxSplits);
}
__device__ inline int splits_of(const Params& p, int len) {
  return min(max(ceil_div(len, kTile * kPartTiles), 1), most_splits(p));
}

struct AttentionMemory {
  float cos_sin[kHeadDim];  // of the item's position
  float2 state[kWarps][kMaxGroup];
  uint4 heads[kMaxGroup + 2][kHeadDim / 8];  // of this step: the queries, the key and the value
  float out[1];                              // [kWarps][group][kOutStep]
};

// Tiles [begin, end) of a row's context for one KV head. A row that sees nothing has an item without tiles.
struct Item {
  bool exists = false;
  int row = 0, head = 0, split = 0, splits = 1, len = 0, begin = 0, end = 0;
  int slot = -1;  // of this step's token; -1: it is not stored
  int64_t position = 0;

  Item() = default;
  __device__ Item(const Params& p, int index) {
    const int most = most_splits(p);
    row = index / (p.kv_heads * most);
    const int rest = index - row * p.kv_heads * most;
    head = rest / most;
    split = rest - head * most;
    len = p.kv_lens[row];
    splits = splits_of(p, len);
    const int tiles = (len + kTile - 1) / kTile;
    exists = split < splits;
    if (exists) {
      begin = tiles * split / splits;
      end = tiles * (split + 1) / splits;
    }
    const int64_t wanted = p.slots[row];
    slot = wanted >= 0 && wanted < p.num_slots ? static_cast<int>(wanted) : -1;
    position = p.positions[row];
    if (position < 0 || position >= p.max_position) position = 0;
  }
  __device__ static int count(const Params& p) { return p.tokens * p.kv_heads * most_splits(p); }
  __device__ int last() const { return len - 1; }  // the token of this step
};

struct KvTile {
  uint4 k[2][kPieces];  // tokens g, g + 8
  uint4 v[4][kHalves];  // tokens 2 t, 2 t + 1, 2 t + 8, 2 t + 9
};

__device__ inline int value_token(int i) {
  return threadIdx.x % 4 * 2 + i % 2 + i / 2 * 8;
}

// Where token `offset` of a page has this head.
__device__ inline int64_t cached(const Params& p, const Item& item, int page, int offset) {
  return page * p.cache.page + offset * p.cache.slot + item.head * p.cache.head;
}

// The pages of a lane's tokens in a tile, the same in all layers. Behind the last token it is read again: what its key
// gives is masked, and its value is cleared (end_tile).
struct TilePages {
  int index;
  int k[2], v[4];

  __device__ TilePages(const Params& p, const Item& item, int tile) : index(tile) {
#pragma unroll
    for (int i = 0; i < 2; i++) k[i] = page(p, item, key_token(i));
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = page(p, item, value_token(i));
  }

  // Elements from the cache's begin to token i of a lane.
  __device__ int64_t key_place(const Params& p, const Item& item, int i) const {
    return place(p, item, k[i], key_token(i)) + threadIdx.x % 4 * 8;
  }
  __device__ int64_t value_place(const Params& p, const Item& item, int i) const {
    return place(p, item, v[i], value_token(i)) + threadIdx.x % 32 / 4 * 8;
  }

 private:
  __device__ static int key_token(int i) { return threadIdx.x % 32 / 4 + i * 8; }
  __device__ int page(const Params& p, const Item& item, int token) const {
    return p.page_table[item.row * p.page_table_step + (at(item, token) >> p.page_shift)];
  }
  __device__ int64_t place(const Params& p, const Item& item, int page, int token) const {
    return cached(p, item, page, at(item, token) & ((1 << p.page_shift) - 1));
  }
  __device__ int at(const Item& item, int token) const { return max(min(index * kTile + token, item.last()), 0); }
};

// Keys and values pass once: they need not stay in L1. Asked for where the call stands.
__device__ inline uint4 load_cached(const bf16* from) {
  uint4 x;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from));
  return x;
}

__device__ inline void load_tile(KvTile& tile, const Params& p, const Layer& layer, const Item& item,
                                 const TilePages& pages) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const bf16* from = layer.k_cache + pages.key_place(p, item, i);
#pragma unroll
    for (int j = 0; j < kPieces; j++) tile.k[i][j] = load_cached(from + j * 32);
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const bf16* from = layer.v_cache + pages.value_place(p, item, i);
#pragma unroll
    for (int h = 0; h < kHalves; h++) tile.v[i][h] = load_cached(from + h * 64);
  }
}

// What a lane of the eight of a head has: dims 8 i and 64 + 8 i, which meet in a rotation.
struct HeadPart {
  float low[8], high[8];

  // Of `table`, float32 [kHeadDim].
  __device__ void load(const float* table) {
    const float4* from = reinterpret_cast<const float4*>(table) + threadIdx.x % 8 * 2;
    const float4 parts[4] = {from[0], from[1], from[kHeadDim / 8], from[kHeadDim / 8 + 1]};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float* to = i < 2 ? low + i * 4 : high + (i - 2) * 4;
      to[0] = parts[i].x;
      to[1] = parts[i].y;
      to[2] = parts[i].z;
      to[3] = parts[i].w;
    }
  }
  // Eight lanes together.
  __device__ void norm(const HeadPart& weight, float eps) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) sum += low[i] * low[i] + high[i] * high[i];
#pragma unroll
    for (int mask = 4; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
    const float scale = rsqrtf(sum * (1.f / kHeadDim) + eps);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      low[i] *= scale * weight.low[i];
      high[i] *= scale * weight.high[i];
    }
  }
  // turn: cosines, sines.
  __device__ void rotate(const HeadPart& turn) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const float a = low[i], b = high[i];
      low[i] = a * turn.low[i] - b * turn.high[i];
      high[i] = b * turn.low[i] + a * turn.high[i];
    }
  }
};

// Puts this step's token into the last tile, and zeros behind it.
__device__ inline void end_tile(KvTile& tile, const uint4* key, const uint4* value, int in_tile) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < 2; i++)
#pragma unroll
    for (int j = 0; j < kPieces; j++)
      if (g + i * 8 == in_tile) tile.k[i][j] = key[j * 4 + t];
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int h = 0; h < kHalves; h++) {
      if (value_token(i) == in_tile) tile.v[i][h] = value[h * 8 + g];
      if (value_token(i) > in_tile) tile.v[i][h] = {};
    }
}

// Element i (0 to 7) of two packs, the first's in the low half.
__device__ inline uint32_t pair_of(const uint4& first, const uint4& second, int i) {
  const uint32_t a[4] = {first.x, first.y, first.z, first.w}, b[4] = {second.x, second.y, second.z, second.w};
  return __byte_perm(a[i / 2], b[i / 2], i % 2 ? 0x7632 : 0x5410);
}

// Of a warp's tiles so far. Lane (g, t) has heads 2 t and 2 t + 1.
struct Attended {
  float most[2] = {kNegInf, kNegInf}, sum[2] = {};
  float out[8][4] = {};  // [i]: dim 8 g + i of the two heads, then dim 64 + 8 g + i

  __device__ void add(const KvTile& tile, const uint4 (&q)[kPieces], const Item& item, int index, float scale) {
    const int g = threadIdx.x % 32 / 4;
    float scores[4] = {};
#pragma unroll
    for (int j = 0; j < kPieces; j++) {
      const uint4 &a = tile.k[0][j], &b = tile.k[1][j];
      sm90::mma<bf16>(scores, {a.x, b.x, a.y, b.y}, q[j].x, q[j].y);
      sm90::mma<bf16>(scores, {a.z, b.z, a.w, b.w}, q[j].z, q[j].w);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int at = index * kTile + g + i / 2 * 8;
      scores[i] = at < item.len ? scores[i] * scale : kNegInf;
    }
    float keep[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float top = fmaxf(scores[h], scores[h + 2]);
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, mask));
      top = fmaxf(top, most[h]);
      keep[h] = sm90::exp2_approx(most[h] - top);  // a tile has a token: top is finite
      most[h] = top;
      scores[h] = sm90::exp2_approx(scores[h] - top);
      scores[h + 2] = sm90::exp2_approx(scores[h + 2] - top);
      sum[h] = sum[h] * keep[h] + scores[h] + scores[h + 2];
    }
    const uint32_t p0 = transposed(sm90::round_pair<bf16>(scores[0], scores[1]));
    const uint32_t p1 = transposed(sm90::round_pair<bf16>(scores[2], scores[3]));
#pragma unroll
    for (int i = 0; i < 8; i++) {
#pragma unroll
      for (int c = 0; c < 4; c++) out[i][c] *= keep[c % 2];
      const uint32_t v[4] = {pair_of(tile.v[0][0], tile.v[1][0], i), pair_of(tile.v[0][1], tile.v[1][1], i),
                             pair_of(tile.v[2][0], tile.v[3][0], i), pair_of(tile.v[2][1], tile.v[3][1], i)};
      sm90::mma<bf16>(out[i], v, p0, p1);
    }
  }

  // Into the warp's place in shared memory.
  __device__ void store(AttentionMemory& shared, int group) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, warp = threadIdx.x / 32;
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2) sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], mask);
      const int head = 2 * t + h;
      if (head >= group) continue;
      if (g == 0) shared.state[warp][head] = {most[h], sum[h]};
      float* to = shared.out + (warp * group + head) * kOutStep + g * 8;
#pragma unroll
      for (int half = 0; half < kHalves; half++)
#pragma unroll
        for (int i = 0; i < 8; i += 4)
          *reinterpret_cast<float4*>(to + half * 64 + i) = {out[i][half * 2 + h], out[i + 1][half * 2 + h],
                                                            out[i + 2][half * 2 + h], out[i + 3][half * 2 + h]};
    }
  }

 private:
  // An 8 x 8 matrix of 16-bit elements, two a lane.
  __device__ static uint32_t transposed(uint32_t x) {
    uint32_t y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
  }
};

// The attention of a block's item in all layers.
class Attention {
 public:
  __device__ Attention(const Params& p, const Item& item, AttentionMemory& shared)
      : p_(p),
        item_(item),
        shared_(shared),
        first_(item.begin + threadIdx.x / 32),
        pages_(p, item, first_),
        next_(p, item, first_ + kWarps) {}

  // What does not depend on q, k and v of this layer is asked for.
  __device__ void prefetch(const Layer& layer) {
    if (first_ < item_.end) load_tile(tile_, p_, layer, item_, pages_);
  }

  // Between the product that q, k and v come from and the one that takes the result. flag: of q, k and v; that of the
  // results is the next.
  __device__ void run(const Layer& layer, uint32_t flag) {
    flag_ = flag;
    take_heads(layer);
    compute_sync();
    if (first_ < item_.end) attend(layer);
    compute_sync();
    join_warps();
    if (item_.splits > 1) join_parts();
  }

 private:
  __device__ int group() const { return p_.heads / p_.kv_heads; }

  // The queries, the key and the value of this step from the words of the projection: eight lanes a head.
  __device__ void take_heads(const Layer& layer) {
    const int index = threadIdx.x / 8, lane = threadIdx.x % 8;
    if (threadIdx.x / 32 * 4 >= group() + 2) return;  // whole warps
    const bool is_q = index < group(), is_k = index == group(), exists = index < group() + 2;
    const int head = is_q ? item_.head * group() + index : p_.heads + item_.head + (is_k || !exists ? 0 : p_.kv_heads);
    const uint64_t* from = p_.workspace.qkv + item_.row * (qkv_rows(p_) / 2) + head * (kHeadDim / 2) + lane * 4;
    Words<4> words[2];
    words[0].load(from);
    words[1].load(from + kHeadDim / 4);
    const float* norm = is_q ? layer.q_norm : layer.k_norm;
    HeadPart weight, turn, part;
    if (norm) weight.load(norm);
    turn.load(shared_.cos_sin);
    words[0].settle(from, flag_);
    words[1].settle(from + kHeadDim / 4, flag_);
    __syncwarp();
    uint4 low = packed(words[0]), high = packed(words[1]);
    widen(low, part.low);
    widen(high, part.high);
    if (norm) part.norm(weight, p_.qk_eps);
    part.rotate(turn);
    if (!exists) return;
    if (is_q || is_k) {
      low = rounded(part.low);
      high = rounded(part.high);
    }
    shared_.heads[index][lane] = low;
    shared_.heads[index][8 + lane] = high;
    if (is_q || item_.slot < 0 || item_.split != item_.splits - 1) return;
    bf16* cache = (is_k ? layer.k_cache : layer.v_cache) + lane * 8 +
                  cached(p_, item_, item_.slot >> p_.page_shift, item_.slot & ((1 << p_.page_shift) - 1));
    *reinterpret_cast<uint4*>(cache) = low;
    *reinterpret_cast<uint4*>(cache + kHeadDim / 2) = high;
  }

  __device__ void attend(const Layer& layer) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, last_tile = item_.last() / kTile;
    uint4 q[kPieces];
#pragma unroll
    for (int j = 0; j < kPieces; j++)
      q[j] = shared_.heads[min(g, group() - 1)][j * 4 + t];  // repeated heads are not stored
    Attended attended;
    TilePages next = next_;
#pragma unroll 1
    for (int index = first_; index < item_.end; index += kWarps) {
      if (index == last_tile) end_tile(tile_, shared_.heads[group()], shared_.heads[group() + 1], item_.last() % kTile);
      const KvTile tile = tile_;
      if (index + kWarps < item_.end) {
        load_tile(tile_, p_, layer, item_, next);
        next = TilePages(p_, item_, index + 2 * kWarps);
      }
      attended.add(tile, q, item_, index, p_.score_scale);
    }
    attended.store(shared_, group());
  }

  // Joins what the warps have left, two dims a thread: the heads' results, or their part of them.
  __device__ void join_warps() const {
    const int warps = min(kWarps, item_.end - item_.begin);
#pragma unroll 1
    for (int i = threadIdx.x; i < group() * (kHeadDim / 2); i += kComputeThreads) {
      const int local = i / (kHeadDim / 2), dim = i % (kHeadDim / 2) * 2;
      float2 state[kWarps];
      float most = kNegInf, sum = 0, low = 0, high = 0;
#pragma unroll
      for (int w = 0; w < kWarps; w++) {
        state[w] = w < warps ? shared_.state[w][local] : float2{kNegInf, 0};
        most = fmaxf(most, state[w].x);
      }
#pragma unroll
      for (int w = 0; w < kWarps; w++) {
        if (w >= warps) continue;
        const float scale = sm90::exp2_approx(state[w].x - most);
        const float2 part = *reinterpret_cast<const float2*>(shared_.out + (w * group() + local) * kOutStep + dim);
        sum += scale * state[w].y;
        low += scale * part.x;
        high += scale * part.y;
      }
      if (item_.splits == 1) {
        put_result(local, dim, low, high, sum);
        continue;
      }
      uint64_t* part = part_of(local, item_.split);
      put_float(part + 2 + dim, low, flag_);
      put_float(part + 3 + dim, high, flag_);
      if (dim > 0) continue;
      put_float(part, most, flag_);
      put_float(part + 1, sum, flag_);
    }
  }

  // Joins this block's share of the heads' dims from all parts of the row's context: neighbouring lanes have the parts
  // of two dims.
  __device__ void join_parts() const {
    const int splits = item_.splits, pairs = group() * (kHeadDim / 2);
    int lanes = 2;
    while (lanes < splits) lanes *= 2;
    const int split = threadIdx.x % lanes, first = pairs * item_.split / splits,
              end = pairs * (item_.split + 1) / splits;
#pragma unroll 1
    for (int base = first; base < end; base += kComputeThreads / lanes) {
      const int pair = base + threadIdx.x / lanes, wanted = min(pair, end - 1);
      const int local = wanted / (kHeadDim / 2), dim = wanted % (kHeadDim / 2) * 2;
      const uint64_t* from = part_of(local, min(split, splits - 1));
      Words<2> state, part;
      state.load(from);
      part.load(from + 2 + dim);
      state.settle(from, flag_);
      part.settle(from + 2 + dim, flag_);
      __syncwarp();
      const float mine = __uint_as_float(state.data(0));
      float most = mine;
      for (int mask = lanes / 2; mask > 0; mask /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, mask));
      const float scale = split < splits ? sm90::exp2_approx(mine - most) : 0.f;
      float sum = scale * __uint_as_float(state.data(1));
      float low = scale * __uint_as_float(part.data(0)), high = scale * __uint_as_float(part.data(1));
      for (int mask = lanes / 2; mask > 0; mask /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, mask);
        low += __shfl_xor_sync(0xffffffffu, low, mask);
        high += __shfl_xor_sync(0xffffffffu, high, mask);
      }
      if (split == 0 && pair < end) put_result(local, dim, low, high, sum);
    }
  }

  __device__ uint64_t* part_of(int local, int split) const {
    const int head = item_.row * p_.heads + item_.head * group() + local;
    return p_.workspace.parts + (head * kMaxSplits + split) * kPartWords;
  }
  __device__ void put_result(int local, int dim, float low, float high, float sum) const {
    const int head = item_.row * p_.heads + item_.head * group() + local;
    const float over = sum > 0 ? __fdividef(1.f, sum) : 0.f;
    put_word(p_.workspace.attended + (head * kHeadDim + dim) / 2, sm90::round_pair<bf16>(low * over, high * over),
             flag_ + 1);
  }

  const Params& p_;
  const Item& item_;
  AttentionMemory& shared_;
  const int first_;               // this warp's first tile
  const TilePages pages_, next_;  // of its first and its second
  KvTile tile_;                   // its next
  uint32_t flag_ = 0;
};

}  // namespace radix::persistent_decoder
