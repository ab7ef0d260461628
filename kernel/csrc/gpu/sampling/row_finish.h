// What the scan left becomes a token and its log-probabilities: a block a row.
#pragma once

#include "gpu/sampling/scores.h"

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

// How filters of one row look at their words.
struct Filters {
  bool by_number, by_mass;
  int64_t top_k;
  float top_p, min_p;
  float largest;  // x
  float top;      // the largest logit
  double mass;    // of the row in units of its largest; where top-p acts alone

  // `top` is the row's largest logit.
  __device__ static Filters of(const RowDraw& row, int64_t vocabulary, float top) {
    return {row.has_top_k(vocabulary), row.has_top_p(), row.top_k, row.top_p, row.min_p, top / row.divisor(), top, 0};
  }
  __device__ bool above_min_p(float x) const { return is_above(x, min_p, largest); }
  // Whether nothing below least_kept() matters. With top-k and top-p the mass is that of the first k: all are needed.
  __device__ bool cut_by_min_p() const { return min_p > 0 && !(by_number && by_mass); }
  __device__ float least_kept() const { return largest + logf(min_p) - 1e-3f; }
};

// The sum of the groups' masses in units of the row's largest logit.
__device__ inline double mass_of_row(const GroupStats& stats, int64_t groups, float largest, float slope) {
  double sum = 0;
  for (int64_t g = threadIdx.x; g < groups; g += kSelectThreads)
    sum += static_cast<double>(stats.mass[g] * fast_exp2((stats.largest[g] - largest) * slope));
  return reduce_block(sum, Sum());
}

// How many of the sorted words stay; -1 when the list ends before that is known.
template <int kMost = kCapacity>
__device__ int count_kept(const Selection& s, int count, const Filters& f, bool complete) {
  constexpr int kEach = kMost / kSelectThreads;
  const int64_t end = f.by_number && f.top_k < count ? f.top_k : count;
  double weight[kEach], sum = 0, all;
#pragma unroll
  for (int i = 0; i < kEach; i++) {
    const int at = threadIdx.x * kEach + i;
    weight[i] = at < end ? static_cast<double>(expf(value_of(s.words[at]) - f.largest)) : 0;
    sum += weight[i];
  }
  double before = sum_before(sum, &all);
  const double limit = static_cast<double>(f.top_p) * (f.by_number ? all : f.mass);
  int kept = 0;
#pragma unroll
  for (int i = 0; i < kEach; i++) {
    const int at = threadIdx.x * kEach + i;
    const bool stays = (!f.by_mass || before < limit) && f.above_min_p(at < end ? value_of(s.words[at]) : -INFINITY);
    if (at < end && (at == 0 || stays)) kept++;
    before += weight[i];
  }
  kept = reduce_block(kept, Sum());
  const bool known = f.by_number || complete || kept < count || (f.by_mass && all >= limit);
  return known ? kept : -1;
}

__device__ inline int32_t draw_listed(const Selection& s, int kept, const Draw& draw, int64_t b) {
  uint64_t best = 0;
  for (int i = threadIdx.x; i < kept; i += kSelectThreads) {
    const uint32_t id = id_of(s.words[i]);
    const uint64_t word = order_word(draw.score(b, value_of(s.words[i]), id), id);
    best = word > best ? word : best;
  }
  return static_cast<int32_t>(id_of(reduce_block(best, MaxWord())));
}

// ------------------------------------------------------------------ a draw by proposals

// Of a row's groups those whose largest stands at or before a border. A row with more of them than there is room for
// has all.
__device__ inline Groups groups_until(Selection& s, const GroupStats& stats, int64_t groups, const Eligible& until) {
  clear_list(s);
  for (int64_t g = threadIdx.x; g < groups; g += kSelectThreads) {
    if (!(stats.largest[g] >= until.low)) continue;
    const int at = atomicAdd(&s.count, 1);
    if (at < kMostGroups) s.groups[at] = static_cast<int32_t>(g);
  }
  __syncthreads();
  return s.count > kMostGroups ? Groups{nullptr, groups} : Groups{s.groups, s.count};
}

// What the groups say of the mass at or before a border: it has that of their largest, and none of groups without.
struct MassBounds {
  double least, most;
};

__device__ inline MassBounds bounds_of_mass(const GroupStats& stats, int64_t groups, float top, float temperature,
                                            const Eligible& until) {
  const float slope = kLog2e / temperature;
  double least = 0, most = 0;
  for (int64_t g = threadIdx.x; g < groups; g += kSelectThreads) {
    const float largest = stats.largest[g];
    if (!(largest >= until.low)) continue;
    const float weight = fast_exp2((largest - top) * slope);
    if (largest >= until.high) least += static_cast<double>(weight);
    most += static_cast<double>(stats.mass[g] * weight);
  }
  return {reduce_block(least, Sum()) * (1 - 1e-5), reduce_block(most, Sum()) * (1 + 1e-5)};
}

