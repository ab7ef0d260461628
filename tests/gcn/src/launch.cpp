// A launch: its arguments, its blocks, the waves of a block between barriers.
#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "fault.h"
#include "lanes.h"
#include "machine.h"

namespace gcn {
namespace {

const std::unordered_map<std::string, Handler>& handlers() {
  static const auto* all = [] {
    Table table;
    add_scalar(table);
    add_integer(table);
    add_float(table);
    add_double(table);
    add_packed(table);
    add_compare(table);
    add_memory(table);
    add_buffer(table);
    add_lds(table);
    add_matrix(table);
    add_gfx950(table);
    auto* found = new std::unordered_map<std::string, Handler>;
    for (const Entry& entry : table) found->emplace(entry.name, entry.handler);
    return found;
  }();
  return *all;
}

// Bits of the kernel descriptor's properties: what lies in the first scalar registers.
enum Property : unsigned {
  kPrivateBuffer = 1,
  kDispatchPointer = 2,
  kQueuePointer = 4,
  kArgumentPointer = 8,
  kDispatchId = 16,
  kFlatScratchInit = 32,
  kPrivateSize = 64
};

// The packet of the queue that a launch is, as HSA has it. A kernel reads the shape of its block there where the
// compiler has moved an array of its threads to LDS.
struct DispatchPacket {
  uint16_t header, setup;
  uint16_t block[3], reserved;
  uint32_t threads[3];  // of the grid
  uint32_t scratch_bytes, lds_bytes;
  uint64_t kernel, arguments, reserved_too, signal;
};
static_assert(sizeof(DispatchPacket) == 64);

DispatchPacket packet_of(const Kernel& kernel, const Launch& launch, const uint8_t* arguments) {
  DispatchPacket packet{};
  packet.setup = 3;  // dimensions
  for (unsigned axis = 0; axis < 3; axis++) {
    packet.block[axis] = static_cast<uint16_t>(launch.block[axis]);
    packet.threads[axis] = launch.grid[axis] * launch.block[axis];
  }
  packet.scratch_bytes = kernel.scratch_bytes;
  packet.lds_bytes = kernel.lds_bytes + launch.dynamic_lds;
  packet.arguments = reinterpret_cast<uint64_t>(arguments);
  return packet;
}

void set_pointer(Wave& w, unsigned at, const void* pointer) {
  const auto address = reinterpret_cast<uint64_t>(pointer);
  w.s[at] = static_cast<uint32_t>(address);
  w.s[at + 1] = static_cast<uint32_t>(address >> 32);
}

void start_registers(Wave& w, const Kernel& kernel, const Launch& launch, const DispatchPacket& packet) {
  unsigned at = 0;
  if (kernel.properties & kPrivateBuffer) {
    w.s[0] = w.s[2] = w.s[3] = 0;
    w.s[1] = kScratchBuffer;
    at += 4;
  }
  if (kernel.properties & kDispatchPointer) {
    set_pointer(w, at, &packet);
    at += 2;
  }
  if (kernel.properties & kQueuePointer) at += 2;
  if (kernel.properties & kArgumentPointer) {
    set_pointer(w, at, reinterpret_cast<const void*>(packet.arguments));
    at += 2;
  }
  if (kernel.properties & kDispatchId) fault("%s asks for the number of its dispatch", kernel.name.c_str());
  if (kernel.properties & kFlatScratchInit) set_pointer(w, at, nullptr);
  at = kernel.rsrc2 >> 1 & 31;  // behind the user's registers
  for (unsigned axis = 0; axis < 3; axis++)
    if (kernel.rsrc2 >> (7 + axis) & 1) w.s[at++] = w.block.id[axis];
  if (kernel.rsrc2 & 1) w.s[at] = 0;  // where the scratch of the wave begins
  uint32_t* ids = w.vector(0);
  for (unsigned l = 0; l < kLanes; l++) {
    const uint32_t t = w.number * kLanes + l;
    const uint32_t x = t % launch.block[0], rest = t / launch.block[0];
    ids[l] = x | (rest % launch.block[1]) << 10 | (rest / launch.block[1]) << 20;
  }
}

// Runs the waves of a block in turn from barrier to barrier.
uint64_t run_block(std::vector<Wave>& waves, Block& block, uint64_t limit) {
  while (true) {
    size_t stopped = 0, ended = 0;
    for (Wave& w : waves) {
      if (w.ended()) continue;
      if (w.run(limit))
        stopped++;
      else
        ended++;
    }
    if (!stopped) break;
    if (ended || stopped != waves.size())
      fault("barrier: %zu of %zu waves of a block of %s have ended before it", waves.size() - stopped, waves.size(),
            waves[0].kernel.name.c_str());
    block.lds.barrier();
  }
  uint64_t count = 0;
  for (const Wave& w : waves) count += w.count;
  return count;
}

uint64_t product(const uint32_t* sizes) {
  return uint64_t{sizes[0]} * sizes[1] * sizes[2];
}

void check(const Kernel& kernel, const Launch& launch) {
  const uint64_t threads = product(launch.block);
  if (!threads || !product(launch.grid)) fault("%s: an empty launch", kernel.name.c_str());
  if (threads > kernel.max_threads)
    fault("%s: a block of %lu threads, at most %u", kernel.name.c_str(), threads, kernel.max_threads);
  if (kernel.lds_bytes + launch.dynamic_lds > launch.lds_limit)
    fault("%s: %u bytes of LDS, the GPU has %u", kernel.name.c_str(), kernel.lds_bytes + launch.dynamic_lds,
          launch.lds_limit);
}

}  // namespace

Handler find_handler(const std::string& name) {
  const auto found = handlers().find(name);
  return found == handlers().end() ? nullptr : found->second;
}

size_t count_handlers() {
  return handlers().size();
}

std::vector<uint8_t> pack_arguments(const Kernel& kernel, const Launch& launch, void** values) {
  std::vector<uint8_t> out(kernel.argument_bytes);
  const auto starts = [](const std::string& text, const char* with) { return text.rfind(with, 0) == 0; };
  for (const Argument& a : kernel.arguments) {
    if (a.offset + a.size > out.size()) fault("%s: an argument past the segment", kernel.name.c_str());
    if (!starts(a.kind, "hidden_")) {
      std::memcpy(&out[a.offset], *values++, a.size);
      continue;
    }
    const unsigned axis = static_cast<unsigned>(a.kind.back() - 'x');
    uint64_t value = 0;
    if (starts(a.kind, "hidden_block_count_")) value = launch.grid[axis];
    if (starts(a.kind, "hidden_group_size_")) value = launch.block[axis];
    if (a.kind == "hidden_grid_dims") value = launch.grid[2] > 1 ? 3 : launch.grid[1] > 1 ? 2 : 1;
    if (a.kind == "hidden_dynamic_lds_size") value = launch.dynamic_lds;
    std::memcpy(&out[a.offset], &value, a.size);
  }
  return out;
}

uint64_t run_kernel(Program& program, const Kernel& kernel, const Launch& launch, Memory& memory,
                    const std::vector<uint8_t>& arguments) {
  check(kernel, launch);
  memory.add(arguments.data(), arguments.size(), false);
  memory.add(program.object.image.data(), program.object.image.size(), false);
  const DispatchPacket packet = packet_of(kernel, launch, arguments.data());
  memory.add(&packet, sizeof packet, false);
  memory.seal();
  const auto threads = static_cast<unsigned>(product(launch.block));
  uint64_t count = 0;
  for (uint32_t z = 0; z < launch.grid[2]; z++) {
    for (uint32_t y = 0; y < launch.grid[1]; y++) {
      for (uint32_t x = 0; x < launch.grid[0]; x++) {
        Block block(kernel.lds_bytes + launch.dynamic_lds, (threads + kLanes - 1) / kLanes);
        block.id[0] = x;
        block.id[1] = y;
        block.id[2] = z;
        std::vector<Wave> waves;
        waves.reserve((threads + kLanes - 1) / kLanes);
        for (unsigned first = 0; first < threads; first += kLanes) {
          waves.emplace_back(program, kernel, memory, block, first / kLanes, std::min(kLanes, threads - first));
          start_registers(waves.back(), kernel, launch, packet);
        }
        count += run_block(waves, block, launch.instruction_limit);
      }
    }
  }
  return count;
}

}  // namespace gcn
