// One entry, token or sample of a step: the arithmetic that host and device code share. include/radix_kernels/step.h
// has its meaning. Every function returns false, and has written nothing, where an index is outside of its tensor.
#pragma once

#include "common/host_device.h"
#include "common/tensor.h"
#include "radix_kernels/step.h"

namespace radix {

struct StepTensors {
  const int32_t *entries, *tokens;  // [4, B], [4, T]
  int64_t entry_stride, token_stride;
  const int32_t *sample_tokens, *next_token, *row_pages;
  int32_t *committed_len, *kv_lens, *input_ids, *positions, *page_table;
  int64_t *slot_mapping, *sample_positions;
  int64_t num_entries, num_tokens, num_samples;
  int64_t num_next, num_committed;     // elements
  int64_t num_rows, row_width, width;  // of row_pages, and columns of page_table
  int32_t page_size;

  explicit StepTensors(const rk_fill_step_tensors_args& args);

  // committed_len[base] + more, in `sum`.
  RK_HOST_DEVICE bool past_base(int32_t base, int32_t more, int32_t& sum) const {
    if (base < 0 || base >= num_committed) return false;
    sum = committed_len[base] + more;
    return sum >= 0;
  }
  RK_HOST_DEVICE bool position_of(int64_t token, int32_t& position) const {
    return past_base(tokens[token], tokens[token_stride + token], position);
  }
  RK_HOST_DEVICE bool slot_of(int64_t token, int32_t position, int64_t& slot) const {
    const int32_t start = tokens[2 * token_stride + token];
    const int32_t page = position / page_size;
    slot = -1;
    if (start < 0) return true;
    const int64_t element = int64_t{start} + page;
    if (element >= num_rows * row_width) return false;
    slot = int64_t{row_pages[element]} * page_size + (position - page * page_size);
    return true;
  }
  RK_HOST_DEVICE bool id_of(int64_t token, int32_t& id) const {
    const int32_t source = tokens[3 * token_stride + token];
    id = source;
    if (source >= 0) return true;
    if (~source >= num_next) return false;
    id = next_token[~source];
    if (id < 0) id = 0;
    return true;
  }
  RK_HOST_DEVICE bool fill_token(int64_t token) const {
    int32_t position, id;
    int64_t slot;
    if (!position_of(token, position) || !slot_of(token, position, slot) || !id_of(token, id)) return false;
    positions[token] = position;
    slot_mapping[token] = slot;
    input_ids[token] = id;
    return true;
  }
  RK_HOST_DEVICE bool has_row(int64_t entry) const { return entries[entry] >= 0 && entries[entry] < num_rows; }
  RK_HOST_DEVICE bool length_of(int64_t entry, int32_t& length) const {
    const int32_t commit = entries[3 * entry_stride + entry];
    if (commit < 0 || commit >= num_committed) return false;
    return past_base(entries[entry_stride + entry], entries[2 * entry_stride + entry], length);
  }
  RK_HOST_DEVICE bool fill_entry(int64_t entry) const {
    int32_t length;
    if (!has_row(entry) || !length_of(entry, length)) return false;
    kv_lens[entry] = length;
    committed_len[entries[3 * entry_stride + entry]] = length;
    return true;
  }
  RK_HOST_DEVICE bool fill_sample(int64_t sample) const {
    const int32_t token = sample_tokens[sample];
    int32_t position;
    if (token < 0 || token >= num_tokens || !position_of(token, position)) return false;
    sample_positions[sample] = int64_t{position} + 1;
    return true;
  }
};

struct AcceptedTokens {
  const int32_t *ids, *rows, *grow_rows, *cu_samples, *drafts;
  int32_t *next_token, *committed_len, *counts;
  int64_t num_entries, num_samples, num_rows, next_stride;
  bool all_drawn;

  explicit AcceptedTokens(const rk_accept_tokens_args& args);

  RK_HOST_DEVICE bool is_valid(int64_t entry) const {
    if (rows[entry] < 0 || rows[entry] >= num_rows || grow_rows[entry] < 0 || grow_rows[entry] >= num_rows)
      return false;
    if (!cu_samples) return true;
    return cu_samples[entry] >= 0 && cu_samples[entry] < cu_samples[entry + 1] && cu_samples[entry + 1] <= num_samples;
  }
  RK_HOST_DEVICE int32_t count_of(int64_t entry) const {
    if (!cu_samples) return 1;
    const int32_t first = cu_samples[entry], end = cu_samples[entry + 1];
    int32_t next = first + 1;
    while (next < end && drafts[next] == ids[next - 1]) next++;
    return next - first;
  }
  // How much the row grows; the length itself is the caller's to change. `entry` is valid.
  RK_HOST_DEVICE int32_t accept(int64_t entry) const {
    const int64_t first = cu_samples ? cu_samples[entry] : entry;
    const int32_t count = count_of(entry);
    if (counts) counts[entry] = count;
    if (ids[first] < 0 && !all_drawn) return 0;
    next_token[rows[entry] * next_stride] = ids[first + count - 1];
    return count;
  }
};

inline int64_t elements_of(const rk_tensor& t) {
  int64_t count = 1;
  for (int i = 0; i < t.ndim; i++) count *= t.shape[i];
  return count;
}

inline StepTensors::StepTensors(const rk_fill_step_tensors_args& args)
    : entries(data_ptr<int32_t>(*args.entries)),
      tokens(data_ptr<int32_t>(*args.tokens)),
      entry_stride(args.entries->strides[0]),
      token_stride(args.tokens->strides[0]),
      sample_tokens(data_ptr<int32_t>(*args.sample_tokens)),
      next_token(data_ptr<int32_t>(*args.next_token)),
      row_pages(data_ptr<int32_t>(*args.row_pages)),
      committed_len(data_ptr<int32_t>(*args.committed_len)),
      kv_lens(data_ptr<int32_t>(*args.kv_lens)),
      input_ids(data_ptr<int32_t>(*args.input_ids)),
      positions(data_ptr<int32_t>(*args.positions)),
      page_table(data_ptr<int32_t>(*args.page_table)),
      slot_mapping(data_ptr<int64_t>(*args.slot_mapping)),
      sample_positions(data_ptr<int64_t>(*args.sample_positions)),
      num_entries(args.entries->shape[1]),
      num_tokens(args.tokens->shape[1]),
      num_samples(args.sample_tokens->shape[0]),
      num_next(elements_of(*args.next_token)),
      num_committed(args.committed_len->shape[0]),
      num_rows(args.row_pages->shape[0]),
      row_width(args.row_pages->shape[1]),
      width(args.page_table->shape[1]),
      page_size(args.page_size) {}

inline AcceptedTokens::AcceptedTokens(const rk_accept_tokens_args& args)
    : ids(data_ptr<int32_t>(*args.ids)),
      rows(data_ptr<int32_t>(*args.rows)),
      grow_rows(data_ptr<int32_t>(*args.grow_rows)),
      cu_samples(args.cu_samples ? data_ptr<int32_t>(*args.cu_samples) : nullptr),
      drafts(args.drafts ? data_ptr<int32_t>(*args.drafts) : nullptr),
      next_token(data_ptr<int32_t>(*args.next_token)),
      committed_len(data_ptr<int32_t>(*args.committed_len)),
      counts(args.counts ? data_ptr<int32_t>(*args.counts) : nullptr),
      num_entries(args.rows->shape[0]),
      num_samples(args.ids->shape[0]),
      num_rows(args.committed_len->shape[0]),
      next_stride(args.next_token->strides[0]),
      all_drawn(args.all_drawn != 0) {}

}  // namespace radix
