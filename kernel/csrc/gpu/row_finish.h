// What the scan left becomes a token and its log-probabilities: a block a row.
#pragma once

#include "gpu/row_scan.h"
#include "gpu/select.h"

namespace radix::gpu {

struct Finish {
  Matrix logits;
  Draw draw;
  Edits edits;
  Scratch scratch;
  bool draws;          // else `ids` are given
  int32_t* out;        // [rows]
  const int32_t* ids;  // [rows]
  float *logprob, *top_logprobs;
  int32_t* top_ids;
  int64_t top_n;
};

// ------------------------------------------------------------------ the draw

// A row's filters, and what they are measured against.
struct Filters {
  RowDraw row;
  float largest;  // x
  double mass;    // of the row in units of its largest; where needed

  __device__ bool above_min_p(float x) const { return row.min_p <= 0 || expf(x - largest) >= row.min_p; }
};

// The sum of the groups' masses in units of the row's largest logit.
__device__ RK_CALLED double mass_of_row(const GroupStats& stats, int64_t groups, float largest, float slope) {
  double sum = 0;
  for (int64_t g = threadIdx.x; g < groups; g += kSelectThreads)
    sum += static_cast<double>(stats.mass[g] * fast_exp2((stats.largest[g] - largest) * slope));
  return reduce_block(sum, Sum());
}

// How many of the sorted words stay; -1 when the list ends before that is known.
__device__ RK_CALLED int count_kept(const Selection& s, int count, const Filters& f, bool complete) {
  constexpr int kEach = kCapacity / kSelectThreads;
  const int end = f.row.has_top_k && f.row.top_k < count ? f.row.top_k : count;
  double weight[kEach], sum = 0, all;
#pragma unroll
  for (int i = 0; i < kEach; i++) {
    const int at = threadIdx.x * kEach + i;
    weight[i] = at < end ? static_cast<double>(expf(value_of(s.words[at]) - f.largest)) : 0;
    sum += weight[i];
  }
  double before = sum_before(sum, &all);
  const double limit = static_cast<double>(f.row.top_p) * (f.row.has_top_k ? all : f.mass);
  int kept = 0;
#pragma unroll
  for (int i = 0; i < kEach; i++) {
    const int at = threadIdx.x * kEach + i;
    const bool stays =
        (!f.row.has_top_p || before < limit) && f.above_min_p(at < end ? value_of(s.words[at]) : -INFINITY);
    if (at < end && (at == 0 || stays)) kept++;
    before += weight[i];
  }
  kept = reduce_block(kept, Sum());
  const bool known = f.row.has_top_k || complete || kept < count || (f.row.has_top_p && all >= limit);
  return known ? kept : -1;
}

__device__ RK_CALLED int32_t draw_listed(const Selection& s, int kept, const RowDraw& r) {
  uint64_t best = 0;
  for (int i = threadIdx.x; i < kept; i += kSelectThreads) {
    const uint32_t id = id_of(s.words[i]);
    const uint64_t word = order_word(r.score(value_of(s.words[i]), id), id);
    best = word > best ? word : best;
  }
  return static_cast<int32_t>(id_of(reduce_block(best, MaxWord())));
}

// The draw among all ids at or before the border, over the whole row.
template <bool kEdits>
__device__ RK_CALLED int32_t draw_before(Selection& s, const Row<kEdits>& row, uint32_t first_id, const Filters& f,
                                         uint64_t border) {
  __syncthreads();
  if (threadIdx.x == 0) s.best = 0;
  __syncthreads();
  visit_quads(row, nullptr, row.groups(), first_id, [&](uint32_t id, const float(&x)[4]) {
    uint32_t stays = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const bool kept = x[i] > -INFINITY && order_word(x[i], id + i) >= border && f.above_min_p(x[i]);
      stays |= kept ? 1u << i : 0;
    }
    if (!stays) return;
    const PhiloxBlock words = f.row.words(id / 4);
    const uint64_t leader = s.best;  // an old one will do
    const float floor = leader ? bound_of_score(value_of(leader)) : -INFINITY;
    uint64_t mine = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (!(stays >> i & 1u) || score_bound(x[i], kLog2e, words.word[i]) < floor) continue;
      const uint64_t word = order_word(x[i] + noise(words.word[i]), id + i);
      mine = word > mine ? word : mine;
    }
    if (mine > leader) atomicMax(&s.best, static_cast<unsigned long long>(mine));
  });
  __syncthreads();
  return static_cast<int32_t>(id_of(s.best));
}

