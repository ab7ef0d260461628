radix_cpu_family(step BACKEND step.cpp)  # copies and sums of integers: no kernel a level
