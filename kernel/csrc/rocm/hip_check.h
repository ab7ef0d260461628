// Our numbers of HIP (hip_constants.h) are those of the header at hand, whichever compiles this.
#pragma once

#include <hip/hip_runtime_api.h>

#include <cstddef>

#include "rocm/hip_constants.h"

namespace radix::hip {

static_assert(kErrorNotInitialized == hipErrorNotInitialized);
static_assert(kErrorNoDevice == hipErrorNoDevice);
static_assert(kAttributeMultiprocessorCount == hipDeviceAttributeMultiprocessorCount);
static_assert(kHostRegisterMapped == hipHostRegisterMapped);
static_assert(kIpcHandleBytes == sizeof(hipIpcMemHandle_t));
#if HIP_VERSION_MAJOR >= 6
static_assert(kMallocUncached == hipDeviceMallocUncached);
static_assert(kIpcLazyEnablePeerAccess == hipIpcMemLazyEnablePeerAccess);
static_assert(kArchNameOffset == offsetof(hipDeviceProp_tR0600, gcnArchName));
static_assert(kPropertiesRoom >= sizeof(hipDeviceProp_tR0600));
#else
static_assert(hipIpcMemLazyEnablePeerAccess == 0);  // why the library has its own
#endif

}  // namespace radix::hip
