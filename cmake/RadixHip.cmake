# The ROCm backend: csrc/gpu as HIP by any clang with the AMDGPU target, ROCm's amdclang++ or a distribution's. Custom
# commands and not CMake's HIP language, which insists on an installed ROCm and on linking libamdhip64: the library finds
# the HIP runtime when it is first used (csrc/rocm/hip_shim.cpp).
#
# A source is compiled once for each target and once for the host, whose object holds the targets' code in one bundle:
# so another compiler can make the code of a target that this one does not know.
find_program(RADIX_HIPCXX NAMES amdclang++ clang++-21 clang++-20 clang++-19
             HINTS $ENV{ROCM_PATH}/llvm/bin /opt/rocm/llvm/bin REQUIRED)
set(RADIX_ZIG "" CACHE STRING "zig, whose clang compiles for targets that are too new for the other")
file(REAL_PATH ${RADIX_HIPCXX} _real)
cmake_path(GET _real PARENT_PATH _llvm)
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)
if(DEFINED ENV{ROCM_PATH})
  set(_rocm $ENV{ROCM_PATH})
elseif(EXISTS /opt/rocm/include/hip/hip_runtime.h)
  set(_rocm /opt/rocm)
else()
  set(_rocm /usr)
endif()
set(RADIX_ROCM_PATH ${_rocm} CACHE PATH "prefix of include/hip")

# Which compiler makes the code of a target: _compiler_<target>, empty where none can.
execute_process(COMMAND ${RADIX_HIPCXX} -print-resource-dir OUTPUT_VARIABLE _resources OUTPUT_STRIP_TRAILING_WHITESPACE
  COMMAND_ERROR_IS_FATAL ANY)
foreach(arch gfx90a gfx942 gfx950 ${RADIX_ARCHS})
  execute_process(COMMAND ${RADIX_HIPCXX} --target=amdgcn-amd-amdhsa -mcpu=${arch} -nogpulib -x c -E /dev/null
    RESULT_VARIABLE _unknown OUTPUT_QUIET ERROR_QUIET)
  set(_compiler_${arch} ${RADIX_HIPCXX})
  if(_unknown AND RADIX_ZIG)
    # Its package leaves out HIP's headers and finds no linker of its own.
    set(_compiler_${arch} ${RADIX_ZIG} clang --target=x86_64-unknown-linux-gnu -resource-dir ${_resources} -B${_llvm})
  elseif(_unknown)
    set(_compiler_${arch} "")
  endif()
endforeach()
if(RADIX_ARCHS)
  set(_archs ${RADIX_ARCHS})
else()
  set(_archs gfx90a gfx942 gfx950)
endif()
foreach(arch ${_archs})
  if(NOT _compiler_${arch})
    message(FATAL_ERROR "${RADIX_HIPCXX} does not know ${arch}: clang 20 or later, or RADIX_ZIG, is needed")
  endif()
endforeach()
set(RADIX_TARGETS ${_archs})

set(_flags -x hip --rocm-path=${RADIX_ROCM_PATH} -std=c++17 -O3 -fPIC -fvisibility=hidden -fvisibility-inlines-hidden
           -ffp-contract=on -Wall -DNDEBUG)
foreach(folder ${RADIX_INCLUDES})
  list(APPEND _flags -I${folder})
endforeach()
set(_device_flags --cuda-device-only --no-gpu-bundle-output -mcode-object-version=5)

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
  set(_isa_950 9500)
  foreach(arch ${_archs})
    string(REPLACE "gfx" "" _number ${arch})
    set(_constant ${_links}/oclc_isa_version_${_number}.bc)
    if(NOT EXISTS ${_constant} AND DEFINED _isa_${_number})
      file(WRITE ${_links}/isa_${_number}.c
        "extern __attribute__((weak, visibility(\"protected\"), address_space(4))) const unsigned __oclc_ISA_version;\n"
        "__attribute__((weak, visibility(\"protected\"), address_space(4))) const unsigned __oclc_ISA_version = ${_isa_${_number}};\n")
      execute_process(COMMAND ${RADIX_HIPCXX} --target=amdgcn-amd-amdhsa -mcode-object-version=5 -nogpulib -x c -O2
        -emit-llvm -c ${_links}/isa_${_number}.c -o ${_constant} COMMAND_ERROR_IS_FATAL ANY)
    endif()
  endforeach()
  # Its HIP headers take their fences from a library that clang 20 and later no longer link by themselves.
  list(APPEND _device_flags --rocm-device-lib-path=${_links} -Xclang -mlink-builtin-bitcode -Xclang ${_links}/hip.bc)
endif()

include(cmake/RadixGpu.cmake)
foreach(source ${RADIX_GPU_SOURCES})
  cmake_path(RELATIVE_PATH source BASE_DIRECTORY ${RADIX_CSRC}/gpu OUTPUT_VARIABLE _name)
  set(_object ${CMAKE_BINARY_DIR}/hip/${_name}.o)
  cmake_path(GET _object PARENT_PATH _folder)
  file(MAKE_DIRECTORY ${_folder})
  set(_parts "")
  set(_inputs "")
  foreach(arch ${_archs})
    set(_part hip/${_name}.${arch}.co)
    add_custom_command(OUTPUT ${CMAKE_BINARY_DIR}/${_part}
      COMMAND ${_compiler_${arch}} ${_flags} ${_device_flags} --offload-arch=${arch}
        -Xclang -dependency-file -Xclang ${_part}.d -Xclang -MT -Xclang ${_part} -c ${source} -o ${_part}
      DEPENDS ${source} DEPFILE ${CMAKE_BINARY_DIR}/${_part}.d WORKING_DIRECTORY ${CMAKE_BINARY_DIR}
      COMMENT "HIP ${_name} [${arch}]" VERBATIM)
    list(APPEND _parts ${CMAKE_BINARY_DIR}/${_part})
    list(APPEND _inputs ${arch}=${CMAKE_BINARY_DIR}/${_part})
  endforeach()
  string(MD5 _id ${_name})  # of a symbol that each object defines
  add_custom_command(OUTPUT ${_object}
    COMMAND ${Python_EXECUTABLE} ${CMAKE_SOURCE_DIR}/cmake/hip_bundle.py ${_object}.hipfb ${_inputs}
    COMMAND ${RADIX_HIPCXX} ${_flags} --cuda-host-only -Xclang -cuid=${_id} -Xclang -fcuda-include-gpubinary -Xclang ${_object}.hipfb
      -MD -MF ${_object}.d -MT hip/${_name}.o -c ${source} -o ${_object}
    DEPENDS ${source} ${_parts} ${CMAKE_SOURCE_DIR}/cmake/hip_bundle.py DEPFILE ${_object}.d COMMENT "HIP ${_name} [host]" VERBATIM)
  set_source_files_properties(${_object} PROPERTIES EXTERNAL_OBJECT TRUE GENERATED TRUE)
  target_sources(radix_kernels PRIVATE ${_object})
endforeach()
radix_family(hip)
target_sources(radix_kernels PRIVATE ${RADIX_CSRC}/rocm/hip_choice.cpp ${RADIX_CSRC}/rocm/hip_shim.cpp)
target_link_libraries(radix_kernels PRIVATE ${CMAKE_DL_LIBS})
