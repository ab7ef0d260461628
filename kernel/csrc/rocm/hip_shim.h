// What the library knows of the HIP runtime that it calls.
#pragma once

#include <string>
#include <vector>

namespace radix::hip {

// Files of the HIP runtime that Python packages bring, found without importing them (_hip.py).
void set_bundled(const std::vector<std::string>& paths);
// The runtime in use, which is opened where it was not yet; "" without one.
const char* runtime_path();
// Why there is no runtime; "" with one.
const char* runtime_problem();

}  // namespace radix::hip
