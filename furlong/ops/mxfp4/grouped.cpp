// mxfp4_grouped_linear on the CPU. Groups of few rows go through the packed kernel. With many rows the library's
// products are faster than ours by more than the unpacking costs: blocks of outputs are dequantised and multiplied.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "furlong/base/parallel.h"
#include "furlong/ops/common/kernel.h"
#include "furlong/ops/mxfp4/blocks.h"
#include "furlong/ops/mxfp4/checks.h"
#include "furlong/ops/mxfp4/product.h"
#include "furlong/ops/mxfp4/reference.h"

namespace furlong {
namespace {

/// Outputs of one task: packed rows that stay in the second-level cache while the row tiles pass.
constexpr int64_t kFewRowsOutputs = 128;
constexpr int64_t kRowsOfTile = 8;
/// Outputs of one task where one tile takes all rows: each start of a task waits for memory.
constexpr int64_t kOneTileOutputs = 512;
constexpr int64_t kOneTileRows = 4;
/// Outputs that are dequantised at a time for the library.
constexpr int64_t kManyRowsOutputs = 256;
/// Rows from which on a group goes through the library.
constexpr int64_t kManyRows = 32;

/// The outputs [first, last) of some rows of one group.
struct Task {
  int64_t group, first_row, rows, first, last;
  bool many_rows;
};

struct Operands {
  at::Tensor x_PI, y_PO;
  at::TensorList packed, scale;
  std::vector<int64_t> bounds;

  Mxfp4Matrix matrix(int64_t group) const {
    const at::Tensor& codes = packed[group];
    const at::Tensor& bytes = scale[group];
    return {.packed = codes.const_data_ptr<uint8_t>(),
            .scale = bytes.const_data_ptr<uint8_t>(),
            .packed_stride = codes.stride(0),
            .scale_stride = bytes.stride(0),
            .inputs = x_PI.size(1)};
  }
};

/// Wide tasks only where every thread gets several: the width changes no bits.
int64_t outputs_of_task(const Operands& op, int64_t rows) {
  if (rows >= kManyRows) return kManyRowsOutputs;
  const int64_t wide_tasks = static_cast<int64_t>(op.packed.size()) * op.y_PO.size(1) / kOneTileOutputs;
  return rows <= kOneTileRows && wide_tasks >= 4 * num_threads() ? kOneTileOutputs : kFewRowsOutputs;
}

std::vector<Task> make_tasks(const Operands& op) {
  std::vector<Task> tasks;
  for (int64_t group = 0; group < static_cast<int64_t>(op.packed.size()); ++group) {
    const int64_t start = op.bounds[group], rows = op.bounds[group + 1] - start, outputs = op.y_PO.size(1);
    const int64_t width = outputs_of_task(op, rows);
    const int64_t height = rows >= kManyRows ? rows : kRowsOfTile;
    for (int64_t first = 0; first < outputs; first += width) {
      for (int64_t row = 0; row < rows; row += height) {
        tasks.push_back({group, start + row, std::min(height, rows - row), first, std::min(outputs, first + width),
                         rows >= kManyRows});
      }
    }
  }
  return tasks;
}

/// FormatError where the scale bytes of rows [first, last) hold a 255.
void check_scale_rows(const Mxfp4Matrix& matrix, int64_t group, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; ++row) {
    const uint8_t* begin = matrix.scale + row * matrix.scale_stride;
    const uint8_t* end = begin + matrix.inputs / kMxBlock;
    const uint8_t* found = std::find(begin, end, static_cast<uint8_t>(kMxNanScale));
    if (found != end) refuse_nan_scale(name_of_scale(group), row, found - begin);
  }
}

/// Rows of x in the order of the packed kernel; those of groups with many rows are left unwritten.
class ArrangedRows {
 public:
  ArrangedRows(const Operands& op, const Mxfp4ProductKernels& kernels)
      : size_(kernels.arranged_bytes(op.x_PI.size(1))) {
    std::vector<int64_t> rows;
    for (size_t group = 0; group + 1 < op.bounds.size(); ++group) {
      if (op.bounds[group + 1] - op.bounds[group] >= kManyRows) continue;
      for (int64_t row = op.bounds[group]; row < op.bounds[group + 1]; ++row) rows.push_back(row);
    }
    if (rows.empty()) return;
    data_ = at::empty({rows.back() + 1, size_}, op.x_PI.options().dtype(at::kByte));
    uint8_t* to = data_.mutable_data_ptr<uint8_t>();
    const char* from = static_cast<const char*>(op.x_PI.const_data_ptr());
    const int64_t row_bytes = op.x_PI.size(1) * op.x_PI.element_size();
    parallel_for(0, static_cast<int64_t>(rows.size()), 16, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        kernels.arrange(from + rows[i] * row_bytes, op.x_PI.size(1), to + rows[i] * size_);
      }
    });
  }
  const void* row(int64_t index) const { return data_.const_data_ptr<uint8_t>() + index * size_; }

 private:
  int64_t size_;
  at::Tensor data_;
};

