// Modules, launches, streams and graphs of the stand-in.
#include <chrono>
#include <cstdio>
#include <cstring>

#include "fault.h"
#include "hip_state.h"

using namespace gcn;
using namespace gcn::hip;

namespace {

constexpr uint32_t kLdsBytes = 65536, kLdsBytesOfGfx950 = 163840;
constexpr uint64_t kInstructionLimit = 400'000'000;  // a wave
constexpr uint32_t kFatBinaryMagic = 0x48495046;     // "HIPF"

struct FatBinary {  // what the compiler registers
  uint32_t magic, version;
  const char* bundle;
  const void* unused;
};

// Handles 0 to 2 are the default streams, which have no state here and cannot be captured.
bool is_default(const Stream* stream) {
  return reinterpret_cast<uintptr_t>(stream) <= 2;
}

// Whatever HIP does not permit ends the captures that are open.
bool invalidate_captures(State& s) {
  bool any = false;
  for (Stream* stream : s.streams) {
    if (!stream->capturing) continue;
    any = true;
    stream->invalidated = true;
  }
  return any;
}

Launch shape_of(Dim3 grid, Dim3 block, size_t shared_bytes) {
  return {{grid.x, grid.y, grid.z},
          {block.x, block.y, block.z},
          static_cast<uint32_t>(shared_bytes),
          state().target == "gfx950" ? kLdsBytesOfGfx950 : kLdsBytes,
          kInstructionLimit};
}

Error submit(const Function& function, Dim3 grid, Dim3 block, void** values, size_t shared_bytes, Stream* stream) {
  State& s = state();
  last_fault().clear();
  if (!s.devices) return kNoDevice;
  std::shared_ptr<Program> program;
  if (const Error error = find_program(function, program)) return error;
  const auto kernel = program->object.kernels.find(function.name);
  if (kernel == program->object.kernels.end()) return kInvalidDeviceFunction;
  const Launch shape = shape_of(grid, block, shared_bytes);
  Node node{function, shape, current_device(), {}};
  try {
    node.arguments = pack_arguments(kernel->second, shape, values);
  } catch (const Fault& problem) {
    last_fault() = problem.what();
    return kLaunchFailure;
  }
  {
    const std::lock_guard lock(s.mutex);
    char numbers[160];
    std::snprintf(numbers, sizeof numbers, "|%u,%u,%u|%u,%u,%u|%d|%zu", grid.x, grid.y, grid.z, block.x, block.y,
                  block.z, node.device, reinterpret_cast<size_t>(stream));
    s.last = function.name + numbers;
    if (is_default(stream)) {
      if (invalidate_captures(s)) return kCaptureImplicit;
    } else {
      if (!s.streams.count(stream)) return kInvalidHandle;
      if (stream->invalidated) return kCaptureInvalidated;
      if (stream->capturing) {
        stream->recorded->nodes.push_back(std::move(node));
        return kSuccess;
      }
    }
  }
  return launch(node.function, node.launch, node.device, node.arguments);
}

}  // namespace

