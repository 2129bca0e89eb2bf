# The CUDA kernels: nvcc 13 for sm_90a, free of torch headers. FURLONG_CUDA_KERNELS says whether they are built; without
# nvcc the operators run their references on CUDA tensors.

set(FURLONG_CUDA_KERNELS OFF)
if(FURLONG_CUDA)
  find_program(FURLONG_NVCC nvcc HINTS ENV CUDA_HOME /usr/local/cuda PATH_SUFFIXES bin)
  if(FURLONG_NVCC)
    set(CMAKE_CUDA_COMPILER "${FURLONG_NVCC}")
    set(CMAKE_CUDA_ARCHITECTURES 90a-real)
    enable_language(CUDA)
    set(CMAKE_CUDA_STANDARD 20)
    set(CMAKE_CUDA_EXTENSIONS OFF)
    if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 does not know this dialect of nvcc
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
      set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
    endif()
    find_package(CUDAToolkit REQUIRED)
    set(FURLONG_CUDA_KERNELS ON)
  else()
    message(STATUS "No nvcc: CUDA tensors run the references")
  endif()
endif()
