#include "common/check.h"

#include <cstdarg>
#include <cstdio>

#include "common/backend.h"

namespace radix {
namespace {

std::string list_text(const int64_t* values, int n) {
  std::string s = "[";
  for (int i = 0; i < n; i++) s += (i ? ", " : "") + std::to_string(values[i]);
  return s + "]";
}

rk_dtype to_rk(DType d) {
  const auto word = static_cast<uint32_t>(d);
  return {static_cast<uint8_t>(word >> 8), static_cast<uint8_t>(word), 1};
}

}  // namespace

std::string shape_text(const rk_tensor& t) {
  return list_text(t.shape, t.ndim);
}

std::string device_text(rk_device device) {
  switch (device.type) {
    case RK_DEVICE_CPU: return "cpu";
    case RK_DEVICE_CUDA: return "cuda:" + std::to_string(device.id);
    case RK_DEVICE_CUDA_HOST: return "cuda_host";
    case RK_DEVICE_ROCM: return "rocm:" + std::to_string(device.id);
    default: return "device type " + std::to_string(device.type);
  }
}

std::string dtype_text(rk_dtype d) {
  const std::string bits = std::to_string(d.bits);
  switch (d.code) {
    case RK_CODE_INT: return "int" + bits;
    case RK_CODE_UINT: return "uint" + bits;
    case RK_CODE_FLOAT: return "float" + bits;
    case RK_CODE_BFLOAT: return "bfloat" + bits;
    case 5: return "complex" + bits;
    case RK_CODE_BOOL: return "bool";
    case RK_CODE_FLOAT8_E4M3FN: return "float8_e4m3fn";
    case RK_CODE_FLOAT8_E4M3FNUZ: return "float8_e4m3fnuz";
    case RK_CODE_FLOAT8_E5M2: return "float8_e5m2";
    default: return "dtype code " + std::to_string(d.code) + " of " + bits + " bits";
  }
}

Arg::Arg(const char* op, const char* name, const rk_tensor* tensor) : op_(op), name_(name), t_(tensor) {
  if (!t_) fail(RK_INVALID, "%s: %s is required", op_, name_);
  if (t_->ndim < 0 || t_->ndim > kMaxDims)
    reject(RK_INVALID, "has %d dimensions, at most %d are supported", t_->ndim, kMaxDims);
  if (t_->ndim > 0 && (!t_->shape || !t_->strides)) reject(RK_INVALID, "has no shape or strides");
  if (t_->dtype.lanes != 1) reject(RK_DTYPE, "has vector elements (%d lanes), expected 1", t_->dtype.lanes);
  // A FakeTensor or meta tensor passes the exchange with a NULL pointer.
  if (!t_->data && numel() > 0) reject(RK_INVALID, "has shape %s but no storage", shape_text(*t_).c_str());
}

void Arg::reject(rk_status status, const char* format, ...) const {
  char text[768];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  fail(status, "%s: %s %s", op_, name_, text);
}

int64_t Arg::numel() const {
  int64_t n = 1;
  for (int i = 0; i < t_->ndim; i++) n *= t_->shape[i];
  return n;
}

const Arg& Arg::backend_device() const {
  if (!backend::owns_device(t_->device))
    reject(RK_UNSUPPORTED, "is on %s; this is the %s wheel, which has kernels for %s only",
           device_text(t_->device).c_str(), backend::name(), backend::name());
  return *this;
}

const Arg& Arg::same_device(const Arg& other) const {
  if (t_->device.type != other->device.type || t_->device.id != other->device.id)
    reject(RK_INVALID, "is on %s, expected %s (where %s is)", device_text(t_->device).c_str(),
           device_text(other->device).c_str(), other.name());
  return *this;
}

const Arg& Arg::dtype(std::initializer_list<DType> allowed) const {
  std::string want;
  for (DType d : allowed) {
    if (d == type()) return *this;
    const std::string name = dtype_text(to_rk(d));
    if (want.find(name) == std::string::npos) want += (want.empty() ? "" : " or ") + name;
  }
  reject(RK_DTYPE, "has dtype %s, expected %s", dtype_text(t_->dtype).c_str(), want.c_str());
}

const Arg& Arg::same_dtype(const Arg& other) const {
  if (type() != other.type())
    reject(RK_DTYPE, "has dtype %s, expected %s (dtype of %s)", dtype_text(t_->dtype).c_str(),
           dtype_text(other->dtype).c_str(), other.name());
  return *this;
}

const Arg& Arg::ndim(int n) const {
  if (t_->ndim != n) reject(RK_INVALID, "has shape %s, expected %d dimensions", shape_text(*t_).c_str(), n);
  return *this;
}

const Arg& Arg::min_ndim(int n) const {
  if (t_->ndim < n) reject(RK_INVALID, "has shape %s, expected at least %d dimensions", shape_text(*t_).c_str(), n);
  return *this;
}

const Arg& Arg::shape(std::initializer_list<int64_t> want, const char* why) const {
  bool same = t_->ndim == static_cast<int>(want.size());
  const int64_t* w = want.begin();
  for (int i = 0; same && i < t_->ndim; i++) same = w[i] < 0 || w[i] == t_->shape[i];
  if (!same) {
    std::string text = list_text(w, static_cast<int>(want.size()));
    for (size_t at; (at = text.find("-1")) != std::string::npos;) text.replace(at, 2, "any");
    reject(RK_INVALID, "has shape %s, expected %s (%s)", shape_text(*t_).c_str(), text.c_str(), why);
  }
  return *this;
}

const Arg& Arg::same_shape(const Arg& other) const {
  bool same = t_->ndim == other->ndim;
  for (int i = 0; same && i < t_->ndim; i++) same = t_->shape[i] == other->shape[i];
  if (!same)
    reject(RK_INVALID, "has shape %s, expected %s (shape of %s)", shape_text(*t_).c_str(), shape_text(*other).c_str(),
           other.name());
  return *this;
}

const Arg& Arg::last_contiguous() const {
  if (t_->ndim > 0 && size(-1) > 1 && stride(-1) != 1 && numel() > 0)
    reject(RK_INVALID, "has strides %s, expected a contiguous last dimension (stride 1)",
           list_text(t_->strides, t_->ndim).c_str());
  return *this;
}

const Arg& Arg::contiguous() const {
  int64_t want = 1;
  for (int i = t_->ndim - 1; i >= 0; i--) {
    if (t_->shape[i] != 1 && t_->strides[i] != want && numel() > 0)
      reject(RK_INVALID, "has shape %s and strides %s, expected a contiguous tensor", shape_text(*t_).c_str(),
             list_text(t_->strides, t_->ndim).c_str());
    want *= t_->shape[i];
  }
  return *this;
}

const Arg& Arg::writable() const {
  for (int i = 0; i < t_->ndim; i++)
    if (t_->strides[i] == 0 && t_->shape[i] > 1 && numel() > 0)
      reject(RK_INVALID, "has strides %s: an expanded tensor cannot be written to",
             list_text(t_->strides, t_->ndim).c_str());
  return *this;
}

}  // namespace radix
