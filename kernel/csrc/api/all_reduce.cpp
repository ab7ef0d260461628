// All-reduce family: checks once for every backend, then the backend's kernel.
#include "api/all_reduce.h"

#include "common/check.h"
#include "gpu/comm/peer_group.h"

using namespace radix;

namespace {

constexpr int64_t kMaxRowBytes = 32 << 10;

// Of the group's device, contiguous.
Arg group_tensor(const char* op, const char* name, const rk_tensor* tensor, const rk_gpu_comm* comm) {
  if (!comm) fail(RK_INVALID, "%s: comm is required", op);
  const Arg arg(op, name, tensor);
  const rk_device device = comm->device();
  if (arg->device.type != device.type || arg->device.id != device.id)
    arg.reject(RK_INVALID, "is on %s, expected %s (the communicator's)", device_text(arg->device).c_str(),
               device_text(device).c_str());
  arg.contiguous();
  return arg;
}

// `many` has the shape of `one` with the ranks in front.
void check_stacked(const Arg& many, const Arg& one, const rk_gpu_comm& comm) {
  const int world = comm.world_size();
  many.same_dtype(one);
  bool same = many->ndim == one->ndim + 1 && many.size(0) == world;
  for (int i = 0; same && i < one->ndim; i++) same = many.size(i + 1) == one.size(i);
  if (!same)
    many.reject(RK_INVALID, "has shape %s, expected %d of %s", shape_text(*many).c_str(), world,
                shape_text(*one).c_str());
}

void check_launch(const char* op, int32_t algorithm, int32_t blocks) {
  if (algorithm < RK_ALL_REDUCE_AUTO || algorithm > RK_ALL_REDUCE_TWO_SHOT)
    fail(RK_INVALID, "%s: algorithm is %d, expected 0, 1 or 2", op, algorithm);
  if (blocks < 0) fail(RK_INVALID, "%s: blocks is %d, expected 0 or more", op, blocks);
}

void check_quantized(const Arg& out, const Arg& scale, const Arg& input) {
  out.dtype({DType::f8e4m3});
  scale.same_device(input).dtype({DType::f32}).contiguous().writable();
  const int64_t hidden = input.size(-1);
  bool same = scale->ndim == input->ndim;
  for (int i = 0; same && i < input->ndim - 1; i++) same = scale.size(i) == input.size(i);
  same = same && (scale.size(-1) == 1 || (hidden % 128 == 0 && scale.size(-1) == hidden / 128));
  if (!same)
    scale.reject(RK_INVALID, "has shape %s, expected one number a row of input %s or one for each 128 elements",
                 shape_text(*scale).c_str(), shape_text(*input).c_str());
}

}  // namespace

rk_status rk_gpu_comm_create(const rk_gpu_comm_config* config, void* handle, rk_gpu_comm** comm) {
  return guard([&] {
    const char* op = "GpuCommunicator";
    const auto c = read_args(op, config);
    if (!handle || !comm || !c.control) fail(RK_INVALID, "%s: handle, comm and control are required", op);
    if (c.world_size != 2 && c.world_size != 4 && c.world_size != 8)
      fail(RK_UNSUPPORTED, "%s: world_size is %d, expected 2, 4 or 8", op, c.world_size);
    if (c.rank < 0 || c.rank >= c.world_size)
      fail(RK_INVALID, "%s: rank is %d, expected 0 <= rank < world_size = %d", op, c.rank, c.world_size);
    if (c.max_bytes < 1) fail(RK_INVALID, "%s: max_bytes is %lld, expected 1 or more", op, (long long)c.max_bytes);
    if (!(c.timeout > 0)) fail(RK_INVALID, "%s: timeout is %g, expected a positive number of seconds", op, c.timeout);
    *comm = new rk_gpu_comm(c, handle);
  });
}

rk_status rk_gpu_comm_connect(rk_gpu_comm* comm, const void* handles) {
  return guard([&] {
    if (!comm || !handles) fail(RK_INVALID, "GpuCommunicator: comm and handles are required");
    comm->connect(static_cast<const char*>(handles));
  });
}

