// The HIP functions that the kernels use, found when one is first called instead of when the library is loaded.
//
//   - the library imports where there is no ROCm, and then says so;
//   - one wheel serves libamdhip64.so.5 to .7: these symbols kept their names, versions and C signatures;
//   - in a process that has a HIP runtime already (PyTorch brings its own), that very copy is used.
//
// Compiler-generated constructors register the device code here; the registrations are replayed to the real runtime
// once it is open. Only functions of scalars, pointers, dim3 and the 64-byte IPC handle: the other structs of the HIP
// API changed between releases.
#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#define RK_SHIM extern "C" __attribute__((visibility("hidden")))

namespace {

using Status = int;  // hipError_t
constexpr Status kInvalidValue = 1, kNotInitialized = 3;

struct Dim3 {
  uint32_t x, y, z;
};
struct IpcHandle {
  char bytes[64];
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

class Runtime {
 public:
  static Runtime& get() {
    static Runtime runtime;
    return runtime;
  }
  void* symbol(const char* name) const { return handle_ ? dlsym(handle_, name) : nullptr; }
  const char* problem() const { return problem_.c_str(); }

 private:
  Runtime() {
    std::vector<std::string> names;
    dl_iterate_phdr(collect_loaded, &names);
    if (names.size() > 1) {
      problem_ = "two HIP runtimes in one process: " + names[0] + " and " + names[1];
      return;
    }
    if (names.empty()) names = candidates();
    for (const auto& name : names) {
      handle_ = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
      if (handle_) break;
      problem_ += (problem_.empty() ? "no HIP runtime: " : "; ") + std::string(dlerror());
    }
    if (handle_) register_modules();
  }

  static int collect_loaded(dl_phdr_info* info, size_t, void* out) {
    const char* slash = std::strrchr(info->dlpi_name, '/');
    const char* base = slash ? slash + 1 : info->dlpi_name;
    if (std::strncmp(base, "libamdhip64", 11) == 0)
      static_cast<std::vector<std::string>*>(out)->push_back(info->dlpi_name);
    return 0;
  }

  static std::vector<std::string> candidates() {
    if (const char* path = std::getenv("RADIX_LIBHIP")) return {path};
    return {"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5", "/opt/rocm/lib/libamdhip64.so"};
  }

  void register_modules() {
    using RegisterBinary = void** (*)(const void*);
    using RegisterFunction = void (*)(void**, const void*, char*, const char*, int, void*, void*, void*, void*, int*);
    const auto binary = reinterpret_cast<RegisterBinary>(symbol("__hipRegisterFatBinary"));
    const auto function = reinterpret_cast<RegisterFunction>(symbol("__hipRegisterFunction"));
    if (!binary || !function) {
      problem_ = "the HIP runtime lacks __hipRegisterFatBinary";
      handle_ = nullptr;
      return;
    }
    for (const Module* module : modules()) {
      void** real = binary(module->fat_binary);
      for (const Function& f : module->functions)
        function(real, f.host, const_cast<char*>(f.name), f.name, -1, nullptr, nullptr, nullptr, nullptr, nullptr);
    }
  }

  void* handle_ = nullptr;
  std::string problem_;
};

// Calls the real function of that name; hipErrorNotInitialized where there is no runtime.
template <class... Params, class... Args>
Status forward(const char* name, Args... args) {
  const auto real = reinterpret_cast<Status (*)(Params...)>(Runtime::get().symbol(name));
  return real ? real(args...) : kNotInitialized;
}

thread_local std::vector<LaunchConfig> launches;

}  // namespace

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

// The GPU's name without its features (gfx942); false where the runtime is older than HIP 6. Its properties are a
// struct of 1,472 bytes, which may grow, with the name at 1,160.
RK_SHIM bool rk_hip_arch_name(int device, char* name, size_t bytes) {
  constexpr size_t kRoom = 8192, kArchName = 1160;
  alignas(16) char properties[kRoom];
  if (forward<void*, int>("hipGetDevicePropertiesR0600", static_cast<void*>(properties), device)) return false;
  const size_t length = std::min(std::strcspn(properties + kArchName, ":"), bytes - 1);
  std::memcpy(name, properties + kArchName, length);
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
  const auto real = reinterpret_cast<const char* (*)(Status)>(Runtime::get().symbol("hipGetErrorString"));
  return real ? real(status) : Runtime::get().problem();
}
