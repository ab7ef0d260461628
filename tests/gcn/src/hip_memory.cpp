// Devices and memory of the stand-in: what HIP's functions of these names do, and refuse.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "hip_state.h"

using namespace gcn::hip;

namespace {

constexpr size_t kPage = 4096;
constexpr unsigned kLazyEnablePeerAccess = 1;  // what hipIpcOpenMemHandle wants, since HIP 6
constexpr uint64_t kHandleMark = 0x53495048'4e4347;

struct IpcHandle {
  uint64_t mark;
  uint64_t process;
  uint64_t bytes;
  char name[40];
};
static_assert(sizeof(IpcHandle) == 64);

size_t pages(size_t bytes) {
  return (bytes + kPage - 1) / kPage * kPage;
}

void* map_shared(const char* name, size_t bytes, int flags) {
  const int file = shm_open(name, flags, 0600);
  if (file < 0) return nullptr;
  void* memory = MAP_FAILED;
  if (!(flags & O_CREAT) || ftruncate(file, static_cast<off_t>(pages(bytes))) == 0)
    memory = mmap(nullptr, pages(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  return memory == MAP_FAILED ? nullptr : memory;
}

struct Cleanup {  // shared memory outlives its process otherwise
  ~Cleanup() {
    for (const auto& entry : state().buffers)
      if (!entry.second.opened && !entry.second.shared_name.empty()) shm_unlink(entry.second.shared_name.c_str());
  }
};

Error allocate(void** out, size_t bytes) {
  static unsigned number = 0;
  State& s = state();
  if (!out) return kInvalidValue;
  if (const Error refused = refuse_while_capturing()) return refused;
  *out = nullptr;
  if (!bytes) return kSuccess;
  const std::lock_guard lock(s.mutex);
  static const Cleanup cleanup;
  if (!s.devices) return kNoDevice;
  Buffer buffer;
  buffer.bytes = bytes;
  buffer.device = current_device();
  buffer.shared_name = "/gcn-" + std::to_string(getpid()) + "-" + std::to_string(number++);
  *out = map_shared(buffer.shared_name.c_str(), bytes, O_CREAT | O_EXCL | O_RDWR);
  if (!*out) return kOutOfMemory;
  std::memset(*out, 0xff, bytes);
  s.buffers.emplace(reinterpret_cast<uint64_t>(*out), buffer);
  return kSuccess;
}

// The buffer that holds these bytes, or the end of the map.
auto find_buffer(State& s, const void* memory, size_t bytes) {
  const auto address = reinterpret_cast<uint64_t>(memory);
  auto at = s.buffers.upper_bound(address);
  if (at == s.buffers.begin()) return s.buffers.end();
  --at;
  return address + bytes <= at->first + at->second.bytes ? at : s.buffers.end();
}

}  // namespace

namespace gcn::hip {

State& state() {
  static State* const all = [] {
    auto* s = new State;  // used until the very end of the process
    if (const char* devices = std::getenv("GCN_DEVICES")) s->devices = std::atoi(devices);
    if (const char* target = std::getenv("GCN_TARGET")) s->target = target;
    return s;
  }();
  return *all;
}

int& current_device() {
  thread_local int device = 0;
  return device;
}

std::string& last_fault() {
  thread_local std::string text;
  return text;
}

}  // namespace gcn::hip

GCN_API int hipGetDeviceCount(int* count) {
  if (!count) return kInvalidValue;
  *count = state().devices;
  return *count ? kSuccess : kNoDevice;
}
GCN_API int hipGetDevice(int* device) {
  if (!device) return kInvalidValue;
  if (!state().devices) return kNoDevice;
  *device = current_device();
  return kSuccess;
}
GCN_API int hipSetDevice(int device) {
  if (!state().devices) return kNoDevice;
  if (device < 0 || device >= state().devices) return kInvalidDevice;
  current_device() = device;
  return kSuccess;
}
GCN_API int hipDeviceGetAttribute(int* value, int attribute, int device) {
  constexpr int kMajor = 23, kMinor = 61, kMultiprocessors = 63, kSharedBytes = 74, kWarpSize = 87;
  if (!value) return kInvalidValue;
  if (device < 0 || device >= state().devices) return kInvalidDevice;
  switch (attribute) {
    case kMajor: *value = 9; break;
    case kMinor: *value = state().target == "gfx942" ? 4 : state().target == "gfx950" ? 5 : 0; break;
    case kMultiprocessors: *value = 8; break;  // few, so that launches of a block for each stay small
    case kSharedBytes: *value = 65536; break;
    case kWarpSize: *value = 64; break;
    default: return kInvalidValue;
  }
  return kSuccess;
}
// HIP 6 and later: a struct of 1,472 bytes with the GPU's name at 1,160. Nothing else in it is filled in.
GCN_API int hipGetDevicePropertiesR0600(void* properties, int device) {
  constexpr size_t kBytes = 1472, kArchName = 1160;
  if (!properties) return kInvalidValue;
  if (device < 0 || device >= state().devices) return kInvalidDevice;
  std::memset(properties, 0, kBytes);
  std::strcpy(static_cast<char*>(properties) + kArchName, (state().target + ":sramecc+:xnack-").c_str());
  return kSuccess;
}

GCN_API int hipMalloc(void** memory, size_t bytes) {
  return allocate(memory, bytes);
}
GCN_API int hipExtMallocWithFlags(void** memory, size_t bytes, unsigned flags) {
  constexpr unsigned kDefault = 0, kFineGrained = 1, kSignal = 2, kUncached = 3;
  if (flags != kDefault && flags != kFineGrained && flags != kSignal && flags != kUncached) return kInvalidValue;
  return allocate(memory, bytes);
}
GCN_API int hipFree(void* memory) {
  if (!memory) return kSuccess;
  if (const Error refused = refuse_while_capturing()) return refused;
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const auto found = s.buffers.find(reinterpret_cast<uint64_t>(memory));
  if (found == s.buffers.end() || found->second.opened) return kInvalidValue;
  munmap(memory, pages(found->second.bytes));
  shm_unlink(found->second.shared_name.c_str());
  s.buffers.erase(found);
  return kSuccess;
}
GCN_API int hipMemset(void* memory, int value, size_t bytes) {
  if (const Error refused = refuse_while_capturing()) return refused;
  State& s = state();
  const std::lock_guard lock(s.mutex);
  if (find_buffer(s, memory, bytes) == s.buffers.end()) return kInvalidValue;
  std::memset(memory, value, bytes);
  return kSuccess;
}
GCN_API int hipMemcpy(void* to, const void* from, size_t bytes, int) {
  if (const Error refused = refuse_while_capturing()) return refused;
  std::memcpy(to, from, bytes);
  return kSuccess;
}
GCN_API int hipDeviceSynchronize() {
  return refuse_while_capturing();
}

GCN_API int hipHostRegister(void* memory, size_t bytes, unsigned) {
  if (!memory || !bytes) return kInvalidValue;
  State& s = state();
  const std::lock_guard lock(s.mutex);
  return s.host.emplace(reinterpret_cast<uint64_t>(memory), bytes).second ? kSuccess : kAlreadyRegistered;
}
GCN_API int hipHostGetDevicePointer(void** there, void* memory, unsigned flags) {
  if (!there || flags) return kInvalidValue;
  State& s = state();
  const std::lock_guard lock(s.mutex);
  if (!s.host.count(reinterpret_cast<uint64_t>(memory))) return kInvalidValue;
  *there = memory;
  return kSuccess;
}
GCN_API int hipHostUnregister(void* memory) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  return s.host.erase(reinterpret_cast<uint64_t>(memory)) ? kSuccess : kNotRegistered;
}

GCN_API int hipIpcGetMemHandle(IpcHandle* handle, void* memory) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const auto found = s.buffers.find(reinterpret_cast<uint64_t>(memory));
  if (!handle || found == s.buffers.end() || found->second.opened) return kInvalidValue;
  *handle = {kHandleMark, static_cast<uint64_t>(getpid()), found->second.bytes, {}};
  std::strcpy(handle->name, found->second.shared_name.c_str());
  return kSuccess;
}
GCN_API int hipIpcOpenMemHandle(void** memory, IpcHandle handle, unsigned flags) {
  if (!memory || flags != kLazyEnablePeerAccess) return kInvalidValue;
  if (handle.mark != kHandleMark) return kInvalidValue;  // made by another runtime
  if (handle.process == static_cast<uint64_t>(getpid())) return kInvalidContext;
  State& s = state();
  const std::lock_guard lock(s.mutex);
  *memory = map_shared(handle.name, handle.bytes, O_RDWR);
  if (!*memory) return kInvalidValue;
  s.buffers.emplace(reinterpret_cast<uint64_t>(*memory), Buffer{handle.bytes, current_device(), handle.name, true});
  return kSuccess;
}
GCN_API int hipIpcCloseMemHandle(void* memory) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const auto found = s.buffers.find(reinterpret_cast<uint64_t>(memory));
  if (found == s.buffers.end() || !found->second.opened) return kInvalidValue;
  munmap(memory, pages(found->second.bytes));
  s.buffers.erase(found);
  return kSuccess;
}

