// short_conv on CPU tensors: from tensors to rows of the kernels, and the split over threads.
//   N packed tokens   B sequences   S state slots   P channels   W kernel width   T = W - 1 tail columns

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <cstring>

#include "furlong/base/parallel.h"
#include "furlong/base/shape.h"
#include "furlong/ops/common/kernel.h"
#include "furlong/ops/short_conv/cpu_conv.h"
#include "furlong/ops/short_conv/internal.h"

namespace furlong::short_conv_detail {

namespace {

constexpr int64_t kPieceRows = 128;

struct Piece {
  int64_t sequence, first, count;  // first: row within the sequence
};

std::vector<Piece> pieces_of(const int64_t* offsets, int64_t sequences) {
  std::vector<Piece> pieces;
  for (int64_t b = 0; b < sequences; ++b) {
    const int64_t length = offsets[b + 1] - offsets[b];
    for (int64_t first = 0; first < length; first += kPieceRows) {
      pieces.push_back({b, first, std::min(kPieceRows, length - first)});
    }
  }
  return pieces;
}

at::Tensor with_adjacent_channels(const at::Tensor& x) {
  return x.size(-1) <= 1 || x.stride(-1) == 1 ? x : x.contiguous();
}

/// Where the rows of padded sequences lie: row r < T of sequence b is its tail, later rows are its tokens.
template <typename T>
struct PaddedRows {
  const T* x;
  int64_t x_stride;
  const T* tail;         // [B, T, P] or null
  std::vector<T> zeros;  // stands for a missing tail
  const int64_t* offsets;
  int64_t tail_rows, channels;

  PaddedRows(const at::Tensor& x_NP, const at::Tensor& tail_BTP, const int64_t* starts, int64_t tail_columns)
      : x(x_NP.const_data_ptr<T>()),
        x_stride(x_NP.stride(0)),
        tail(tail_BTP.defined() ? tail_BTP.const_data_ptr<T>() : nullptr),
        zeros(x_NP.size(1), T(0)),
        offsets(starts),
        tail_rows(tail_columns),
        channels(x_NP.size(1)) {}

