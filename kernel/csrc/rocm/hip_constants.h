// Numbers that we pass to the HIP runtime or take from it, as all of HIP 6 and 7 have them. They are ours: a header
// that this is compiled with may be of another HIP than the runtime of the process, and one number has moved before.
#pragma once

#include <cstddef>

namespace radix::hip {

constexpr int kErrorNotInitialized = 3;
constexpr int kErrorNoDevice = 100;
constexpr int kAttributeMultiprocessorCount = 63;
constexpr unsigned kHostRegisterMapped = 2;
constexpr unsigned kMallocUncached = 3;
constexpr unsigned kIpcLazyEnablePeerAccess = 1;  // 0 before HIP 6, whose runtimes refuse that
constexpr size_t kIpcHandleBytes = 64;
// hipDeviceProp_tR0600, which hipGetDevicePropertiesR0600 fills in.
constexpr size_t kPropertiesRoom = 8192;
constexpr size_t kArchNameOffset = 1160;

}  // namespace radix::hip
