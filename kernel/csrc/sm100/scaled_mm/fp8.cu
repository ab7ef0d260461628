// FP8 (e4m3) on sm_100: CUTLASS's kernel for tcgen05 and TMA, with scales and bias in its epilogue. One tile for any
// number of tokens. Compiled for sm_100a.
#include <cutlass/cutlass.h>
#include <cutlass/device_kernel.h>
#include <cute/tensor.hpp>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>

#include "gpu/device/launch.h"
#include "sm80/scaled_mm/problem.h"

namespace radix::scaled_mm {

namespace {

namespace collective = cutlass::gemm::collective;
namespace ends = cutlass::epilogue::collective;
namespace fusion = cutlass::epilogue::fusion;
using cute::_0;
using cute::_1;

using BlockTile = cute::Shape<cute::_128, cute::_128, cute::_128>;
using Cluster = cute::Shape<_1, _1, _1>;
constexpr int kOutAlignment = 8, kOperandAlignment = 16;  // elements in 16 bytes

// Values of tokens or of columns: as many, or (stride false) one for all; none is 0.
using OfTokens = fusion::Sm90ColBroadcast<0, BlockTile, float, float, cute::Stride<bool, _0, int64_t>>;
template <class T>
using OfColumns = fusion::Sm90RowBroadcast<0, BlockTile, T, float, cute::Stride<_0, bool, int64_t>>;

template <template <class> class Function, class To>
using Compute = fusion::Sm90Compute<Function, To, float, cutlass::FloatRoundStyle::round_to_nearest>;
using Sum = fusion::Sm90AccFetch;
using Scaled = fusion::Sm90EVT<Compute<cutlass::multiplies, float>, OfColumns<float>, Sum>;
// scale_x * (scale_w * sum) + bias + bias, of which one is of the result's type and one float32.
template <class Out>
using Biased = fusion::Sm90EVT<Compute<cutlass::homogeneous_multiply_add, float>, OfTokens, Scaled, OfColumns<Out>>;
template <class Out>
using Finish = fusion::Sm90EVT<Compute<cutlass::plus, Out>, Biased<Out>, OfColumns<float>>;

template <class Out>
using End = typename ends::CollectiveBuilder<cutlass::arch::Sm100, cutlass::arch::OpClassTensorOp, BlockTile, Cluster,
                                             ends::EpilogueTileAuto, float, float, void, cutlass::layout::RowMajor,
                                             kOutAlignment, Out, cutlass::layout::RowMajor, kOutAlignment,
                                             ends::EpilogueScheduleAuto, Finish<Out>>::CollectiveOp;

template <class Out>
using MainLoop = typename collective::CollectiveBuilder<
    cutlass::arch::Sm100, cutlass::arch::OpClassTensorOp, cutlass::float_e4m3_t, cutlass::layout::RowMajor,
    kOperandAlignment, cutlass::float_e4m3_t, cutlass::layout::ColumnMajor, kOperandAlignment, float, BlockTile,
    Cluster, collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename End<Out>::SharedStorage))>,
    collective::KernelScheduleAuto>::CollectiveOp;

}  // namespace

// A name of its own for the kernel: CUTLASS's has thousands of characters.
template <class Out>
struct Sm100Product
    : cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, MainLoop<Out>, End<Out>, void> {};

namespace {

// CUTLASS's own launch reports, and clears, whatever error the thread has pending, and hides CUDA's text of its own.
template <class Kernel>
void launch(const Problem& q, const typename Kernel::Params& params) {
  const void* kernel = reinterpret_cast<const void*>(cutlass::device_kernel<Kernel>);
  constexpr int kSharedBytes = Kernel::SharedStorageSize;
  gpu::raise_kernel_attribute(q.op, q.device, kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  void* pointers[] = {const_cast<typename Kernel::Params*>(&params)};
  const cudaError_t error = cudaLaunchKernel(kernel, Kernel::get_grid_shape(params), Kernel::get_block_shape(),
                                             pointers, kSharedBytes, reinterpret_cast<cudaStream_t>(q.stream));
  gpu::check_gpu(error, q.op);
}

// Values lie next to each other, or there is one.
bool is_vector(const char* op, const char* name, int64_t step) {
  if (step != 0 && step != 1)
    fail(RK_UNSUPPORTED, "%s: %s has a step of %lld elements, sm_100 takes 1", op, name, (long long)step);
  return step == 1;
}

template <class Out>
void run(const Problem& q) {
  using Kernel = Sm100Product<Out>;
  const Epilogue& e = q.epilogue;
  // The step of a single row may be anything; TMA wants multiples of 16 bytes.
  const int64_t x_step = q.m > 1 ? q.x_step : q.k, out_step = q.m > 1 ? e.out_step : q.n;
  typename Kernel::Arguments a{};
  a.mode = cutlass::gemm::GemmUniversalMode::kGemm;
  a.problem_shape = {q.m, q.n, q.k, 1};
  a.mainloop.ptr_A = reinterpret_cast<const cutlass::float_e4m3_t*>(q.x);
  a.mainloop.dA = cute::make_stride(x_step, _1{}, int64_t{0});
  a.mainloop.ptr_B = reinterpret_cast<const cutlass::float_e4m3_t*>(q.weight);
  a.mainloop.dB = cute::make_stride(q.weight_step, _1{}, int64_t{0});
  a.epilogue.ptr_D = reinterpret_cast<Out*>(e.out);
  a.epilogue.dD = cute::make_stride(out_step, _1{}, int64_t{0});
  const bool float_bias = e.bias && e.bias_is_float;
  const Out* bias = float_bias ? nullptr : reinterpret_cast<const Out*>(e.bias);
  a.epilogue.thread = {{{e.scale_x, 0.f, {is_vector(q.op, "scales_a", e.scale_x_step), _0{}, int64_t{0}}},
                        {{e.scale_w, 0.f, {_0{}, is_vector(q.op, "scales_b", e.scale_w_step), int64_t{0}}}, {}, {}},
                        {bias, Out(0), {_0{}, true, int64_t{0}}},
                        {}},
                       {float_bias ? reinterpret_cast<const float*>(e.bias) : nullptr, 0.f, {_0{}, true, int64_t{0}}},
                       {}};
  a.hw_info.device_id = q.device.id;
  a.hw_info.sm_count = gpu::multiprocessors(q.device);

  const gpu::DeviceScope scope(q.device);
  if (!Kernel::can_implement(a)) fail(RK_UNSUPPORTED, "%s: CUTLASS does not take these sizes and steps", q.op);
  // The library allocates nothing, and this kernel has nothing to keep: k is not shared.
  if (Kernel::get_workspace_size(a) != 0) fail(RK_UNSUPPORTED, "%s: CUTLASS wants a workspace", q.op);
  launch<Kernel>(q, Kernel::to_underlying_arguments(a, nullptr));
}

}  // namespace

void run_fp8_sm100(const Problem& q) {
  q.epilogue.out_is_f16 ? run<cutlass::half_t>(q) : run<cutlass::bfloat16_t>(q);
}

}  // namespace radix::scaled_mm