GCN_API const char* hipGetErrorString(int error) {
  static thread_local std::string text;
  switch (error) {
    case kSuccess: return "no error";
    case kInvalidValue: return "invalid argument";
    case kOutOfMemory: return "out of memory";
    case kInvalidDeviceFunction: return "invalid device function";
    case kNoDevice: return "no ROCm-capable device is detected";
    case kInvalidDevice: return "invalid device ordinal";
    case kInvalidImage: return "device kernel image is invalid";
    case kInvalidContext: return "invalid device context";
    case kNoBinaryForGpu: return "no kernel image is available for execution on the device";
    case kInvalidHandle: return "invalid resource handle";
    case kNotFound: return "named symbol not found";
    case kAlreadyRegistered: return "part or all of the requested memory range is already mapped";
    case kNotRegistered: return "pointer does not correspond to a registered memory region";
    case kNotSupported: return "operation not supported";
    case kCaptureUnsupported: return "operation not permitted when stream is capturing";
    case kCaptureInvalidated: return "operation failed due to a previous error during capture";
    case kCaptureUnmatched: return "capture was not initiated in this stream";
    case kCaptureImplicit: return "operation would make the legacy stream depend on a capturing blocking stream";
    case kLaunchFailure:
      text = "unspecified launch failure";
      if (!last_fault().empty()) text += ": " + last_fault();
      return text.c_str();
    default: return "unknown error";
  }
}

// For tests: an array's bytes can be touched by launches from now on, until it is taken back.
GCN_API void gcn_map(const void* memory, size_t bytes) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  s.arrays.emplace(reinterpret_cast<uint64_t>(memory), bytes);
}
GCN_API void gcn_unmap(const void* memory, size_t bytes) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const auto range = s.arrays.equal_range(reinterpret_cast<uint64_t>(memory));
  for (auto at = range.first; at != range.second; ++at) {
    if (at->second != bytes) continue;
    s.arrays.erase(at);
    return;
  }
}
