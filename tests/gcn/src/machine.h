// What an instruction sees: a wave of 64 lanes, its block with LDS and barriers, the GPU's memory.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "program.h"

namespace gcn {

// The buffers that a launch may touch. Addresses are the host's.
class Memory {
 public:
  struct Region {
    uint64_t begin, end;
    bool writable;
  };
  void add(const void* begin, size_t bytes, bool writable = true);
  void seal();  // sorts them and joins those that overlap; after the last add()
  // The bytes at `address`, or Fault.
  uint8_t* at(uint64_t address, uint32_t bytes, bool writes);

 private:
  std::vector<Region> regions_;
  size_t last_ = 0;  // where the last access was
};

// A block's LDS: what was written, and by which wave since the last barrier.
class Lds {
 public:
  Lds(uint32_t bytes, unsigned waves);
  uint32_t size() const { return static_cast<uint32_t>(bytes_.size()); }
  void load(uint64_t address, uint8_t* out, uint32_t bytes, unsigned wave);
  void store(uint64_t address, const uint8_t* data, uint32_t bytes, unsigned wave);
  // For a read and a write in one, which is no race with others like it, nor with a load of one word.
  uint8_t* atomic(uint64_t address, uint32_t bytes, unsigned wave);
  void barrier();

 private:
  // A byte's tag: the interval between two barriers in the upper bits, who in the lower ones; 0 is never, kOld before.
  static constexpr uint16_t kOld = 1, kAtomic = 30, kWaveMask = 31, kSeveral = 32, kStep = 64;
  static constexpr uint32_t kWord = 8;  // bytes that are read or written at once
  void check(uint64_t address, uint32_t bytes) const;
  bool recent(uint16_t tag) const { return (tag & ~(kStep - 1)) == interval_; }

  const bool alone_;  // one wave, whose instructions are in order
  std::vector<uint8_t> bytes_;
  std::vector<uint16_t> written_, read_;
  uint16_t interval_ = kStep;
};

struct Block {
  Block(uint32_t lds_bytes, unsigned waves) : lds(lds_bytes, waves) {}
  Lds lds;
  uint32_t id[3] = {0, 0, 0};
};

// The upper word of the buffer of scratch in a kernel's first scalar registers: swizzling, and no base.
constexpr uint32_t kScratchBuffer = 0x80000000;

class Wave {
 public:
  Wave(Program& program, const Kernel& kernel, Memory& memory, Block& block, unsigned number, unsigned lanes);

  // Runs to a barrier (true) or to the end (false). Fault when the program does what it must not.
  bool run(uint64_t limit);

  uint32_t* vector(unsigned index) { return registers_[index].data(); }
  const uint32_t* source(const Operand& op, unsigned word, Lanes& hold);
  uint32_t scalar(const Operand& op) const;
  uint64_t scalar_pair(const Operand& op) const;
  void set_scalar(const Operand& op, uint32_t value);
  void set_scalar_pair(const Operand& op, uint64_t value);
  void set_exec(uint64_t mask);
  uint64_t exec() const { return exec_; }
  uint64_t lane_mask(const Operand& op) const { return scalar_pair(op); }

  // A memory instruction's result is pending until s_waitcnt says that it has come.
  enum class Queue { kVector, kLds, kScalar };
  // Accesses of vector memory that may be under way: vmcnt has six bits, and at its largest the wave waits before it
  // issues another. Triton's LLVM leaves the wait out then.
  static constexpr size_t kMostOutstanding = 63;
  void issued(Queue queue, const Operand* result, unsigned words);
  void wait(unsigned vmcnt, unsigned lgkmcnt);

  uint64_t image_address(uint64_t address) const;  // of code, as the program sees it
  void jump(uint64_t address);                     // to an address as the program sees it
  void jump_to(uint32_t index) { next_ = index; }
  void end() { ended_ = true; }
  void stop_at_barrier() { at_barrier_ = true; }
  void poll() { polled_ = true; }  // it may wait for another GPU

  uint8_t* scratch(unsigned lane, int64_t offset, uint32_t bytes);

  std::array<uint32_t, kScalars> s{};
  bool scc = false;
  Lanes live{};  // all ones where EXEC has the lane
  Program& program;
  const Kernel& kernel;
  Memory& memory;
  Block& block;
  const unsigned number;
  uint64_t count = 0;  // instructions so far
  bool ended() const { return ended_; }
  const Instruction* current = nullptr;

 private:
  struct Outstanding {
    bool in_order;
    uint16_t first, words;  // of the result: scalar registers are behind the vector ones
  };
  void retire(std::deque<Outstanding>& queue);
  void check_pending(const Instruction& in) const;
  void run_rearranged(const Instruction& in);
  void place(const Instruction& in);
  uint64_t select_lanes(const Rearrangement& around, Operand source, uint32_t* out);

  struct Return {
    void operator()(Lanes* rows) const;
  };
  std::unique_ptr<Lanes[], Return> registers_;  // kVectorRows of them, from those of waves that have ended
  std::vector<uint8_t> scratch_;
  uint64_t exec_ = 0, all_ = 0;
  uint32_t next_ = 0;
  bool ended_ = false, at_barrier_ = false, polled_ = false;
  std::deque<Outstanding> vector_queue_, lgkm_queue_;
  std::array<uint8_t, kVectorRows + kScalars> pending_{};
  unsigned outstanding_ = 0;
};

struct Launch {
  uint32_t grid[3], block[3];
  uint32_t dynamic_lds;
  uint32_t lds_limit;
  uint64_t instruction_limit;  // a wave
};

// Runs every block of a launch, one after the other. Returns the number of wave instructions.
uint64_t run_kernel(Program& program, const Kernel& kernel, const Launch& launch, Memory& memory,
                    const std::vector<uint8_t>& arguments);

// The bytes of the argument segment: the given values, and the hidden arguments that the compiler asks for.
std::vector<uint8_t> pack_arguments(const Kernel& kernel, const Launch& launch, void** values);

}  // namespace gcn
