// Checks that the sampling families share.
#pragma once

#include <utility>

#include "api/sampling.h"
#include "common/check.h"
#include "common/tensor.h"

namespace radix {

inline void check_logits(const Arg& logits) {
  logits.backend_device().dtype({DType::f32}).ndim(2).last_contiguous();
}

// One value for each row of logits.
inline void check_row_values(const Arg& x, const Arg& logits, DType type) {
  x.same_device(logits).dtype({type}).shape({logits.size(0)}, "rows of logits").contiguous();
}

inline void check_penalties(const Arg& logits, const Arg& counts, const Arg& slots, const Arg& repetition,
                            const Arg& frequency, const Arg& presence) {
  counts.backend_device().same_device(logits).dtype({DType::i32}).ndim(2).last_contiguous();
  counts.shape({-1, logits.size(1)}, "columns of logits");
  check_row_values(slots, logits, DType::i32);
  for (const Arg* x : {&repetition, &frequency, &presence}) check_row_values(*x, logits, DType::f32);
}

// A list of ids for each row: int32 [B, M].
inline void check_lists(const Arg& ids, const Arg& logits) {
  ids.same_device(logits).dtype({DType::i32}).ndim(2).shape({logits.size(0), -1}, "rows of logits").contiguous();
}

inline void check_workspace(const char* op, const Arg& logits, const rk_tensor* workspace) {
  const int64_t need = backend::sampling_workspace_size(logits.size(0), logits.size(1));
  if (need == 0) return;
  if (!workspace) fail(RK_INVALID, "%s: workspace is NULL, %lld bytes are needed", op, (long long)need);
  const Arg a(op, "workspace", workspace);
  a.same_device(logits).dtype({DType::u8}).ndim(1).contiguous().writable();
  if (a.size(0) < need)
    a.reject(RK_INVALID, "has %lld bytes, expected at least %lld", (long long)a.size(0), (long long)need);
  if (reinterpret_cast<uintptr_t>(data_ptr<char>(*a)) % 16 != 0) a.reject(RK_INVALID, "is not aligned to 16 bytes");
}

// All given, or none; what is missing is named.
inline bool given(const char* op, std::initializer_list<std::pair<const char*, const rk_tensor*>> group) {
  const auto& first = *group.begin();
  for (const auto& [name, tensor] : group)
    if (!tensor != !first.second)
      fail(RK_INVALID, "%s: %s is NULL, %s is not", op, tensor ? first.first : name, tensor ? name : first.first);
  return first.second != nullptr;
}

// Settings and edits bear the same names in every args struct.
template <class Args>
void check_settings(const char* op, const Arg& logits, const Args& a) {
  check_row_values(Arg(op, "temperature", a.temperature), logits, DType::f32);
  check_row_values(Arg(op, "top_k", a.top_k), logits, DType::i32);
  check_row_values(Arg(op, "top_p", a.top_p), logits, DType::f32);
  check_row_values(Arg(op, "min_p", a.min_p), logits, DType::f32);
  check_row_values(Arg(op, "seed", a.seed), logits, DType::i64);
  check_row_values(Arg(op, "position", a.position), logits, DType::i64);
}

template <class Args>
void check_edits(const char* op, const Arg& logits, const Args& a) {
  if (given(op, {{"bias_ids", a.bias_ids}, {"bias_values", a.bias_values}})) {
    const Arg ids(op, "bias_ids", a.bias_ids);
    check_lists(ids, logits);
    Arg(op, "bias_values", a.bias_values).same_device(logits).dtype({DType::f32}).same_shape(ids).contiguous();
  }
  if (given(op, {{"counts", a.counts},
                 {"slots", a.slots},
                 {"repetition", a.repetition},
                 {"frequency", a.frequency},
                 {"presence", a.presence}}))
    check_penalties(logits, Arg(op, "counts", a.counts), Arg(op, "slots", a.slots), Arg(op, "repetition", a.repetition),
                    Arg(op, "frequency", a.frequency), Arg(op, "presence", a.presence));
  if (given(op, {{"stop_ids", a.stop_ids}, {"min_position", a.min_position}})) {
    check_lists(Arg(op, "stop_ids", a.stop_ids), logits);
    check_row_values(Arg(op, "min_position", a.min_position), logits, DType::i64);
  }
  if (a.bitmask) {
    const Arg mask(op, "bitmask", a.bitmask);
    mask.same_device(logits).dtype({DType::i32}).ndim(2).last_contiguous();
    mask.shape({logits.size(0), (logits.size(1) + 31) / 32}, "rows of logits, a bit for each column");
  }
}

}  // namespace radix
