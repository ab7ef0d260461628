// The one order of ids that the filters and the lists of top logprobs use: value descending, id ascending.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace radix::cpu {

struct ByValue {
  const float* x;
  bool operator()(int32_t a, int32_t b) const { return x[a] > x[b] || (x[a] == x[b] && a < b); }
};

// The first `count` ids of [0, n) in that order, sorted, in `ids` (resized). x holds no NaN.
inline void first_ids(const float* x, int64_t n, int64_t count, std::vector<int32_t>& ids) {
  const ByValue before{x};
  count = std::min(count, n);
  ids.clear();
  if (count == 0) return;
  // A heap of the best so far, worst on top: most elements fail one comparison.
  for (int64_t i = 0; i < n; i++) {
    const auto id = static_cast<int32_t>(i);
    if (static_cast<int64_t>(ids.size()) < count) {
      ids.push_back(id);
      if (static_cast<int64_t>(ids.size()) == count) std::make_heap(ids.begin(), ids.end(), before);
    } else if (x[i] > x[ids.front()]) {  // an equal value has a higher id than all before it
      std::pop_heap(ids.begin(), ids.end(), before);
      ids.back() = id;
      std::push_heap(ids.begin(), ids.end(), before);
    }
  }
  std::sort(ids.begin(), ids.end(), before);
}

}  // namespace radix::cpu
