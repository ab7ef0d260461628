// Errors inside the library are exceptions; guard() turns them into a status and a text at the C border.
#pragma once

#include <exception>
#include <new>
#include <string>

#include "radix_kernels/types.h"

namespace radix {

struct Error {
  rk_status status;
  std::string text;
};

// Throws an Error with a printf-formatted text.
[[noreturn]] void fail(rk_status status, const char* format, ...) __attribute__((format(printf, 2, 3)));

// Keeps the text for rk_last_error() on this thread and returns the status.
rk_status set_last_error(rk_status status, const char* text) noexcept;

template <class Body>
rk_status guard(Body&& body) noexcept {
  try {
    body();
    return RK_OK;
  } catch (const Error& e) {
    return set_last_error(e.status, e.text.c_str());
  } catch (const std::bad_alloc&) {
    return set_last_error(RK_RUNTIME, "out of host memory");
  } catch (const std::exception& e) {
    return set_last_error(RK_RUNTIME, e.what());
  } catch (...) {
    return set_last_error(RK_RUNTIME, "unknown error");
  }
}

}  // namespace radix