rk_status rk_gpu_comm_check(const rk_gpu_comm* comm) {
  return guard([&] {
    if (!comm) fail(RK_INVALID, "GpuCommunicator: comm is required");
    comm->check();
  });
}

void rk_gpu_comm_destroy(rk_gpu_comm* comm) {
  delete comm;
}

rk_status rk_all_reduce(const rk_all_reduce_args* args, rk_stream stream) {
  return guard([&] {
    const char* op = "all_reduce";
    const auto a = read_args(op, args);
    const Arg input = group_tensor(op, "input", a.input, a.comm), out = group_tensor(op, "out", a.out, a.comm);
    input.dtype(kFloats);
    out.same_dtype(input).same_shape(input).writable();
    check_launch(op, a.algorithm, a.blocks);
    if (a.threads < 0 || a.threads > 512 || a.threads % 64)
      fail(RK_INVALID, "%s: threads is %d, expected a multiple of 64 up to 512", op, a.threads);
    if (input.numel() > 0) backend::all_reduce(a, stream);
  });
}

rk_status rk_all_reduce_add_rmsnorm(const rk_all_reduce_add_rmsnorm_args* args, rk_stream stream) {
  return guard([&] {
    const char* op = "all_reduce_add_rmsnorm";
    const auto a = read_args(op, args);
    const Arg input = group_tensor(op, "input", a.input, a.comm), out = group_tensor(op, "out", a.out, a.comm);
    const Arg residual = group_tensor(op, "residual", a.residual, a.comm), weight(op, "weight", a.weight);
    input.dtype(kFloats).min_ndim(1);
    residual.same_dtype(input).same_shape(input).writable();
    weight.same_device(input).shape({input.size(-1)}, "last dimension of input").last_contiguous();
    weight.dtype({input.type(), DType::f32});
    out.same_shape(input).writable();
    if (a.scale) {
      check_quantized(out, Arg(op, "scale", a.scale), input);
    } else {
      out.same_dtype(input);
    }
    check_launch(op, a.algorithm, a.blocks);
    const int64_t row = input.size(-1) * input->dtype.bits / 8;
    if (row % 16 || row > kMaxRowBytes)
      input.reject(RK_INVALID, "has rows of %lld bytes, expected a multiple of 16 up to %lld", (long long)row,
                   (long long)kMaxRowBytes);
    for (const Arg* arg : {&input, &residual, &out})
      if ((reinterpret_cast<uintptr_t>((*arg)->data) + (*arg)->byte_offset) % 16)
        arg->reject(RK_INVALID, "is not aligned to 16 bytes");
    if (input.numel() > 0) backend::all_reduce_add_rmsnorm(a, stream);
  });
}

rk_status rk_reduce_scatter(const rk_reduce_scatter_args* args, rk_stream stream) {
  return guard([&] {
    const char* op = "reduce_scatter";
    const auto a = read_args(op, args);
    const Arg input = group_tensor(op, "input", a.input, a.comm), out = group_tensor(op, "out", a.out, a.comm);
    input.dtype(kFloats);
    out.writable();
    check_stacked(input, out, *a.comm);
    check_launch(op, RK_ALL_REDUCE_AUTO, a.blocks);
    if (out.numel() > 0) backend::reduce_scatter(a, stream);
  });
}

rk_status rk_all_gather(const rk_all_gather_args* args, rk_stream stream) {
  return guard([&] {
    const char* op = "all_gather";
    const auto a = read_args(op, args);
    const Arg input = group_tensor(op, "input", a.input, a.comm), out = group_tensor(op, "out", a.out, a.comm);
    out.writable();
    check_stacked(out, input, *a.comm);
    check_launch(op, RK_ALL_REDUCE_AUTO, a.blocks);
    if (input.numel() > 0) backend::all_gather(a, stream);
  });
}
