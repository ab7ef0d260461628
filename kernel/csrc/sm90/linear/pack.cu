// Packing and unpacking: a thread has one step of a lane. Done once a weight, at load.
#include "sm90/linear/problem.cuh"

namespace radix::linear {
namespace {

constexpr int kThreads = 256;

// Bytes of the unpacked side, [rows, columns].
struct Bytes {
  uint8_t* data;
  int64_t row_step, column_step;
  __device__ uint8_t& at(int64_t row, int64_t column) const { return data[row * row_step + column * column_step]; }
};

Bytes bytes_of(const rk_tensor& t) {
  const int64_t size = element_size(t);
  return {data_ptr<uint8_t>(t), t.strides[0] * size, t.strides[1] * size};
}

// A thread's step of a lane, and its first word.
struct Step {
  int64_t row, k;  // of the tile's first element
  int strip, lane, step;
  int64_t word;
  bool exists;

  __device__ Step(const Layout& l) {
    const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x, tile = index / 512;
    step = static_cast<int>(index % 4);
    lane = static_cast<int>(index / 4 % 32);
    strip = static_cast<int>(index / 128 % 4);
    row = tile / l.k_tiles * kTileRows;
    k = tile % l.k_tiles * kTileK;
    word = tile * (tile_bytes(l.code) / 4) + step_word(l.code, strip, lane, step);
    exists = tile < l.row_tiles * l.k_tiles;
  }
};

// Of a word of codes in nibbles, this thread's and, one lane further, that of the neighbouring step: what is stored of
// e2m1 (E2m1Pair). Whole warps.
__device__ uint32_t shared_by_steps(uint32_t word, int step) {
  const uint32_t other = __shfl_xor_sync(~0u, word, 1);
  const uint32_t steps[2] = {step % 2 ? other : word, step % 2 ? word : other};
  return E2m1Pair::of_nibbles(steps).word(step % 2);
}
// And back.
__device__ uint32_t own_nibbles(uint32_t word, int step) {
  const uint32_t other = __shfl_xor_sync(~0u, word, 1);
  return E2m1Pair(step % 2 ? other : word, step % 2 ? word : other).nibbles(step % 2);
}

// Two codes of a byte, in each register of a step. An odd k leaves the last byte's upper half to padding.
__global__ void __launch_bounds__(kThreads) pack_nibbles_kernel(Layout l, Bytes from, uint32_t* to) {
  const Step s(l);
  if (!s.exists) return;
  const uint32_t padding = zero_code(l.code);
  uint32_t word = 0;
  for (int j = 0; j < 4; j++) {
    const CodePlace place = register_place(s.strip, s.lane, s.step, j);
    const int64_t row = s.row + place.row, k = s.k + place.k;
    uint32_t low = padding, high = padding;
    if (row < l.n && k < l.k) {
      const uint32_t pair = from.at(row, k / 2);
      low = pair & 15;
      if (k + 1 < l.k) high = pair >> 4;
    }
    word |= low << (4 * j) | high << (4 * j + 16);
  }
  to[s.word] = l.code == Code::e2m1 ? shared_by_steps(word, s.step) : word;
}

__global__ void __launch_bounds__(kThreads) unpack_nibbles_kernel(Layout l, const uint32_t* from, Bytes to) {
  const Step s(l);
  if (!s.exists) return;
  uint32_t word = from[s.word];
  if (l.code == Code::e2m1) word = own_nibbles(word, s.step);
  for (int j = 0; j < 4; j++) {
    const CodePlace place = register_place(s.strip, s.lane, s.step, j);
    const int64_t row = s.row + place.row, k = s.k + place.k;
    if (row >= l.n || k >= l.k) continue;
    const uint32_t low = word >> (4 * j) & 15, high = k + 1 < l.k ? word >> (4 * j + 16) & 15 : 0;
    to.at(row, k / 2) = static_cast<uint8_t>(low | high << 4);
  }
}

__global__ void __launch_bounds__(kThreads) pack_bytes_kernel(Layout l, Bytes from, uint32_t* to) {
  const Step s(l);
  if (!s.exists) return;
  uint32_t words[2] = {};
  for (int i = 0; i < 8; i++) {
    const int j = i / 2, half = i % 2;
    const CodePlace place = register_place(s.strip, s.lane, s.step, j);
    const int64_t row = s.row + place.row, k = s.k + place.k + half;
    const uint32_t code = row < l.n && k < l.k ? from.at(row, k) : zero_code(l.code);
    words[j / 2] |= code << (8 * (j % 2) + 16 * half);
  }
  to[s.word] = words[0];
  to[s.word + 1] = words[1];
}

__global__ void __launch_bounds__(kThreads) unpack_bytes_kernel(Layout l, const uint32_t* from, Bytes to) {
  const Step s(l);
  if (!s.exists) return;
  const uint32_t words[2] = {from[s.word], from[s.word + 1]};
  for (int i = 0; i < 8; i++) {
    const int j = i / 2, half = i % 2;
    const CodePlace place = register_place(s.strip, s.lane, s.step, j);
    const int64_t row = s.row + place.row, k = s.k + place.k + half;
    if (row < l.n && k < l.k) to.at(row, k) = static_cast<uint8_t>(words[j / 2] >> (8 * (j % 2) + 16 * half));
  }
}

// Scales or zero points of `size` bytes, of `groups` groups with what is stored beyond them <-> [n, groups].
struct Numbers {
  Layout layout;
  Bytes unpacked;
  uint8_t* packed;
  int64_t groups;
  int size;
};

template <bool kPack>
__global__ void __launch_bounds__(kThreads) numbers_kernel(Numbers p) {
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x, groups = p.groups;
  const int64_t row = index / (groups * kTileRows) * kTileRows + index % kTileRows, group = index / kTileRows % groups;
  if (row >= p.layout.row_tiles * kTileRows) return;
  const bool inside = row < p.layout.n && group < p.layout.groups;
  uint8_t* packed = p.packed + p.layout.scale_index(row, group) * p.size;
  uint8_t* unpacked = inside ? &p.unpacked.at(row, group) : nullptr;
  for (int i = 0; i < p.size; i++) {
    if (kPack) {
      packed[i] = inside ? unpacked[i] : 0;
    } else if (inside) {
      unpacked[i] = packed[i];
    }
  }
}

unsigned blocks_for(int64_t threads) {
  return static_cast<unsigned>((threads + kThreads - 1) / kThreads);
}

struct Call {
  const char* op;
  rk_device device;
  rk_stream stream;
};

void move_numbers(const Call& call, const Layout& l, bool pack, const rk_tensor& unpacked, char* packed) {
  const int64_t groups = l.code == Code::e2m1 ? l.numbers * 2 : l.groups;
  const Numbers p{l, bytes_of(unpacked), reinterpret_cast<uint8_t*>(packed), groups, element_size(unpacked)};
  const unsigned blocks = blocks_for(l.row_tiles * kTileRows * groups);
  gpu::launch(call.op, call.device, call.stream, pack ? numbers_kernel<true> : numbers_kernel<false>, blocks, kThreads,
              p);
}

}  // namespace

void pack(const Layout& l, const rk_pack_weight_args& args, rk_stream stream) {
  const Call call{"pack_weight", args.packed->device, stream};
  char* packed = data_ptr<char>(*args.packed);
  const bool nibbles = code_bits(l.code) == 4;
  gpu::launch(call.op, call.device, stream, nibbles ? pack_nibbles_kernel : pack_bytes_kernel,
              blocks_for(l.row_tiles * l.k_tiles * 512), kThreads, l, bytes_of(*args.weight),
              reinterpret_cast<uint32_t*>(packed));
  move_numbers(call, l, true, *args.scales, packed + l.scales);
  if (args.zeros) move_numbers(call, l, true, *args.zeros, packed + l.zeros);
}

void unpack(const Layout& l, const rk_unpack_weight_args& args, rk_stream stream) {
  const Call call{"unpack_weight", args.packed->device, stream};
  char* packed = data_ptr<char>(*args.packed);
  const bool nibbles = code_bits(l.code) == 4;
  gpu::launch(call.op, call.device, stream, nibbles ? unpack_nibbles_kernel : unpack_bytes_kernel,
              blocks_for(l.row_tiles * l.k_tiles * 512), kThreads, l, reinterpret_cast<const uint32_t*>(packed),
              bytes_of(*args.weight));
  move_numbers(call, l, false, *args.scales, packed + l.scales);
  if (args.zeros) move_numbers(call, l, false, *args.zeros, packed + l.zeros);
}

}  // namespace radix::linear
