#include "cpu/core_claims.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <cstdio>

namespace radix::cpu {
namespace {

// The socket, or -1 when another process has the CPU.
int claim(int cpu) {
  const int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return -1;
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  // A name that begins with 0 is abstract.
  const int length = std::snprintf(name.sun_path + 1, sizeof name.sun_path - 1, "radix-kernels-cpu-%d", cpu);
  const socklen_t size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
  if (bind(fd, reinterpret_cast<sockaddr*>(&name), size) == 0) return fd;
  close(fd);
  return -1;
}

}  // namespace

std::vector<int> CoreClaims::take(const std::vector<int>& cpus, int count) {
  std::vector<int> taken;
  for (int cpu : cpus) {
    if (static_cast<int>(taken.size()) == count) break;
    const int fd = claim(cpu);
    if (fd < 0) continue;
    sockets_.push_back(fd);
    taken.push_back(cpu);
  }
  if (static_cast<int>(taken.size()) == count) return taken;
  release();
  return {};
}

void CoreClaims::release() {
  for (int fd : sockets_) close(fd);
  sockets_.clear();
}

}  // namespace radix::cpu
