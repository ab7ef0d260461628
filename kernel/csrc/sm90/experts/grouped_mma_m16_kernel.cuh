// Fused experts for up to 16 tokens, on mma.sync. Bound by bytes: each named expert is read once, in two launches.
//
//   up      act[pair] = silu(gate) * up. An item is 8 gate rows and their 8 up rows of one expert
//   down    out[token] = sum over its experts of weight * W2[e] @ act[pair]. An item is 8 rows of every named
//           expert, so the sum over experts stays in registers and nothing is added up between blocks
//
// A block takes a run of items one after another; its 8 warps share k in units of 128 bytes a row. A unit comes by
// cp.async into the warp's own ring of kDepth units; a lane reads back what it copied itself, so a weight passes no
// barrier, and the ring runs on from item to item. A sum over k may take its products in any order as long
// as both operands agree: the lane's 16 contiguous bytes are the operands of two mma steps as they come from memory.
// Lane 4 g + t reads byte 16 t of row g (the weight: the mma's columns) and of tokens g, g + 8 (the mma's rows, from
// L1).
//
// The second launch starts while the first runs (pdl.cuh): it finds the experts and fills its rings before it waits.
//
// Shared memory: rings of units, kDepth x 1 or 2 KiB a warp (dynamic); the experts and pairs of the batch
// (ChosenExperts, 15 KiB) and the warps' sums (Parts), both static. Two blocks a multiprocessor.
#pragma once

#include "gpu/device/element.h"
#include "sm90/common/limits.cuh"
#include "sm90/common/pdl.cuh"
#include "sm90/experts/grouped_mma_m16_routing.cuh"
#include "sm90/experts/grouped_mma_m16_units.cuh"

namespace radix::experts {

struct GroupedMmaM16Params {
  Routing routing;
  const char *x, *weight;                 // up: the tokens; down: act, a row a pair
  int64_t x_step, expert_step, row_step;  // bytes
  int n, k_bytes;                         // result columns; bytes of a weight row (a multiple of 16)
  Scales scales;
  char* out;
  int64_t out_step;  // elements
};

// Sums of the warps of a block, [warp][group][accumulator][lane]; two sets, so that one barrier an item is enough.
template <int kGroups, int kHalves>
struct Parts {
  float at[2][kMmaM16Warps][kGroups][2 * kHalves][32];

  __device__ void write(int set, int group, const float (&sum)[4]) {
#pragma unroll
    for (int j = 0; j < 2 * kHalves; j++) at[set][threadIdx.x / 32][group][j][threadIdx.x % 32] = sum[j];
  }
  // Column c (0 .. 7) of a token, in the order of the warps.
  __device__ float total(int set, int group, int token, int c) const {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kMmaM16Warps; w++) sum += at[set][w][group][token / 8 * 2 + c % 2][token % 8 * 4 + c / 2];
    return sum;
  }
};

// The items of this block.
struct Run {
  int begin, end;
  __device__ explicit Run(int items)
      : begin(static_cast<int>(int64_t{items} * blockIdx.x / gridDim.x)),
        end(static_cast<int>(int64_t{items} * (blockIdx.x + 1) / gridDim.x)) {}
};

// What one lane has of x for a unit: of tokens g and g + 8.
template <class T, class W>
struct Tokens {
  Pieces<T, W> low, high;
};

