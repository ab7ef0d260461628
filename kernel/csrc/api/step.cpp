// Step family: checks once for every backend, then the backend's kernel.
#include "api/step.h"

#include "common/check.h"

using namespace radix;

namespace {

// One int32 (or other) value for each of `count` items.
void check_list(const Arg& list, const Arg& other, DType type, int64_t count, const char* why) {
  list.same_device(other).dtype({type}).shape({count}, why).contiguous();
}

void check_written(const Arg& list, const Arg& other, DType type, int64_t count, const char* why) {
  check_list(list, other, type, count, why);
  list.writable();
}

void check_columns(const Arg& columns, int64_t rows) {
  columns.dtype({DType::i32}).ndim(2).shape({rows, -1}, "what an entry or a token is made of").last_contiguous();
}

}  // namespace

rk_status rk_fill_step_tensors(const rk_fill_step_tensors_args* args, rk_stream stream) {
  return guard([&] {
    const char* op = "fill_step_tensors";
    const auto a = read_args(op, args);
    const Arg entries(op, "entries", a.entries), tokens(op, "tokens", a.tokens);
    const Arg samples(op, "sample_tokens", a.sample_tokens), next(op, "next_token", a.next_token);
    const Arg committed(op, "committed_len", a.committed_len), pages(op, "row_pages", a.row_pages);
    const Arg kv_lens(op, "kv_lens", a.kv_lens), ids(op, "input_ids", a.input_ids);
    const Arg positions(op, "positions", a.positions), slots(op, "slot_mapping", a.slot_mapping);
    const Arg table(op, "page_table", a.page_table), sampled(op, "sample_positions", a.sample_positions);
    if (a.page_size < 1) fail(RK_INVALID, "%s: page_size is %d, expected at least 1", op, a.page_size);
    check_columns(entries.backend_device(), 4);
    check_columns(tokens.same_device(entries), 4);
    const int64_t num_entries = entries.size(1), num_tokens = tokens.size(1);
    samples.same_device(entries).dtype({DType::i32}).ndim(1).contiguous();
    next.same_device(entries).dtype({DType::i32}).contiguous();
    committed.same_device(entries).dtype({DType::i32}).ndim(1).contiguous().writable();
    pages.same_device(entries).dtype({DType::i32}).ndim(2).contiguous();
    check_written(kv_lens, entries, DType::i32, num_entries, "entries");
    check_written(ids, entries, DType::i32, num_tokens, "tokens");
    check_written(positions, entries, DType::i32, num_tokens, "tokens");
    check_written(slots, entries, DType::i64, num_tokens, "tokens");
    check_written(sampled, entries, DType::i64, samples.size(0), "sample_tokens");
    table.same_device(entries).dtype({DType::i32}).ndim(2).shape({num_entries, -1}, "entries").contiguous().writable();
    if (table.size(1) > pages.size(1))
      table.reject(RK_INVALID, "has %ld columns, row_pages has %ld", table.size(1), pages.size(1));
    if (num_entries > 0 || num_tokens > 0 || samples.size(0) > 0) backend::fill_step_tensors(a, stream);
  });
}

rk_status rk_accept_tokens(const rk_accept_tokens_args* args, rk_stream stream) {
  return guard([&] {
    const char* op = "accept_tokens";
    const auto a = read_args(op, args);
    const Arg ids(op, "ids", a.ids), rows(op, "rows", a.rows), grow(op, "grow_rows", a.grow_rows);
    const Arg next(op, "next_token", a.next_token), committed(op, "committed_len", a.committed_len);
    ids.backend_device().dtype({DType::i32}).ndim(1).contiguous();
    rows.same_device(ids).dtype({DType::i32}).ndim(1).contiguous();
    check_list(grow, ids, DType::i32, rows.size(0), "rows");
    committed.same_device(ids).dtype({DType::i32}).ndim(1).contiguous().writable();
    next.same_device(ids).dtype({DType::i32}).ndim(2).shape({committed.size(0), -1}, "rows of committed_len, any");
    next.last_contiguous().writable();
    if (next.size(1) < 1) next.reject(RK_INVALID, "has no columns");
    if (!a.cu_samples != !a.drafts) fail(RK_INVALID, "%s: cu_samples and drafts go together", op);
    if (a.cu_samples) {
      check_list(Arg(op, "cu_samples", a.cu_samples), ids, DType::i32, rows.size(0) + 1, "one more than rows");
      check_list(Arg(op, "drafts", a.drafts), ids, DType::i32, ids.size(0), "ids");
    } else {
      rows.shape({ids.size(0)}, "ids, one an entry without cu_samples");
    }
    if (a.counts) check_written(Arg(op, "counts", a.counts), ids, DType::i32, rows.size(0), "rows");
    if (rows.size(0) > 0) backend::accept_tokens(a, stream);
  });
}