namespace gcn::hip {

std::shared_ptr<Program> load_program(const void* elf, size_t bytes) {
  auto program = std::make_shared<Program>();
  program->object = read_code_object(elf, bytes);
  decode(*program, disassemble(program->object));
  return program;
}

Error find_program(const Function& function, std::shared_ptr<Program>& out) {
  State& s = state();
  if (function.program) {
    out = function.program;
    return kSuccess;
  }
  const std::lock_guard lock(s.mutex);
  std::shared_ptr<Program>& kept = s.programs[function.bundle];
  if (!kept) {
    const std::string_view elf = find_in_bundle(function.bundle, s.target);
    if (elf.empty()) return kNoBinaryForGpu;
    try {
      kept = load_program(elf.data(), elf.size());
    } catch (const Fault& problem) {
      last_fault() = problem.what();
      return kLaunchFailure;
    }
  }
  out = kept;
  return kSuccess;
}

Error refuse_while_capturing() {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  return invalidate_captures(s) ? kCaptureUnsupported : kSuccess;
}

Error launch(const Function& function, const Launch& shape, int, const std::vector<uint8_t>& arguments) {
  State& s = state();
  std::shared_ptr<Program> program;
  if (const Error error = find_program(function, program)) return error;
  Memory memory;
  {
    const std::lock_guard lock(s.mutex);
    for (const auto& [address, buffer] : s.buffers) memory.add(reinterpret_cast<void*>(address), buffer.bytes);
    for (const auto& [address, bytes] : s.arrays) memory.add(reinterpret_cast<void*>(address), bytes);
    for (const auto& [address, bytes] : s.host) memory.add(reinterpret_cast<void*>(address), bytes);
  }
  const auto begin = std::chrono::steady_clock::now();
  uint64_t count = 0;
  try {
    count = run_kernel(*program, program->object.kernels.at(function.name), shape, memory, arguments);
  } catch (const Fault& problem) {
    last_fault() = problem.what();
    return kLaunchFailure;
  }
  const std::chrono::duration<double> time = std::chrono::steady_clock::now() - begin;
  const std::lock_guard lock(s.mutex);
  s.totals.launches++;
  s.totals.instructions += count;
  s.totals.seconds += time.count();
  s.kernels[function.name] += count;
  return kSuccess;
}

}  // namespace gcn::hip

GCN_API void** __hipRegisterFatBinary(const FatBinary* binary) {
  return binary && binary->magic == kFatBinaryMagic ? reinterpret_cast<void**>(const_cast<FatBinary*>(binary))
                                                    : nullptr;
}
GCN_API void __hipRegisterFunction(const FatBinary* binary, const void* host, char*, const char* name, int, void*,
                                   void*, void*, void*, int*) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  s.functions[host] = {binary->bundle, nullptr, name};
}
GCN_API void __hipUnregisterFatBinary(void**) {}

GCN_API int hipLaunchKernel(const void* host, Dim3 grid, Dim3 block, void** values, size_t shared_bytes,
                            Stream* stream) {
  State& s = state();
  Function function;
  {
    const std::lock_guard lock(s.mutex);
    const auto found = s.functions.find(host);
    if (found == s.functions.end()) return kInvalidDeviceFunction;
    function = found->second;
  }
  return submit(function, grid, block, values, shared_bytes, stream);
}

GCN_API int hipModuleLoadData(std::shared_ptr<Program>** module, const void* image) {
  constexpr size_t kSectionTable = 40, kSectionCount = 60, kSectionBytes = 64;
  uint64_t table;
  uint16_t count;
  if (!module || !image) return kInvalidValue;
  std::memcpy(&table, static_cast<const char*>(image) + kSectionTable, sizeof table);
  std::memcpy(&count, static_cast<const char*>(image) + kSectionCount, sizeof count);
  last_fault().clear();
  try {  // an ELF file ends with its table of sections
    *module = new std::shared_ptr<Program>(load_program(image, table + count * kSectionBytes));
  } catch (const Fault& problem) {
    last_fault() = problem.what();
    return kInvalidImage;
  }
  return (**module)->object.target == state().target ? kSuccess : kNoBinaryForGpu;
}
// Not HIP's: the listing of a code object that is loaded afterwards.
GCN_API void gcn_listing(const uint8_t* elf, size_t bytes, const char* text) {
  keep_listing({elf, elf + bytes}, text);
}
// Not HIP's: what the executor reads of a code object, "" where it is none. The text is the caller's until its next
// call in this thread.
GCN_API const char* gcn_disassembly(const void* elf, size_t bytes) {
  static thread_local std::string text;
  text.clear();
  last_fault().clear();
  try {
    text = disassemble(read_code_object(elf, bytes));
  } catch (const Fault& problem) {
    last_fault() = problem.what();
  }
  return text.c_str();
}
GCN_API int hipModuleGetFunction(Function** function, std::shared_ptr<Program>* module, const char* name) {
  State& s = state();
  if (!(*module)->object.kernels.count(name)) return kNotFound;
  *function = new Function{nullptr, *module, name};
  const std::lock_guard lock(s.mutex);
  s.module_functions.insert(*function);
  return kSuccess;
}
GCN_API int hipModuleLaunchKernel(Function* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                  unsigned bz, unsigned shared_bytes, Stream* stream, void** values, void** extra) {
  State& s = state();
  {
    const std::lock_guard lock(s.mutex);
    if (extra || !s.module_functions.count(function)) return kInvalidValue;
  }
  return submit(*function, {gx, gy, gz}, {bx, by, bz}, values, shared_bytes, stream);
}
GCN_API int hipModuleUnload(std::shared_ptr<Program>* module) {
  delete module;
  return kSuccess;
}

