// A code object: the ELF file that the compiler makes for one GPU target, with the metadata of its kernels.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace gcn {

struct Argument {
  std::string kind;  // by_value, global_buffer, hidden_block_count_x, ...
  uint32_t offset, size;
};

// What the kernel descriptor and the metadata say.
struct Kernel {
  std::string name;
  std::vector<Argument> arguments;
  uint32_t lds_bytes = 0, scratch_bytes = 0, argument_bytes = 0, max_threads = 0;
  uint32_t vgprs = 0;       // registers a lane, accumulation registers among them
  uint32_t first_agpr = 0;  // where accumulation register 0 lies in them
  uint32_t rsrc2 = 0;
  uint16_t properties = 0;
  uint64_t entry = 0;  // address in the image
};

struct CodeObject {
  std::string target;  // gfx942
  std::vector<uint8_t> elf;
  std::vector<uint8_t> image;  // the loaded segments, from address 0
  std::map<std::string, Kernel> kernels;
};

// Throws Fault when the bytes are no code object of version 4 or later.
CodeObject read_code_object(const void* elf, size_t bytes);

// The entry of a target in a clang offload bundle; empty when there is none. `bundle` is trusted to be complete.
std::string_view find_in_bundle(const char* bundle, std::string_view target);
// All targets of a bundle that have code, with what follows the name (gfx942:sramecc+).
std::vector<std::string> targets_of_bundle(const char* bundle);

}  // namespace gcn
