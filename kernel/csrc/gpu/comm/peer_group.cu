// Making and taking down a group of GPUs. Host code only.
#include "gpu/comm/peer_group.h"

#include <algorithm>
#include <cstring>

#include "gpu/device/launch.h"

using namespace radix;
using namespace radix::gpu;

namespace {

constexpr size_t kPage = 4096;
constexpr const char* kName = "GpuCommunicator";

static_assert(sizeof(cudaIpcMemHandle_t) == RK_GPU_COMM_HANDLE_BYTES);
static_assert(kMaxRanks == RK_GPU_COMM_MAX_RANKS && kMaxChannels * sizeof(uint32_t) <= kPage);
static_assert((1 + kMaxRanks) * kLineWords * 8 <= kPage);

// Memory that other GPUs write to while a kernel of ours reads it.
char* allocate_shared(size_t bytes) {
  void* memory = nullptr;
#if defined(__HIP__)
  check_gpu(hipExtMallocWithFlags(&memory, bytes, hip::kMallocUncached), kName);
#else
  check_gpu(cudaMalloc(&memory, bytes), kName);
#endif
  return static_cast<char*>(memory);
}

}  // namespace

rk_gpu_comm::rk_gpu_comm(const rk_gpu_comm_config& config, void* handle)
    : device_(config.device),
      world_size_(config.world_size),
      timeout_(config.timeout),
      control_(static_cast<uint64_t*>(config.control)) {
  const DeviceScope scope(device_);
  const int64_t words = (2 * config.max_bytes + 15) / 16;  // of a side of all channels together
  view_.rank = config.rank;
  view_.timeout_ns = static_cast<uint64_t>(config.timeout * 1e9);
  // Room for one word of each rank at least, whatever max_bytes is.
  view_.side = std::max<int64_t>((words + kMaxChannels - 1) / kMaxChannels, 2 * kMaxRanks);
  const size_t staging = size_t{2} * kMaxChannels * view_.side * sizeof(Words);
  try {
    map_control();
    memory_ = allocate_shared(kPage + staging);
    check_gpu(cudaMemset(memory_, 0, kPage), kName);
    check_gpu(cudaMemset(memory_ + kPage, 0xff, staging), kName);
    check_gpu(cudaDeviceSynchronize(), kName);  // empty before anybody can write to it
    check_gpu(cudaIpcGetMemHandle(static_cast<cudaIpcMemHandle_t*>(handle), memory_), kName);
  } catch (...) {
    release();
    throw;
  }
  view_.calls = reinterpret_cast<uint32_t*>(memory_);
  view_.pool[0] = reinterpret_cast<Words*>(memory_ + kPage);
}

rk_gpu_comm::~rk_gpu_comm() {
  release();
}

void rk_gpu_comm::map_control() {
  check_gpu(cudaHostRegister(control_, kPage, cudaHostRegisterMapped), "GpuCommunicator: control page");
  control_mapped_ = true;
  void* there = nullptr;
  check_gpu(cudaHostGetDevicePointer(&there, control_, 0), "GpuCommunicator: control page");
  view_.control = static_cast<uint64_t*>(there);
}

void rk_gpu_comm::release() noexcept {
  int previous = 0;
  (void)cudaGetDevice(&previous);
  (void)cudaSetDevice(device_.id);
  for (char*& memory : opened_)
    if (memory) (void)cudaIpcCloseMemHandle(memory);
  if (memory_) (void)cudaFree(memory_);
  if (control_mapped_) (void)cudaHostUnregister(control_);
  (void)cudaSetDevice(previous);
}

void rk_gpu_comm::connect(const char* handles) {
  const DeviceScope scope(device_);
  for (int k = 1; k < world_size_; k++) {
    const int rank = (view_.rank + k) % world_size_;
    cudaIpcMemHandle_t handle;
    std::memcpy(&handle, handles + rank * sizeof handle, sizeof handle);
    void* memory = nullptr;
    const cudaError_t error = cudaIpcOpenMemHandle(&memory, handle, cudaIpcMemLazyEnablePeerAccess);
    if (error != cudaSuccess)
      fail(RK_UNSUPPORTED, "%s: the memory of rank %d cannot be reached: %s", kName, rank, cudaGetErrorString(error));
    opened_[k] = static_cast<char*>(memory);
    view_.pool[k] = reinterpret_cast<Words*>(opened_[k] + kPage);
  }
}

void rk_gpu_comm::check() const {
  const volatile uint64_t* words = control_;
  const uint64_t mine = words[kLineWords * (1 + view_.rank) + 1], aborted = words[0];
  if (mine >= kLate)
    fail(RK_RUNTIME, "communicator: rank %d did not arrive in %g s", static_cast<int>(mine - kLate), timeout_);
  if (mine || aborted)
    fail(RK_RUNTIME, "communicator: aborted by rank %d", static_cast<int>(mine ? mine : aborted) - 1);
}
