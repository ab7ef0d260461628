// What the scan left becomes a token and its log-probabilities: a block a row.
#pragma once

#include "gpu/few.h"
#include "gpu/row_scan.h"

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

__device__ inline bool is_above(float x, float min_p, float largest) {
  return min_p <= 0 || expf(x - largest) >= min_p;
}

// How filters of one row look at their words.
struct Filters {
  bool by_number, by_mass;
  int64_t top_k;
  float top_p, min_p;
  float largest;  // x
  double mass;    // of the row in units of its largest; where needed

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

// The best word (score, id) of s.best and of the row's ids at or before the border that min-p leaves.
template <bool kEdits>
__device__ RK_CALLED uint64_t best_among(Selection& s, const Row<kEdits>& row, const Draw& draw, float min_p,
                                         float largest, uint64_t border) {
  __syncthreads();
  visit_quads(row, nullptr, row.groups(), draw.first_id, [&](uint32_t id, const float(&x)[4]) {
    bool stays[4], any = false;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      stays[i] = x[i] > -INFINITY && order_word(x[i], id + i) >= border && is_above(x[i], min_p, largest);
      any |= stays[i];
    }
    if (!any) return;
    const PhiloxBlock words = draw.words(row.index, id / 4);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (!stays[i]) continue;
      const uint64_t leader = s.best;  // an old one will do
      if (leader && score_bound(x[i], kLog2e, words.word[i]) < bound_of_score(value_of(leader))) continue;
      const uint64_t word = order_word(x[i] + noise(words.word[i]), id + i);
      if (word > leader) atomicMax(&s.best, static_cast<unsigned long long>(word));
    }
  });
  __syncthreads();
  return s.best;
}

// What the scan says of a row: its largest edited logit (Best::largest) and, unless it is filtered, its best word.
struct Standing {
  float largest;
  uint64_t best;
};

// One copy, so that an exact score after the first costs no more instructions to be fetched.
__device__ RK_CALLED uint64_t score_word(const Draw& draw, int64_t b, float logit, uint32_t id) {
  return logit > -INFINITY ? order_word(draw.score(b, logit / draw.divisor(b), id), id) : 0;
}

// The best word (score, id) of the quads at `quad`, each asked for by 32 lanes.
template <bool kEdits>
__device__ uint64_t score_quad(const Row<kEdits>& row, const Draw& draw, uint32_t quad) {
  const uint32_t own = quad - draw.first_id / 4;
  const int owner = static_cast<int>(own % kLanes), i = threadIdx.x % 4;
  Quad mine[1];
  row.template load<1>(own / kLanes, mine);
  row.template edit<1>(own / kLanes, mine);
  Quad its;
#pragma unroll
  for (int k = 0; k < 4; k++) its.at[k] = shuffle_from(mine[0].at[k], owner);
  return score_word(draw, row.index, pick(its, i), quad * 4 + i);
}

// The best of the listed groups' scores and of `best`.
template <bool kEdits>
__device__ uint64_t score_groups(const Selection& s, const Row<kEdits>& row, const Draw& draw, int count, float floor,
                                 uint64_t best) {
  const float slope = draw.of_row(row.index).slope();
  for (int at = threadIdx.x / kLanes; at < count; at += kSelectParts) {
    Quad v[1];
    row.template load<1>(s.groups[at], v);
    row.template edit<1>(s.groups[at], v);
    const uint32_t quad = draw.first_id / 4 + static_cast<uint32_t>(s.groups[at] * kLanes + threadIdx.x % kLanes);
    const PhiloxBlock words = draw.words(row.index, quad);
    uint32_t wanted = 0;
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (!(score_bound(v[0].at[i], slope, words.word[i]) < floor)) wanted |= 1u << i;
#pragma unroll 1
    for (int i = 0; i < 4; i++) {
      if (!(wanted >> i & 1u)) continue;
      best = MaxWord()(best, score_word(draw, row.index, pick(v[0], i), quad * 4 + i));
    }
  }
  return reduce_block(best, MaxWord());
}

// Greedy rows.
__device__ inline Standing standing_of_blocks(const Best* blocks, int64_t count) {
  uint64_t best = 0;
  float largest = -INFINITY;
  for (int64_t i = threadIdx.x; i < count; i += kSelectThreads) {
    best = MaxWord()(best, blocks[i].word);
    largest = MaxOrNan()(largest, blocks[i].largest);
  }
  largest = reduce_block(largest, MaxOrNan());
  return {largest, reduce_block(best, MaxWord())};
}