// The edited logit of an id.
template <bool kEdits>
__device__ float logit_of(const Row<kEdits>& row, uint32_t id, uint32_t first_id) {
  const auto own = static_cast<int>(id - first_id);
  Quad v[1];
  row.template load<1>(own / kGroup, v);
  row.template edit<1>(own / kGroup, v);
  return shuffle_from(pick(v[0], own % 4), own / 4 % kLanes);
}

// The least logit whose quotient reaches x; `near` is one whose quotient is about that.
__device__ inline float least_logit(float x, float temperature, float near) {
  const auto reaches = [&](uint32_t key) { return value_of(key) / temperature >= x; };
  constexpr uint32_t kStep = 16;
  uint32_t low = order_key(-INFINITY), high = order_key(INFINITY);
  const uint32_t key = order_key(near);
  if (key > low + kStep && !reaches(key - kStep)) low = key - kStep;
  if (key < high - kStep && reaches(key + kStep)) high = key + kStep;
  while (high - low > 1) {
    const uint32_t middle = low + (high - low) / 2;
    (reaches(middle) ? high : low) = middle;
  }
  return value_of(high);
}

// Those at or before a border, a word (x, id), that min-p leaves. `near`: a logit about there.
__device__ inline Eligible eligible_until(uint64_t border, const Filters& f, float temperature, float near) {
  Eligible e;
  e.min_p = f.min_p;
  e.largest = f.largest;
  e.temperature = temperature;
  if (border == 0) return e;
  e.last = id_of(border);
  e.low = least_logit(value_of(border), temperature, near);
  e.high = least_logit(value_of(static_cast<uint32_t>(border >> 32) + 1), temperature, near);
  return e;
}

// The mass of the groups' ids at or before the border of `given`, in units of the row's largest. Integers of 2^-40
// are added: in any order the same.
template <bool kEdits>
__device__ RK_CALLED double mass_before(const Row<kEdits>& row, const Groups& groups, uint32_t first_id, float top,
                                        const Eligible& given) {
  const Eligible eligible = given;  // in registers
  const float slope = kLog2e / row.temperature;
  uint64_t mass = 0;
  visit_logits(row, groups, first_id, [&](uint32_t id, const float(&v)[4]) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (eligible.before(v[i], id + i)) sum += fast_exp2((v[i] - top) * slope);
    mass += static_cast<uint64_t>(sum * 0x1p40f);
  });
  return static_cast<double>(reduce_block(mass, Sum())) * 0x1p-40;
}

// The best word (score, id) of the eligible ids, if its score is not far below `score`, which none of them passes; else
// 0.
template <bool kEdits>
__device__ uint64_t best_near(Selection& s, const Scratch& scratch, const Row<kEdits>& row, const Draw& draw,
                              float score, const Eligible& eligible) {
  const float least = score - 2.5f, floor = bound_of_score(least);
  const int count = floor > -1e38f ? list_parts(s, scratch, row.index, floor) : kMostGroups + 1;
  if (count > kMostGroups) return 0;
  const uint64_t best = score_groups(s, row, draw, count, floor, 0, eligible);
  return best && value_of(best) >= least ? best : 0;
}

// The draw from the ids at or before the border that top-p and min-p leave. No border of top-p is looked for: the best
// score of all (`proposal`, from the scan, or 0) is that of those that stay if its id is one of them, as it is with a
// probability of top_p or more; and what is drawn next, if not, stands before it.
template <bool kEdits>
__device__ int32_t draw_by_proposals(Selection& s, const Finish& k, const Row<kEdits>& row, const Filters& f,
                                     const Tops& tops, uint64_t border, uint64_t proposal) {
  const uint32_t first_id = k.draw.first_id;
  const GroupStats stats = k.scratch.of_row(k.scratch.edited, row.index);
  const bool from_scan = proposal != 0;
  Groups groups{nullptr, tops.groups};
  Eligible eligible = eligible_until(border, f, row.temperature, value_of(border) * row.temperature);
  double limit = f.top_p * f.mass;
  if (f.by_number && f.by_mass) limit = f.top_p * mass_before(row, groups, first_id, f.top, eligible);
  for (;;) {
    if (proposal == 0) {
      __syncthreads();
      if (threadIdx.x == 0) s.best = 0;
      proposal = best_among(s, row, k.draw, eligible, groups);
      if (!f.by_mass || proposal == 0) return static_cast<int32_t>(id_of(proposal));
    }
    const uint32_t id = id_of(proposal);
    const float logit = logit_of(row, id, first_id), x = logit / row.temperature;
    eligible = eligible_until(order_word(x, id) + 1, f, row.temperature, logit);  // those before it
    bool known = false, stays = false;
    if (from_scan) {
      const MassBounds mass = bounds_of_mass(stats, tops.groups, f.top, row.temperature, eligible);
      const bool first = mass.most == 0;  // stays whatever the filters
      known = first || mass.least >= limit || mass.most < limit;
      stays = first || (mass.most < limit && f.above_min_p(x));
    }
    if (!known) {
      groups = groups_until(s, stats, tops.groups, eligible);
      const double before = mass_before(row, groups, first_id, f.top, eligible);
      stays = before == 0 || (before < limit && f.above_min_p(x));
    }
    if (stays) return static_cast<int32_t>(id);
    proposal = from_scan ? best_near(s, k.scratch, row, k.draw, value_of(proposal), eligible) : 0;
    if (from_scan && proposal == 0) groups = groups_until(s, stats, tops.groups, eligible);
  }
}

