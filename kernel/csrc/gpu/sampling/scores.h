// The best score of a row: over the parts that the scan has left, or over some of the row's groups and ids.
#pragma once

#include "gpu/sampling/leading_words.h"
#include "gpu/sampling/row_scan.h"

namespace radix::gpu {

__device__ inline bool is_above(float x, float min_p, float largest) {
  return min_p <= 0 || expf(x - largest) >= min_p;
}

// The ids of a row that may be drawn: those at or before a border that min-p leaves.
struct Eligible {
  float low = -INFINITY, high = -INFINITY;  // the least logits at or before the border: of ids up to `last`, of others
  uint32_t last = 0;
  float min_p = 0, largest = 0, temperature = 1;

  __device__ bool before(float logit, uint32_t id) const { return logit >= (id <= last ? low : high); }
  __device__ bool has(float logit, uint32_t id) const {
    return logit > -INFINITY && before(logit, id) && (min_p <= 0 || is_above(logit / temperature, min_p, largest));
  }
};

// The best word (score, id) of s.best and of the groups' eligible ids.
template <bool kEdits>
__device__ RK_CALLED uint64_t best_among(Selection& s, const Row<kEdits>& row, const Draw& draw, const Eligible& given,
                                         const Groups& groups) {
  const Eligible eligible = given;  // in registers
  const float slope = draw.of_row(row.index).slope();
  __syncthreads();
  visit_logits(row, groups, draw.first_id, [&](uint32_t id, const float(&v)[4]) {
    bool stays[4], any = false;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      stays[i] = eligible.has(v[i], id + i);
      any |= stays[i];
    }
    if (!any) return;
    const PhiloxBlock words = draw.words(row.index, id / 4);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (!stays[i]) continue;
      const uint64_t leader = s.best;  // an old one will do
      if (leader && score_bound(v[i], slope, words.word[i]) < bound_of_score(value_of(leader))) continue;
      const uint64_t word = order_word(v[i] / row.temperature + noise(words.word[i]), id + i);
      if (word > leader) atomicMax(&s.best, static_cast<unsigned long long>(word));
    }
  });
  __syncthreads();
  return s.best;
}

// What the scan says of a row: its largest edited logit (Best::largest) and its best word, 0 where it has left none.
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

// The best of the scores of the listed groups' eligible ids whose bounds reach the floor, and of `best`.
template <bool kEdits>
__device__ RK_CALLED uint64_t score_groups(const Selection& s, const Row<kEdits>& row, const Draw& draw, int count,
                                           float floor, uint64_t best, const Eligible& given) {
  const Eligible eligible = given;
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
      if (!(score_bound(v[0].at[i], slope, words.word[i]) < floor) && eligible.has(v[0].at[i], quad * 4 + i))
        wanted |= 1u << i;
#pragma unroll 1
    for (int i = 0; i < 4; i++) {
      if (!(wanted >> i & 1u)) continue;
      best = MaxWord()(best, score_word(draw, row.index, pick(v[0], i), quad * 4 + i));
    }
  }
  return reduce_block(best, MaxWord());
}

// Greedy rows.
__device__ inline Standing standing_of_greedy(const Best* parts, int64_t count) {
  uint64_t best = 0;
  float largest = -INFINITY;
  for (int64_t i = threadIdx.x; i < count; i += kSelectThreads) {
    best = MaxWord()(best, parts[i].word);
    largest = MaxOrNan()(largest, parts[i].largest);
  }
  largest = reduce_block(largest, MaxOrNan());
  return {largest, reduce_block(best, MaxWord())};
}

// Into s.groups those of the parts that have a bound from `floor` on; how many, perhaps more than there is room for.
__device__ inline int list_parts(Selection& s, const Scratch& scratch, int64_t b, float floor) {
  const Best* parts = scratch.best + b * scratch.parts;
  const auto number = static_cast<int>(scratch.part_groups);
  clear_list(s);
  for (int64_t p = threadIdx.x; p < scratch.parts; p += kSelectThreads) {
    if (!(parts[p].second >= floor) && !(value_of(parts[p].word) >= floor)) continue;
    const int at = atomicAdd(&s.count, number);
    for (int i = 0; i < number && at + i < kMostGroups; i++) s.groups[at + i] = static_cast<int>(p) * number + i;
  }
  __syncthreads();
  return s.count;
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
  const int count = list_parts(s, scratch, row.index, floor);
  if (!whole && count <= kMostGroups)
    return {mine.largest, score_groups(s, row, draw, count, floor, mine.word, Eligible())};
  if (threadIdx.x == 0) s.best = mine.word;
  return {mine.largest, best_among(s, row, draw, Eligible(), {nullptr, row.groups()})};
}

}  // namespace radix::gpu
