/* Collectives between the processes of one machine over shared memory, for tensors in host memory. */
#ifndef RADIX_KERNELS_COMM_H
#define RADIX_KERNELS_COMM_H

#include "radix_kernels/types.h"

/* One rank's end of a group. Every rank maps the same file, which must be new (all zero):
 *   word 0              abort flag: the rank that gave up, plus one
 *   word 8 * (1 + r)    sequence number of rank r; the word after it is written by the rank's GPU (all_reduce.h)
 *   page-aligned data   [rank][2][max_bytes]
 * All ranks call the same collectives in the same order with equal shapes and dtypes. Waits spin for at most 50 us,
 * then sleep; they end with RK_RUNTIME when a rank aborts or the time limit passes. Calls on one handle must not
 * overlap, except rk_comm_abort. */
typedef struct rk_comm rk_comm;

RK_API rk_status rk_comm_create(const char* path, int32_t rank, int32_t world_size, int64_t max_bytes, double timeout,
                                rk_comm** comm);
RK_API void rk_comm_destroy(rk_comm* comm);

/* In place: the sum over the ranks, rank 0 first, in float32 for 16-bit types and rounded once, so that all ranks hold
 * the same bits. tensor: contiguous bf16, fp16, fp32, fp64, int32 or int64. */
RK_API rk_status rk_comm_all_reduce(rk_comm* comm, const rk_tensor* tensor);
/* out [world_size, shape of tensor], contiguous, or NULL where the result is not wanted. Any dtype. */
RK_API rk_status rk_comm_all_gather(rk_comm* comm, const rk_tensor* tensor, const rk_tensor* out);
/* In place: the bytes of `root`. */
RK_API rk_status rk_comm_broadcast(rk_comm* comm, const rk_tensor* tensor, int32_t root);
/* timeout 0: the group's. */
RK_API rk_status rk_comm_barrier(rk_comm* comm, double timeout);
/* Makes every present and later wait of every rank fail. Any thread; idempotent. */
RK_API void rk_comm_abort(rk_comm* comm);

#endif
