# The CUDA backend, by nvcc, ahead of time, with the static runtime: csrc/gpu for every architecture, csrc/sm90 for Hopper.
# The driver is reached through the runtime's own entry points, so the library imports on a machine without a GPU.
set(CMAKE_CUDA_ARCHITECTURES 80-real 89-real 90a-real 100-real 80-virtual)
if(RADIX_ARCHS)
  set(CMAKE_CUDA_ARCHITECTURES ${RADIX_ARCHS})
endif()
enable_language(CUDA)
set(_flags -O3 --extended-lambda -Xptxas=-v -Xcompiler=-Wall)
# Target properties that both CUDA targets share.
set(_properties CUDA_STANDARD 17 CUDA_STANDARD_REQUIRED ON CUDA_RUNTIME_LIBRARY None CUDA_VISIBILITY_PRESET hidden)

include(cmake/RadixGpu.cmake)
target_sources(radix_kernels PRIVATE ${RADIX_GPU_SOURCES})
target_compile_options(radix_kernels PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:${_flags}>")
set_target_properties(radix_kernels PROPERTIES CUDA_ARCHITECTURES "${CMAKE_CUDA_ARCHITECTURES}" ${_properties}
  LINKER_LANGUAGE CXX)

# Hopper's kernels are compiled for sm_90a alone. CUDA loads a module when a kernel of it is first launched, so on other
# chips they cost file size only; _dispatch.py asks rk_isa() before it chooses them. A family is a folder
# csrc/sm90/<name> with a sources.cmake that calls radix_sm90_family(<name> files...), files relative to the folder.
set(RADIX_SM90_SOURCES "")
macro(radix_sm90_family name)
  radix_family(${name})
  set(_sources ${ARGN})
  list(TRANSFORM _sources PREPEND ${RADIX_CSRC}/sm90/${name}/)
  list(APPEND RADIX_SM90_SOURCES ${_sources})
endmacro()
file(GLOB _manifests CONFIGURE_DEPENDS ${RADIX_CSRC}/sm90/*/sources.cmake)
foreach(manifest ${_manifests})
  cmake_path(GET manifest PARENT_PATH _folder)
  cmake_path(GET _folder FILENAME _name)
  if(NOT RADIX_ONLY OR _name IN_LIST RADIX_ONLY)
    include(${manifest})
  endif()
endforeach()
if(RADIX_SM90_SOURCES)
  add_library(radix_sm90 OBJECT ${RADIX_SM90_SOURCES})
  target_include_directories(radix_sm90 PRIVATE ${RADIX_INCLUDES})
  target_compile_options(radix_sm90 PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:${_flags}>")
  set_target_properties(radix_sm90 PROPERTIES CUDA_ARCHITECTURES 90a-real ${_properties})
  target_sources(radix_kernels PRIVATE $<TARGET_OBJECTS:radix_sm90>)
endif()

# With the CXX linker CMake leaves the CUDA runtime to us.
find_library(RADIX_CUDART_STATIC cudart_static REQUIRED HINTS ${CMAKE_CUDA_IMPLICIT_LINK_DIRECTORIES})
target_link_libraries(radix_kernels PRIVATE ${RADIX_CUDART_STATIC} ${CMAKE_DL_LIBS} rt)
