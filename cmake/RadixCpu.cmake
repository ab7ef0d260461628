# The CPU backend. A family is a folder csrc/cpu/<name> with a sources.cmake, which calls radix_cpu_family(): adding one
# touches no file that another family uses.
target_sources(radix_kernels PRIVATE
  ${RADIX_CSRC}/cpu/backend.cpp
  ${RADIX_CSRC}/cpu/core_claims.cpp
  ${RADIX_CSRC}/cpu/cpu_quota.cpp
  ${RADIX_CSRC}/cpu/isa.cpp
  ${RADIX_CSRC}/cpu/thread_pool.cpp)

# Every kernel source is compiled once per level, as an object library. Linked in rising order and after the sources
# that are compiled once: should the linker have to merge an inline function, it keeps the most portable copy.
set(RADIX_ISA_LEVELS portable avx2 avx512 avx512_bf16 amx)
set(RADIX_FLAGS_portable "")
set(RADIX_FLAGS_avx2 -mavx2 -mfma -mf16c)
# gcc 12 takes its own _mm512_undefined_*() for a mistake (-Wmaybe-uninitialized).
set(RADIX_FLAGS_avx512 ${RADIX_FLAGS_avx2} -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512
    -Wno-maybe-uninitialized -Wno-uninitialized)
set(RADIX_FLAGS_avx512_bf16 ${RADIX_FLAGS_avx512} -mavx512bf16 -mavx512vnni)
set(RADIX_FLAGS_amx ${RADIX_FLAGS_avx512_bf16} -mamx-tile -mamx-bf16 -mamx-int8)
set(_number 0)
foreach(level ${RADIX_ISA_LEVELS})
  add_library(radix_cpu_${level} OBJECT)
  target_include_directories(radix_cpu_${level} PRIVATE ${RADIX_INCLUDES})
  target_compile_options(radix_cpu_${level} PRIVATE ${RADIX_CXX_FLAGS} ${RADIX_FLAGS_${level}})
  target_compile_definitions(radix_cpu_${level} PRIVATE RK_ISA=${level} RK_ISA_LEVEL=${_number})
  target_sources(radix_kernels PRIVATE $<TARGET_OBJECTS:radix_cpu_${level}>)
  math(EXPR _number "${_number} + 1")
endforeach()

# radix_cpu_family(<name> [BACKEND files...] [KERNELS files...]): files relative to csrc/cpu/<name>; BACKEND is compiled
# once, KERNELS once per level.
macro(radix_cpu_family name)
  cmake_parse_arguments(_f "" "" "BACKEND;KERNELS" ${ARGN})
  radix_family(${name})
  list(TRANSFORM _f_BACKEND PREPEND ${RADIX_CSRC}/cpu/${name}/)
  list(TRANSFORM _f_KERNELS PREPEND ${RADIX_CSRC}/cpu/${name}/)
  target_sources(radix_kernels PRIVATE ${_f_BACKEND})
  foreach(level ${RADIX_ISA_LEVELS})
    target_sources(radix_cpu_${level} PRIVATE ${_f_KERNELS})
  endforeach()
endmacro()

set(RADIX_ONLY "" CACHE STRING "development: build only these CPU families")
file(GLOB _manifests CONFIGURE_DEPENDS ${RADIX_CSRC}/cpu/*/sources.cmake)
foreach(manifest ${_manifests})
  cmake_path(GET manifest PARENT_PATH _folder)
  cmake_path(GET _folder FILENAME _name)
  if(NOT RADIX_ONLY OR _name IN_LIST RADIX_ONLY)
    include(${manifest})
  endif()
endforeach()
