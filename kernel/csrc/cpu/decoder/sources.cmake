radix_cpu_family(decoder
  BACKEND decoder.cpp rmsnorm.cpp product.cpp rope_store.cpp attend.cpp activate.cpp sum.cpp scale.cpp route.cpp
    experts.cpp latent.cpp
  KERNELS add.cpp)
