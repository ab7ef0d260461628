// Which CPUs other processes have bound their workers to, so that two engines on one machine do not choose the same.
#pragma once

#include <vector>

namespace radix::cpu {

// A claim is a Unix socket bound to an abstract name: the system gives a name to one process at a time and takes it
// back when the process ends, however it ends, and nothing lies in a file system. Processes of other network namespaces
// (containers) are not seen.
class CoreClaims {
 public:
  CoreClaims() = default;
  ~CoreClaims() { release(); }
  CoreClaims(const CoreClaims&) = delete;
  CoreClaims& operator=(const CoreClaims&) = delete;

  // Claims `count` of these CPUs and returns them, in their order; none when so many are not free.
  std::vector<int> take(const std::vector<int>& cpus, int count);
  void release();

 private:
  std::vector<int> sockets_;
};

}  // namespace radix::cpu
