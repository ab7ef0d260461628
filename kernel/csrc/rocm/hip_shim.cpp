// The HIP functions that the kernels use, found when one is first called instead of when the library is loaded.
//
//   - the library imports where there is no ROCm, and then says so;
//   - one wheel serves libamdhip64.so.6 and .7: these symbols kept their names, versions and C signatures;
//   - in a process that has a HIP runtime already (PyTorch brings its own), that very copy is used (hip_choice.h).
//
// Compiler-generated constructors register the device code here; the registrations are replayed to the real runtime
// once it is open. Only functions of scalars, pointers, dim3 and the 64-byte IPC handle: the other structs of the HIP
// API changed between releases.
#include "rocm/hip_shim.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

#include "rocm/hip_choice.h"
#include "rocm/hip_constants.h"

#define RK_SHIM extern "C" __attribute__((visibility("hidden")))

namespace {

using radix::hip::Choice;

using Status = int;  // hipError_t
constexpr Status kInvalidValue = 1;

struct Dim3 {
  uint32_t x, y, z;
};
struct IpcHandle {
  char bytes[radix::hip::kIpcHandleBytes];
};
struct LaunchConfig {
  Dim3 grid, block;
  size_t shared_bytes;
  void* stream;
};
struct Function {
  const void* host;
  const char* name;
};
struct Module {
  const void* fat_binary;
  std::vector<Function> functions;
};

std::vector<Module*>& modules() {
  static std::vector<Module*> all;  // filled by static constructors, so it must not be one of them itself
  return all;
}

// An opened runtime that knows our kernels; without a handle, why there is none.
struct Copy {
  void* handle = nullptr;
  std::string path;
  std::string problem;
};

using RegisterBinary = void** (*)(const void*);
using RegisterFunction = void (*)(void**, const void*, char*, const char*, int, void*, void*, void*, void*, int*);

// Why a runtime cannot serve; "" where it can. HIP 6 brought a symbol that ours ask for.
std::string unfit(void* handle, const std::string& path) {
  if (!dlsym(handle, "hipGetDevicePropertiesR0600")) return path + " is older than HIP 6";
  if (!dlsym(handle, "__hipRegisterFatBinary") || !dlsym(handle, "__hipRegisterFunction"))
    return path + " lacks __hipRegisterFatBinary";
  return "";
}

void register_modules(void* handle) {
  const auto binary = reinterpret_cast<RegisterBinary>(dlsym(handle, "__hipRegisterFatBinary"));
  const auto function = reinterpret_cast<RegisterFunction>(dlsym(handle, "__hipRegisterFunction"));
  for (const Module* module : modules()) {
    void** real = binary(module->fat_binary);
    for (const Function& f : module->functions)
      function(real, f.host, const_cast<char*>(f.name), f.name, -1, nullptr, nullptr, nullptr, nullptr, nullptr);
  }
}

// The file behind a handle: the name it was opened by may be no more than that.
std::string file_of(void* handle) {
  link_map* map = nullptr;
  return dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 ? map->l_name : "";
}

// The runtime in use. Until torch is there every library that the process loads may change it: torch that is imported
// after the first call brings the copy that launches have to go to from then on.
class Runtime {
 public:
  static Runtime& get() {
    static Runtime* const runtime = new Runtime;  // used until the very end of the process
    return *runtime;
  }
  const Copy& current() {
    if (settled_.load(std::memory_order_acquire)) return *current_.load(std::memory_order_relaxed);
    if (seen_.load(std::memory_order_acquire) != radix::hip::libraries_loaded()) choose();
    return *current_.load(std::memory_order_acquire);
  }
  // From the next call on `bundled` are known: files that torch or rocm_sdk will load.
  void bundle(const std::vector<std::string>& bundled) {
    const std::lock_guard lock(mutex_);
    bundled_ = bundled;
    seen_.store(kNever, std::memory_order_release);
  }

 private:
  static constexpr uint64_t kNever = UINT64_MAX;

  void choose() {
    const std::lock_guard lock(mutex_);
    const Choice choice = radix::hip::choose(bundled_);
    current_.store(open(choice), std::memory_order_release);
    seen_.store(radix::hip::libraries_loaded(), std::memory_order_release);
    if (choice.settled) settled_.store(true, std::memory_order_release);
  }

  const Copy* open(const Choice& choice) {
    std::string problem = choice.problem;
    for (const std::string& path : choice.paths) {
      void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
      const std::string why = handle ? unfit(handle, path) : dlerror();
      if (handle && why.empty()) return known(handle);
      if (handle) dlclose(handle);
      problem += (problem.empty() ? "no HIP runtime: " : "; ") + why;
    }
    copies_.push_back({nullptr, "", problem});
    return &copies_.back();
  }

  // The copy of this handle, which is told of our kernels once.
  const Copy* known(void* handle) {
    for (const Copy& copy : copies_)
      if (copy.handle == handle) return &copy;
    register_modules(handle);
    copies_.push_back({handle, file_of(handle), ""});
    return &copies_.back();
  }

