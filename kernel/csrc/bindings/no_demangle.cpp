// The static C++ runtime and pybind11 turn type names into readable ones for messages this module never gives (it
// registers no C++ class). Refusing here keeps the demangler, a seventh of the module, out of it.
extern "C" char* __cxa_demangle(const char*, char*, unsigned long*, int* status) {
  constexpr int kInvalidName = -2;
  if (status) *status = kInvalidName;
  return nullptr;
}