template <class T, class W, int kHalves, int kDepth>
__global__ void __launch_bounds__(kMmaM16Threads, 2)
    grouped_mma_m16_up_kernel(const __grid_constant__ GroupedMmaM16Params p) {
  static_assert(kHalves == 1 || kHalves == 2, "8 or 16 tokens are the rows of mma.m16n8k16");
  static_assert(sm90::shared_fits(UnitRing<2, kDepth>::kBytes + sizeof(ChosenExperts) + sizeof(Parts<2, kHalves>), 2));
  extern __shared__ uint4 memory[];
  __shared__ ChosenExperts chosen;
  __shared__ Parts<2, kHalves> parts;
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  chosen.clear();
  sm90::pdl_wait();
  sm90::pdl_trigger();  // after the wait: what came before this kernel has ended when the next one starts
  chosen.find(p.routing);

  const int groups = (p.n + 7) / 8;
  const Run run(chosen.count * groups);
  if (run.begin == run.end) return;
  const int steps = (p.k_bytes + kMmaM16Warps * kUnitBytes - 1) / (kMmaM16Warps * kUnitBytes);
  const int first = warp * kUnitBytes + t * 16;
  const int64_t up_rows = p.n * p.row_step;
  UnitRing<2, kDepth> ring(memory);
  int ahead = run.begin, ahead_step = 0;
  const char* ahead_row;  // null past the last row
  const auto enter = [&] {
    const int row = ahead % groups * 8 + g;
    ahead_row = ahead < run.end && row < p.n
                    ? p.weight + chosen.expert[ahead / groups] * p.expert_step + row * p.row_step
                    : nullptr;
  };
  const auto fetch = [&] {
    if (ahead < run.end) {
      const int at = first + ahead_step * kMmaM16Warps * kUnitBytes;
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const bool there = ahead_row && at + h * 64 < p.k_bytes;
        const char* from = there ? ahead_row + at + h * 64 : p.weight;
        ring.copy(0, h, from, there);
        ring.copy(1, h, from + (there ? up_rows : 0), there);
      }
      if (++ahead_step == steps) {
        ahead_step = 0;
        ahead++;
        enter();
      }
    }
    ring.next();
  };
  enter();
  for (int i = 0; i < kDepth; i++) fetch();

  const auto load = [&](int item, int step) {
    const int slot = item / groups, at = first + step * kMmaM16Warps * kUnitBytes;
    const auto row = [&](int token) { return chosen.pair[slot][token] >= 0 ? p.x + token * p.x_step : nullptr; };
    Tokens<T, W> x = {};
    x.low.load(row(g), at, p.k_bytes);
    if constexpr (kHalves > 1) x.high.load(row(g + 8), at, p.k_bytes);
    return x;
  };
  Tokens<T, W> x = load(run.begin, 0);
  for (int item = run.begin; item < run.end; item++) {
    const int slot = item / groups, group = item % groups, set = item & 1;
    const float* scale = p.scales.of(chosen.expert[slot], group * 8);
    const float* up_scale = p.scales.of(chosen.expert[slot], p.n + group * 8);
    float gate[4] = {}, up[4] = {};
    for (int step = 0; step < steps; step++) {
      Tokens<T, W> next = {};
      if (step + 1 < steps || item + 1 < run.end) next = step + 1 < steps ? load(item, step + 1) : load(item + 1, 0);
      const int unit = min(warp + step * kMmaM16Warps, p.scales.last_unit);
      ring.wait();
      multiply_unit<T, W>(gate, x.low, x.high, ring.read(0), p.scales.at(scale, unit));
      multiply_unit<T, W>(up, x.low, x.high, ring.read(1), p.scales.at(up_scale, unit));
      fetch();
      x = next;
    }
    parts.write(set, 0, gate);
    parts.write(set, 1, up);
    __syncthreads();
    const int token = threadIdx.x / 8, c = threadIdx.x % 8, column = group * 8 + c;
    if (token >= p.routing.tokens || column >= p.n) continue;
    const int pair = chosen.pair[slot][token];
    if (pair < 0) continue;
    const float z = parts.total(set, 0, token, c);
    gpu::from_float(z / (1.f + __expf(-z)) * parts.total(set, 1, token, c),
                    reinterpret_cast<T*>(p.out)[pair * p.out_step + column]);
  }
}

