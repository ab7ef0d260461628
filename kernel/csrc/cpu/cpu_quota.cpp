#include "cpu/cpu_quota.h"

#include <algorithm>
#include <climits>
#include <cstdio>
#include <cstring>

namespace radix::cpu {
namespace {

// Reads up to two numbers from the beginning of a file ("max" is none); returns how many there were.
int numbers_in(const std::string& path, long* first, long* second) {
  FILE* file = std::fopen(path.c_str(), "r");
  if (!file) return 0;
  const int count = std::fscanf(file, "%ld %ld", first, second);
  std::fclose(file);
  return std::max(count, 0);
}

int quota_of(const std::string& folder, bool version_1) {
  long quota = 0, period = 0, unused = 0;
  const bool found = version_1 ? numbers_in(folder + "/cpu.cfs_quota_us", &quota, &unused) == 1 &&
                                     numbers_in(folder + "/cpu.cfs_period_us", &period, &unused) == 1
                               : numbers_in(folder + "/cpu.max", &quota, &period) == 2;
  if (!found || quota <= 0 || period <= 0) return INT_MAX;
  return static_cast<int>(std::min<long>((quota - 1) / period + 1, INT_MAX));
}

// In a container the path may be the host's: then only the mount point itself is there.
int tightest(const std::string& mount, std::string path, bool version_1) {
  int least = quota_of(mount, version_1);
  for (; path.size() > 1; path.resize(std::max<size_t>(path.rfind('/'), 1)))
    least = std::min(least, quota_of(mount + path, version_1));
  return least;
}

}  // namespace

int cpu_quota(const std::string& root) {
  const std::string mount = root + "/sys/fs/cgroup";
  int least = quota_of(mount, false);
  FILE* file = std::fopen((root + "/proc/self/cgroup").c_str(), "r");
  if (!file) return least;
  char line[4096];
  while (std::fgets(line, sizeof line, file)) {  // id:controllers:path, no controllers in version 2
    const char* controllers = std::strchr(line, ':');
    const char* path = controllers ? std::strchr(controllers + 1, ':') : nullptr;
    if (!path) continue;
    const std::string names = "," + std::string(controllers + 1, path) + ",";
    const std::string folder(path + 1, std::strcspn(path + 1, "\n"));
    if (names == ",,") least = std::min(least, tightest(mount, folder, false));
    if (names.find(",cpu,") != std::string::npos) least = std::min(least, tightest(mount + "/cpu", folder, true));
  }
  std::fclose(file);
  return least;
}

}  // namespace radix::cpu
