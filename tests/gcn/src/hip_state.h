// The state behind the stand-in of libamdhip64: GPUs, memory, modules, streams. Guarded by one mutex, which no launch
// holds while it runs.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "machine.h"

namespace gcn::hip {

// hipError_t, by HIP's own numbers.
enum Error : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kInvalidDeviceFunction = 98,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kInvalidImage = 200,
  kInvalidContext = 201,
  kNoBinaryForGpu = 209,
  kInvalidHandle = 400,
  kNotFound = 500,
  kAlreadyRegistered = 712,
  kNotRegistered = 713,
  kLaunchFailure = 719,
  kNotSupported = 801,
  kCaptureUnsupported = 900,
  kCaptureInvalidated = 901,
  kCaptureUnmatched = 903,
  kCaptureImplicit = 906
};

struct Dim3 {
  uint32_t x, y, z;
};

struct Buffer {
  size_t bytes = 0;
  int device = 0;
  std::string shared_name;  // of memory that other processes can open; empty for an array that a test registered
  bool opened = false;      // by an IPC handle
};

struct Function {
  const char* bundle = nullptr;      // the offload bundle it is in
  std::shared_ptr<Program> program;  // or the one it was loaded with
  std::string name;
};

struct Node {  // a recorded launch
  Function function;
  Launch launch;
  int device;
  std::vector<uint8_t> arguments;
};
struct Graph {
  std::vector<Node> nodes;
};

struct Stream {
  bool capturing = false, invalidated = false;
  std::unique_ptr<Graph> recorded;
};

struct Totals {
  uint64_t launches = 0, instructions = 0;
  double seconds = 0;
};

struct State {
  std::mutex mutex;
  int devices = 1;
  std::string target = "gfx942";
  std::map<uint64_t, Buffer> buffers;      // by address: hipMalloc and its like
  std::multimap<uint64_t, size_t> arrays;  // registered by tests, for the time of a call
  std::map<uint64_t, size_t> host;         // hipHostRegister
  std::map<const void*, Function> functions;
  std::map<const char*, std::shared_ptr<Program>> programs;  // of bundles, once used
  std::set<Function*> module_functions;
  std::vector<std::shared_ptr<Program>> modules;
  std::set<Stream*> streams;
  std::map<std::string, uint64_t> kernels;  // wave instructions by kernel
  Totals totals;
  std::string last;  // the last launch: kernel|grid|block|device|stream
};

State& state();
int& current_device();

// Says why the last launch of this thread failed; "" when it did not.
std::string& last_fault();

// hipErrorStreamCaptureUnsupported where a capture is open, which it ends, like HIP; else kSuccess.
Error refuse_while_capturing();

Error launch(const Function& function, const Launch& shape, int device, const std::vector<uint8_t>& arguments);
// The program of a function on the target, decoded when it is first asked for.
Error find_program(const Function& function, std::shared_ptr<Program>& out);
std::shared_ptr<Program> load_program(const void* elf, size_t bytes);

}  // namespace gcn::hip

#define GCN_API extern "C" __attribute__((visibility("default")))