template <class T, class W, int kHalves, int kDepth>
__global__ void __launch_bounds__(kMmaM16Threads, 2)
    grouped_mma_m16_down_kernel(const __grid_constant__ GroupedMmaM16Params p) {
  static_assert(kHalves == 1 || kHalves == 2, "8 or 16 tokens are the rows of mma.m16n8k16");
  static_assert(sm90::shared_fits(UnitRing<1, kDepth>::kBytes + sizeof(ChosenExperts) + sizeof(Parts<1, kHalves>), 2));
  extern __shared__ uint4 memory[];
  __shared__ ChosenExperts chosen;
  __shared__ Parts<1, kHalves> parts;
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  chosen.clear();
  chosen.find(p.routing);  // written before the kernel ahead began

  const Run run((p.n + 7) / 8);
  // The units of all experts in a row; the warps take turns.
  const int units = (p.k_bytes + kUnitBytes - 1) / kUnitBytes;
  const int steps = (chosen.count * units + kMmaM16Warps - 1) / kMmaM16Warps;
  struct Place {
    int slot, unit;
    __device__ void next(int units) {
      for (unit += kMmaM16Warps; unit >= units; unit -= units) slot++;
    }
  };
  const Place begin = {warp / units, warp % units};
  UnitRing<1, kDepth> ring(memory);
  int ahead = run.begin, ahead_step = 0;
  Place ahead_place = begin;
  const auto fetch = [&] {
    if (ahead < run.end && steps > 0) {
      const int row = ahead * 8 + g, at = ahead_place.unit * kUnitBytes + t * 16;
      const bool any = row < p.n && ahead_place.slot < chosen.count;
      const char* from =
          any ? p.weight + chosen.expert[ahead_place.slot] * p.expert_step + row * p.row_step + at : p.weight;
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const bool there = any && at + h * 64 < p.k_bytes;
        ring.copy(0, h, there ? from + h * 64 : p.weight, there);
      }
      ahead_place.next(units);
      if (++ahead_step == steps) {
        ahead_step = 0;
        ahead_place = begin;
        ahead++;
      }
    }
    ring.next();
  };
  for (int i = 0; i < kDepth; i++) fetch();
  sm90::pdl_wait();
  sm90::pdl_trigger();

  const auto load = [&](const Place& place) {
    const int at = place.unit * kUnitBytes + t * 16;
    const auto row = [&](int token) {
      const int pair = place.slot < chosen.count ? chosen.pair[place.slot][token] : -1;
      return pair >= 0 ? p.x + pair * p.x_step : nullptr;
    };
    Tokens<T, W> x = {};
    x.low.load(row(g), at, p.k_bytes);
    if constexpr (kHalves > 1) x.high.load(row(g + 8), at, p.k_bytes);
    return x;
  };
  Tokens<T, W> x = load(begin);
  for (int item = run.begin; item < run.end; item++) {
    float sum[4] = {}, result[4] = {};
    Place place = begin;
    const auto finish_expert = [&] {
#pragma unroll
      for (int half = 0; half < kHalves; half++) {
        if (chosen.pair[place.slot][g + 8 * half] < 0) continue;  // x was zero, the weights need not be finite
        const float weight = chosen.weight[place.slot][g + 8 * half];
        result[2 * half] += weight * sum[2 * half];
        result[2 * half + 1] += weight * sum[2 * half + 1];
      }
#pragma unroll
      for (int j = 0; j < 4; j++) sum[j] = 0;
    };
    for (int step = 0; step < steps; step++) {
      Place after = place;
      after.next(units);
      const Tokens<T, W> next = load(step + 1 < steps ? after : begin);
      const bool here = place.slot < chosen.count;
      const float scale = p.scales.at(p.scales.of(chosen.expert[here ? place.slot : 0], item * 8), place.unit);
      ring.wait();
      multiply_unit<T, W>(sum, x.low, x.high, ring.read(0), scale);
      fetch();
      if (here && (after.slot != place.slot || step == steps - 1)) finish_expert();
      place = after;
      x = next;
    }
    parts.write(item & 1, 0, result);
    __syncthreads();
    const int token = threadIdx.x / 8, c = threadIdx.x % 8, column = item * 8 + c;
    if (token < p.routing.tokens && column < p.n)
      gpu::from_float(parts.total(item & 1, 0, token, c), reinterpret_cast<T*>(p.out)[token * p.out_step + column]);
  }
}

}  // namespace radix::experts
