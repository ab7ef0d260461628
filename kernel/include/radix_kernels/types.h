/* The plain C types every entry of libradix_kernels.so speaks.
 *
 * rk_tensor has the memory layout of DLPack's DLTensor, so a binding can hand one over without copying. Strides are
 * counted in elements and are never NULL. The library borrows every pointer for the time of the call only.
 */
#ifndef RADIX_KERNELS_TYPES_H
#define RADIX_KERNELS_TYPES_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
#define RK_EXTERN extern "C"
#define RK_STATIC_ASSERT(cond, text) static_assert(cond, text)
#else
#define RK_EXTERN
#define RK_STATIC_ASSERT(cond, text) _Static_assert(cond, text)
#endif
#define RK_API RK_EXTERN __attribute__((visibility("default")))

/* Raised when a struct or the meaning of an entry changes; appending to a struct does not raise it. */
#define RK_ABI_VERSION 1

typedef int32_t rk_status;
enum {
  RK_OK = 0,
  RK_INVALID = 1,     /* wrong shape, stride, device or value: ValueError */
  RK_DTYPE = 2,       /* wrong element type: TypeError */
  RK_UNSUPPORTED = 3, /* right, but not built or not possible here: NotImplementedError */
  RK_RUNTIME = 4      /* the machine or the system failed: RuntimeError */
};

/* A CUDA or HIP stream handle; ignored on the CPU. */
typedef int64_t rk_stream;

/* Device types and dtype codes are DLPack's. */
enum { RK_DEVICE_CPU = 1, RK_DEVICE_CUDA = 2, RK_DEVICE_CUDA_HOST = 3, RK_DEVICE_ROCM = 10 };
enum {
  RK_CODE_INT = 0,
  RK_CODE_UINT = 1,
  RK_CODE_FLOAT = 2,
  RK_CODE_BFLOAT = 4,
  RK_CODE_BOOL = 6,
  RK_CODE_FLOAT8_E4M3FN = 10,
  RK_CODE_FLOAT8_E4M3FNUZ = 11,
  RK_CODE_FLOAT8_E5M2 = 12
};

typedef struct rk_device {
  int32_t type;
  int32_t id;
} rk_device;

typedef struct rk_dtype {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
} rk_dtype;

typedef struct rk_tensor {
  void* data;
  rk_device device;
  int32_t ndim;
  rk_dtype dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
} rk_tensor;

RK_STATIC_ASSERT(sizeof(rk_tensor) == 48, "rk_tensor must have DLTensor's layout");
RK_STATIC_ASSERT(offsetof(rk_tensor, shape) == 24 && offsetof(rk_tensor, byte_offset) == 40,
                 "rk_tensor must have DLTensor's layout");

#endif
