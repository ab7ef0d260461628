// Collectives over peer memory (gpu/peer.h). Bound by one hop over the link for small tensors, by the link's bytes for
// large ones: (N - 1) * n out of each GPU in one shot, 2 * (N - 1) / N * n in two.
//
//   one shot   send all of mine to every other rank; sum what arrives
//   two shot   send each rank its share of mine; sum my share of everybody's; send the sums; collect the others' sums
//
// A block moves one stretch of the tensor through its channel; a thread sends, receives and sums the same places of it,
// so there is no barrier inside. Places are counted in Words.
#include "api/all_reduce.h"
#include "common/tensor.h"
#include "gpu/comm/all_reduce_plan.h"
#include "gpu/comm/peer.h"
#include "gpu/comm/peer_sum.h"
#include "gpu/device/launch.h"

namespace radix {
namespace {

using namespace gpu;

constexpr int kThreads = 512;

template <class T, int N>
__global__ void __launch_bounds__(kThreads, 1) one_shot_kernel(PeerView view, Bytes in, Bytes out, int per_block) {
  constexpr int kBatch = kUnderWay<N>;
  wait_for_previous();
  const Channel<N> channel(view);
  Wait wait(view);
  const Stretch stretch(in, per_block);
  const int step = blockDim.x;
  for (int base = threadIdx.x; base < stretch.count; base += kBatch * step)
    send_batch<N>(channel, stretch, base, step, view.rank * per_block);
  for (int base = threadIdx.x; base < stretch.count; base += kBatch * step) {
    Words w[kBatch][N];
#pragma unroll
    for (int b = 0; b < kBatch; b++) {
      const int i = base + b * step;
      if (i < stretch.count) look_all<N>(channel, view.rank, i, per_block, stretch.load(i), w[b]);
    }
#pragma unroll
    for (int b = 0; b < kBatch; b++) {
      const int i = base + b * step;
      if (i >= stretch.count) continue;
      settle_all<N>(channel, view.rank, i, per_block, w[b], wait);
      out.store(stretch.first + i, sum_of<T, N>(w[b]));
    }
  }
  channel.close();
}

template <class T, int N>
__global__ void __launch_bounds__(kThreads, 1) two_shot_kernel(PeerView view, Bytes in, Bytes out, int per_block) {
  wait_for_previous();
  const Channel<N> channel(view);
  Wait wait(view);
  const Stretch stretch(in, per_block);
  const int share = per_block / N;
  send_shares<N>(channel, stretch, view.rank, share);
  sum_share<T, N>(channel, stretch, view.rank, share, wait, [&](int place, const Words& sum) {
    out.store(stretch.first + place, sum);
    channel.send_others(per_block + place, sum);
  });
  for (int i = threadIdx.x; i < share; i += blockDim.x) {
    Words w[N];
#pragma unroll
    for (int k = 1; k < N; k++) w[k] = channel.look(per_block + (view.rank + k) % N * share + i);
#pragma unroll
    for (int k = 1; k < N; k++) {
      const int owner = (view.rank + k) % N, place = owner * share + i;
      if (place >= stretch.count) continue;
      channel.settle(per_block + place, owner, w[k], wait);
      out.store(stretch.first + place, w[k]);
    }
  }
  channel.close();
}

// The input has N parts; `in` is a piece of the first, that of part r begins r * part bytes later.
template <class T, int N>
__global__ void __launch_bounds__(kThreads, 1)
    reduce_scatter_kernel(PeerView view, Bytes in, int64_t part, Bytes out, int per_block) {
  wait_for_previous();
  const Channel<N> channel(view);
  Wait wait(view);
  const Stretch mine({in.data + view.rank * part, in.n, in.aligned}, per_block);
#pragma unroll
  for (int k = 1; k < N; k++) {
    const Stretch stretch({in.data + (view.rank + k) % N * part, in.n, in.aligned}, per_block);
    for (int i = threadIdx.x; i < stretch.count; i += blockDim.x)
      channel.send(k, view.rank * per_block + i, stretch.load(i));
  }
  for (int i = threadIdx.x; i < mine.count; i += blockDim.x) {
    Words w[N];
    look_all<N>(channel, view.rank, i, per_block, mine.load(i), w);
    settle_all<N>(channel, view.rank, i, per_block, w, wait);
    out.store(mine.first + i, sum_of<T, N>(w));
  }
  channel.close();
}

// Eight bytes a place, each half of them beside a word that says it is there: any bits may travel.
template <int N>
__global__ void __launch_bounds__(kThreads, 1)
    all_gather_kernel(PeerView view, Bytes in, Bytes out, int64_t part, int per_block) {
  wait_for_previous();
  const Channel<N> channel(view);
  Wait wait(view);
  const int64_t first = int64_t{blockIdx.x} * per_block, left = (in.n + 7) / 8 - first;
  const int count = static_cast<int>(left < per_block ? left : per_block);
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    const uint64_t bits = in.load_half(8 * (first + i));
    const Words w{{static_cast<uint32_t>(bits), 0, static_cast<uint32_t>(bits >> 32), 0}};
    channel.send_others(view.rank * per_block + i, w);
    Bytes{out.data + view.rank * part, in.n, out.aligned}.store_half(8 * (first + i), bits);
  }
#pragma unroll
  for (int k = 1; k < N; k++) {
    const int rank = (view.rank + k) % N;
    const Bytes theirs{out.data + rank * part, in.n, out.aligned};
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
      const int at = rank * per_block + i;
      Words w = channel.look(at);
      while ((w.at[1] == kEmpty || w.at[3] == kEmpty) && wait.again(rank)) w = channel.look(at);
      channel.empty(at);
      theirs.store_half(8 * (first + i), uint64_t{w.at[2]} << 32 | w.at[0]);
    }
  }
  channel.close();
}

