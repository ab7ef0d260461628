// The weights of the product that comes next, which threads of the pool fetch into their L2 while they wait: between
// products, and where fewer threads work, the memory would be idle otherwise.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace radix::cpu {

// Packed weights in `streams` parts of the same size, which are read side by side: each by `threads` threads, of which
// each begins with a contiguous share.
struct NextWeights {
  const char* data = nullptr;
  int64_t bytes = 0;
  int streams = 1, threads = 1;
};

// Bytes [first, end) of each stream.
struct WeightsShare {
  int64_t first = 0, end = 0;
};

constexpr int64_t kFetchedLine = 64;
constexpr int64_t kMostFetched = 128 << 10;  // by a thread: much less than its L2 holds

// What a thread of the pool fetches of them, by its number there.
inline WeightsShare share_of(const NextWeights& weights, int thread) {
  if (!weights.data || thread >= weights.threads) return {};
  const int64_t stream = weights.bytes / weights.streams;
  const int64_t first = stream * thread / weights.threads / kFetchedLine * kFetchedLine;
  return {first, std::min(stream * (thread + 1) / weights.threads, first + kMostFetched / weights.streams)};
}

// Where one thread tells the others of them. A hint: who reads while it changes may fetch what nobody wants, and no
// address that is fetched can fault, whatever has become of the memory.
class NextWeightsBoard {
 public:
  void put(const NextWeights& weights) {
    data_.store(weights.data, std::memory_order_relaxed);
    bytes_.store(weights.bytes, std::memory_order_relaxed);
    streams_.store(weights.streams, std::memory_order_relaxed);
    threads_.store(weights.threads, std::memory_order_relaxed);
    number_.fetch_add(1, std::memory_order_release);
  }

  // Of what was put last.
  uint64_t number() const { return number_.load(std::memory_order_acquire); }
  NextWeights get() const {
    NextWeights weights;
    weights.data = data_.load(std::memory_order_relaxed);
    weights.bytes = bytes_.load(std::memory_order_relaxed);
    weights.streams = streams_.load(std::memory_order_relaxed);
    weights.threads = threads_.load(std::memory_order_relaxed);
    return weights;
  }

 private:
  std::atomic<uint64_t> number_{0};
  std::atomic<const char*> data_{nullptr};
  std::atomic<int64_t> bytes_{0};
  std::atomic<int> streams_{1}, threads_{1};
};

// How far one thread has come with its share of what is on a board.
class ShareFetch {
 public:
  // Fetches two lines of each stream, so that the thread soon looks again for what it waits for; false: nothing is
  // left. thread: its number in the pool.
  bool step(const NextWeightsBoard& board, int thread) {
    if (const uint64_t number = board.number(); number != number_) {
      number_ = number;
      weights_ = board.get();
      left_ = share_of(weights_, thread);
    }
    if (left_.first >= left_.end) return false;
    const int64_t stop = std::min(left_.first + 2 * kFetchedLine, left_.end);
    for (; left_.first < stop; left_.first += kFetchedLine)
      for (int s = 0; s < weights_.streams; s++)
        __builtin_prefetch(weights_.data + weights_.bytes / weights_.streams * s + left_.first, 0, 2);
    return true;
  }

 private:
  uint64_t number_ = 0;
  NextWeights weights_;
  WeightsShare left_;
};

}  // namespace radix::cpu
