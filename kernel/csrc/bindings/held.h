// Tensors and packed weights that a Python object of this module keeps, for calls that come later.
#pragma once

#include <algorithm>
#include <deque>
#include <string>
#include <vector>

#include "bindings/packed_desc.h"

namespace radix::bind {

constexpr int kMaxHeldDims = 4;

// A tensor that outlives the call it came with: the object keeps its memory, the view is a copy.
class Held {
 public:
  // NotImplementedError for a tensor of a GPU, unless `anywhere`. call: for errors.
  Held(Call& call, const char* name, py::handle object, bool anywhere = false)
      : object_(py::reinterpret_borrow<py::object>(object)) {
    if (object.is_none()) return;
    view_ = *call.in(name, object);
    const bool on_host = view_.device.type == RK_DEVICE_CPU || view_.device.type == RK_DEVICE_CUDA_HOST;
    if (view_.ndim > kMaxHeldDims || (!on_host && !anywhere))
      raise(RK_UNSUPPORTED,
            (std::string("weights: ") + name + " is not a host tensor of at most 4 dimensions").c_str());
    std::copy_n(view_.shape, view_.ndim, shape_);
    std::copy_n(view_.strides, view_.ndim, strides_);
    view_.shape = shape_;
    view_.strides = strides_;
  }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;

  // NULL for None.
  const rk_tensor* tensor() const { return object_.is_none() ? nullptr : &view_; }

 private:
  py::object object_;
  rk_tensor view_{};
  int64_t shape_[kMaxHeldDims], strides_[kMaxHeldDims];
};

// All that an object keeps; what is returned points into it.
class Keeper {
 public:
  const rk_tensor* tensor(Call& call, const char* name, py::handle object) {
    return tensors_.emplace_back(call, name, object).tensor();
  }
  // Of any device.
  const rk_tensor* device_tensor(Call& call, const char* name, py::handle object) {
    return tensors_.emplace_back(call, name, object, true).tensor();
  }
  // object: a PackedDesc.
  const rk_packed_desc* desc(const py::object& object) {
    descs_.push_back(object);
    return &object.cast<const PackedDesc&>().desc;
  }

 private:
  std::deque<Held> tensors_;
  std::vector<py::object> descs_;
};

}  // namespace radix::bind
