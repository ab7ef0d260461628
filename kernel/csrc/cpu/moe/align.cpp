// Sorting of tokens by expert on the CPU: one counting sort, which is nothing beside the experts' products.
#include <vector>

#include "api/moe.h"
#include "common/tensor.h"

namespace radix::backend {

void moe_align_block_size(const rk_moe_align_block_size_args& args, rk_stream) {
  const int32_t* ids = data_ptr<int32_t>(*args.topk_ids);
  const int32_t* map = args.expert_map ? data_ptr<int32_t>(*args.expert_map) : nullptr;
  int32_t *sorted = data_ptr<int32_t>(*args.sorted_token_ids), *blocks = data_ptr<int32_t>(*args.expert_ids);
  const int32_t n = static_cast<int32_t>(args.topk_ids->shape[0] * args.topk_ids->shape[1]), block = args.block_size;
  const auto takes_part = [&](int32_t e) { return e >= 0 && e < args.num_experts && (!map || map[e] >= 0); };

  std::vector<int32_t> next(static_cast<size_t>(args.num_experts));  // counts, then where an expert's next entry goes
  for (int32_t i = 0; i < n; i++)
    if (takes_part(ids[i])) next[static_cast<size_t>(ids[i])]++;
  int32_t at = 0;
  for (int32_t e = 0; e < args.num_experts; e++) {
    const int32_t count = next[static_cast<size_t>(e)], padded = (count + block - 1) / block * block;
    next[static_cast<size_t>(e)] = at;
    for (int32_t i = count; i < padded; i++) sorted[at + i] = n;
    for (int32_t b = 0; b < padded / block; b++) blocks[at / block + b] = map ? map[e] : e;
    at += padded;
  }
  *data_ptr<int32_t>(*args.num_tokens_post_padded) = at;
  for (int32_t i = 0; i < n; i++)
    if (takes_part(ids[i])) sorted[next[static_cast<size_t>(ids[i])]++] = i;
}

}  // namespace radix::backend
