// Sampling family: checks once for every backend, then the backend's kernel.
#include "api/sampling.h"

#include "common/check.h"

using namespace radix;

namespace {

void check_logits(const Arg& logits) {
  logits.backend_device().dtype({DType::f32}).ndim(2).last_contiguous();
}

// One value for each row of logits.
void check_row_values(const Arg& x, const Arg& logits, DType type) {
  x.same_device(logits).dtype({type}).shape({logits.size(0)}, "rows of logits").contiguous();
}

void check_counts(const Arg& counts, const Arg& slots) {
  counts.backend_device().dtype({DType::i32}).ndim(2).last_contiguous().writable();
  slots.same_device(counts).dtype({DType::i32}).ndim(1).contiguous();
}

}  // namespace

rk_status rk_apply_penalties(const rk_apply_penalties_args* args, rk_stream stream) {
  return guard([&] {
    const char* op = "apply_penalties_inplace";
    const auto a = read_args(op, args);
    const Arg logits(op, "logits", a.logits), counts(op, "counts", a.counts), slots(op, "slots", a.slots);
    check_logits(logits);
    logits.writable();
    check_counts(counts, slots);
    counts.same_device(logits).shape({-1, logits.size(1)}, "columns of logits");
    check_row_values(slots, logits, DType::i32);
    check_row_values(Arg(op, "repetition", a.repetition), logits, DType::f32);
    check_row_values(Arg(op, "frequency", a.frequency), logits, DType::f32);
    check_row_values(Arg(op, "presence", a.presence), logits, DType::f32);
    if (logits.numel() > 0) backend::apply_penalties(a, stream);
  });
}

rk_status rk_count_tokens(const rk_count_tokens_args* args, rk_stream stream) {
  return guard([&] {
    const char* op = "count_tokens_inplace";
    const auto a = read_args(op, args);
    const Arg counts(op, "counts", a.counts), slots(op, "slots", a.slots), ids(op, "ids", a.ids);
    check_counts(counts, slots);
    ids.same_device(counts).dtype({DType::i32}).same_shape(slots).contiguous();
    if (ids.numel() > 0) backend::count_tokens(a, stream);
  });
}

rk_status rk_top_k_top_p_sampling(const rk_top_k_top_p_sampling_args* args, rk_stream stream) {
  return guard([&] {
    const char* op = "top_k_top_p_sampling";
    const auto a = read_args(op, args);
    const Arg logits(op, "logits", a.logits), out(op, "out", a.out);
    check_logits(logits);
    check_row_values(Arg(op, "temperature", a.temperature), logits, DType::f32);
    check_row_values(Arg(op, "top_k", a.top_k), logits, DType::i32);
    check_row_values(Arg(op, "top_p", a.top_p), logits, DType::f32);
    check_row_values(Arg(op, "min_p", a.min_p), logits, DType::f32);
    check_row_values(Arg(op, "seed", a.seed), logits, DType::i64);
    check_row_values(Arg(op, "position", a.position), logits, DType::i64);
    check_row_values(out, logits, DType::i32);
    out.writable();
    if (logits.size(0) > 0) backend::top_k_top_p_sampling(a, stream);
  });
}

rk_status rk_token_logprobs(const rk_token_logprobs_args* args, rk_stream stream) {
  return guard([&] {
    const char* op = "token_logprobs";
    const auto a = read_args(op, args);
    const Arg logits(op, "logits", a.logits), ids(op, "ids", a.ids), logprob(op, "logprob", a.logprob);
    const Arg top(op, "top_logprobs", a.top_logprobs), top_ids(op, "top_ids", a.top_ids);
    check_logits(logits);
    check_row_values(ids, logits, DType::i32);
    check_row_values(logprob, logits, DType::f32);
    top.same_device(logits).dtype({DType::f32}).ndim(2).contiguous();
    if (top.size(1) > logits.size(1))
      fail(RK_INVALID, "%s: top_n is %lld, expected 0 to %lld (columns of logits)", op, (long long)top.size(1),
           (long long)logits.size(1));
    top.shape({logits.size(0), -1}, "rows of logits, top_n");
    top_ids.same_device(logits).dtype({DType::i32}).same_shape(top).contiguous();
    if (logits.size(0) > 0) backend::token_logprobs(a, stream);
  });
}
