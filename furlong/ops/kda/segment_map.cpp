// kda_segment_map: what a segment of tokens does to the state that enters it.
//   N packed tokens   B sequences   H heads   K key size   V value size
//
// The recurrence is affine in its entering state, S_end = M S + O: with v = 0 every column of the state evolves alone,
// so M is the final state of the identity, and O the final state of zero. Both are calls of kda_chunk with other
// values, which brings its kernels, its accuracy and its gradient. As one call where the columns [v | 0] fit the
// kernels: scores and decays are then made once.

#include <ATen/ops/cat.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/zeros.h>

#include "furlong/base/shape.h"
#include "furlong/ops/common/kernel.h"
#include "furlong/ops/kda/internal.h"
#include "furlong/ops/kda/kda.h"

namespace furlong {

namespace {

constexpr int64_t kMostColumns = 256;  // value columns of the CUDA kernels

using ChunkSignature = std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                                          const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                                          const at::Tensor&, const std::optional<at::Tensor>&, double);

std::tuple<at::Tensor, at::Tensor> segment_map(const at::Tensor& k_NHK, const at::Tensor& v_NHV,
                                               const at::Tensor& decay_log_NHK, const at::Tensor& beta_NH,
                                               const at::Tensor& offsets, const at::Tensor& offsets_host) {
  static const auto chunk = find_op<ChunkSignature>("furlong::kda_chunk");
  check_shape("kda_segment_map", "k_NHK", k_NHK, {-1, -1, -1});
  check_shape("kda_segment_map", "v_NHV", v_NHV, {k_NHK.size(0), k_NHK.size(1), -1});
  const int64_t N = k_NHK.size(0), H = k_NHK.size(1), K = k_NHK.size(2), V = v_NHV.size(2);
  const int64_t B = offsets_host.numel() - 1;
  const auto final_state = [&](const at::Tensor& values, const std::optional<at::Tensor>& initial_state) {
    return std::get<1>(
        chunk.call(k_NHK, k_NHK, values, decay_log_NHK, beta_NH, offsets, offsets_host, initial_state, 1.0));
  };
  const at::Tensor no_values_NHK = at::zeros({N, H, K}, v_NHV.options());
  const at::Tensor identity_BHKK = at::eye(K, decay_log_NHK.options()).expand({B, H, K, K});
  if (V + K > kMostColumns) return {final_state(no_values_NHK, identity_BHKK), final_state(v_NHV, std::nullopt)};
  const at::Tensor zero_BHKV = at::zeros({B, H, K, V}, decay_log_NHK.options());
  const at::Tensor both = final_state(at::cat({v_NHV, no_values_NHK}, 2), at::cat({zero_BHKV, identity_BHKK}, 3));
  return {both.narrow(3, V, K), both.narrow(3, 0, V)};
}

}  // namespace

KdaSegmentMap kda_segment_map(const at::Tensor& k_NHK, const at::Tensor& v_NHV, const at::Tensor& decay_log_NHK,
                              const at::Tensor& beta_NH, const SequenceLayout& layout) {
  static const auto op = find_op<decltype(segment_map)>("furlong::kda_segment_map");
  auto [matrix, offset] = op.call(k_NHK, v_NHV, decay_log_NHK, beta_NH, layout.offsets(), layout.offsets_host());
  return {std::move(matrix), std::move(offset)};
}

}  // namespace furlong

TORCH_LIBRARY_FRAGMENT(furlong, m) {
  m.def(
      "kda_segment_map(Tensor k, Tensor v, Tensor decay_log, Tensor beta, Tensor offsets, Tensor offsets_host) -> "
      "(Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(furlong, CompositeImplicitAutograd, m) {
  m.impl("kda_segment_map", furlong::segment_map);
}
