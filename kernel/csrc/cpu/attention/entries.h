// The entries of one ISA level that lie in files of their own.
#pragma once

#include "cpu/attention/attention.h"
#include "cpu/attention/tiles.h"

namespace radix::cpu::RK_ISA {

void decode_part(const AttentionTask& task, const DecodeItem& item);
void decode_combine(const AttentionTask& task, const DecodeRow& row);
#if RK_HAS_TILES
void prefill_tile(const AttentionTask& task, const AttentionTile& tile);
#else
constexpr decltype(AttentionKernels::prefill_tile) prefill_tile = nullptr;
#endif
// Rows [begin, end) of T x H.
void merge_state(const rk_merge_state_args& args, int64_t begin, int64_t end);

}  // namespace radix::cpu::RK_ISA
