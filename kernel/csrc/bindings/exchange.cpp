#include "bindings/exchange.h"

#include <algorithm>
#include <string>
#include <unordered_map>

#include "bindings/dlpack_abi.h"

namespace radix::bind {
namespace {

// What is known about a Python type. Entries live as long as the process and keep their type alive.
struct TypeInfo {
  const DlExchangeApi* api = nullptr;  // NULL: no usable table
  bool takes_max_version = true;       // __dlpack__(max_version=...) was not refused so far
};

const DlExchangeApi* find_api(PyTypeObject* type) {
  PyObject* capsule = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__");
  const DlExchangeApi* api = nullptr;
  if (capsule) {
    api = static_cast<const DlExchangeApi*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
    Py_DECREF(capsule);
  }
  PyErr_Clear();
  while (api && api->version.major != 1) api = api->previous;
  return api && api->tensor_from_object ? api : nullptr;
}

// Guarded by the GIL.
TypeInfo& type_info(PyTypeObject* type) {
  static auto* known = new std::unordered_map<PyTypeObject*, TypeInfo>;
  static PyTypeObject* last_type = nullptr;
  static TypeInfo* last_info = nullptr;
  if (type == last_type) return *last_info;
  auto found = known->find(type);
  if (found == known->end()) {
    Py_INCREF(type);
    found = known->emplace(type, TypeInfo{find_api(type)}).first;
  }
  last_type = type;
  return *(last_info = &found->second);
}

// The caller's current stream where there is no exchange API to ask: torch and CuPy are asked if they are the producer.
rk_stream stream_of(py::handle object, rk_device device) {
  const std::string module = py::cast<std::string>(py::type::of(object).attr("__module__"));
  py::dict modules = py::module_::import("sys").attr("modules");
  if (module.rfind("torch", 0) == 0)
    return py::cast<rk_stream>(modules["torch"].attr("cuda").attr("current_stream")(device.id).attr("cuda_stream"));
  if (module.rfind("cupy", 0) == 0)
    return py::cast<rk_stream>(modules["cupy"].attr("cuda").attr("get_current_stream")().attr("ptr"));
  return 0;
}

// Calls object.__dlpack__, with max_version where the type knows it.
py::object call_dlpack(py::object object, TypeInfo& info) {
  if (py::hasattr(object, "requires_grad") && py::cast<bool>(object.attr("requires_grad")))
    object = object.attr("detach")();  // torch refuses to export what requires a gradient
  const auto method = object.attr("__dlpack__");
  if (info.takes_max_version) {
    try {
      return method(py::arg("max_version") = py::make_tuple(1, 0));
    } catch (py::error_already_set& e) {
      if (!e.matches(PyExc_TypeError)) throw;
      info.takes_max_version = false;
    }
  }
  return method();
}

void read_capsule(View& view, PyObject* capsule) {
  if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
    const auto* managed = static_cast<DlManagedVersioned*>(PyCapsule_GetPointer(capsule, "dltensor_versioned"));
    if (managed->version.major != 1) raise(RK_INVALID, "its DLPack version is unknown");
    view.tensor = managed->tensor;
    view.read_only = managed->flags & kDlReadOnly;
  } else {
    const auto* managed = static_cast<DlManaged*>(PyCapsule_GetPointer(capsule, "dltensor"));
    if (!managed) throw py::error_already_set();
    view.tensor = managed->tensor;
  }
}

// A producer that cannot export (a meta or sparse tensor) raises an error of its own kind and length: name the argument
// and keep the first line.
[[noreturn]] void raise_not_exportable(const char* op, const char* name) {
  const py::error_already_set cause;
  std::string text = py::cast<std::string>(py::str(cause.value()));
  text.resize(std::min(text.find('\n'), text.size()));
  raise(RK_INVALID, (std::string(op) + ": " + name + " cannot be read: " + text).c_str());
}

// The library wants strides always; producers may leave them out for contiguous tensors.
void fill_strides(View& view) {
  rk_tensor& t = view.tensor;
  if (t.strides || t.ndim > kMaxStrides) return;
  int64_t step = 1;
  for (int i = t.ndim - 1; i >= 0; i--) {
    view.strides[i] = step;
    step *= t.shape[i];
  }
  t.strides = view.strides;
}

bool is_host(rk_device device) {
  return device.type == RK_DEVICE_CPU || device.type == RK_DEVICE_CUDA_HOST;
}

}  // namespace

void raise(rk_status status, const char* text) {
  PyObject* type = status == RK_INVALID       ? PyExc_ValueError
                   : status == RK_DTYPE       ? PyExc_TypeError
                   : status == RK_UNSUPPORTED ? PyExc_NotImplementedError
                                              : PyExc_RuntimeError;
  PyErr_SetString(type, text);
  throw py::error_already_set();
}

Call::~Call() {
  for (int i = 0; i < count_; i++) Py_XDECREF(views_[i].owner);
}

View& Call::view(const char* name, py::handle object) {
  View& view = views_[count_++];
  TypeInfo& info = type_info(Py_TYPE(object.ptr()));
  if (info.api) {
    if (info.api->tensor_from_object(object.ptr(), &view.tensor)) raise_not_exportable(op_, name);
  } else {
    if (!py::hasattr(object, "__dlpack__"))
      raise(RK_DTYPE, (std::string(op_) + ": " + name + " is a '" + Py_TYPE(object.ptr())->tp_name +
                       "', expected a tensor (an object with __dlpack__)")
                          .c_str());
    try {
      view.owner = call_dlpack(py::reinterpret_borrow<py::object>(object), info).release().ptr();
      read_capsule(view, view.owner);
    } catch (py::error_already_set& e) {
      e.restore();
      raise_not_exportable(op_, name);
    }
  }
  fill_strides(view);
  if (!on_device_ && !is_host(view.tensor.device)) {
    const rk_device device = view.tensor.device;
    on_device_ = true;
    void* stream = nullptr;
    if (!info.api || !info.api->current_stream) {
      stream_ = stream_of(object, device);
    } else if (info.api->current_stream(device.type, device.id, &stream)) {
      throw py::error_already_set();
    } else {
      stream_ = static_cast<rk_stream>(reinterpret_cast<intptr_t>(stream));
    }
  }
  return view;
}

const rk_tensor* Call::out(const char* name, py::handle object) {
  View& v = view(name, object);
  if (v.read_only) raise(RK_INVALID, (std::string(op_) + ": " + name + " is read-only, the op writes to it").c_str());
  return &v.tensor;
}

}  // namespace radix::bind