// ------------------------------------------------------------------ host

int64_t bytes(const rk_tensor& t) {
  int64_t n = element_size(t);
  for (int i = 0; i < t.ndim; i++) n *= t.shape[i];
  return n;
}

// Whether all parts of a tensor, `part` bytes apart, begin where Words may.
bool aligned(const char* data, int64_t part) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && part % 16 == 0;
}

}  // namespace

namespace backend {

void all_reduce(const rk_all_reduce_args& args, rk_stream stream) {
  const rk_gpu_comm& comm = *args.comm;
  char *in = data_ptr<char>(*args.input), *out = data_ptr<char>(*args.out);
  const int64_t n = bytes(*args.input);
  const bool wide = aligned(in, 0) && aligned(out, 0);
  const AllReducePlan plan = plan_all_reduce(comm.world_size(), n, args.algorithm, args.blocks, args.threads);
  dispatch_float(dtype_of(*args.input), [&](auto t) {
    dispatch_world(comm.world_size(), [&](auto world) {
      using T = typename decltype(t)::type;
      constexpr int N = decltype(world)::value;
      const auto kernel = plan.two_shot ? two_shot_kernel<T, N> : one_shot_kernel<T, N>;
      const int copies = plan.two_shot ? 2 : N, unit = plan.two_shot ? N : 1;
      for_pieces(comm, n, 16, plan.blocks, copies, unit, [&](int64_t begin, int64_t size, Cut cut) {
        launch_dependent("all_reduce", comm.device(), stream, kernel, cut.blocks, plan.threads, comm.view(),
                         Bytes{in + begin, size, wide}, Bytes{out + begin, size, wide}, cut.per_block);
      });
    });
  });
}

void reduce_scatter(const rk_reduce_scatter_args& args, rk_stream stream) {
  const rk_gpu_comm& comm = *args.comm;
  char *in = data_ptr<char>(*args.input), *out = data_ptr<char>(*args.out);
  const int64_t n = bytes(*args.out);
  const bool wide = aligned(in, n) && aligned(out, 0);
  dispatch_float(dtype_of(*args.out), [&](auto t) {
    dispatch_world(comm.world_size(), [&](auto world) {
      using T = typename decltype(t)::type;
      constexpr int N = decltype(world)::value;
      for_pieces(comm, n, 16, args.blocks, N, 1, [&](int64_t begin, int64_t size, Cut cut) {
        launch_dependent("reduce_scatter", comm.device(), stream, reduce_scatter_kernel<T, N>, cut.blocks, kThreads,
                         comm.view(), Bytes{in + begin, size, wide}, n, Bytes{out + begin, size, wide}, cut.per_block);
      });
    });
  });
}

void all_gather(const rk_all_gather_args& args, rk_stream stream) {
  const rk_gpu_comm& comm = *args.comm;
  char *in = data_ptr<char>(*args.input), *out = data_ptr<char>(*args.out);
  const int64_t n = bytes(*args.input);
  const bool wide = aligned(in, 0) && aligned(out, n);
  dispatch_world(comm.world_size(), [&](auto world) {
    constexpr int N = decltype(world)::value;
    for_pieces(comm, n, 8, args.blocks, N, 1, [&](int64_t begin, int64_t size, Cut cut) {
      launch_dependent("all_gather", comm.device(), stream, all_gather_kernel<N>, cut.blocks, kThreads, comm.view(),
                       Bytes{in + begin, size, wide}, Bytes{out + begin, size, wide}, n, cut.per_block);
    });
  });
}

}  // namespace backend
}  // namespace radix