template <bool kEdits>
__device__ int32_t draw_filtered(Selection& s, const Row<kEdits>& row, const Filters& f, const Tops& tops,
                                 uint32_t first_id) {
  const RowDraw& r = f.row;
  const Ruler ruler = ruler_of(tops, f.largest);
  // With top-k and top-p the mass is that of the first k, so all of them are needed.
  const bool cut_by_min_p = r.min_p > 0 && !(r.has_top_k && r.has_top_p);
  const int deepest = cut_by_min_p ? ruler.bin(f.largest + logf(r.min_p) - 1e-3f) : kBins - 1;
  if (!r.has_top_k || r.top_k <= kCapacity) {
    const uint64_t limit = r.has_top_k      ? static_cast<uint64_t>(r.top_k)
                           : r.needs_mass() ? limit_of_mass(r.top_p, f.mass * (1 + 1e-5) * 0x1p40)
                                            : UINT64_MAX;
    const int count =
        gather(s, row, tops, ruler, first_id, r.needs_mass() ? Depth::mass : Depth::number, limit, deepest);
    const int kept = count > 0 ? count_kept(s, count, f, s.border >= deepest) : -1;
    if (kept > 0) return draw_listed(s, kept, r);
  }
  // Masses below 2^-40 are none, so a search by mass need not look deeper than 30.
  Sweep task{Sweep::Action::list, wide_ruler(ruler)};
  if (!r.has_top_k) task.ruler = Ruler::of(f.largest, fminf(kBins / task.ruler.scale, 30.f));
  uint64_t border = 0;
  for (const bool by_mass : {false, true}) {
    if (!(by_mass ? r.has_top_p : r.has_top_k)) continue;
    task.by_mass = by_mass;
    task.low = border;
    const uint64_t first =
        find_border(s, row, first_id, task, Cut{static_cast<uint64_t>(r.top_k), by_mass ? r.top_p : -1});
    border = first > border ? first : border;
  }
  return draw_before(s, row, first_id, f, border);
}

// The word of the largest logit, for a temperature so small that the row turns out to be greedy.
template <bool kEdits>
__device__ uint64_t first_largest(Selection& s, const Row<kEdits>& row, float largest, uint32_t first_id) {
  sweep(s, row, first_id, Sweep{Sweep::Action::extent, Ruler::of(largest, 1.f)});
  return s.most;
}

__device__ RK_CALLED float largest_of_row(const float* largest, int64_t groups) {
  float mine = -INFINITY;
  for (int64_t g = threadIdx.x; g < groups; g += kSelectThreads) mine = MaxOrNan()(mine, largest[g]);
  return reduce_block(mine, MaxOrNan());
}

// What the scan says of a row: its largest edited logit and, unless it is filtered, its best word.
struct Standing {
  float largest;
  uint64_t best;
};

__device__ inline Standing standing_of(const Scratch& scratch, Kind kind, int64_t b) {
  if (kind == Kind::filtered) return {largest_of_row(scratch.of_row(scratch.edited, b).largest, scratch.groups), 0};
  Standing mine{-INFINITY, 0};
  for (int64_t t = threadIdx.x; t < scratch.tiles; t += kSelectThreads) {
    const TileBest tile = scratch.best[b * scratch.tiles + t];
    mine.best = tile.word > mine.best ? tile.word : mine.best;
    mine.largest = MaxOrNan()(mine.largest, tile.largest);
  }
  return {reduce_block(mine.largest, MaxOrNan()), reduce_block(mine.best, MaxWord())};
}

__device__ inline Filters filters_of(const RowDraw& r, const Scratch& scratch, int64_t b, float largest) {
  Filters f{r, largest / r.temperature, 0};
  if (r.needs_mass())
    f.mass = mass_of_row(scratch.of_row(scratch.edited, b), scratch.groups, largest, kLog2e / r.temperature);
  return f;
}

