# Kernels for NVIDIA chips beside Hopper, from CUTLASS. A family is a folder csrc/sm80/<name> with a sources.cmake that calls
# radix_sm80_family(<name> HOST files... SM80 files... SM89 files... SM100 files...), files relative to the folder. Those of
# SM80 and SM89 are compiled to the machine code and the PTX of that chip alone, whatever RADIX_ARCHS says: a later chip of
# its generation runs the code, any later one the PTX. Those of SM100 are for sm_100a, whose code no other chip runs.
set(RADIX_CUTLASS_DIR "$ENV{RADIX_CUTLASS_DIR}" CACHE STRING
    "CUTLASS (a folder with include/cutlass); empty: found or fetched; none: build without the kernels that need it")
set(_cutlass_tag v4.2.0)  # as tools/fetch_cutlass.py
set(_cutlass_git https://github.com/NVIDIA/cutlass.git)

# Sets RADIX_CUTLASS to a folder with include/cutlass: the given one, that of the package nvidia-cutlass where the
# interpreter of the build has it, or GitHub's.
function(radix_find_cutlass)
  if(RADIX_CUTLASS_DIR)
    set(_found ${RADIX_CUTLASS_DIR})
  else()
    find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)
    execute_process(COMMAND ${Python_EXECUTABLE} -c
      "import importlib.util as u; print(u.find_spec('cutlass_library').submodule_search_locations[0])"
      OUTPUT_VARIABLE _package OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE _missing ERROR_QUIET)
    set(_found ${_package}/source)
    if(_missing)
      radix_fetch_cutlass()
      set(_found ${CMAKE_BINARY_DIR}/_deps/cutlass-src)
    endif()
  endif()
  if(NOT EXISTS ${_found}/include/cutlass/version.h)
    message(FATAL_ERROR "${_found} is no CUTLASS: include/cutlass/version.h is missing (RADIX_CUTLASS_DIR)")
  endif()
  file(STRINGS ${_found}/include/cutlass/version.h _version REGEX "define CUTLASS_MAJOR 4")
  if(NOT _version)
    message(FATAL_ERROR "${_found} is not CUTLASS 4 (RADIX_CUTLASS_DIR)")
  endif()
  message(STATUS "CUTLASS: ${_found}")
  set(RADIX_CUTLASS ${_found} PARENT_SCOPE)
endfunction()

function(radix_fetch_cutlass)
  if(EXISTS ${CMAKE_BINARY_DIR}/_deps/cutlass-src/include/cutlass/version.h)
    return()
  endif()
  execute_process(COMMAND ${CMAKE_COMMAND} -E env GIT_TERMINAL_PROMPT=0 git ls-remote --exit-code ${_cutlass_git} ${_cutlass_tag}
    RESULT_VARIABLE _unreachable OUTPUT_QUIET ERROR_QUIET TIMEOUT 30)
  if(_unreachable)
    message(FATAL_ERROR "The kernels for chips beside Hopper need CUTLASS ${_cutlass_tag}, and ${_cutlass_git} cannot be "
      "reached. Give RADIX_CUTLASS_DIR a folder with include/cutlass, install the package nvidia-cutlass==4.2.0.0, or build "
      "without them: RADIX_CUTLASS_DIR=none (Triton runs what they would)")
  endif()
  include(FetchContent)
  # A subdirectory without a CMakeLists.txt: nothing of it is built.
  FetchContent_Declare(cutlass GIT_REPOSITORY ${_cutlass_git} GIT_TAG ${_cutlass_tag} GIT_SHALLOW TRUE SOURCE_SUBDIR include)
  FetchContent_MakeAvailable(cutlass)
endfunction()

macro(radix_sm80_family name)
  cmake_parse_arguments(_f "" "" "HOST;SM80;SM89;SM100" ${ARGN})
  radix_find_cutlass()
  radix_family(${name})
  foreach(_list _f_HOST _f_SM80 _f_SM89 _f_SM100)
    list(TRANSFORM ${_list} PREPEND ${RADIX_CSRC}/sm80/${name}/)
  endforeach()
  target_sources(radix_kernels PRIVATE ${_f_HOST})
  set(_code_80 80-real 80-virtual)
  set(_code_89 89-real 89-virtual)
  set(_code_100 100a-real)
  foreach(_chip 80 89 100)
    if(_f_SM${_chip})
      set(_target radix_sm${_chip}_${name})
      add_library(${_target} OBJECT ${_f_SM${_chip}})
      target_include_directories(${_target} PRIVATE ${RADIX_INCLUDES})
      target_include_directories(${_target} SYSTEM PRIVATE ${RADIX_CUTLASS}/include)
      target_compile_options(${_target} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:${_flags};--expt-relaxed-constexpr>")
      set_target_properties(${_target} PROPERTIES CUDA_ARCHITECTURES "${_code_${_chip}}" ${_properties})
      target_sources(radix_kernels PRIVATE $<TARGET_OBJECTS:${_target}>)
    endif()
  endforeach()
endmacro()

file(GLOB _manifests CONFIGURE_DEPENDS ${RADIX_CSRC}/sm80/*/sources.cmake)
foreach(manifest ${_manifests})
  cmake_path(GET manifest PARENT_PATH _folder)
  cmake_path(GET _folder FILENAME _name)
  if(RADIX_ONLY AND NOT _name IN_LIST RADIX_ONLY)
    continue()
  endif()
  if(RADIX_CUTLASS_DIR STREQUAL "none")
    message(STATUS "without CUTLASS, and so without ${_name}")
  else()
    include(${manifest})
  endif()
endforeach()
