# The ROCm backend: csrc/gpu as HIP by any clang with the AMDGPU target, ROCm's amdclang++ or a distribution's. Custom
# commands and not CMake's HIP language, which insists on an installed ROCm and on linking libamdhip64: the library finds
# the HIP runtime when it is first used (csrc/rocm/hip_shim.cpp).
set(_archs gfx90a gfx942)
if(RADIX_ARCHS)
  set(_archs ${RADIX_ARCHS})
endif()
set(RADIX_TARGETS ${_archs})
find_program(RADIX_HIPCXX NAMES amdclang++ clang++-21 clang++-20 clang++-19
             HINTS $ENV{ROCM_PATH}/llvm/bin /opt/rocm/llvm/bin REQUIRED)
if(DEFINED ENV{ROCM_PATH})
  set(_rocm $ENV{ROCM_PATH})
elseif(EXISTS /opt/rocm/include/hip/hip_runtime.h)
  set(_rocm /opt/rocm)
else()
  set(_rocm /usr)
endif()
set(RADIX_ROCM_PATH ${_rocm} CACHE PATH "prefix of include/hip")
set(_flags -x hip --rocm-path=${RADIX_ROCM_PATH} -mcode-object-version=5 -std=c++17 -O3 -fPIC -fvisibility=hidden
           -fvisibility-inlines-hidden -ffp-contract=on -Wall -DNDEBUG)

# Debian's device libraries lack one constant for newer targets: the ISA version. Make it beside links to the rest.
set(_bitcode /usr/lib/x86_64-linux-gnu/amdgcn/bitcode)
if(RADIX_ROCM_PATH STREQUAL "/usr" AND EXISTS ${_bitcode})
  set(_links ${CMAKE_BINARY_DIR}/bitcode)
  file(MAKE_DIRECTORY ${_links})
  file(GLOB _libraries ${_bitcode}/*.bc)
  foreach(library ${_libraries})
    cmake_path(GET library FILENAME _name)
    file(CREATE_LINK ${library} ${_links}/${_name} SYMBOLIC)
  endforeach()
  set(_isa_942 9402)
  foreach(arch ${_archs})
    string(REPLACE "gfx" "" _number ${arch})
    set(_constant ${_links}/oclc_isa_version_${_number}.bc)
    if(NOT EXISTS ${_constant} AND DEFINED _isa_${_number})
      file(WRITE ${_links}/isa_${_number}.c
        "extern __attribute__((weak, visibility(\"protected\"), address_space(4))) const unsigned __oclc_ISA_version;\n"
        "__attribute__((weak, visibility(\"protected\"), address_space(4))) const unsigned __oclc_ISA_version = ${_isa_${_number}};\n")
      execute_process(COMMAND ${RADIX_HIPCXX} --target=amdgcn-amd-amdhsa -nogpulib -x c -O2 -emit-llvm
        -c ${_links}/isa_${_number}.c -o ${_constant} COMMAND_ERROR_IS_FATAL ANY)
    endif()
  endforeach()
  list(APPEND _flags --rocm-device-lib-path=${_links})
endif()
foreach(arch ${_archs})
  list(APPEND _flags --offload-arch=${arch})
endforeach()
foreach(folder ${RADIX_INCLUDES})
  list(APPEND _flags -I${folder})
endforeach()

include(cmake/RadixGpu.cmake)
foreach(source ${RADIX_GPU_SOURCES})
  cmake_path(RELATIVE_PATH source BASE_DIRECTORY ${RADIX_CSRC}/gpu OUTPUT_VARIABLE _name)
  set(_object ${CMAKE_BINARY_DIR}/hip/${_name}.o)
  cmake_path(GET _object PARENT_PATH _folder)
  add_custom_command(OUTPUT ${_object}
    COMMAND ${CMAKE_COMMAND} -E make_directory ${_folder}
    COMMAND ${RADIX_HIPCXX} ${_flags} -MD -MF ${_object}.d -MT hip/${_name}.o -c ${source} -o ${_object}
    DEPENDS ${source} DEPFILE ${_object}.d COMMENT "HIP ${_name} [${_archs}]" VERBATIM)
  set_source_files_properties(${_object} PROPERTIES EXTERNAL_OBJECT TRUE GENERATED TRUE)
  target_sources(radix_kernels PRIVATE ${_object})
endforeach()
radix_family(hip)
target_sources(radix_kernels PRIVATE ${RADIX_CSRC}/rocm/hip_choice.cpp ${RADIX_CSRC}/rocm/hip_shim.cpp)
target_link_libraries(radix_kernels PRIVATE ${CMAKE_DL_LIBS})
