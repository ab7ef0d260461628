// Where everything lies in the workspace of a call.
#pragma once

#include "radix_kernels/experts.h"
#include "sm90/experts/grouped_persistent.cuh"

namespace radix::experts {

// Bytes before each part of the workspace, and of all.
struct Workspace {
  int64_t rows, sorted, offsets, places, tiles, act_scales, all;

  explicit Workspace(const rk_fused_experts_sizes& s) {
    const auto up = [](int64_t bytes) { return (bytes + 255) / 256 * 256; };
    const int64_t pairs = s.tokens * s.topk;
    rows = up(pairs * s.inter_size * 2);
    sorted = rows + up(pairs * s.hidden_size * 2);
    offsets = sorted + up(pairs * 4);
    places = offsets + up((s.named_experts + 1) * 4);
    tiles = places + up(pairs * 4);
    act_scales = tiles + up(TileList::bytes(pairs, static_cast<int>(s.named_experts)));
    all = act_scales + up((s.inter_size + 127) / 128 * (pairs + 3) * 4);
  }

  // What every sorted batch has.
  Scratch scratch(char* memory) const {
    return {memory, memory + rows, reinterpret_cast<int32_t*>(memory + sorted),
            reinterpret_cast<int32_t*>(memory + offsets)};
  }
};

}  // namespace radix::experts
