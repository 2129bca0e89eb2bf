#include "furlong/model/initialize.h"

#include <ATen/ops/empty.h>

#include <cmath>

#include "furlong/base/parallel.h"
#include "furlong/base/rng.h"

namespace furlong {

namespace {

// Counters an element may use: a normal draw takes 2, a truncated one repeats with probability 0.0027.
constexpr uint64_t kCountersPerElement = 16;
constexpr double kTruncation = 3.0;  // standard deviations

uint64_t name_hash(const std::string& name) {
  uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a, 64 bits
  for (const char byte : name) hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001b3u;
  return hash;
}

double draw(const Init& init, Rng rng) {
  switch (init.kind) {
    case Init::Kind::kConstant:
      return init.a;
    case Init::Kind::kNormal:
      return init.a * rng.normal();
    case Init::Kind::kTruncatedNormal: {
      double z = rng.normal();
      for (uint64_t used = 2; std::abs(z) > kTruncation && used + 2 <= kCountersPerElement; used += 2) z = rng.normal();
      return init.a * std::clamp(z, -kTruncation, kTruncation);
    }
    case Init::Kind::kUniform:
      return init.a + (init.b - init.a) * rng.uniform();
    case Init::Kind::kLogUniform:
      return std::log(init.a + (init.b - init.a) * rng.uniform());
  }
  return 0.0;
}

}  // namespace

at::Tensor draw_initial(const ParamSpec& spec, uint64_t seed) {
  at::Tensor value = at::empty(spec.shape, at::kFloat);
  float* data = value.data_ptr<float>();
  const uint64_t stream = name_hash(spec.name);
  parallel_for(0, value.numel(), 4096, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      data[i] = static_cast<float>(draw(spec.init, Rng(seed, stream, static_cast<uint64_t>(i) * kCountersPerElement)));
    }
  });
  return value;
}

}  // namespace furlong
