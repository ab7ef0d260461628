// What surrounds the products of sorted pairs: the gathering of the tokens' rows by expert, the weighted sum.
#pragma once

#include "sm90/experts/problem.cuh"

namespace radix::experts {

// sorted [pairs]: indices into the flat ids, by expert; offsets [named + 1]: where each named expert's begin.
// rows[place] = x[sorted[place] / topk], [pairs, hidden]: in FP8 with row_scales, or for weights that are widened in
// the order of permuted_piece(). True: in two launches, the offsets in the first.
bool gather_rows(const Problem& problem, const Scratch& scratch);
// out[t] = sum over its pairs that are here of weight * part[pair], in their order, in float32; with places, of
// part[places[pair]].
void combine(const Problem& problem, const char* part, const int32_t* places = nullptr);

}  // namespace radix::experts
