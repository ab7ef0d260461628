// The launch of the kernel for one form of layers.
#pragma once

#include "sm90/persistent_decoder/kernel.cuh"

namespace radix::persistent_decoder {

template <class Form>
void launch(const Params& p, rk_device device, rk_stream stream) {
  sm90::LaunchShape shape;
  shape.grid = dim3(gpu::multiprocessors(device));
  shape.threads = dim3(kThreads);
  shape.shared_bytes = shared_plan(p, Form::kMixture).bytes;
  shape.cooperative = true;
  sm90::launch_dependent("persistent_decode", device, stream, persistent_decode_kernel<Form>, shape, p);
}

}  // namespace radix::persistent_decoder
