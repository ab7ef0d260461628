// What surrounds the products of sorted pairs: the sort, the gathering of the tokens' rows, the weighted sum.
#pragma once

#include "cuda/experts/launch.h"

namespace radix::experts {

// sorted [pairs]: indices into the flat ids, by expert; offsets [named + 1]: where each named expert's begin.
void sort_pairs(const Problem& problem, int32_t* sorted, int32_t* offsets);
// rows[place] = x[sorted[place] / topk], [pairs, hidden]; for FP8 weights in the order of permuted_piece().
void gather_rows(const Problem& problem, const int32_t* sorted, const int32_t* offsets, char* rows);
// out[t] = sum over its pairs that are here of weight * part[pair], in their order, in float32.
void combine(const Problem& problem, const char* part);

}  // namespace radix::experts
