// From Python objects to rk_tensor views, without linking any framework.
//
// Fast path: the DLPack C exchange API, a table of functions found on the object's type and cached for each type (about
// 50 ns a tensor, borrowed for the time of the call). Otherwise __dlpack__(): the capsule is kept until the call ends.
// What the library cannot see is asked here (read-only). What the exchange hides is refused by the library's ordinary
// checks: a FakeTensor has NULL data, a conjugate view is complex, a negative view has no contiguous last dimension.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "radix_kernels/library.h"

namespace radix::bind {

namespace py = pybind11;

constexpr int kMaxTensors = 24;
constexpr int kMaxStrides = 8;

// Raises the Python exception that belongs to a status (see RK_INVALID and its neighbours in types.h).
[[noreturn]] void raise(rk_status status, const char* text);

// A tensor argument during one call.
struct View {
  rk_tensor tensor{};
  bool read_only = false;
  int64_t strides[kMaxStrides];  // filled in when the producer leaves them out (contiguous)
  PyObject* owner = nullptr;     // the capsule of the fallback; NULL on the fast path
};

// One call of an op: collects views and the stream, runs the C entry, raises on failure.
class Call {
 public:
  explicit Call(const char* op) : op_(op) {}
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  // The object's view; its name is used in errors. `out` refuses read-only memory.
  const rk_tensor* in(const char* name, py::handle object) { return &view(name, object).tensor; }
  const rk_tensor* out(const char* name, py::handle object);
  // None becomes NULL.
  const rk_tensor* optional_in(const char* name, py::handle object) {
    return object.is_none() ? nullptr : in(name, object);
  }
  const rk_tensor* optional_out(const char* name, py::handle object) {
    return object.is_none() ? nullptr : out(name, object);
  }

  // Calls entry(args, current stream). Releases the GIL when the tensors are in host memory.
  template <class Args>
  void run(rk_status (*entry)(const Args*, rk_stream), const Args& args) {
    rk_status status;
    if (on_device_) {
      status = entry(&args, stream_);
    } else {
      py::gil_scoped_release unlocked;
      status = entry(&args, 0);
    }
    if (status != RK_OK) raise(status, rk_last_error());
  }

 private:
  View& view(const char* name, py::handle object);

  const char* op_;
  int count_ = 0;
  bool on_device_ = false;
  rk_stream stream_ = 0;
  View views_[kMaxTensors];
};

}  // namespace radix::bind
