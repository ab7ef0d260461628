# The CUDA backend: csrc/gpu by nvcc, ahead of time, with the static runtime. The driver is reached through the runtime's
# own entry points, so the library imports on a machine without a GPU.
set(CMAKE_CUDA_ARCHITECTURES 80-real 89-real 90a-real 100-real 80-virtual)
if(RADIX_ARCHS)
  set(CMAKE_CUDA_ARCHITECTURES ${RADIX_ARCHS})
endif()
enable_language(CUDA)

include(cmake/RadixGpu.cmake)
target_sources(radix_kernels PRIVATE ${RADIX_GPU_SOURCES})
target_compile_options(radix_kernels PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:-O3;--extended-lambda;-Xptxas=-v;-Xcompiler=-Wall>")
set_target_properties(radix_kernels PROPERTIES
  CUDA_ARCHITECTURES "${CMAKE_CUDA_ARCHITECTURES}" CUDA_STANDARD 17 CUDA_STANDARD_REQUIRED ON CUDA_RUNTIME_LIBRARY None
  CUDA_VISIBILITY_PRESET hidden LINKER_LANGUAGE CXX)
# With the CXX linker CMake leaves the CUDA runtime to us.
find_library(RADIX_CUDART_STATIC cudart_static REQUIRED HINTS ${CMAKE_CUDA_IMPLICIT_LINK_DIRECTORIES})
target_link_libraries(radix_kernels PRIVATE ${RADIX_CUDART_STATIC} ${CMAKE_DL_LIBS} rt)