template <bool kEdits>
__device__ int32_t choose(Selection& s, const Finish& k, int64_t b) {
  const RowDraw r = k.draw.row(b);
  const uint32_t first_id = k.draw.first_id;
  const Kind kind = r.kind();
  const Standing standing = standing_of(k.scratch, kind, b);
  if (!isfinite(standing.largest)) return -1;
  const bool greedy_after_all = kind != Kind::greedy && !isfinite(standing.largest / r.temperature);
  if (kind != Kind::filtered && !greedy_after_all) return static_cast<int32_t>(id_of(standing.best));
  const Row<kEdits> row(k.logits, b, greedy_after_all ? 1.f : r.temperature, k.edits);
  if (greedy_after_all) return static_cast<int32_t>(id_of(first_largest(s, row, standing.largest, first_id)));
  const Tops tops{k.scratch.of_row(k.scratch.edited, b).largest, k.scratch.groups, r.temperature};
  return draw_filtered(s, row, filters_of(r, k.scratch, b, standing.largest), tops, first_id);
}

// ------------------------------------------------------------------ log-probabilities

template <class Logprob>
__device__ void write_listed(const Selection& s, int64_t count, const Logprob& logprob, float* values, int32_t* ids) {
  for (int64_t i = threadIdx.x; i < count; i += kSelectThreads) {
    ids[i] = static_cast<int32_t>(id_of(s.words[i]));
    values[i] = logprob(value_of(s.words[i]));
  }
  __syncthreads();
}

// The top_n largest of the logits as they were given.
template <class Logprob>
__device__ void write_top(Selection& s, const Finish& k, const Row<false>& row, float largest, const GroupStats& stats,
                          const Logprob& logprob) {
  float* values = k.top_logprobs + row.index * k.top_n;
  int32_t* ids = k.top_ids + row.index * k.top_n;
  const Tops tops{stats.largest, k.scratch.groups, 1.f};
  int number = static_cast<int>(k.top_n < kCapacity ? k.top_n : kCapacity);
  int count = list_first(s, row, tops, largest, 0, number, true);
  for (int64_t done = 0;;) {
    if (count < number) number = count;
    write_listed(s, number, logprob, values + done, ids + done);
    done += number;
    if (done == k.top_n || number == 0) return;
    Sweep task{Sweep::Action::list, wide_ruler(ruler_of(tops, largest))};
    task.masked = true;
    task.high = s.words[number - 1] - 1;
    number = static_cast<int>(k.top_n - done < kCapacity ? k.top_n - done : kCapacity);
    count = search_first(s, row, 0, task, number);
  }
}

__device__ inline void write_logprobs(Selection& s, const Finish& k, int64_t b, int32_t id) {
  const Row<false> row(k.logits, b, 1.f, k.edits);
  const GroupStats stats = k.scratch.of_row(k.scratch.given, b);
  const float largest = largest_of_row(stats.largest, k.scratch.groups);
  const double log_sum = log(mass_of_row(stats, k.scratch.groups, largest, kLog2e));
  const auto logprob = [&](float x) {
    return static_cast<float>(static_cast<double>(x) - static_cast<double>(largest) - log_sum);
  };
  if (threadIdx.x == 0) k.logprob[b] = id < 0 || id >= row.columns ? NAN : logprob(row.data[id]);
  if (k.top_n == 0) return;
  if (isnan(largest)) {
    for (int64_t i = threadIdx.x; i < k.top_n; i += kSelectThreads) {
      k.top_logprobs[b * k.top_n + i] = NAN;
      k.top_ids[b * k.top_n + i] = -1;
    }
    return;
  }
  write_top(s, k, row, largest, stats, logprob);
}

template <bool kEdits>
__global__ void __launch_bounds__(kSelectThreads, 2) finish_kernel(const RK_PARAMETER Finish k) {
  __shared__ Selection s;
  wait_for_previous();
  const int64_t b = blockIdx.x;
  const int32_t id = k.draws ? choose<kEdits>(s, k, b) : k.ids[b];
  if (k.draws && threadIdx.x == 0) k.out[b] = id;
  if (k.logprob) write_logprobs(s, k, b, id);
}

}  // namespace radix::gpu
