radix_cpu_family(decoder
  BACKEND decoder.cpp rmsnorm.cpp product.cpp rope_store.cpp attend.cpp activate.cpp sum.cpp scale.cpp route.cpp
    experts.cpp latent_store.cpp latent_attention.cpp
    latent_prefill.cpp
  KERNELS add.cpp)
