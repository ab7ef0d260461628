#include "radix_kernels/comm.h"

#include <memory>
#include <string>

#include "bindings/exchange.h"

namespace radix::bind {
namespace {

struct Destroy {
  void operator()(rk_comm* comm) const { rk_comm_destroy(comm); }
};

// The Python object `_bind.Comm`; radix_kernels.comm.ShmCommunicator is its public face.
class Comm {
 public:
  Comm(const std::string& path, int rank, int world_size, int64_t max_bytes, double timeout) {
    rk_comm* comm = nullptr;
    check(rk_comm_create(path.c_str(), rank, world_size, max_bytes, timeout, &comm));
    comm_.reset(comm);
  }

  void all_reduce(py::handle tensor) {
    Call call("all_reduce");
    const rk_tensor* t = call.out("tensor", tensor);
    run([&] { return rk_comm_all_reduce(comm_.get(), t); });
  }
  void all_gather(py::handle tensor, py::handle out) {
    Call call("all_gather");
    const rk_tensor* t = call.in("tensor", tensor);
    const rk_tensor* o = call.optional_out("out", out);
    run([&] { return rk_comm_all_gather(comm_.get(), t, o); });
  }
  void broadcast(py::handle tensor, int root) {
    Call call("broadcast");
    const rk_tensor* t = call.out("tensor", tensor);
    run([&] { return rk_comm_broadcast(comm_.get(), t, root); });
  }
  void barrier(double timeout) {
    run([&] { return rk_comm_barrier(comm_.get(), timeout); });
  }
  void abort() { rk_comm_abort(comm_.get()); }

 private:
  static void check(rk_status status) {
    if (status != RK_OK) raise(status, rk_last_error());
  }
  // Waits of other Python threads must not depend on this rank's peers.
  template <class Fn>
  void run(const Fn& fn) {
    rk_status status;
    {
      py::gil_scoped_release unlocked;
      status = fn();
    }
    check(status);
  }

  std::unique_ptr<rk_comm, Destroy> comm_;
};

}  // namespace

void bind_comm(py::module_& m) {
  py::class_<Comm>(m, "Comm")
      .def(py::init<const std::string&, int, int, int64_t, double>())
      .def("all_reduce", &Comm::all_reduce)
      .def("all_gather", &Comm::all_gather)
      .def("broadcast", &Comm::broadcast)
      .def("barrier", &Comm::barrier)
      .def("abort", &Comm::abort);
}

}  // namespace radix::bind