  const T* row(int64_t b, int64_t r) const {
    if (r >= tail_rows) return x + (offsets[b] + r - tail_rows) * x_stride;
    return tail == nullptr ? zeros.data() : tail + (b * tail_rows + r) * channels;
  }
};

template <typename T>
void forward(const PaddedRows<T>& in, const at::Tensor& weight_WP, int64_t sequences, const at::Tensor& y,
             const at::Tensor& final_tail) {
  const int64_t P = in.channels, W = weight_WP.size(0), tail = in.tail_rows;
  const auto pieces = pieces_of(in.offsets, sequences);
  T* out = y.mutable_data_ptr<T>();
  parallel_for(0, static_cast<int64_t>(pieces.size()), 1, [&](int64_t first, int64_t last) {
    std::vector<const T*> rows(kPieceRows + tail);
    for (int64_t n = first; n < last; ++n) {
      const Piece& piece = pieces[n];
      for (int64_t r = 0; r < piece.count + tail; ++r) rows[r] = in.row(piece.sequence, piece.first + r);
      T* to = out + (in.offsets[piece.sequence] + piece.first) * P;
      conv_forward({rows.data(), piece.count, weight_WP.const_data_ptr<float>(), W, P, 0, P, to, P});
    }
  });
  T* tails = final_tail.mutable_data_ptr<T>();
  for (int64_t b = 0; b < sequences; ++b) {
    const int64_t length = in.offsets[b + 1] - in.offsets[b];
    for (int64_t r = 0; r < tail; ++r) {
      std::memcpy(tails + (b * tail + r) * P, in.row(b, length + r), sizeof(T) * P);
    }
  }
}

at::Tensor token_rows(const at::Tensor& like, int64_t tokens) {
  at::Tensor x = at::empty(like.sizes(), like.options());
  if (x.size(0) > tokens) x.slice(0, tokens).zero_();
  return x;
}

std::tuple<at::Tensor, at::Tensor> conv_cpu(const at::Tensor& x_NP, const at::Tensor& weight_PW,
                                            const at::Tensor& offsets, const at::Tensor& offsets_host,
                                            const std::optional<at::Tensor>& initial_tail_BTP) {
  check_arguments("short_conv", x_NP, weight_PW, offsets, offsets_host, initial_tail_BTP);
  if (!has_cpu_kernel(x_NP)) return reference(x_NP, weight_PW, offsets, offsets_host, initial_tail_BTP);
  const at::Tensor x = with_adjacent_channels(x_NP), weight_WP = weight_PW.t().contiguous();
  const at::Tensor tail = initial_tail_BTP.has_value() ? initial_tail_BTP->contiguous() : at::Tensor();
  const auto* starts = offsets_host.const_data_ptr<int64_t>();
  const int64_t sequences = offsets_host.numel() - 1, tail_rows = weight_PW.size(1) - 1;
  const at::Tensor y = token_rows(x, starts[sequences]);
  const at::Tensor final_tail = at::empty({sequences, tail_rows, x.size(1)}, x.options());
  if (x.scalar_type() == at::kBFloat16) {
    forward(PaddedRows<c10::BFloat16>(x, tail, starts, tail_rows), weight_WP, sequences, y, final_tail);
  } else {
    forward(PaddedRows<float>(x, tail, starts, tail_rows), weight_WP, sequences, y, final_tail);
  }
  return {y, final_tail};
}

template <typename T>
struct GradientRows {
  const T* d_y;
  int64_t d_y_stride;
  const T* d_final_tail;  // [B, T, P] or null
  T* d_x;                 // [N, P]
  T* d_initial_tail;      // [B, T, P]
};

template <typename T>
void backward(const PaddedRows<T>& in, const GradientRows<T>& grad, const at::Tensor& weight_WP, int64_t sequences,
              const at::Tensor& d_weight_WP) {
  const int64_t P = in.channels, W = weight_WP.size(0), tail = in.tail_rows;
  const int64_t blocks = (P + kChannelBlock - 1) / kChannelBlock;
  // A block of channels walks through all sequences: its weight gradients need no reduction over threads.
  parallel_for(0, blocks, 1, [&](int64_t first, int64_t last) {
    std::vector<const T*> rows, d_out, d_tail;
    std::vector<T*> d_rows;
    std::vector<float> scratch(2 * W * kChannelBlock);
    for (int64_t b = 0; b < sequences; ++b) {
      const int64_t length = in.offsets[b + 1] - in.offsets[b];
      rows.clear(), d_out.clear(), d_tail.clear(), d_rows.clear();
      for (int64_t r = 0; r < length + tail; ++r) {
        rows.push_back(in.row(b, r));
        const bool kept = grad.d_final_tail != nullptr && r >= length;
        d_tail.push_back(kept ? grad.d_final_tail + (b * tail + r - length) * P : nullptr);
        d_rows.push_back(r < tail ? grad.d_initial_tail + (b * tail + r) * P
                                  : grad.d_x + (in.offsets[b] + r - tail) * P);
        if (r < length) d_out.push_back(grad.d_y + (in.offsets[b] + r) * grad.d_y_stride);
      }
      for (int64_t block = first; block < last; ++block) {
        const int64_t begin = block * kChannelBlock;
        conv_backward({rows.data(), d_out.data(), d_tail.data(), d_rows.data(), length,
                       weight_WP.const_data_ptr<float>(), W, P, begin, std::min(begin + kChannelBlock, P),
                       d_weight_WP.mutable_data_ptr<float>(), scratch.data()});
      }
    }
  });
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward_cpu(const at::Tensor& d_y_NP,
                                                            const std::optional<at::Tensor>& d_final_tail_BTP,
                                                            const at::Tensor& x_NP, const at::Tensor& weight_PW,
                                                            const at::Tensor& offsets_host,
                                                            const std::optional<at::Tensor>& initial_tail_BTP) {
  const at::Tensor x = with_adjacent_channels(x_NP), d_y = with_adjacent_channels(d_y_NP);
  const at::Tensor weight_WP = weight_PW.t().contiguous();
  const at::Tensor tail = initial_tail_BTP.has_value() ? initial_tail_BTP->contiguous() : at::Tensor();
  const at::Tensor d_final = d_final_tail_BTP.has_value() ? d_final_tail_BTP->contiguous() : at::Tensor();
  const auto* starts = offsets_host.const_data_ptr<int64_t>();
  const int64_t sequences = offsets_host.numel() - 1, tail_rows = weight_PW.size(1) - 1;
  const at::Tensor d_x = token_rows(x, starts[sequences]);
  const at::Tensor d_tail = at::empty({sequences, tail_rows, x.size(1)}, x.options());
  const at::Tensor d_weight = at::zeros(weight_WP.sizes(), weight_WP.options());
  const auto run = [&](auto zero) {
    using T = decltype(zero);
    const GradientRows<T> grad{d_y.const_data_ptr<T>(), d_y.stride(0),
                               d_final.defined() ? d_final.const_data_ptr<T>() : nullptr, d_x.mutable_data_ptr<T>(),
                               d_tail.mutable_data_ptr<T>()};
    backward(PaddedRows<T>(x, tail, starts, tail_rows), grad, weight_WP, sequences, d_weight);
  };
  if (x.scalar_type() == at::kBFloat16) {
    run(c10::BFloat16());
  } else {
    run(0.0f);
  }
  return {d_x, d_weight.t().contiguous(), d_tail};
}

template <typename T>
void step(const at::Tensor& x, const at::Tensor& weight_WP, const at::Tensor& pool, const int64_t* slots,
          const at::Tensor& out) {
  const int64_t P = x.size(1), W = weight_WP.size(0), tail = W - 1;
  parallel_for(0, x.size(0), 1, [&](int64_t first, int64_t last) {
    std::vector<const T*> rows(W);
    for (int64_t b = first; b < last; ++b) {
      T* tail_rows = pool.mutable_data_ptr<T>() + slots[b] * pool.stride(0);
      for (int64_t j = 0; j < tail; ++j) rows[j] = tail_rows + j * pool.stride(1);
      rows[tail] = x.const_data_ptr<T>() + b * x.stride(0);
      conv_forward(
          {rows.data(), 1, weight_WP.const_data_ptr<float>(), W, P, 0, P, out.mutable_data_ptr<T>() + b * P, P});
      for (int64_t j = 0; j < tail; ++j) std::memcpy(tail_rows + j * pool.stride(1), rows[j + 1], sizeof(T) * P);
    }
  });
}

at::Tensor step_cpu(const at::Tensor& x_BP, const at::Tensor& weight_PW, at::Tensor tail_STP,
                    const at::Tensor& slots_B) {
  if (!has_cpu_kernel(x_BP) || (tail_STP.size(2) > 1 && tail_STP.stride(2) != 1)) {
    return step_reference(x_BP, weight_PW, tail_STP, slots_B);
  }
  const at::Tensor x = with_adjacent_channels(x_BP), weight_WP = weight_PW.t().contiguous();
  const at::Tensor slots = slots_B.contiguous();
  const auto* slot = slots.const_data_ptr<int64_t>();
  for (int64_t b = 0; b < slots.numel(); ++b) {
    check_argument(
        slot[b] >= 0 && slot[b] < tail_STP.size(0), "short_conv_step_",
        "slots_B: got " + std::to_string(slot[b]) + ", need a slot of a pool of " + std::to_string(tail_STP.size(0)));
  }
  const at::Tensor out = at::empty(x.sizes(), x.options());
  if (x.scalar_type() == at::kBFloat16) {
    step<c10::BFloat16>(x, weight_WP, tail_STP, slot, out);
  } else {
    step<float>(x, weight_WP, tail_STP, slot, out);
  }
  return out;
}

}  // namespace

}  // namespace furlong::short_conv_detail

TORCH_LIBRARY_IMPL(furlong, CPU, m) {
  m.impl("short_conv", furlong::short_conv_detail::conv_cpu);
  m.impl("short_conv_step_", furlong::short_conv_detail::step_cpu);
  m.impl("_short_conv_backward", furlong::short_conv_detail::backward_cpu);
}
