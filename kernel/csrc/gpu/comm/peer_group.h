// One rank's end of a group of GPUs: its staging memory, the others' as this process maps it, the control page.
#pragma once

#include <cstdint>

#include "radix_kernels/all_reduce.h"

namespace radix::gpu {

constexpr int kMaxRanks = RK_GPU_COMM_MAX_RANKS, kMaxChannels = 128;
constexpr uint32_t kEmpty = 0xffffffffu;  // a word of staging memory to which nothing has come: a NaN, or two of them
constexpr uint32_t kNan = 0x7fff7fffu;    // what is sent instead of such a word
constexpr int kLineWords = 8;             // 64-bit words between the ranks' entries of the control page
constexpr uint64_t kLate = 256;           // error of a rank: kLate + the rank waited for, or 1 + the rank that aborted

// The 16 bytes that move as one access.
struct alignas(16) Words {
  uint32_t at[4];
};

// What a kernel knows of the group, by value. pool[k] is the staging memory of rank (rank + k) % world_size: every rank
// starts its round with its neighbour, so that all links are busy.
struct PeerView {
  int rank;
  uint64_t timeout_ns;
  uint64_t* control;  // the control page of the shared-memory group, in host memory
  uint32_t* calls;    // of each channel, in our own memory
  Words* pool[kMaxRanks];
  int64_t side;  // words of one side of a channel
};

}  // namespace radix::gpu

struct rk_gpu_comm {
 public:
  rk_gpu_comm(const rk_gpu_comm_config& config, void* handle);
  ~rk_gpu_comm();
  rk_gpu_comm(const rk_gpu_comm&) = delete;
  rk_gpu_comm& operator=(const rk_gpu_comm&) = delete;

  void connect(const char* handles);
  // Throws Error when the group is broken.
  void check() const;

  int world_size() const { return world_size_; }
  rk_device device() const { return device_; }
  const radix::gpu::PeerView& view() const { return view_; }

 private:
  void map_control();
  void release() noexcept;

  const rk_device device_;
  const int world_size_;
  const double timeout_;
  uint64_t* const control_;  // as the host sees it
  bool control_mapped_ = false;
  char* memory_ = nullptr;
  char* opened_[radix::gpu::kMaxRanks] = {};
  radix::gpu::PeerView view_{};
};
