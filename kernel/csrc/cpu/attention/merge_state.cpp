// Joining two partial attentions of one query by their log-sum-exps. Bound by bytes.
#include "cpu/attention/entries.h"
#include "cpu/attention/softmax.h"

namespace radix::cpu::RK_ISA {

void merge_state(const rk_merge_state_args& args, int64_t begin, int64_t end) {
  const int64_t heads = args.out_a->shape[1], dim = args.out_a->shape[2];
  dispatch_float(dtype_of(*args.out_a), [&](auto type) {
    using T = typename decltype(type)::type;
    for (int64_t row = begin; row < end; row++) {
      const int64_t t = row / heads, h = row % heads;
      const auto values = [&](const rk_tensor& x) { return data_ptr<T>(x) + t * x.strides[0] + h * x.strides[1]; };
      const auto scalar = [&](const rk_tensor& x) { return data_ptr<float>(x) + t * x.strides[0] + h * x.strides[1]; };
      const T* a = values(*args.out_a);
      const T* b = values(*args.out_b);
      T* out = values(*args.out);
      const float la = *scalar(*args.lse_a), lb = *scalar(*args.lse_b);
      const float top = la > lb || la != la ? la : lb;  // NaN where either is
      if (top == -__builtin_inff()) {
        for (int64_t i = 0; i < dim; i++) from_float(0.f, out[i]);
        *scalar(*args.lse) = top;
        continue;
      }
      const float wa = exp_scalar(la - top), wb = exp_scalar(lb - top), sum = wa + wb;
      for (int64_t i = 0; i < dim; i++) {
        // A side that saw nothing may hold anything, NaN included.
        const float xa = wa > 0 ? wa * to_float(a[i]) : 0.f, xb = wb > 0 ? wb * to_float(b[i]) : 0.f;
        from_float((xa + xb) / sum, out[i]);
      }
      *scalar(*args.lse) = top + __builtin_logf(sum);
    }
  });
}

}  // namespace radix::cpu::RK_ISA
