#include "common/error.h"

#include <cstdarg>
#include <cstdio>

#include "radix_kernels/library.h"

namespace radix {
namespace {
constexpr size_t kMaxText = 1024;
thread_local char last_error[kMaxText] = "";
}  // namespace

void fail(rk_status status, const char* format, ...) {
  char text[kMaxText];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  throw Error{status, text};
}

rk_status set_last_error(rk_status status, const char* text) noexcept {
  snprintf(last_error, sizeof last_error, "%s", text);
  return status;
}

}  // namespace radix

const char* rk_last_error(void) {
  return radix::last_error;
}