// The draw from a filtered row of which more than a few ids may stay. `proposal`: its best score, where top-p acts
// alone.
template <bool kEdits>
__device__ RK_CALLED int32_t draw_from_many(Selection& s, const Finish& k, const Row<kEdits>& row, const Filters& f,
                                            uint64_t proposal) {
  const Tops tops{k.scratch.of_row(k.scratch.edited, row.index).largest, k.scratch.groups, row.temperature};
  const bool by_mass_alone = f.by_mass && !f.by_number;
  uint64_t border = 0;
  if (!by_mass_alone) {
    const Ruler ruler = ruler_of(tops, f.largest);
    const int deepest = f.cut_by_min_p() ? ruler.bin(f.least_kept()) : kBins - 1;
    if (!f.by_number || f.top_k <= kCapacity) {
      const int number = f.by_number ? static_cast<int>(f.top_k) : INT32_MAX;
      const int count = gather(s, row, tops, ruler, k.draw.first_id, number, deepest);
      const int kept = count > 0 ? count_kept(s, count, f, s.border >= deepest) : -1;
      if (kept > 0) return draw_listed(s, kept, k.draw, row.index);
    }
    const Sweep task{Sweep::Action::list, Ruler::of(f.largest, 2 * kBins / ruler.scale)};
    if (f.by_number) border = find_border(s, row, k.draw.first_id, task, static_cast<int>(f.top_k));
  }
  return draw_by_proposals(s, k, row, f, tops, border, proposal);
}

template <bool kEdits>
__device__ int32_t draw_filtered(Selection& s, const Finish& k, const Row<kEdits>& row, const Filters& f,
                                 uint64_t proposal) {
  const bool few_by_number = f.by_number && f.top_k <= kFewWanted;
  if (few_by_number || (f.cut_by_min_p() && !f.by_mass)) {
    const TopsHere tops({k.scratch.of_row(k.scratch.edited, row.index).largest, k.scratch.groups, row.temperature});
    if (tops.fits()) {
      float border = few_by_number ? tops.border(f.largest, static_cast<int>(f.top_k)) : -FLT_MAX;
      if (f.cut_by_min_p()) border = fmaxf(border, f.least_kept());
      const int count = list_from(s, row, tops, k.draw.first_id, border);
      if (count > 0) return draw_listed(s, count_kept<kFew>(s, count, f, true), k.draw, row.index);
    }
  }
  return draw_from_many(s, k, row, f, proposal);
}

// The word of the largest logit, for a temperature so small that the row turns out to be greedy.
template <bool kEdits>
__device__ uint64_t first_largest(Selection& s, const Row<kEdits>& row, float largest, uint32_t first_id) {
  sweep(s, row, first_id, {Sweep::Action::extent, Ruler::of(largest, 1.f)});
  return s.most;
}

__device__ inline float largest_of_row(const float* largest, int64_t groups) {
  float mine = -INFINITY;
  for (int64_t g = threadIdx.x; g < groups; g += kSelectThreads) mine = MaxOrNan()(mine, largest[g]);
  return reduce_block(mine, MaxOrNan());
}

template <bool kEdits>
__device__ Standing standing_of(Selection& s, const Row<kEdits>& row, const Scratch& scratch, const Draw& draw,
                                Kind kind) {
  if (kind == Kind::greedy) return standing_of_greedy(scratch.best + row.index * scratch.parts, scratch.parts);
  const bool filtered = kind == Kind::filtered;
  float largest = 0;
  if (filtered) largest = largest_of_row(scratch.of_row(scratch.edited, row.index).largest, scratch.groups);
  if (filtered && !(scratch.proposes && draw.of_row(row.index).needs_mass(draw.vocabulary))) return {largest, 0};
  const Standing standing = standing_of_parts(s, row, scratch, draw);
  return {filtered ? largest : standing.largest, standing.best};
}

