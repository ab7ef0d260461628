# One binding module per interpreter in RADIX_PYTHONS. Only an interpreter's headers are needed, so that a wheel for five
# Pythons compiles the library once.
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)
if(NOT RADIX_PYTHONS)
  set(RADIX_PYTHONS ${Python_EXECUTABLE})
endif()
execute_process(COMMAND ${Python_EXECUTABLE} -c "import pybind11; print(pybind11.get_include())"
  OUTPUT_VARIABLE RADIX_PYBIND11_INCLUDE OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)

set(_inc "")
set(_sources ${RADIX_CSRC}/bindings/module.cpp ${RADIX_CSRC}/bindings/exchange.cpp
    ${RADIX_CSRC}/bindings/no_demangle.cpp ${RADIX_CSRC}/common/find_object.cpp)
foreach(family ${RADIX_FAMILIES})
  string(APPEND _inc "RK_FAMILY(${family})\n")
  list(APPEND _sources ${RADIX_CSRC}/bindings/${family}.cpp)
endforeach()
file(CONFIGURE OUTPUT ${CMAKE_BINARY_DIR}/generated/families.inc CONTENT "${_inc}" @ONLY)

foreach(python ${RADIX_PYTHONS})
  execute_process(
    COMMAND ${python} -c "import sysconfig as s; print(s.get_path('include'), s.get_config_var('EXT_SUFFIX'), sep=';')"
    OUTPUT_VARIABLE _facts OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  list(GET _facts 0 _include)
  list(GET _facts 1 _suffix)
  if(NOT EXISTS ${_include}/Python.h)
    message(FATAL_ERROR "${_include}/Python.h is missing: install the headers of ${python} (Debian, Ubuntu: python3-dev; "
                        "Fedora: python3-devel)")
  endif()
  string(MAKE_C_IDENTIFIER "radix_bind${_suffix}" _target)
  add_library(${_target} MODULE ${_sources})
  target_include_directories(${_target} PRIVATE ${RADIX_INCLUDES} ${CMAKE_BINARY_DIR}/generated)
  target_include_directories(${_target} SYSTEM PRIVATE ${RADIX_PYBIND11_INCLUDE} ${_include})
  target_compile_options(${_target} PRIVATE ${RADIX_CXX_FLAGS} -Os -ffunction-sections -fdata-sections)
  # Python's own symbols come from the interpreter that loads the module.
  target_link_options(${_target} PRIVATE ${RADIX_LINK_FLAGS} -Wl,-z,undefs -Wl,-z,noseparate-code
    -Wl,--version-script=${CMAKE_CURRENT_LIST_DIR}/radix_bind.map)
  target_link_libraries(${_target} PRIVATE radix_kernels)
  set_target_properties(${_target} PROPERTIES
    PREFIX "" OUTPUT_NAME _bind SUFFIX ${_suffix}
    LINK_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/radix_bind.map
    LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/out
    BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "$ORIGIN/lib")
  install(TARGETS ${_target} LIBRARY DESTINATION radix_kernels)
endforeach()

# What was built, for _loader.py and bug reports.
file(READ ${RADIX_CSRC}/../include/radix_kernels/types.h _types)
string(REGEX MATCH "define RK_ABI_VERSION ([0-9]+)" _match "${_types}")
list(JOIN RADIX_TARGETS "\", \"" _targets)  # of a ROCm library: the chips that it has code for
if(_targets)
  set(_targets ", \"targets\": [\"${_targets}\"]")
endif()
file(CONFIGURE OUTPUT ${CMAKE_BINARY_DIR}/out/_build.json CONTENT
  "{\"backend\": \"${RADIX_BACKEND}\", \"version\": \"${RADIX_VERSION}\", \"abi\": ${CMAKE_MATCH_1}${_targets}}\n" @ONLY)
install(FILES ${CMAKE_BINARY_DIR}/out/_build.json DESTINATION radix_kernels)
