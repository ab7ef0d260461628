#include "cpu/comm/group.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <vector>

#include "cpu/comm/sum.h"

using namespace radix;

namespace {

constexpr int64_t kPage = 4096;
constexpr int64_t kLineWords = 8;
constexpr double kSpinSeconds = 50e-6;
constexpr double kSleepSeconds = 0.05;  // at most, so that an abort without a wake-up is seen

static_assert(std::atomic<uint64_t>::is_always_lock_free);

double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// The futex word is the low half of the sequence number (x86 is little-endian); the file is shared between processes.
uint32_t* futex_word(std::atomic<uint64_t>& word) {
  return reinterpret_cast<uint32_t*>(&word);
}

void sleep_until_changed(std::atomic<uint64_t>& word, uint64_t seen) {
  const timespec limit{0, static_cast<long>(kSleepSeconds * 1e9)};
  syscall(SYS_futex, futex_word(word), FUTEX_WAIT, static_cast<uint32_t>(seen), &limit, nullptr, 0);
}

void wake(std::atomic<uint64_t>& word) {
  syscall(SYS_futex, futex_word(word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

char* map_file(const char* path, int64_t bytes) {
  const int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0) fail(RK_RUNTIME, "ShmCommunicator: cannot open %s: %s", path, std::strerror(errno));
  struct stat info;
  // Every rank asks for the same size.
  const bool sized = fstat(fd, &info) == 0 && (info.st_size >= bytes || ftruncate(fd, bytes) == 0);
  void* map = sized ? mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : MAP_FAILED;
  const int error = errno;
  close(fd);
  if (map == MAP_FAILED)
    fail(RK_RUNTIME, "ShmCommunicator: cannot map %lld bytes of %s: %s", (long long)bytes, path, std::strerror(error));
  return static_cast<char*>(map);
}

}  // namespace

rk_comm::rk_comm(const char* path, int rank, int world_size, int64_t max_bytes, double timeout)
    : rank_(rank), world_size_(world_size), max_bytes_(max_bytes), timeout_(timeout) {
  control_bytes_ = kPage * (1 + (1 + world_size) * kLineWords * 8 / kPage);
  map_bytes_ = control_bytes_ + 2 * world_size * max_bytes;
  map_ = map_file(path, map_bytes_);
}

rk_comm::~rk_comm() {
  munmap(map_, map_bytes_);
}

std::atomic<uint64_t>& rk_comm::word(int64_t index) const {
  return *reinterpret_cast<std::atomic<uint64_t>*>(map_ + index * 8);
}

std::atomic<uint64_t>& rk_comm::sequence_of(int rank) const {
  return word(kLineWords * (1 + rank));
}

char* rk_comm::segment(int rank) const {
  return map_ + control_bytes_ + (2 * rank + static_cast<int64_t>(sequence_ % 2)) * max_bytes_;
}

void rk_comm::begin(const char* data, int64_t bytes) {
  sequence_++;
  if (data) std::memcpy(segment(rank_), data, bytes);
}

void rk_comm::publish_and_wait(double timeout) {
  sequence_of(rank_).store(sequence_, std::memory_order_release);
  wake(sequence_of(rank_));
  const double start = now();
  for (int r = 0; r < world_size_; r++) wait_for(r, timeout, start);
  if (const uint64_t flag = word(0).load()) fail(RK_RUNTIME, "communicator: aborted by rank %d", int(flag) - 1);
}

void rk_comm::wait_for(int rank, double timeout, double start) {
  for (;;) {
    const uint64_t seen = sequence_of(rank).load(std::memory_order_acquire);
    if (seen >= sequence_ || word(0).load(std::memory_order_relaxed)) return;
    const double waited = now() - start;
    if (waited > timeout) {
      const std::string late = late_ranks();
      abort();
      fail(RK_RUNTIME, "communicator: rank(s) [%s] did not arrive in %g s", late.c_str(), timeout);
    }
    if (waited > kSpinSeconds) {
      sleep_until_changed(sequence_of(rank), seen);
    } else {
      __builtin_ia32_pause();
    }
  }
}

std::string rk_comm::late_ranks() const {
  std::string list;
  for (int r = 0; r < world_size_; r++)
    if (sequence_of(r).load() < sequence_) list += (list.empty() ? "" : ", ") + std::to_string(r);
  return list;
}

template <class Fn>
void rk_comm::for_pieces(const rk_tensor& tensor, int64_t numel, const Fn& fn) const {
  const int64_t item = std::max(1, element_size(tensor)), step = max_bytes_ / item * item;
  if (step == 0)
    fail(RK_INVALID, "communicator: an element has %lld bytes, a segment %lld", (long long)item, (long long)max_bytes_);
  for (int64_t offset = 0; offset < numel * item; offset += step) fn(offset, std::min(step, numel * item - offset));
}

void rk_comm::all_reduce(const rk_tensor& tensor, int64_t numel) {
  const DType dtype = dtype_of(tensor);
  std::vector<const void*> parts(world_size_);
  for_pieces(tensor, numel, [&](int64_t offset, int64_t bytes) {
    char* piece = data_ptr<char>(tensor) + offset;
    begin(piece, bytes);
    publish_and_wait(timeout_);
    for (int r = 0; r < world_size_; r++) parts[r] = segment(r);
    cpu::comm_kernels().sum(dtype, parts.data(), world_size_, piece, bytes / element_size(tensor));
  });
}

void rk_comm::all_gather(const rk_tensor& tensor, int64_t numel, const rk_tensor* out) {
  const int64_t total = numel * element_size(tensor);
  for_pieces(tensor, numel, [&](int64_t offset, int64_t bytes) {
    begin(data_ptr<char>(tensor) + offset, bytes);
    publish_and_wait(timeout_);
    for (int r = 0; out && r < world_size_; r++)
      std::memcpy(data_ptr<char>(*out) + r * total + offset, segment(r), bytes);
  });
}

void rk_comm::broadcast(const rk_tensor& tensor, int64_t numel, int root) {
  for_pieces(tensor, numel, [&](int64_t offset, int64_t bytes) {
    char* piece = data_ptr<char>(tensor) + offset;
    begin(rank_ == root ? piece : nullptr, bytes);
    publish_and_wait(timeout_);
    if (rank_ != root) std::memcpy(piece, segment(root), bytes);
  });
}

void rk_comm::barrier(double timeout) {
  begin(nullptr, 0);
  publish_and_wait(timeout > 0 ? timeout : timeout_);
}

void rk_comm::abort() noexcept {
  uint64_t none = 0;
  word(0).compare_exchange_strong(none, static_cast<uint64_t>(rank_) + 1);
  for (int r = 0; r < world_size_; r++) wake(sequence_of(r));
}