  std::mutex mutex_;
  std::vector<std::string> bundled_;
  std::deque<Copy> copies_;  // none moves or ends
  std::atomic<const Copy*> current_{nullptr};
  std::atomic<uint64_t> seen_{kNever};
  std::atomic<bool> settled_{false};
};

void* symbol(const char* name) {
  const Copy& copy = Runtime::get().current();
  return copy.handle ? dlsym(copy.handle, name) : nullptr;
}

// Calls the real function of that name; hipErrorNotInitialized where there is no runtime.
template <class... Params, class... Args>
Status forward(const char* name, Args... args) {
  const auto real = reinterpret_cast<Status (*)(Params...)>(symbol(name));
  return real ? real(args...) : radix::hip::kErrorNotInitialized;
}

thread_local std::vector<LaunchConfig> launches;

}  // namespace

namespace radix::hip {

void set_bundled(const std::vector<std::string>& paths) {
  Runtime::get().bundle(paths);
}

const char* runtime_path() {
  return Runtime::get().current().path.c_str();
}

const char* runtime_problem() {
  return Runtime::get().current().problem.c_str();
}

}  // namespace radix::hip

RK_SHIM void** __hipRegisterFatBinary(const void* fat_binary) {
  auto* module = new Module{fat_binary, {}};  // lives as long as the process
  modules().push_back(module);
  return reinterpret_cast<void**>(module);
}

RK_SHIM void __hipRegisterFunction(void** module, const void* host, char*, const char* name, int, void*, void*, void*,
                                   void*, int*) {
  reinterpret_cast<Module*>(module)->functions.push_back({host, name});
}

// Runs when the process ends: the runtime takes itself down.
RK_SHIM void __hipUnregisterFatBinary(void**) {}

RK_SHIM Status __hipPushCallConfiguration(Dim3 grid, Dim3 block, size_t shared_bytes, void* stream) {
  launches.push_back({grid, block, shared_bytes, stream});
  return 0;
}

RK_SHIM Status __hipPopCallConfiguration(Dim3* grid, Dim3* block, size_t* shared_bytes, void** stream) {
  if (launches.empty()) return kInvalidValue;
  const LaunchConfig c = launches.back();
  launches.pop_back();
  *grid = c.grid;
  *block = c.block;
  *shared_bytes = c.shared_bytes;
  *stream = c.stream;
  return 0;
}

RK_SHIM Status hipLaunchKernel(const void* function, Dim3 grid, Dim3 block, void** args, size_t shared_bytes,
                               void* stream) {
  return forward<const void*, Dim3, Dim3, void**, size_t, void*>("hipLaunchKernel", function, grid, block, args,
                                                                 shared_bytes, stream);
}
RK_SHIM Status hipGetDeviceCount(int* count) {
  return forward<int*>("hipGetDeviceCount", count);
}
RK_SHIM Status hipGetDevice(int* device) {
  return forward<int*>("hipGetDevice", device);
}
RK_SHIM Status hipSetDevice(int device) {
  return forward<int>("hipSetDevice", device);
}
RK_SHIM Status hipDeviceGetAttribute(int* value, int attribute, int device) {
  return forward<int*, int, int>("hipDeviceGetAttribute", value, attribute, device);
}

// The GPU's name without its features (gfx942); false where the runtime does not say it.
RK_SHIM bool rk_hip_arch_name(int device, char* name, size_t bytes) {
  alignas(16) char properties[radix::hip::kPropertiesRoom];
  if (forward<void*, int>("hipGetDevicePropertiesR0600", static_cast<void*>(properties), device)) return false;
  const char* found = properties + radix::hip::kArchNameOffset;
  const size_t length = std::min(std::strcspn(found, ":"), bytes - 1);
  std::memcpy(name, found, length);
  name[length] = 0;
  return length != 0;
}

RK_SHIM Status hipExtMallocWithFlags(void** memory, size_t bytes, unsigned flags) {
  return forward<void**, size_t, unsigned>("hipExtMallocWithFlags", memory, bytes, flags);
}
RK_SHIM Status hipFree(void* memory) {
  return forward<void*>("hipFree", memory);
}
RK_SHIM Status hipMemset(void* memory, int value, size_t bytes) {
  return forward<void*, int, size_t>("hipMemset", memory, value, bytes);
}
RK_SHIM Status hipDeviceSynchronize() {
  return forward<>("hipDeviceSynchronize");
}
RK_SHIM Status hipHostRegister(void* memory, size_t bytes, unsigned flags) {
  return forward<void*, size_t, unsigned>("hipHostRegister", memory, bytes, flags);
}
RK_SHIM Status hipHostGetDevicePointer(void** there, void* memory, unsigned flags) {
  return forward<void**, void*, unsigned>("hipHostGetDevicePointer", there, memory, flags);
}
RK_SHIM Status hipHostUnregister(void* memory) {
  return forward<void*>("hipHostUnregister", memory);
}
RK_SHIM Status hipIpcGetMemHandle(IpcHandle* handle, void* memory) {
  return forward<IpcHandle*, void*>("hipIpcGetMemHandle", handle, memory);
}
RK_SHIM Status hipIpcOpenMemHandle(void** memory, IpcHandle handle, unsigned flags) {
  return forward<void**, IpcHandle, unsigned>("hipIpcOpenMemHandle", memory, handle, flags);
}
RK_SHIM Status hipIpcCloseMemHandle(void* memory) {
  return forward<void*>("hipIpcCloseMemHandle", memory);
}

RK_SHIM const char* hipGetErrorString(Status status) {
  const auto real = reinterpret_cast<const char* (*)(Status)>(symbol("hipGetErrorString"));
  return real ? real(status) : Runtime::get().current().problem.c_str();
}
