# The library target, its flags, and the families of ops in it.
#
# A backend file (RadixCpu.cmake, RadixCuda.cmake, RadixHip.cmake) calls radix_family(<names>) for the families it
# implements and adds its own sources to the target radix_kernels. Names of a family's files are fixed:
# csrc/api/<name>.cpp (checks, C entries), csrc/bindings/<name>.cpp (Python).
set(RADIX_CSRC ${CMAKE_CURRENT_SOURCE_DIR}/kernel/csrc)
set(RADIX_INCLUDES ${CMAKE_CURRENT_SOURCE_DIR}/kernel/include ${RADIX_CSRC})
set(RADIX_CXX_FLAGS -O3 -fno-math-errno -ffp-contract=off -Wall -Wextra -Wno-missing-field-initializers)
set(RADIX_LINK_FLAGS -static-libstdc++ -static-libgcc -Wl,--as-needed -Wl,-z,now -Wl,--no-undefined
                     -Wl,--exclude-libs,ALL -Wl,--gc-sections)

set(CMAKE_CXX_STANDARD 17)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_FLAGS_RELEASE "-DNDEBUG")
find_package(Threads REQUIRED)

add_library(radix_kernels SHARED
  ${RADIX_CSRC}/common/check.cpp
  ${RADIX_CSRC}/common/error.cpp
  ${RADIX_CSRC}/common/find_object.cpp
  ${RADIX_CSRC}/api/library.cpp)
target_include_directories(radix_kernels PRIVATE ${RADIX_INCLUDES})
target_compile_options(radix_kernels PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:${RADIX_CXX_FLAGS}>")
target_compile_definitions(radix_kernels PRIVATE RADIX_VERSION="${RADIX_VERSION}")
target_link_options(radix_kernels PRIVATE ${RADIX_LINK_FLAGS}
  -Wl,--version-script=${CMAKE_CURRENT_LIST_DIR}/radix_kernels.map)
set_target_properties(radix_kernels PROPERTIES
  LINK_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/radix_kernels.map
  LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/out/lib)
target_link_libraries(radix_kernels PRIVATE Threads::Threads)
install(TARGETS radix_kernels LIBRARY DESTINATION radix_kernels/lib)

set(RADIX_FAMILIES "")
function(radix_family)
  foreach(name ${ARGN})
    target_sources(radix_kernels PRIVATE ${RADIX_CSRC}/api/${name}.cpp)
    list(APPEND RADIX_FAMILIES ${name})
  endforeach()
  set(RADIX_FAMILIES ${RADIX_FAMILIES} PARENT_SCOPE)
endfunction()
