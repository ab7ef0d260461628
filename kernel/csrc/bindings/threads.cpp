#include "radix_kernels/threads.h"

#include "bindings/exchange.h"

namespace radix::bind {

void bind_threads(py::module_& m) {
  m.def("set_num_threads", [](int32_t n, bool pin) {
    rk_status status;
    {
      py::gil_scoped_release unlocked;  // waits for a running op
      status = rk_set_num_threads(n, pin);
    }
    if (status != RK_OK) raise(status, rk_last_error());
  });
  m.def("get_num_threads", [] {
    int32_t n = 0;
    if (const rk_status status = rk_get_num_threads(&n)) raise(status, rk_last_error());
    return n;
  });
}

}  // namespace radix::bind
