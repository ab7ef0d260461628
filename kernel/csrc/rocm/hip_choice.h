// Which copy of the HIP runtime this process should call: at most one is ever opened by us.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace radix::hip {

struct Choice {
  std::vector<std::string> paths;  // the first that can be opened
  std::string problem;             // why there is none, where paths is empty
  bool settled = false;            // torch is here: no library that is loaded later changes the choice
};

// In this order:
//   - of copies that are loaded, the one that libtorch_hip calls, else the only one, else the one that Python packages
//     bring; never another one beside them;
//   - with none loaded $RADIX_LIBHIP, `bundled` (what torch or rocm_sdk will load once it is imported), $ROCM_PATH,
//     the loader's own search, ROCm's folders in /opt, the newest first.
// $RADIX_LIBHIP also decides between loaded copies.
Choice choose(const std::vector<std::string>& bundled);

// Grows with every library that is loaded into the process.
uint64_t libraries_loaded();

}  // namespace radix::hip
