// A partial softmax over some tokens, and how two of them become one.
//
// The result of a block's kRows query rows is spread over the block: a thread owns pieces of 4 dimensions of a row,
// always the same ones, so joining results needs no communication, and the thread that wrote a node in the workspace is
// the one that reads it.
#pragma once

#include "sm90/common/convert.cuh"
#include "sm90/common/math.cuh"
#include "sm90/common/split_plan.cuh"

namespace radix::split_kv {

using sm90::exp2_approx;
using sm90::kLn2;
using sm90::kLog2e;
using sm90::round_pair;

// exp2(x - max); x -inf gives 0 also where nothing has been seen (max -inf).
__device__ inline float exp2_diff(float x, float max) {
  return exp2_approx(x - (max == -INFINITY ? 0.f : max));
}

// o and l are relative to 2^m.
struct Piece {
  float4 o;
  float m, l;
};

__device__ inline void add_scaled(float4& sum, const float4& x, float w) {
  sum.x += x.x * w, sum.y += x.y * w, sum.z += x.z * w, sum.w += x.w * w;
}

__device__ inline Piece join(const Piece& a, const Piece& b) {
  const float m = fmaxf(a.m, b.m), wa = exp2_diff(a.m, m), wb = exp2_diff(b.m, m);
  Piece sum = {make_float4(0.f, 0.f, 0.f, 0.f), m, a.l * wa + b.l * wb};
  add_scaled(sum.o, a.o, wa);
  add_scaled(sum.o, b.o, wb);
  return sum;
}

// Which pieces a thread owns. Rows come in passes of 8; a pass none of whose rows is in use is left out.
template <int kDim, int kRows_, int kThreads_>
struct Layout {
  static constexpr int kRows = kRows_, kThreads = kThreads_;
  static_assert(kDim % 4 == 0, "a piece is four dimensions of a row");
  static_assert(kRows % 8 == 0 && kRows <= kMaxTileRows, "rows come in passes of eight");
  static_assert(kThreads % 32 == 0 && kThreads <= sm90::kMaxThreads);
  static constexpr int kQuads = kDim / 4;  // pieces of a row
  static constexpr int kPasses = kRows / 8;
  static constexpr int kPerPass = (8 * kQuads + kThreads - 1) / kThreads;
  static constexpr int kPieces = kPasses * kPerPass;
  static constexpr bool kAll = 8 * kQuads % kThreads == 0;  // every thread has kPerPass pieces

  __device__ static int flat(int i) { return threadIdx.x + i % kPerPass * kThreads; }
  __device__ static int row(int i) { return i / kPerPass * 8 + flat(i) / kQuads; }
  __device__ static int quad(int i) { return flat(i) % kQuads; }
  __device__ static bool owns(int i) { return kAll || flat(i) < 8 * kQuads; }

  // A piece is two pairs of dimensions of its row.
  static constexpr int kSecondPair = 2;
  __device__ static int dim(int i) { return quad(i) * 4; }

  // A node: float4 [rows * kQuads], then float2 (m, l) for each, so that a thread reads only its own. In the workspace
  // of kRows, in shared memory of those in use.
  static constexpr int64_t kNodeBytes = int64_t{kRows} * kQuads * (sizeof(float4) + sizeof(float2));
  __device__ static int index(int i) { return row(i) * kQuads + quad(i); }
  __device__ static void store(char* node, int i, const Piece& piece, int rows = kRows) {
    reinterpret_cast<float4*>(node)[index(i)] = piece.o;
    reinterpret_cast<float2*>(node + rows * kQuads * sizeof(float4))[index(i)] = {piece.m, piece.l};
  }
  __device__ static Piece load(const char* node, int i, int rows = kRows) {
    const float4 o = reinterpret_cast<const float4*>(node)[index(i)];
    const float2 ml = reinterpret_cast<const float2*>(node + rows * kQuads * sizeof(float4))[index(i)];
    return {o, ml.x, ml.y};
  }
};

// Does the i-th of a thread's pieces hold a row in use?
template <class L>
__device__ inline bool live(int i, int rows) {
  return L::owns(i) && L::row(i) < rows;
}

// The joined chunks [first, now) of a row, as the nodes of the tree that lie within: a stack in the workspace, whose
// upper part waits in kSharedBytes of shared memory (0, or a node of all rows: the fewer are in use, the more nodes).
template <class L, int kSharedBytes = 0>
class Tree {
  static constexpr bool kShared = kSharedBytes > 0;
  static_assert(!kShared || kSharedBytes == L::kNodeBytes, "shared memory holds a node of all rows, or none");

 public:
  __device__ explicit Tree(char* shared = nullptr) : shared_(shared) {}

  // nodes: this block's space. rows: in use.
  __device__ void begin(char* nodes, int levels, int first, int rows) {
    // The row that the block enters in the middle keeps its nodes; every other one begins at 0.
    base_ = nodes + (first > 0 ? 0 : 2 * levels * L::kNodeBytes);
    first_ = first, rows_ = rows, depth_ = 0, settled_ = 0;
    if constexpr (kShared) slots_ = 1 << (31 - __clz(L::kRows / rows));
  }

