// The host side that sampling.cu and sampling_shards.cu share: tensors into device structs, and the scan's launch.
#pragma once

#include "gpu/sampling/row_scan.h"

namespace radix::gpu {

template <class T>
const T* optional(const rk_tensor* t) {
  return t ? data_ptr<T>(*t) : nullptr;
}

// Args: any struct with the members of rk_top_k_top_p_sampling_args.
template <class Args>
Draw draw_of(const Args& a, int64_t vocabulary, int64_t first_id) {
  return {data_ptr<float>(*a.temperature),
          data_ptr<float>(*a.top_p),
          data_ptr<float>(*a.min_p),
          data_ptr<int32_t>(*a.top_k),
          data_ptr<int64_t>(*a.seed),
          data_ptr<int64_t>(*a.position),
          a.draw_stream,
          vocabulary,
          static_cast<uint32_t>(first_id)};
}

template <class Args>
Edits edits_of(const Args& a, int64_t first_id) {
  Edits e;
  e.bias_ids = optional<int32_t>(a.bias_ids);
  e.bias_values = optional<float>(a.bias_values);
  e.bias_count = a.bias_ids ? a.bias_ids->shape[1] : 0;
  if (a.counts) e.counts = Matrix(*a.counts);
  e.slots = optional<int32_t>(a.slots);
  e.repetition = optional<float>(a.repetition);
  e.frequency = optional<float>(a.frequency);
  e.presence = optional<float>(a.presence);
  e.stop_ids = optional<int32_t>(a.stop_ids);
  e.stop_count = a.stop_ids ? a.stop_ids->shape[1] : 0;
  e.min_position = optional<int64_t>(a.min_position);
  e.position = data_ptr<int64_t>(*a.position);
  e.bitmask = optional<uint32_t>(a.bitmask);
  e.bitmask_stride = a.bitmask ? a.bitmask->strides[0] : 0;
  e.first_id = first_id;
  return e;
}

inline bool any(const Edits& e) {
  return e.bias_ids || e.slots || e.stop_ids || e.bitmask;
}

// Lays out the workspace (`scan.scratch`) and launches the scan. `proposes`: Scratch::proposes.
void run_scan(const char* op, rk_device device, rk_stream stream, Scan& scan, const rk_tensor& workspace,
              bool proposes);

}  // namespace radix::gpu
