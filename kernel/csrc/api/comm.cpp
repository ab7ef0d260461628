// Collectives: checks, then the shared-memory group.
#include "api/comm.h"

#include "cpu/comm/group.h"

using namespace radix;

rk_status rk_comm_create(const char* path, int32_t rank, int32_t world_size, int64_t max_bytes, double timeout,
                         rk_comm** comm) {
  return guard([&] {
    const char* op = "ShmCommunicator";
    if (!path || !comm) fail(RK_INVALID, "%s: path and comm are required", op);
    if (world_size < 1 || rank < 0 || rank >= world_size)
      fail(RK_INVALID, "%s: rank is %d, expected 0 <= rank < world_size = %d", op, rank, world_size);
    if (max_bytes < 8 || max_bytes % 8 != 0)
      fail(RK_INVALID, "%s: max_bytes is %lld, expected a positive multiple of 8", op, (long long)max_bytes);
    if (!(timeout > 0)) fail(RK_INVALID, "%s: timeout is %g, expected a positive number of seconds", op, timeout);
    *comm = new rk_comm(path, rank, world_size, max_bytes, timeout);
  });
}

void rk_comm_destroy(rk_comm* comm) {
  delete comm;
}

rk_status rk_comm_all_reduce(rk_comm* comm, const rk_tensor* tensor) {
  return guard([&] {
    const Arg t = host_tensor("all_reduce", "tensor", tensor);
    t.dtype({DType::bf16, DType::f16, DType::f32, DType::f64, DType::i32, DType::i64}).writable();
    comm->all_reduce(*t, t.numel());
  });
}

rk_status rk_comm_all_gather(rk_comm* comm, const rk_tensor* tensor, const rk_tensor* out) {
  return guard([&] {
    const char* op = "all_gather";
    const Arg t = host_tensor(op, "tensor", tensor);
    if (out) {
      const Arg o = host_tensor(op, "out", out);
      o.same_dtype(t).writable();
      bool same = o->ndim == t->ndim + 1 && o.size(0) == comm->world_size();
      for (int i = 0; same && i < t->ndim; i++) same = o.size(i + 1) == t.size(i);
      if (!same)
        o.reject(RK_INVALID, "has shape %s, expected %d of %s", shape_text(*o).c_str(), comm->world_size(),
                 shape_text(*t).c_str());
    }
    comm->all_gather(*t, t.numel(), out);
  });
}

rk_status rk_comm_broadcast(rk_comm* comm, const rk_tensor* tensor, int32_t root) {
  return guard([&] {
    const char* op = "broadcast";
    const Arg t = host_tensor(op, "tensor", tensor);
    t.writable();
    if (root < 0 || root >= comm->world_size())
      fail(RK_INVALID, "%s: root is %d, expected a rank below %d", op, root, comm->world_size());
    comm->broadcast(*t, t.numel(), root);
  });
}

rk_status rk_comm_barrier(rk_comm* comm, double timeout) {
  return guard([&] { comm->barrier(timeout); });
}

void rk_comm_abort(rk_comm* comm) {
  comm->abort();
}