void run_few_rows(const Operands& op, const Mxfp4ProductKernels& kernels, const ArrangedRows& x, const Task& task) {
  const Mxfp4Matrix matrix = op.matrix(task.group);
  char* y = static_cast<char*>(op.y_PO.mutable_data_ptr());
  const int64_t outputs = op.y_PO.size(1);
  const bool finite = kernels.product(matrix, task.first, task.last, x.row(task.first_row), task.rows,
                                      y + task.first_row * outputs * op.y_PO.element_size(), outputs);
  if (!finite) check_scale_rows(matrix, task.group, task.first, task.last);
}

void run_many_rows(const Operands& op, const Mxfp4BlockKernels& kernels, const Task& task) {
  const Mxfp4Matrix matrix = op.matrix(task.group);
  check_scale_rows(matrix, task.group, task.first, task.last);
  const int64_t outputs = task.last - task.first;
  const at::Tensor weight_OI = at::empty({outputs, matrix.inputs}, op.x_PI.options());
  char* to = static_cast<char*>(weight_OI.mutable_data_ptr());
  for (int64_t row = 0; row < outputs; ++row, to += matrix.inputs * weight_OI.element_size()) {
    kernels.dequantize(matrix.packed + (task.first + row) * matrix.packed_stride,
                       matrix.scale + (task.first + row) * matrix.scale_stride, to, matrix.inputs / kMxBlock);
  }
  at::Tensor y = op.y_PO.narrow(0, task.first_row, task.rows).narrow(1, task.first, outputs);
  at::mm_out(y, op.x_PI.narrow(0, task.first_row, task.rows), weight_OI.t());
}

/// Threads take tasks in turn: neighbours cost about the same, so that all end together. Every output is one task's, so
/// its bits do not depend on the number of threads; nor do the library's, which runs on one thread inside a task.
template <typename Body>
void for_each_task(const std::vector<Task>& tasks, const Body& body) {
  const int64_t threads = std::min<int64_t>(num_threads(), static_cast<int64_t>(tasks.size()));
  parallel_for(0, threads, 1, [&](int64_t first, int64_t last) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;  // per thread
    for (int64_t thread = first; thread < last; ++thread) {
      for (int64_t task = thread; task < static_cast<int64_t>(tasks.size()); task += threads) body(tasks[task]);
    }
  });
}

/// Rows contiguous inside, whatever lies between them.
at::Tensor with_dense_rows(const at::Tensor& matrix) {
  return matrix.stride(1) == 1 || matrix.size(1) <= 1 ? matrix : matrix.contiguous();
}

at::Tensor grouped_linear_cpu(const at::Tensor& x_PI, at::TensorList packed_in, at::TensorList scale_in,
                              const at::Tensor& offsets) {
  const int64_t outputs = check_grouped(x_PI, packed_in, scale_in, offsets);
  if (!has_cpu_kernel(x_PI)) return mxfp4_grouped_linear_reference(x_PI, packed_in, scale_in, offsets);
  std::vector<at::Tensor> packed, scale;
  for (const at::Tensor& codes : packed_in) packed.push_back(with_dense_rows(codes));
  for (const at::Tensor& bytes : scale_in) scale.push_back(with_dense_rows(bytes));
  const Operands op{x_PI.contiguous(), at::empty({x_PI.size(0), outputs}, x_PI.options()), packed, scale,
                    group_bounds(x_PI, offsets)};
  op.y_PO.narrow(0, op.bounds.back(), x_PI.size(0) - op.bounds.back()).zero_();

  const Mxfp4ProductKernels product = mxfp4_product_kernels(is_bf16(x_PI));
  const Mxfp4BlockKernels blocks = mxfp4_block_kernels(is_bf16(x_PI));
  const ArrangedRows arranged(op, product);
  for_each_task(make_tasks(op), [&](const Task& task) {
    task.many_rows ? run_many_rows(op, blocks, task) : run_few_rows(op, product, arranged, task);
  });
  return op.y_PO;
}

}  // namespace
}  // namespace furlong

TORCH_LIBRARY_IMPL(furlong, CPU, m) {
  m.impl("mxfp4_grouped_linear", furlong::grouped_linear_cpu);
}