  // Adds chunk `index`. True when it is the last of `count` and all of them are here: then `state` is their sum.
  __device__ bool push(Piece (&state)[L::kPieces], int index, int count) {
    const bool done = index + 1 == count && first_ == 0;
    // Left siblings; after the last chunk everything, from the right.
    for (int width = 1; done ? depth_ > 0 : (index & width) && index - width >= first_; width *= 2) {
      depth_--;
      index -= width;
#pragma unroll
      for (int i = 0; i < L::kPieces; i++)
        if (live<L>(i, rows_)) state[i] = join(load(i), state[i]);
      settled_ = min(settled_, depth_);
    }
    if (done) return true;
    if constexpr (kShared) {
      if (depth_ - settled_ == slots_) settle();
    }
#pragma unroll
    for (int i = 0; i < L::kPieces; i++)
      if (live<L>(i, rows_)) {
        if constexpr (kShared) {
          L::store(slot(depth_), i, state[i], rows_);
        } else {
          L::store(base_ + depth_ * L::kNodeBytes, i, state[i]);
        }
      }
    depth_++;
    return false;
  }

  // All goes to the workspace: needed where the block leaves the row.
  __device__ void flush() {
    if constexpr (kShared)
      while (settled_ < depth_) settle();
  }

 private:
  __device__ char* slot(int node) const {
    return shared_ + (node & slots_ - 1) * rows_ * static_cast<int>(L::kNodeBytes / L::kRows);
  }
  __device__ Piece load(int i) const {
    if constexpr (kShared)
      if (depth_ >= settled_) return L::load(slot(depth_), i, rows_);
    return L::load(base_ + depth_ * L::kNodeBytes, i);
  }
  // The lowest node in shared memory goes to the workspace.
  __device__ void settle() {
#pragma unroll
    for (int i = 0; i < L::kPieces; i++)
      if (live<L>(i, rows_)) L::store(base_ + settled_ * L::kNodeBytes, i, L::load(slot(settled_), i, rows_));
    settled_++;
  }

  char* base_;
  char* shared_;
  int first_, rows_, depth_;
  int settled_ = 0, slots_ = 0;  // nodes [0, settled_) are in the workspace, at most slots_ more in shared memory
};

// The query rows of one block of one row of the batch, for one KV head.
struct QueryBlock {
  int token;    // first query token of the row
  int queries;  // of the row
  int packed;   // first packed row of the block; packed row r is token r / group, head r % group
  int rows;     // in use
  int head;     // first query head of the KV head
};

__device__ inline QueryBlock query_block(const Plan& plan, const Chunk& c, int group, int kv_head, int tile_rows) {
  const int token = plan.q_begin[c.row], queries = plan.q_begin[c.row + 1] - token, packed = c.block * tile_rows;
  return {token, queries, packed, min(tile_rows, queries * group - packed), kv_head * group};
}

// Adds the sink, divides, rounds and stores a thread's i-th piece.
template <class T, class L>
__device__ inline void finish_piece(const Args& a, const QueryBlock& q, int kv_head, int i, const Piece& piece) {
  const Params& p = a.p;
  const float v_scale = p.v_scale ? p.v_scale[p.scale_per_head ? kv_head : 0] : 1.f;
  const int packed = q.packed + L::row(i), group = a.group;
  const int64_t token = q.token + packed / group, head = q.head + packed % group;
  float m = piece.m, l = piece.l, scale = 1.f;
  if (p.sinks) {
    const float sink = p.sinks[head] * kLog2e, larger = fmaxf(m, sink);
    scale = exp2_diff(m, larger);
    l = l * scale + exp2_diff(sink, larger);
    m = larger;
  }
  // NaN in l is a NaN that was there to be seen: it stays.
  const bool none = l == 0;
  scale = none ? 0.f : scale * v_scale / l;
  const int dim = L::dim(i);
  if (dim < p.head_dim) {
    const uint2 rounded = {round_pair<T>(piece.o.x * scale, piece.o.y * scale),
                           round_pair<T>(piece.o.z * scale, piece.o.w * scale)};
    T* out = static_cast<T*>(p.out) + token * p.out_token + head * p.out_head + dim;
    if constexpr (L::kSecondPair == 2) {
      *reinterpret_cast<uint2*>(out) = rounded;
    } else {
      *reinterpret_cast<uint32_t*>(out) = rounded.x;
      *reinterpret_cast<uint32_t*>(out + L::kSecondPair) = rounded.y;
    }
  }
  if (p.lse && dim == 0) p.lse[token * p.lse_token + head * p.lse_head] = none ? -INFINITY : (m + log2f(l)) * kLn2;
}

// All of a thread's pieces.
template <class T, class L>
__device__ void finish(const Args& a, const QueryBlock& q, int kv_head, const Piece (&state)[L::kPieces]) {
#pragma unroll
  for (int i = 0; i < L::kPieces; i++)
    if (live<L>(i, q.rows)) finish_piece<T, L>(a, q, kv_head, i, state[i]);
}

}  // namespace radix::split_kv