__device__ inline Filters filters_of(const Draw& draw, const Scratch& scratch, int64_t b, float largest) {
  Filters f = Filters::of(draw.of_row(b), draw.vocabulary, largest);
  if (f.by_mass && !f.by_number)
    f.mass = mass_of_row(scratch.of_row(scratch.edited, b), scratch.groups, largest, kLog2e / draw.divisor(b));
  return f;
}

template <bool kEdits>
__device__ int32_t choose(Selection& s, const Finish& k, int64_t b) {
  const Draw& draw = k.draw;
  const Kind kind = draw.kind(b);
  const float temperature = draw.divisor(b);
  Row<kEdits> row(k.logits, b, temperature, k.edits);
  const Standing standing = standing_of(s, row, k.scratch, draw, kind);
  if (!isfinite(standing.largest)) return -1;
  if (kind != Kind::greedy && !isfinite(standing.largest / temperature)) {
    row.temperature = 1;  // as given
    return static_cast<int32_t>(id_of(first_largest(s, row, standing.largest, draw.first_id)));
  }
  if (kind != Kind::filtered) return static_cast<int32_t>(id_of(standing.best));
  return draw_filtered(s, k, row, filters_of(draw, k.scratch, b, standing.largest), standing.best);
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
__device__ RK_CALLED void write_many(Selection& s, const Finish& k, const Row<false>& row, float largest,
                                     const Tops& tops, const Logprob& logprob) {
  float* values = k.top_logprobs + row.index * k.top_n;
  int32_t* ids = k.top_ids + row.index * k.top_n;
  const Ruler ruler = ruler_of(tops, largest);
  if (k.top_n <= kCapacity) {
    const int count = gather(s, row, tops, ruler, 0, static_cast<int>(k.top_n), kBins - 1);
    if (count >= k.top_n) return write_listed(s, k.top_n, logprob, values, ids);
  }
  const Ruler wide = Ruler::of(largest, 2 * kBins / ruler.scale);
  Sweep task{Sweep::Action::list, wide};
  task.masked = true;
  for (int64_t done = 0; done < k.top_n;) {
    const int64_t left = k.top_n - done;
    task.low = find_border(s, row, 0, task, static_cast<int>(left < kCapacity ? left : kCapacity));
    sweep(s, row, 0, task);
    const int count = s.count;
    if (count == 0) return;
    sort_words(s, count);
    write_listed(s, count, logprob, values + done, ids + done);
    done += count;
    if (task.low == 0) return;
    task.high = task.low - 1;
    task.low = 0;
  }
}

// Largest of a row and its mass in units of that, by one look at the groups.
struct Totals {
  float largest;
  double mass;
};

__device__ inline Totals totals_of(const GroupStats& stats, int64_t groups) {
  float top = -INFINITY;
  double mass = 0;
  for (int64_t g = threadIdx.x; g < groups; g += kSelectThreads) {
    const float other = stats.largest[g], more = stats.mass[g];
    const float larger = MaxOrNan()(top, other);
    if (other > -INFINITY)
      mass = mass * fast_exp2((top - larger) * kLog2e) + more * fast_exp2((other - larger) * kLog2e);
    top = larger;
  }
  const float largest = reduce_block(top, MaxOrNan());
  if (top > -INFINITY) mass *= fast_exp2((top - largest) * kLog2e);
  return {largest, reduce_block(mass, Sum())};
}

__device__ inline void write_logprobs(Selection& s, const Finish& k, int64_t b, int32_t id) {
  const Row<false> row(k.logits, b, 1.f, k.edits);
  const GroupStats stats = k.scratch.of_row(k.scratch.given, b);
  const Tops tops{stats.largest, k.scratch.groups, 1.f};
  const TopsHere here(tops);
  const float own = threadIdx.x == 0 && id >= 0 && id < row.columns ? row.data[id] : NAN;
  const Totals totals = totals_of(stats, k.scratch.groups);
  const float largest = totals.largest;
  const double log_sum = log(totals.mass);
  const auto logprob = [&](float x) {
    return static_cast<float>(static_cast<double>(x) - static_cast<double>(largest) - log_sum);
  };
  if (threadIdx.x == 0) k.logprob[b] = logprob(own);
  if (k.top_n == 0) return;
  if (isnan(largest)) {
    for (int64_t i = threadIdx.x; i < k.top_n; i += kSelectThreads) {
      k.top_logprobs[b * k.top_n + i] = NAN;
      k.top_ids[b * k.top_n + i] = -1;
    }
    return;
  }
  const int wanted = k.top_n <= kFewWanted ? static_cast<int>(k.top_n) : 0;
  if (wanted && here.fits()) {
    const int count = list_from(s, row, here, 0, here.border(largest, wanted));
    if (count >= wanted) return write_listed(s, wanted, logprob, k.top_logprobs + b * wanted, k.top_ids + b * wanted);
  }
  write_many(s, k, row, largest, tops, logprob);
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
