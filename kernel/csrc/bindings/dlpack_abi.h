// The parts of DLPack's ABI (major version 1) that cross into this module, declared here so that building needs no
// framework's headers. Layouts are checked below.
#pragma once

#include <cstddef>
#include <cstdint>

#include "radix_kernels/types.h"

namespace radix::bind {

struct DlVersion {
  uint32_t major, minor;
};

// Behind a capsule named "dltensor".
struct DlManaged {
  rk_tensor tensor;
  void* manager;
  void (*deleter)(DlManaged*);
};

// Behind a capsule named "dltensor_versioned".
struct DlManagedVersioned {
  DlVersion version;
  void* manager;
  void (*deleter)(DlManagedVersioned*);
  uint64_t flags;
  rk_tensor tensor;
};
constexpr uint64_t kDlReadOnly = 1;

// Behind type(tensor).__dlpack_c_exchange_api__, a capsule named "dlpack_exchange_api". Members that this module does
// not call are untyped.
struct DlExchangeApi {
  DlVersion version;
  const DlExchangeApi* previous;
  void* allocate;
  void* managed_from_object;
  void* managed_to_object;
  int (*tensor_from_object)(void* object, rk_tensor* out);  // borrowed; -1 with a Python exception set
  int (*current_stream)(int32_t device_type, int32_t device_id, void** out);
};

static_assert(sizeof(DlManaged) == 64);
static_assert(sizeof(DlManagedVersioned) == 80 && offsetof(DlManagedVersioned, tensor) == 32);
static_assert(sizeof(DlExchangeApi) == 56 && offsetof(DlExchangeApi, tensor_from_object) == 40);

}  // namespace radix::bind