// Unfiltered rows. 32 lanes share some of the parts and score the quad with the best bound. Where the bound of another
// quad reaches the best score its part is read again. That is rare: a bound passes its score by log(E / u), next to
// nothing unless u is close to 1.
template <bool kEdits>
__device__ Standing standing_of_parts(Selection& s, const Row<kEdits>& row, const Scratch& scratch, const Draw& draw) {
  const Best* parts = scratch.best + row.index * scratch.parts;
  const int share = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const int64_t first = share + int64_t{lane} * kSelectParts;
  Best mine{0, -INFINITY, -INFINITY};
#pragma unroll 1
  for (int64_t p = first; p < scratch.parts; p += kSelectThreads) {
    const Best other = parts[p];
    const uint64_t less = other.word < mine.word ? other.word : mine.word;
    mine.second = fmaxf(fmaxf(mine.second, other.second), value_of(less));  // NaN, which loses, of no word
    mine.word = MaxWord()(mine.word, other.word);
    mine.largest = MaxOrNan()(mine.largest, other.largest);
  }
  const uint64_t leader = best_of_part(mine.word);
  if (mine.word != leader) mine.second = fmaxf(mine.second, value_of(mine.word));
  mine = {leader, largest_of_part(mine.second), largest_of_part(mine.largest)};
  if (leader) mine.word = best_of_part(score_quad(row, draw, id_of(leader)));
  __shared__ Best best_of[kSelectParts];
  if (lane == 0) best_of[share] = mine;
  __syncthreads();
  mine = best_of[lane % kSelectParts];
  mine = {best_of_part(mine.word), largest_of_part(mine.second), largest_of_part(mine.largest)};
  const Standing standing{mine.largest, mine.word};
  const float floor = bound_of_score(value_of(mine.word));
  const bool whole = !(floor > -1e38f);  // logits so large that bounds overflow
  if (!isfinite(mine.largest) || (mine.second < floor && !whole)) return standing;
  clear_list(s);
  for (int64_t p = first; p < scratch.parts; p += kSelectThreads) {
    const Best part = parts[p];
    const bool scored = part.word == leader;
    if (!(part.second >= floor) && (scored || !(value_of(part.word) >= floor))) continue;
    const auto number = static_cast<int>(scratch.part_groups);
    const int at = atomicAdd(&s.count, number);
    for (int i = 0; i < number && at + i < kMostGroups; i++) s.groups[at + i] = static_cast<int>(p) * number + i;
  }
  __syncthreads();
  if (!whole && s.count <= kMostGroups) return {mine.largest, score_groups(s, row, draw, s.count, floor, mine.word)};
  if (threadIdx.x == 0) s.best = mine.word;
  return {mine.largest, best_among(s, row, draw, 0, 0, 0)};
}

// The draw from a filtered row of which more than a few ids may stay.
template <bool kEdits>
__device__ RK_CALLED int32_t draw_from_many(Selection& s, const Finish& k, const Row<kEdits>& row, const Filters& f) {
  const int64_t b = row.index, groups = k.scratch.groups;
  const Tops tops{k.scratch.of_row(k.scratch.edited, b).largest, groups, row.temperature};
  const Ruler ruler = ruler_of(tops, f.largest);
  const int deepest = f.cut_by_min_p() ? ruler.bin(f.least_kept()) : kBins - 1;
  if (!f.by_number || f.top_k <= kCapacity) {
    const bool by_mass = f.by_mass && !f.by_number;
    const uint64_t limit = f.by_number ? static_cast<uint64_t>(f.top_k)
                           : by_mass   ? limit_of_mass(f.top_p, f.mass * (1 + 1e-5) * 0x1p40)
                                       : UINT64_MAX;
    const int count =
        gather(s, row, tops, ruler, k.draw.first_id, by_mass ? Depth::mass : Depth::number, limit, deepest);
    const int kept = count > 0 ? count_kept(s, count, f, s.border >= deepest) : -1;
    if (kept > 0) return draw_listed(s, kept, k.draw, b);
  }
  const float range = 2 * kBins / ruler.scale;
  const Ruler wide = Ruler::of(f.largest, f.by_number ? range : fminf(range, 30.f));
  Sweep task{Sweep::Action::list, wide};
  if (f.by_number) task.low = find_border(s, row, k.draw.first_id, task, static_cast<uint64_t>(f.top_k));
  uint64_t border = task.low;
  if (f.by_mass) {
    task.by_mass = true;
    const uint64_t first = find_border(s, row, k.draw.first_id, task, 0, f.top_p);
    border = first > border ? first : border;
  }
  __syncthreads();
  if (threadIdx.x == 0) s.best = 0;
  return static_cast<int32_t>(id_of(best_among(s, row, k.draw, f.min_p, f.largest, border)));
}

template <bool kEdits>
__device__ int32_t draw_filtered(Selection& s, const Finish& k, const Row<kEdits>& row, const Filters& f) {
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
  return draw_from_many(s, k, row, f);
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
  if (kind == Kind::filtered)
    return {largest_of_row(scratch.of_row(scratch.edited, row.index).largest, scratch.groups), 0};
  if (kind == Kind::greedy) return standing_of_blocks(scratch.best + row.index * scratch.parts, scratch.tiles);
  return standing_of_parts(s, row, scratch, draw);
}

__device__ inline Filters filters_of(const Draw& draw, const Scratch& scratch, int64_t b, float largest) {
  const float temperature = draw.divisor(b);
  Filters f{
      draw.has_top_k(b), draw.has_top_p(b), draw.top_k[b], draw.top_p[b], draw.min_p[b], largest / temperature, 0};
  if (draw.needs_mass(b))
    f.mass = mass_of_row(scratch.of_row(scratch.edited, b), scratch.groups, largest, kLog2e / temperature);
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
  return draw_filtered(s, k, row, filters_of(draw, k.scratch, b, standing.largest));
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
    const int count = gather(s, row, tops, ruler, 0, Depth::number, static_cast<uint64_t>(k.top_n), kBins - 1);
    if (count >= k.top_n) return write_listed(s, k.top_n, logprob, values, ids);
  }
  const Ruler wide = Ruler::of(largest, 2 * kBins / ruler.scale);
  Sweep task{Sweep::Action::list, wide};
  task.masked = true;
  for (int64_t done = 0; done < k.top_n;) {
    const int64_t left = k.top_n - done;
    task.low = find_border(s, row, 0, task, static_cast<uint64_t>(left < kCapacity ? left : kCapacity));
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
