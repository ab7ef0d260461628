/* Collectives between the GPUs of one machine that reach each other's memory (NVLink, xGMI, PCIe): one rank a process.
 *
 * A rank writes its data into staging memory of the others; no rank reads another's memory. Sums run in rank order,
 * rank 0 first, in float32 and are rounded once, so that every rank holds the same bits whichever algorithm ran. All
 * ranks call the same entries in the same order with equal shapes and dtypes; the calls of a rank are ordered among
 * themselves (one stream, or streams that wait for each other). They may be captured in a CUDA graph.
 *
 * A wait on the device ends when the group is aborted or the time limit passes; the results of that call and of all
 * later ones are then undefined and rk_gpu_comm_check() says why. */
#ifndef RADIX_KERNELS_ALL_REDUCE_H
#define RADIX_KERNELS_ALL_REDUCE_H

#include "radix_kernels/types.h"

typedef struct rk_gpu_comm rk_gpu_comm;

enum { RK_GPU_COMM_HANDLE_BYTES = 64, RK_GPU_COMM_MAX_RANKS = 8 };

/* Makes this rank's end. The one place where the library allocates device memory (4 * max_bytes and a page): other
 * processes can map whole allocations only. It also waits for the device.
 *
 * world_size is 2, 4 or 8. max_bytes: what one launch moves at most; larger tensors take several. timeout: seconds.
 * control: the control page of the ranks' shared-memory group (comm.h), mapped by every rank; it is made visible to the
 * device. Its abort word (0) ends all waits; word 8 * (1 + r) + 1 is written by rank r's device when a wait of it has
 * ended early. handle receives RK_GPU_COMM_HANDLE_BYTES bytes that the other ranks need. */
typedef struct rk_gpu_comm_config {
  uint32_t struct_size;
  int32_t rank;
  int32_t world_size;
  rk_device device;
  int64_t max_bytes;
  double timeout;
  void* control;
} rk_gpu_comm_config;
RK_API rk_status rk_gpu_comm_create(const rk_gpu_comm_config* config, void* handle, rk_gpu_comm** comm);
/* Opens the others' memory; handles: those of all ranks, in order. RK_UNSUPPORTED where a GPU cannot reach another. No
 * rank may start a collective before all have connected, nor destroy its end while another's call is running. */
RK_API rk_status rk_gpu_comm_connect(rk_gpu_comm* comm, const void* handles);
/* RK_RUNTIME when the group was aborted or a wait ran into the time limit. Does not wait for the device: call it after
 * the work of interest has completed. */
RK_API rk_status rk_gpu_comm_check(const rk_gpu_comm* comm);
RK_API void rk_gpu_comm_destroy(rk_gpu_comm* comm);

/* AUTO takes what was measured to be fastest for the size. ONE_SHOT: every rank sends all of its data to all others.
 * TWO_SHOT: a rank sums one share and sends the sums: fewer bytes, one hop more. */
enum { RK_ALL_REDUCE_AUTO = 0, RK_ALL_REDUCE_ONE_SHOT = 1, RK_ALL_REDUCE_TWO_SHOT = 2 };

/* out = sum of the ranks' inputs. bf16, fp16 or fp32, contiguous; out may be input. blocks, threads: 0, or the size of
 * the launch, for measurements. */
typedef struct rk_all_reduce_args {
  uint32_t struct_size;
  int32_t algorithm;
  rk_gpu_comm* comm;
  const rk_tensor* input;
  const rk_tensor* out;
  int32_t blocks;
  int32_t threads;
} rk_all_reduce_args;
RK_API rk_status rk_all_reduce(const rk_all_reduce_args* args, rk_stream stream);

/* residual += all_reduce(input); out = rmsnorm(residual) * weight, with the roundings of an all-reduce followed by
 * rk_fused_add_rmsnorm. input, residual [..., H] contiguous and 16-byte aligned, H * item size a multiple of 16 and at
 * most 32 KiB; weight [H], input's dtype or fp32. out: input's dtype (it may be input itself), or float8_e4m3fn with
 * scale, fp32 [..., H / g], g = H or 128: out * scale is the norm, scale = max(largest |norm| of the g, 1e-10) / 448.
 */
typedef struct rk_all_reduce_add_rmsnorm_args {
  uint32_t struct_size;
  int32_t algorithm;
  rk_gpu_comm* comm;
  const rk_tensor* input;
  const rk_tensor* residual;
  const rk_tensor* weight;
  const rk_tensor* out;
  const rk_tensor* scale; /* NULL when out is not quantized */
  float eps;
  int32_t blocks;
} rk_all_reduce_add_rmsnorm_args;
RK_API rk_status rk_all_reduce_add_rmsnorm(const rk_all_reduce_add_rmsnorm_args* args, rk_stream stream);

/* out[...] = sum over the ranks of input[rank, ...]; input [world_size, shape of out], contiguous bf16, fp16 or fp32.
 */
typedef struct rk_reduce_scatter_args {
  uint32_t struct_size;
  int32_t blocks;
  rk_gpu_comm* comm;
  const rk_tensor* input;
  const rk_tensor* out;
} rk_reduce_scatter_args;
RK_API rk_status rk_reduce_scatter(const rk_reduce_scatter_args* args, rk_stream stream);

/* out[r, ...] = rank r's input, bit for bit; out [world_size, shape of input], contiguous, any dtype. For small
 * tensors: it sends two bytes for each. */
typedef struct rk_all_gather_args {
  uint32_t struct_size;
  int32_t blocks;
  rk_gpu_comm* comm;
  const rk_tensor* input;
  const rk_tensor* out;
} rk_all_gather_args;
RK_API rk_status rk_all_gather(const rk_all_gather_args* args, rk_stream stream);

#endif
