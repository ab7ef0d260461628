// What a cluster of decode_cluster_h16 has of the batch: a row, or of a long row a part.
//
//   rows       |------- row 0 -------|- row 1 -|--- row 2 ---|
//   clusters   |  0  |  1  |  2 |  3 |    4    |      5      |   6 and the others: nothing to do
//
// The tiles of a cluster's part are dealt out to its blocks. There is a cluster for each row, so none has two; the
// clusters left over go to the rows that are long enough to be cut, by their tiles.
#pragma once

#include "sm90/mla/run.cuh"

namespace radix::mla {

constexpr int kCluster = sm90::kPortableCluster;  // blocks
constexpr int kMostClusters = 32;                 // a lane looks after one
// To join the parts of a row costs about as much as four tiles of a block: up to there a cluster has all of the row,
// and beyond as many clusters as there are, but none with less than a tile for each block.
constexpr int kWholeTiles = 5 * kCluster, kMinPartTiles = kCluster;
static_assert(kWholeTiles >= kMinPartTiles, "a row that is cut has a tile at least for each part");

struct Share {
  Segment segment;    // the first query block of the row, with this block's tiles
  int parts, part;    // of the row; 0 parts: there is nothing to do
  int first_cluster;  // that has a part of the row
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

// Clusters for a row of so many tiles, the lane's own; the same for all warps. clusters: at least as many as rows.
__device__ inline int parts_of(int tiles, bool one_block, int clusters) {
  const int spare = clusters - __popc(__ballot_sync(~0u, tiles > 0));
  const bool long_row = tiles > kWholeTiles && one_block;
  const int total = __reduce_add_sync(~0u, long_row ? tiles : 0);
  if (!long_row) return min(tiles, 1);
  return min(1 + tiles * spare / total, tiles / kMinPartTiles);
}

// This block's share, with which no other warp helps. rank: of the block in its cluster.
__device__ inline Share find_share(const WgmmaArgs& a, int block_rows, int rank) {
  const int lane = threadIdx.x % 32, cluster = blockIdx.x / kCluster;
  int q_begin = 0, queries = 0, kv_len = 0;
  if (lane < a.p.batch) {
    q_begin = a.p.cu_q[lane], queries = a.p.cu_q[lane + 1] - q_begin, kv_len = max(a.p.kv_lens[lane], 0);
  }
  const int tiles = queries > 0 ? max(1, (kv_len + kTile - 1) / kTile) : 0;
  // Where a hint about the queries was too low, a row has several query blocks, and its cluster one after the other.
  const int parts = parts_of(tiles, queries * a.group <= block_rows, gridDim.x / kCluster);
  int end = parts;  // clusters of the rows up to this one
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(~0u, end, step);
    if (lane >= step) end += before;
  }
  const unsigned reached = __ballot_sync(~0u, end > cluster);
  if (reached == 0) return {};
  const int row = __ffs(reached) - 1;
  const auto of_row = [row](int x) { return __shfl_sync(~0u, x, row); };
  Share share{};
  share.parts = of_row(parts);
  share.first_cluster = of_row(end) - share.parts;
  share.part = cluster - share.first_cluster;
  const Range part = cut(of_row(tiles), share.parts, share.part), mine = cut(part.count, kCluster, rank);
  share.sources = min(kCluster, part.count);
  Segment& s = share.segment;
  s.row = row, s.q_begin = of_row(q_begin), s.queries = of_row(queries), s.kv_len = of_row(kv_len);
  s.first = part.first + mine.first, s.tiles = mine.count, s.count = part.count;
  return share;
}

}  // namespace radix::mla
