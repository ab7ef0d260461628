# The single-source GPU kernels, which CUDA and ROCm compile alike. A folder csrc/gpu/<group> has a sources.cmake that
# calls radix_gpu_family(<name> files...) for each of its families, files relative to the folder: adding one touches no
# file that another group uses.
set(RADIX_ONLY "" CACHE STRING "development: build only these families")
set(RADIX_GPU_SOURCES ${RADIX_CSRC}/gpu/backend.cu)
macro(radix_gpu_family name)
  if(NOT RADIX_ONLY OR ${name} IN_LIST RADIX_ONLY)
    radix_family(${name})
    set(_sources ${ARGN})
    list(TRANSFORM _sources PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
    list(APPEND RADIX_GPU_SOURCES ${_sources})
  endif()
endmacro()
file(GLOB _manifests CONFIGURE_DEPENDS ${RADIX_CSRC}/gpu/*/sources.cmake)
foreach(manifest ${_manifests})
  include(${manifest})
endforeach()
