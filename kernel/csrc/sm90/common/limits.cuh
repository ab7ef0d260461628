// What sm_90 gives a block, a copy and an instruction: the bounds that static_asserts of the kernels name.
#pragma once

namespace radix::sm90 {

constexpr int kMaxSharedBytes = 227 << 10;    // of a block
constexpr int kSmSharedBytes = 228 << 10;     // of a multiprocessor, of which each block costs 1 KiB more
constexpr int kStaticSharedBytes = 48 << 10;  // of a block that does not ask for more
constexpr int kMaxThreads = 1024;             // of a block
constexpr int kSmThreads = 2048;              // of a multiprocessor
constexpr int kSmRegisters = 65536;           // of a multiprocessor, and of a block
constexpr int kNamedBarriers = 16;            // of a block; 0 is __syncthreads()
constexpr int kPortableCluster = 8;           // blocks of a cluster on every sm_90

constexpr int kMaxBox = 256;           // elements of a TMA box along each dimension
constexpr int kSwizzleBytes = 128;     // of a row of an operand in the 128-byte swizzle
constexpr int kSwizzleAtom = 1024;     // 8 such rows: where an operand may begin
constexpr int kWarpgroup = 128;        // threads that issue a wgmma together
constexpr int kWgmmaRows = 64;         // M of the instruction
constexpr int kMaxWgmmaColumns = 256;  // N of the instruction

__host__ __device__ constexpr bool is_power_of_two(int n) {
  return n > 0 && (n & (n - 1)) == 0;
}

// Blocks of two per multiprocessor leave 1 KiB each to the system.
__host__ __device__ constexpr bool shared_fits(int bytes, int blocks_per_sm = 1) {
  return bytes <= kMaxSharedBytes && blocks_per_sm * (bytes + 1024) <= kSmSharedBytes;
}

// Registers that a block's warpgroups hold after setmaxnreg: so many a thread of each producer and consumer.
__host__ __device__ constexpr bool registers_fit(int producers, int of_producer, int consumers, int of_consumer) {
  return kWarpgroup * (producers * of_producer + consumers * of_consumer) <= kSmRegisters;
}

}  // namespace radix::sm90
