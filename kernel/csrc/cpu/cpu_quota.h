// How much CPU time the cgroups of this process leave it.
#pragma once

#include <string>

namespace radix::cpu {

// CPUs' worth of time, rounded up, that the tightest limit grants among this process's cgroup and those above it:
// cpu.max of version 2, cpu.cfs_quota_us of version 1. INT_MAX: there is no limit. `root` stands before /proc and /sys.
int cpu_quota(const std::string& root = "");

}  // namespace radix::cpu
