# The single-source GPU kernels: what CUDA and ROCm compile alike. A family <name> is csrc/gpu/<name>.cu and what else is
# named for it here.
set(RADIX_ONLY "" CACHE STRING "development: build only these families")
set(_files_sampling penalties)
set(_files_all_reduce all_reduce_norm peer_group)
set(RADIX_GPU_SOURCES ${RADIX_CSRC}/gpu/backend.cu)
foreach(_name norm rope fused_rope activation kv_cache merge_state mla_kv moe sampling sampling_shards all_reduce quantize)
  if(NOT RADIX_ONLY OR _name IN_LIST RADIX_ONLY)
    radix_family(${_name})
    foreach(_file ${_name} ${_files_${_name}})
      list(APPEND RADIX_GPU_SOURCES ${RADIX_CSRC}/gpu/${_file}.cu)
    endforeach()
  endif()
endforeach()
