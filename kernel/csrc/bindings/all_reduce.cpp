#include "radix_kernels/all_reduce.h"

#include <memory>
#include <string>

#include "bindings/exchange.h"

namespace radix::bind {
namespace {

struct Destroy {
  void operator()(rk_gpu_comm* comm) const { rk_gpu_comm_destroy(comm); }
};

void raise_unless_ok(rk_status status) {
  if (status != RK_OK) raise(status, rk_last_error());
}

// The Python object `_bind.GpuComm`; radix_kernels.comm.GpuCommunicator is its public face. `control` is the address of
// the shared-memory group's control page.
class GpuComm {
 public:
  GpuComm(uintptr_t control, int device, int rank, int world_size, int64_t max_bytes, double timeout)
      : handle_(RK_GPU_COMM_HANDLE_BYTES, '\0') {
    rk_gpu_comm_config config{sizeof config};
    config.rank = rank;
    config.world_size = world_size;
    config.device = {std::string(rk_backend()) == "rocm" ? RK_DEVICE_ROCM : RK_DEVICE_CUDA, device};
    config.max_bytes = max_bytes;
    config.timeout = timeout;
    config.control = reinterpret_cast<void*>(control);
    rk_gpu_comm* comm = nullptr;
    raise_unless_ok(rk_gpu_comm_create(&config, handle_.data(), &comm));
    comm_.reset(comm);
  }

  py::bytes handle() const { return handle_; }
  void connect(const std::string& handles) { raise_unless_ok(rk_gpu_comm_connect(comm_.get(), handles.data())); }
  void check() const { raise_unless_ok(rk_gpu_comm_check(comm_.get())); }

  void all_reduce(py::handle input, int algorithm, int blocks, int threads, py::handle out) {
    Call call("all_reduce");
    rk_all_reduce_args args{sizeof args};
    args.comm = comm_.get();
    args.input = call.in("input", input);
    args.algorithm = algorithm;
    args.blocks = blocks;
    args.threads = threads;
    args.out = call.out("out", out);
    call.run(rk_all_reduce, args);
  }
  void all_reduce_add_rmsnorm(py::handle input, py::handle residual, py::handle weight, float eps, int algorithm,
                              int blocks, py::handle out, py::handle scale) {
    Call call("all_reduce_add_rmsnorm");
    rk_all_reduce_add_rmsnorm_args args{sizeof args};
    args.comm = comm_.get();
    args.input = call.in("input", input);
    args.residual = call.out("residual", residual);
    args.weight = call.in("weight", weight);
    args.eps = eps;
    args.algorithm = algorithm;
    args.blocks = blocks;
    args.out = call.out("out", out);
    args.scale = call.optional_out("scale", scale);
    call.run(rk_all_reduce_add_rmsnorm, args);
  }
  void reduce_scatter(py::handle input, int blocks, py::handle out) {
    Call call("reduce_scatter");
    rk_reduce_scatter_args args{sizeof args};
    args.comm = comm_.get();
    args.input = call.in("input", input);
    args.blocks = blocks;
    args.out = call.out("out", out);
    call.run(rk_reduce_scatter, args);
  }
  void all_gather(py::handle input, int blocks, py::handle out) {
    Call call("all_gather");
    rk_all_gather_args args{sizeof args};
    args.comm = comm_.get();
    args.input = call.in("input", input);
    args.blocks = blocks;
    args.out = call.out("out", out);
    call.run(rk_all_gather, args);
  }

 private:
  std::string handle_;
  std::unique_ptr<rk_gpu_comm, Destroy> comm_;
};

}  // namespace

void bind_all_reduce(py::module_& m) {
  py::class_<GpuComm>(m, "GpuComm")
      .def(py::init<uintptr_t, int, int, int, int64_t, double>())
      .def("handle", &GpuComm::handle)
      .def("connect", &GpuComm::connect)
      .def("check", &GpuComm::check)
      .def("all_reduce", &GpuComm::all_reduce)
      .def("all_reduce_add_rmsnorm", &GpuComm::all_reduce_add_rmsnorm)
      .def("reduce_scatter", &GpuComm::reduce_scatter)
      .def("all_gather", &GpuComm::all_gather);
}

}  // namespace radix::bind
