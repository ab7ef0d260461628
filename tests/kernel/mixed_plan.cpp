// Plans of packed weights: of each line "rows k halves long_groups tile_bytes multiprocessors tokens" of the input.
#include "sm90/linear/mixed_plan.cuh"

#include <cstdio>

int main() {
  using namespace radix::linear;
  int rows, k, halves, long_groups, bytes, multiprocessors, tokens;
  while (std::scanf("%d %d %d %d %d %d %d", &rows, &k, &halves, &long_groups, &bytes, &multiprocessors, &tokens) == 7) {
    PlannedWeight w = {};
    w.rows = rows;
    w.k_tiles = ceil_div(k, 64);
    w.halves = halves != 0;
    w.long_groups = long_groups != 0;
    w.tile_bytes = bytes;
    w.multiprocessors = multiprocessors;
    const MixedPlan plan = mixed_plan(w, tokens);
    const int blocks = plan.row_blocks * plan.k_shares;
    std::printf("%d %d %d %d %d %d %d\n", takes_wgmma(w, tokens), plan.form.strips * 64, plan.form.tokens,
                plan.form.k_parts, plan.row_blocks, plan.k_shares, clusters_of(multiprocessors, blocks) * blocks);
  }
}
