// What a cluster of decode_cluster_h16 has of the batch: a query block of a row, or of a long row a part.
//
//   rows       |------- row 0 -------|- row 1 -|--- row 2 ---|
//   clusters   |  0  |  1  |  2 |  3 |    4    |      5      |   6 and the others: nothing to do
//
// The tiles of a cluster's part are dealt out to its blocks. There is a cluster for each query block, so none has two;
// the clusters left over go to the rows that are long enough to be cut, by their tiles. Of a row with two query blocks
// the parts of the first stand before those of the second.
#pragma once

#include "sm90/mla/run.cuh"

namespace radix::mla {

// To join the parts of a row costs about as much as four tiles of a block: up to five a cluster has all of the row, and
// beyond as many clusters as there are, but none with less than a tile for each block.
constexpr int kWholeTilesOfBlock = 5, kMinPartTilesOfBlock = 1;
constexpr int kMostParts = 32;  // a lane looks after one (last_arrival.cuh)

struct Share {
  Segment segment;    // the cluster's first query block, with this block's tiles
  int parts, part;    // of the row; 0 parts: there is nothing to do
  int first_cluster;  // that has a part of the query block
  int sources;        // blocks of the cluster that have tiles: the first ones
};

// Piece `at` of `count` tiles in `pieces` pieces, of which the first are the longer ones.
struct Range {
  int first, count;
};
__device__ inline Range cut(int count, int pieces, int at) {
  const int each = count / pieces, rest = count - each * pieces;
  return {at * each + min(at, rest), each + (at < rest)};
}

// Query blocks of a row that have clusters of their own. Where the hint about the queries was too low a row has more,
// and a cluster works on every so many-th of them, one after the other.
__host__ __device__ inline int query_blocks_of(const attention::Params& p, int block_rows) {
  return (p.heads * static_cast<int>(p.max_seqlen_q) + block_rows - 1) / block_rows;
}

// The rows of the batch as a warp has them, kEach a lane: rows kEach * lane, ... Each warp computes the same.
template <int kCluster, int kEach>
struct LaneRows {
  int q_begin[kEach], queries[kEach], kv_len[kEach], tiles[kEach];
  int blocks[kEach];  // query blocks with clusters of their own; 0 without queries
  int parts[kEach];   // clusters of each
  int end[kEach];     // clusters of the rows up to this one

  // clusters: at least as many as query blocks.
  __device__ LaneRows(const WgmmaArgs& a, int block_rows, int clusters) {
    const int first = threadIdx.x % 32 * kEach;
#pragma unroll
    for (int e = 0; e < kEach; e++) {
      q_begin[e] = queries[e] = kv_len[e] = 0;
      if (first + e < a.p.batch) {
        q_begin[e] = a.p.cu_q[first + e], queries[e] = a.p.cu_q[first + e + 1] - q_begin[e];
        kv_len[e] = max(a.p.kv_lens[first + e], 0);
      }
    }
    const int query_blocks = query_blocks_of(a.p, block_rows);
    int spare = clusters, long_tiles = 0;
    bool is_long[kEach];
#pragma unroll
    for (int e = 0; e < kEach; e++) {
      const int needed = queries[e] > 0 ? (queries[e] * a.group + block_rows - 1) / block_rows : 0;
      tiles[e] = max(1, (kv_len[e] + kTile - 1) / kTile);
      blocks[e] = min(needed, query_blocks);
      spare -= __reduce_add_sync(~0u, blocks[e]);
      // A cluster leaves one query block in the workspace, so it has no more of a row that is cut.
      is_long[e] = tiles[e] > kWholeTilesOfBlock * kCluster && needed <= query_blocks;
      if (is_long[e]) long_tiles += tiles[e] * blocks[e];
    }
    long_tiles = __reduce_add_sync(~0u, long_tiles);
    int sum = 0;
#pragma unroll
    for (int e = 0; e < kEach; e++) {
      parts[e] = 1;
      if (is_long[e] && blocks[e] > 0)
        parts[e] =
            min(min(1 + tiles[e] * spare / long_tiles, tiles[e] / (kMinPartTilesOfBlock * kCluster)), kMostParts);
      end[e] = sum += parts[e] * blocks[e];
    }
    int before = sum;
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, before, step);
      if (threadIdx.x % 32 >= step) before += other;
    }
#pragma unroll
    for (int e = 0; e < kEach; e++) end[e] += before - sum;
  }
};

// This block's share, with which no other warp helps. rank: of the block in its cluster.
template <int kCluster, int kEach>
__device__ Share find_share(const WgmmaArgs& a, int block_rows, int rank) {
  const int cluster = blockIdx.x / kCluster;
  const LaneRows<kCluster, kEach> rows(a, block_rows, gridDim.x / kCluster);
  const unsigned reached = __ballot_sync(~0u, rows.end[kEach - 1] > cluster);
  if (reached == 0) return {};
  const int lane = __ffs(reached) - 1;
  int at = 0;  // of that lane's rows
#pragma unroll
  for (int e = 0; e + 1 < kEach; e++) at += __shfl_sync(~0u, rows.end[e], lane) <= cluster;
  const auto of_row = [lane, at](const int(&x)[kEach]) {
    int value = x[0];
#pragma unroll
    for (int e = 1; e < kEach; e++)
      if (at == e) value = x[e];
    return __shfl_sync(~0u, value, lane);
  };
  Share share{};
  share.parts = of_row(rows.parts);
  const int first = of_row(rows.end) - share.parts * of_row(rows.blocks), block = (cluster - first) / share.parts;
  share.first_cluster = first + block * share.parts;
  share.part = cluster - share.first_cluster;
  const Range part = cut(of_row(rows.tiles), share.parts, share.part), mine = cut(part.count, kCluster, rank);
  share.sources = min(kCluster, part.count);
  Segment& s = share.segment;
  s.row = lane * kEach + at, s.q_begin = of_row(rows.q_begin), s.queries = of_row(rows.queries);
  s.kv_len = of_row(rows.kv_len), s.packed = block * block_rows;
  s.first = part.first + mine.first, s.tiles = mine.count, s.count = part.count;
  return share;
}

}  // namespace radix::mla
