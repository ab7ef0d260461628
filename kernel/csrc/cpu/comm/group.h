// One rank's end of a shared-memory group.
//
// Every collective is one exchange: a rank copies its bytes into its own segment, publishes its sequence number and
// waits until every rank has published the same one; then it reads the others' segments. Segments are doubled: a rank
// that publishes exchange n has finished reading n - 1, so buffer n % 2 may be written again at n + 2 with no second
// barrier. A fresh zero-filled file is the valid first state.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "common/tensor.h"
#include "radix_kernels/comm.h"

struct rk_comm {
 public:
  rk_comm(const char* path, int rank, int world_size, int64_t max_bytes, double timeout);
  ~rk_comm();
  rk_comm(const rk_comm&) = delete;
  rk_comm& operator=(const rk_comm&) = delete;

  int world_size() const { return world_size_; }
  void all_reduce(const rk_tensor& tensor, int64_t numel);
  void all_gather(const rk_tensor& tensor, int64_t numel, const rk_tensor* out);
  void broadcast(const rk_tensor& tensor, int64_t numel, int root);
  void barrier(double timeout);
  void abort() noexcept;

 private:
  std::atomic<uint64_t>& word(int64_t index) const;
  std::atomic<uint64_t>& sequence_of(int rank) const;
  // The segment of a rank in the current exchange.
  char* segment(int rank) const;
  // Starts an exchange; with `data`, copies it into our segment.
  void begin(const char* data, int64_t bytes);
  void publish_and_wait(double timeout);
  void wait_for(int rank, double timeout, double start);
  std::string late_ranks() const;
  // Calls fn(offset, bytes) over pieces that fit a segment and hold whole elements.
  template <class Fn>
  void for_pieces(const rk_tensor& tensor, int64_t numel, const Fn& fn) const;

  const int rank_, world_size_;
  const int64_t max_bytes_;
  const double timeout_;
  uint64_t sequence_ = 0;
  char* map_ = nullptr;
  int64_t control_bytes_, map_bytes_;
};
