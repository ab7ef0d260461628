// Marks functions that host and device code share.
#pragma once

#if defined(__CUDACC__) || defined(__HIPCC__)
#define RK_HOST_DEVICE __host__ __device__
#else
#define RK_HOST_DEVICE
#endif
