// Sampling from shards: checks once for every backend, then the backend's kernel.
#include "api/sampling_shards.h"

#include "api/sampling_checks.h"

using namespace radix;
using backend::kMostCandidates;

rk_status rk_sampling_candidates(const rk_sampling_candidates_args* args, rk_stream stream) {
  return guard([&] {
    const char* op = "sampling_candidates";
    const auto a = read_args(op, args);
    const Arg logits(op, "logits", a.logits), records(op, "records", a.records);
    check_logits(logits);
    check_settings(op, logits, a);
    check_edits(op, logits, a);
    if (a.first_id < 0 || a.first_id % 4 != 0 || a.first_id + logits.size(1) > a.vocab_size || a.vocab_size > INT32_MAX)
      fail(RK_INVALID, "%s: first_id is %lld, expected a multiple of 4 with %lld ids from it in vocab_size %lld", op,
           (long long)a.first_id, (long long)logits.size(1), (long long)a.vocab_size);
    records.same_device(logits).dtype({DType::i64}).ndim(2).shape({logits.size(0), -1}, "rows of logits").contiguous();
    records.writable();
    const int64_t candidates = records.size(1) - RK_CANDIDATES_HEADER;
    if (candidates < 1 || candidates > kMostCandidates)
      records.reject(RK_INVALID, "has %lld candidates, expected 1 to %lld", (long long)candidates,
                     (long long)kMostCandidates);
    check_workspace(op, logits, a.workspace);
    if (logits.size(0) > 0) backend::sampling_candidates(a, stream);
  });
}

rk_status rk_sample_candidates(const rk_sample_candidates_args* args, rk_stream stream) {
  return guard([&] {
    const char* op = "sample_candidates";
    const auto a = read_args(op, args);
    const Arg records(op, "records", a.records), out(op, "out", a.out);
    out.backend_device().dtype({DType::i32}).ndim(1).contiguous().writable();
    check_settings(op, out, a);
    records.same_device(out).dtype({DType::i64}).ndim(3).shape({-1, out.size(0), -1}, "rows of out").contiguous();
    const int64_t shards = records.size(0), candidates = records.size(2) - RK_CANDIDATES_HEADER;
    if (shards < 1 || candidates < 1 || shards * candidates > kMostCandidates)
      records.reject(RK_INVALID, "has %lld x %lld candidates, expected 1 to %lld", (long long)shards,
                     (long long)candidates, (long long)kMostCandidates);
    if (out.size(0) > 0) backend::sample_candidates(a, stream);
  });
}