GCN_API int hipStreamCreateWithFlags(Stream** stream, unsigned) {
  State& s = state();
  if (!stream) return kInvalidValue;
  const std::lock_guard lock(s.mutex);
  *stream = *s.streams.insert(new Stream).first;
  return kSuccess;
}
GCN_API int hipStreamCreate(Stream** stream) {
  return hipStreamCreateWithFlags(stream, 0);
}
GCN_API int hipStreamDestroy(Stream* stream) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  if (!s.streams.erase(stream)) return kInvalidHandle;
  delete stream;
  return kSuccess;
}
GCN_API int hipStreamSynchronize(Stream* stream) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  if (is_default(stream)) return invalidate_captures(s) ? kCaptureImplicit : kSuccess;
  if (!s.streams.count(stream)) return kInvalidHandle;
  if (!stream->capturing) return kSuccess;
  stream->invalidated = true;
  return kCaptureUnsupported;
}

GCN_API int hipStreamBeginCapture(Stream* stream, int mode) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  if (mode < 0 || mode > 2) return kInvalidValue;
  if (is_default(stream)) return kCaptureUnsupported;
  if (!s.streams.count(stream)) return kInvalidHandle;
  if (stream->capturing) return kInvalidValue;
  stream->capturing = true;
  stream->recorded = std::make_unique<Graph>();
  return kSuccess;
}
GCN_API int hipStreamEndCapture(Stream* stream, Graph** graph) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  if (!graph) return kInvalidValue;
  *graph = nullptr;
  if (is_default(stream) || !s.streams.count(stream)) return kInvalidHandle;
  if (!stream->capturing) return kCaptureUnmatched;
  const bool invalidated = stream->invalidated;
  stream->capturing = stream->invalidated = false;
  if (invalidated) return kCaptureInvalidated;
  *graph = stream->recorded.release();
  return kSuccess;
}
GCN_API int hipStreamIsCapturing(Stream* stream, int* status) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  if (!status) return kInvalidValue;
  *status = 0;
  if (is_default(stream)) return invalidate_captures(s) ? kCaptureImplicit : kSuccess;
  if (!s.streams.count(stream)) return kInvalidHandle;
  if (stream->capturing) *status = stream->invalidated ? 2 : 1;
  return kSuccess;
}

// An instantiated graph is a copy of it.
GCN_API int hipGraphInstantiateWithFlags(Graph** executable, const Graph* graph, unsigned long long) {
  if (!executable || !graph) return kInvalidValue;
  *executable = new Graph(*graph);
  return kSuccess;
}
GCN_API int hipGraphLaunch(Graph* executable, Stream* stream) {
  {
    State& s = state();
    const std::lock_guard lock(s.mutex);
    if (!executable) return kInvalidValue;
    if (!is_default(stream) && !s.streams.count(stream)) return kInvalidHandle;
  }
  last_fault().clear();
  for (const Node& node : executable->nodes)
    if (const Error error = launch(node.function, node.launch, node.device, node.arguments)) return error;
  return kSuccess;
}
GCN_API int hipGraphExecDestroy(Graph* executable) {
  delete executable;
  return kSuccess;
}
GCN_API int hipGraphDestroy(Graph* graph) {
  delete graph;
  return kSuccess;
}
