# The operator library. Sources are found by room: a new file in a folder needs no line here.

# furlong_sources(OUT folder...): the .cpp files below the folders, without tests and benches.
function(furlong_sources out)
  set(all "")
  foreach(folder IN LISTS ARGN)
    file(GLOB_RECURSE found CONFIGURE_DEPENDS "${CMAKE_SOURCE_DIR}/${folder}/*.cpp")
    list(APPEND all ${found})
  endforeach()
  list(FILTER all EXCLUDE REGEX "_(test|bench)\\.cpp$")
  set(${out} ${all} PARENT_SCOPE)
endfunction()

# The operators: one shared library that needs LibTorch alone, so that Python can load it. From a static archive the
# linker would drop the registrations, hence SHARED and, for whoever links it, --no-as-needed.
furlong_sources(ops_sources furlong/ops)
list(FILTER ops_sources EXCLUDE REGEX "/layer[^/]*\\.cpp$")
if(FURLONG_CUDA_KERNELS)
  # The kernels know nothing of torch: the torch-free test programs link these objects alone.
  file(GLOB_RECURSE kernel_sources CONFIGURE_DEPENDS "${CMAKE_SOURCE_DIR}/furlong/ops/*.cu")
  list(FILTER kernel_sources EXCLUDE REGEX "_(test|bench)\\.cu$")
  add_library(furlong_kernels OBJECT ${kernel_sources})
  target_link_libraries(furlong_kernels PUBLIC furlong_compile)
  set_target_properties(furlong_kernels PROPERTIES POSITION_INDEPENDENT_CODE ON)
else()
  list(FILTER ops_sources EXCLUDE REGEX "/cuda[_/][^/]*\\.cpp$")
endif()
add_library(furlong_ops SHARED ${ops_sources})
if(FURLONG_CUDA_KERNELS)
  target_link_libraries(furlong_ops PRIVATE furlong_kernels CUDA::cudart_static)
  target_compile_definitions(furlong_ops PUBLIC FURLONG_CUDA=1)
endif()
set_target_properties(furlong_ops PROPERTIES DEFINE_SYMBOL "")
target_link_libraries(furlong_ops PUBLIC furlong_compile furlong::libtorch OpenMP::OpenMP_CXX hwy::hwy)
target_link_options(furlong_ops INTERFACE "-Wl,--no-as-needed")
target_precompile_headers(furlong_ops PRIVATE furlong/ops/common/pch.h)
