#pragma once

// Inputs and fp64 oracle of the torch-free CUDA test programs.
//   N packed tokens   B sequences   H heads   K key size   V value size

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "furlong/ops/kda/cuda/args.h"

namespace furlong::kda::cuda::test {

inline uint16_t to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
inline float from_bf16(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

/// Independent of the order in which elements are drawn: element i of stream s is a hash of (s, i).
class Random {
 public:
  explicit Random(uint64_t stream) : stream_(stream * 0x9e3779b97f4a7c15ull + 0x1234567) {}
  double uniform(uint64_t i) const {  // in (0, 1)
    uint64_t x = stream_ + i * 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    x ^= x >> 31;
    return (static_cast<double>(x >> 11) + 0.5) * 0x1p-53;
  }
  double normal(uint64_t i) const {
    return std::sqrt(-2.0 * std::log(uniform(2 * i))) * std::cos(6.283185307179586 * uniform(2 * i + 1));
  }

 private:
  uint64_t stream_;
};

/// How the gate input is drawn.
enum class Gates { kRandom, kAtBound, kZero, kMixed, kMild, kStrong };
/// How q, k, v, beta are drawn. kRepeated: a few keys come again and again, beta near 1: A is as large as it gets.
/// kOutliers: one value in 64 is 100 times as large.
enum class Data { kGaussian, kRepeated, kOutliers };

struct Case {
  std::string name;
  std::vector<int64_t> lengths;
  int64_t heads = 2, key_size = 128, value_size = 128;
  GateForm form = GateForm::kBounded;
  Element type = Element::kBFloat16;
  Element gate_type = Element::kBFloat16;
  Gates gates = Gates::kRandom;
  Data data = Data::kGaussian;
  bool fused = true;  // raw q and k, logit of beta; else normalised and given
  bool initial_state = true;
  int64_t rows_past_end = 0;
  uint64_t seed = 1;

  int64_t used_tokens() const {
    int64_t sum = 0;
    for (const int64_t length : lengths) sum += length;
    return sum;
  }
  int64_t tokens() const { return used_tokens() + rows_past_end; }
  int64_t sequences() const { return static_cast<int64_t>(lengths.size()); }
};

/// Host tensors; narrow ones already hold rounded values.
struct HostData {
  std::vector<float> q, k, v, gate, beta, a_log, dt_bias, state;
  std::vector<int64_t> offsets;
};

inline float gate_input(const Case& c, const Random& random, uint64_t i, uint64_t channel) {
  const bool strong_channel = channel % 2 == 0;
  const double normal = random.normal(i);
  if (c.form == GateForm::kGiven) {
    switch (c.gates) {
      case Gates::kAtBound:
        return -5.0f;
      case Gates::kZero:
        return 0.0f;
      case Gates::kMixed:
        return strong_channel ? -5.0f : static_cast<float>(-1e-3 * random.uniform(3 * i));
      case Gates::kMild:
        return static_cast<float>(-1e-4 * random.uniform(3 * i));
      case Gates::kStrong:  // one row in eight forgets everything, the others little
        return random.uniform(7 * i) < 0.125 ? -1000.0f : static_cast<float>(-random.uniform(3 * i));
      default:
        return static_cast<float>(-5.0 * random.uniform(3 * i));
    }
  }
  switch (c.gates) {
    case Gates::kAtBound:
      return 60.0f;
    case Gates::kZero:
      return -60.0f;
    case Gates::kMixed:
      return strong_channel ? 60.0f : -8.0f;
    case Gates::kMild:
      return static_cast<float>(-9.0 + normal);
    case Gates::kStrong:
      return random.uniform(7 * i) < 0.125 ? 1000.0f : static_cast<float>(normal);
    default:
      return static_cast<float>(normal);
  }
}

inline HostData make_data(const Case& c) {
  HostData d;
  const int64_t H = c.heads, K = c.key_size, V = c.value_size, N = c.tokens();
  const Random rq(c.seed * 16 + 1), rk(c.seed * 16 + 2), rv(c.seed * 16 + 3), rz(c.seed * 16 + 4), rb(c.seed * 16 + 5),
      rs(c.seed * 16 + 6), ra(c.seed * 16 + 7);
  d.q.resize(N * H * K);
  d.k.resize(N * H * K);
  d.v.resize(N * H * V);
  d.gate.resize(N * H * K);
  d.beta.resize(N * H);
  d.a_log.resize(H);
  d.dt_bias.resize(H * K);
  const auto narrow = [&](float x) { return c.type == Element::kBFloat16 ? from_bf16(to_bf16(x)) : x; };
  const auto narrow_gate = [&](float x) { return c.gate_type == Element::kBFloat16 ? from_bf16(to_bf16(x)) : x; };
  for (int64_t h = 0; h < H; ++h) d.a_log[h] = static_cast<float>(0.3 * ra.normal(h));
  for (int64_t i = 0; i < H * K; ++i) d.dt_bias[i] = static_cast<float>(0.3 * ra.normal(1000 + i));
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < N * H; ++row) {
    const int64_t token = row / H;
    const uint64_t key_row = c.data == Data::kRepeated ? static_cast<uint64_t>(row % H + H * (token * 7 % 5)) : row;
    double qq = 0, kk = 0;
    for (int64_t i = 0; i < K; ++i) {
      const double q = rq.normal(row * K + i);
      const double k =
          rk.normal(key_row * K + i) + (c.data == Data::kRepeated ? 0.1 * rk.normal((1u << 30) + row * K + i) : 0.0);
      d.q[row * K + i] = static_cast<float>(q);
      d.k[row * K + i] = static_cast<float>(k);
      qq += q * q;
      kk += k * k;
      d.gate[row * K + i] = narrow_gate(gate_input(c, rz, row * K + i, i));
    }
    for (int64_t i = 0; i < K; ++i) {
      d.q[row * K + i] = narrow(c.fused ? d.q[row * K + i] : static_cast<float>(d.q[row * K + i] / std::sqrt(qq)));
      d.k[row * K + i] = narrow(c.fused ? d.k[row * K + i] : static_cast<float>(d.k[row * K + i] / std::sqrt(kk)));
    }
    for (int64_t i = 0; i < V; ++i) {
      const double v = rv.normal(row * V + i);
      d.v[row * V + i] =
          narrow(static_cast<float>(c.data == Data::kOutliers && rv.uniform(row * V * 5 + i) < 1.0 / 64 ? 100 * v : v));
    }
    const double b = rb.normal(row) + (c.data == Data::kRepeated ? 4.0 : 0.0);
    d.beta[row] = c.fused ? narrow(static_cast<float>(b)) : static_cast<float>(1 / (1 + std::exp(-b)));
  }
  d.offsets.push_back(0);
  for (const int64_t length : c.lengths) d.offsets.push_back(d.offsets.back() + length);
  // Rows past the end are poison.
  for (auto* x : {&d.q, &d.k, &d.v, &d.gate, &d.beta}) {
    const size_t used = x->size() / std::max<int64_t>(N, 1) * c.used_tokens();
    for (size_t i = used; i < x->size(); ++i) (*x)[i] = std::numeric_limits<float>::quiet_NaN();
  }
  if (c.initial_state) {
    d.state.resize(c.sequences() * H * K * V);
    for (size_t i = 0; i < d.state.size(); ++i) d.state[i] = static_cast<float>(rs.normal(i));
  }
  return d;
}

struct Expected {
  std::vector<double> out, state;
};

inline double decay_log_of(const Case& c, const HostData& d, int64_t row, int64_t h, int64_t i) {
  const double z = d.gate[row * c.key_size + i];
  if (c.form == GateForm::kGiven) return z;
  const double a = std::exp(static_cast<double>(d.a_log[h])), x = z + d.dt_bias[h * c.key_size + i];
  if (c.form == GateForm::kBounded) return -5.0 / (1 + std::exp(-a * x));
  return -a * (x > 20 ? x : std::log1p(std::exp(x)));
}

/// The recurrence of kda.h in fp64 for one sequence and head.
inline void oracle_head(const Case& c, const HostData& d, int64_t b, int64_t h, double scale, Expected& to) {
  const int64_t H = c.heads, K = c.key_size, V = c.value_size;
  std::vector<double> state(K * V, 0.0), q(K), k(K), recall(V), out(V);
  const int64_t at = (b * H + h) * K * V;
  if (c.initial_state) std::copy_n(d.state.begin() + at, K * V, state.begin());
  for (int64_t token = d.offsets[b]; token < d.offsets[b + 1]; ++token) {
    const int64_t row = token * H + h;
    double qq = 1e-6, kk = 1e-6;
    for (int64_t i = 0; i < K; ++i) {
      q[i] = d.q[row * K + i];
      k[i] = d.k[row * K + i];
      qq += q[i] * q[i];
      kk += k[i] * k[i];
    }
    const double q_factor = c.fused ? scale / std::sqrt(qq) : scale, k_factor = c.fused ? 1 / std::sqrt(kk) : 1;
    const double beta = c.fused ? 1 / (1 + std::exp(-static_cast<double>(d.beta[row]))) : d.beta[row];
    std::fill(recall.begin(), recall.end(), 0.0);
    std::fill(out.begin(), out.end(), 0.0);
    for (int64_t i = 0; i < K; ++i) {
      k[i] *= k_factor;
      const double decay = std::exp(decay_log_of(c, d, row, h, i));
      double* s = state.data() + i * V;
      for (int64_t j = 0; j < V; ++j) {
        s[j] *= decay;
        recall[j] += s[j] * k[i];
      }
    }
    for (int64_t j = 0; j < V; ++j) recall[j] = beta * (d.v[row * V + j] - recall[j]);
    for (int64_t i = 0; i < K; ++i) {
      const double qi = q[i] * q_factor;
      double* s = state.data() + i * V;
      for (int64_t j = 0; j < V; ++j) {
        s[j] += k[i] * recall[j];
        out[j] += s[j] * qi;
      }
    }
    std::copy(out.begin(), out.end(), to.out.begin() + row * V);
  }
  std::copy(state.begin(), state.end(), to.state.begin() + at);
}

inline Expected oracle(const Case& c, const HostData& d, double scale) {
  Expected e;
  e.out.assign(c.tokens() * c.heads * c.value_size, 0.0);
  e.state.assign(c.sequences() * c.heads * c.key_size * c.value_size, 0.0);
#pragma omp parallel for collapse(2) schedule(dynamic)
  for (int64_t b = 0; b < c.sequences(); ++b)
    for (int64_t h = 0; h < c.heads; ++h) oracle_head(c, d, b, h, scale, e);
  return e;
}

/// ||got - expected|| / ||expected||; infinite if anything is not finite.
template <typename T>
double relative_error(const std::vector<T>& got, const std::vector<double>& expected) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const double difference = static_cast<double>(got[i]) - expected[i];
    if (!std::isfinite(difference)) return std::numeric_limits<double>::infinity();
    error += difference * difference;
    norm += expected[i] * expected[i];
  }
  return norm > 0 ? std::sqrt(error / norm) : std::sqrt(error);
}

}  // namespace furlong::kda::cuda::test
