#pragma once

// Inputs of the torch-free tests of the gradient, its fp64 oracle token by token, and central differences of the
// recurrence.
//   N packed tokens   B sequences   H heads   K key size   V value size

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "furlong/ops/kda/cuda/test_case.h"

namespace furlong::kda::cuda::gradient_test {

// ---- cases ------------------------------------------------------------------------------------------------------

enum class Gates { kRandom, kBound, kZero, kMixed, kWild };
/// kAlike: all keys of a head point nearly the same way, so that A is large and the inverse matters. kOutliers: one
/// value in 64 is 100 times as large.
enum class Data { kGaussian, kAlike, kOutliers };

struct Case {
  std::string name;
  std::vector<int64_t> lengths;
  int64_t H = 2, K = 128, V = 128;
  GateForm form = GateForm::kBounded;
  Gates gates = Gates::kRandom;
  Data data = Data::kGaussian;
  bool bf16 = true, fused = true, states = true;
  int64_t spare_rows = 0;    // rows past the last sequence: NaN
  bool differences = false;  // the kernels against central differences; small shapes only
};

inline float rounded(float x, Element type) {
  return type == Element::kFloat ? x : test::from_bf16(test::to_bf16(x));
}

struct Tensor {
  Element type = Element::kFloat;
  std::vector<float> values;

  std::vector<unsigned char> raw() const {
    std::vector<unsigned char> bytes(values.size() * (type == Element::kFloat ? 4 : 2));
    for (size_t i = 0; i < values.size(); ++i) {
      if (type == Element::kFloat) {
        std::memcpy(bytes.data() + 4 * i, &values[i], 4);
      } else {
        const uint16_t x = test::to_bf16(values[i]);
        std::memcpy(bytes.data() + 2 * i, &x, 2);
      }
    }
    return bytes;
  }
};

struct Problem {
  Case c;
  std::vector<int64_t> offsets;
  int64_t N, B;
  float scale, lower_bound = -5.0f;
  Tensor q, k, v, gate, beta, d_out, initial, d_final, a_log, dt_bias;
};

/// A gate input of element i of [N, H, K].
inline float draw_gate(const Case& c, int64_t i, std::mt19937& engine, std::normal_distribution<float>& normal,
                       std::uniform_real_distribution<float>& uniform) {
  const bool given = c.form == GateForm::kGiven;
  const int64_t token = i / (c.H * c.K);
  switch (c.gates) {
    case Gates::kRandom:
      return given ? -uniform(engine) * uniform(engine) * 3.0f : normal(engine) * 2.0f - 2.0f;
    case Gates::kBound:
      return given ? -5.0f : 30.0f;
    case Gates::kZero:
      return given ? 0.0f : -30.0f;
    case Gates::kMixed: {
      const bool open = ((i * 2654435761u) >> 7) % 2 == 0;
      return given ? (open ? 0.0f : -5.0f) : (open ? -30.0f : 30.0f);
    }
    case Gates::kWild: {
      const float x =
          token % 37 == 5 ? -1000.0f : (uniform(engine) < 0.1f ? -30.0f * uniform(engine) : -0.1f * uniform(engine));
      return given ? x : normal(engine) * 10.0f;
    }
  }
  return 0.0f;
}

/// Rows of length `size` to length one.
inline void normalise(Tensor& t, int64_t size) {
  for (size_t row = 0; row < t.values.size() / size; ++row) {
    float* x = t.values.data() + row * size;
    double sum = 1e-6;
    for (int64_t d = 0; d < size; ++d) sum += x[d] * x[d];
    for (int64_t d = 0; d < size; ++d) x[d] = rounded(static_cast<float>(x[d] / std::sqrt(sum)), t.type);
  }
}

inline Problem make(const Case& c, unsigned seed) {
  Problem p;
  p.c = c;
  p.offsets = {0};
  for (int64_t length : c.lengths) p.offsets.push_back(p.offsets.back() + length);
  p.B = static_cast<int64_t>(c.lengths.size());
  p.N = p.offsets.back() + c.spare_rows;
  p.scale = 1.0f / std::sqrt(static_cast<float>(c.K));
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> uniform;
  const Element type = c.bf16 ? Element::kBFloat16 : Element::kFloat;
  const auto fill_tensor = [&](Tensor& t, int64_t n, Element element, auto draw) {
    t.type = element;
    t.values.resize(n);
    for (int64_t i = 0; i < n; ++i) t.values[i] = rounded(draw(i), element);
  };
  const int64_t keys = p.N * c.H * c.K, values = p.N * c.H * c.V;
  std::vector<float> common(c.H * c.K);
  for (float& x : common) x = normal(engine);
  const auto key = [&](int64_t i) {
    return c.data == Data::kAlike ? common[i % (c.H * c.K)] + 0.3f * normal(engine) : normal(engine);
  };
  fill_tensor(p.q, keys, type, key);
  fill_tensor(p.k, keys, type, key);
  if (!c.fused) {
    for (Tensor* x : {&p.q, &p.k}) normalise(*x, c.K);
  }
  fill_tensor(p.v, values, type, [&](int64_t) {
    const float value = normal(engine);
    return c.data == Data::kOutliers && uniform(engine) < 1.0f / 64 ? 100 * value : value;
  });
  fill_tensor(p.d_out, values, type, [&](int64_t) { return normal(engine); });
  fill_tensor(p.gate, keys, c.form == GateForm::kGiven ? Element::kFloat : type,
              [&](int64_t i) { return draw_gate(c, i, engine, normal, uniform); });
  fill_tensor(p.beta, p.N * c.H, c.fused ? type : Element::kFloat,
              [&](int64_t) { return c.fused ? normal(engine) * 2.0f : uniform(engine); });
  for (Tensor* t : {&p.q, &p.k, &p.v, &p.gate, &p.beta, &p.d_out}) {
    const int64_t used = static_cast<int64_t>(t->values.size()) / std::max<int64_t>(p.N, 1) * p.offsets.back();
    std::fill(t->values.begin() + used, t->values.end(), std::numeric_limits<float>::quiet_NaN());
  }
  fill_tensor(p.initial, p.B * c.H * c.K * c.V, Element::kFloat, [&](int64_t) { return 0.3f * normal(engine); });
  fill_tensor(p.d_final, p.B * c.H * c.K * c.V, Element::kFloat, [&](int64_t) { return 0.3f * normal(engine); });
  fill_tensor(p.a_log, c.H, Element::kFloat, [&](int64_t) { return 0.3f * normal(engine); });
  fill_tensor(p.dt_bias, c.H * c.K, Element::kFloat, [&](int64_t) { return 0.5f * normal(engine); });
  return p;
}

// ---- fp64 oracle --------------------------------------------------------------------------------------------------

struct Gradients {
  std::vector<double> q, k, v, gate, beta, initial, a_log, dt_bias;
  // Squared sizes of what the sums are made of, where more cancels than remains: see limits.
  double a_log_terms = 0, gate_terms = 0, dt_bias_terms = 0, beta_terms = 0;
};

// Where a gate forgets nearly everything, the gradient of its log is far smaller than q d_q, which enters for one row
// and leaves for the next: rounding in fp32 is relative to q d_q. 1.2 % of 3e-4 of it: 4e-6.
constexpr double kCrossing = 3e-4;

inline double logistic(double x) {
  return 1.0 / (1.0 + std::exp(-x));
}

/// What one sequence and head gives to the sums over tokens.
struct Sums {
  double a_log = 0, a_log_terms = 0, gate_terms = 0, dt_bias_terms = 0, beta_terms = 0;
  std::vector<double> dt_bias;
};

/// The recurrence and its gradient for one sequence and head; states are kept every kSpan tokens.
class OracleWalk {
 public:
  OracleWalk(const Problem& problem, int64_t b, int64_t h, Gradients& gradients)
      : p(problem),
        c(problem.c),
        out(gradients),
        K(c.K),
        V(c.V),
        head(h),
        begin(p.offsets[b]),
        T(p.offsets[b + 1] - begin),
        square((b * c.H + h) * K * V),
        a(std::exp(static_cast<double>(p.a_log.values[h]))),
        q(T * K),
        k(T * K),
        g(T * K),
        beta(T),
        norm_q(T, 1),
        norm_k(T, 1),
        d_state(K * V, 0.0),
        x(V),
        a_log_sizes(K, 0),
        dt_bias_sizes(K, 0) {
    sums.dt_bias.assign(K, 0);
    for (int64_t t = 0; t < T; ++t) read(t);
  }

  Sums run() {
    std::vector<double> state(K * V, 0.0), next(K * V), errors(kSpan * V), inside((kSpan + 1) * K * V);
    if (c.states) {
      for (int64_t i = 0; i < K * V; ++i) {
        state[i] = p.initial.values[square + i];
        d_state[i] = p.d_final.values[square + i];
      }
    }
    std::vector<std::vector<double>> kept;
    for (int64_t t = 0; t < T; ++t) {
      if (t % kSpan == 0) kept.push_back(state);
      step(t, state.data(), next.data(), errors.data());
      state.swap(next);
    }
    for (int64_t first = (T - 1) / kSpan * kSpan; T > 0 && first >= 0; first -= kSpan) {
      const int64_t rows = std::min(kSpan, T - first);
      std::copy(kept[first / kSpan].begin(), kept[first / kSpan].end(), inside.begin());
      for (int64_t i = 0; i < rows; ++i) {
        step(first + i, inside.data() + i * K * V, inside.data() + (i + 1) * K * V, errors.data() + i * V);
      }
      for (int64_t i = rows - 1; i >= 0; --i) {
        const double* before = inside.data() + i * K * V;
        step_back(first + i, before, before + K * V, errors.data() + i * V);
      }
    }
    for (int64_t i = 0; i < K * V; ++i) out.initial[square + i] = d_state[i];
    for (int64_t d = 0; d < K; ++d) {
      sums.a_log_terms += a_log_sizes[d] * a_log_sizes[d];
      sums.dt_bias_terms += dt_bias_sizes[d] * dt_bias_sizes[d];
    }
    return std::move(sums);
  }

 private:
  static constexpr int64_t kSpan = 64;

  int64_t key_at(int64_t t) const { return ((begin + t) * c.H + head) * K; }
  int64_t value_at(int64_t t) const { return ((begin + t) * c.H + head) * V; }
  double biased(int64_t t, int64_t d) const {
    return p.gate.values[key_at(t) + d] + double{p.dt_bias.values[head * K + d]};
  }

  /// Norms, gate and sigmoid of a row.
  void read(int64_t t) {
    for (int which = 0; which < 2; ++which) {
      const float* row = (which == 0 ? p.q : p.k).values.data() + key_at(t);
      double sum = 1e-6;
      for (int64_t d = 0; d < K; ++d) sum += static_cast<double>(row[d]) * row[d];
      const double norm = c.fused ? 1 / std::sqrt(sum) : 1;
      (which == 0 ? norm_q : norm_k)[t] = norm;
      for (int64_t d = 0; d < K; ++d) (which == 0 ? q : k)[t * K + d] = row[d] * norm;
    }
    for (int64_t d = 0; d < K; ++d) {
      const double z = p.gate.values[key_at(t) + d], y = biased(t, d);
      g[t * K + d] = c.form == GateForm::kGiven     ? z
                     : c.form == GateForm::kBounded ? p.lower_bound * logistic(a * y)
                                                    : -a * (y > 20 ? y : std::log1p(std::exp(y)));
    }
    const double raw = p.beta.values[(begin + t) * c.H + head];
    beta[t] = c.fused ? logistic(raw) : raw;
  }

  void step(int64_t t, const double* from, double* to, double* error) const {
    const float* v = p.v.values.data() + value_at(t);
    for (int64_t e = 0; e < V; ++e) error[e] = v[e];
    for (int64_t d = 0; d < K; ++d) {
      const double decay = std::exp(g[t * K + d]);
      for (int64_t e = 0; e < V; ++e) {
        to[d * V + e] = decay * from[d * V + e];
        error[e] -= to[d * V + e] * k[t * K + d];
      }
    }
    for (int64_t d = 0; d < K; ++d) {
      for (int64_t e = 0; e < V; ++e) to[d * V + e] += beta[t] * k[t * K + d] * error[e];
    }
  }

  void step_back(int64_t t, const double* before, const double* after, const double* error) {
    const float* d_o = p.d_out.values.data() + value_at(t);
    std::fill(x.begin(), x.end(), 0.0);
    for (int64_t d = 0; d < K; ++d) {
      for (int64_t e = 0; e < V; ++e) {
        d_state[d * V + e] += p.scale * q[t * K + d] * d_o[e];
        x[e] += d_state[d * V + e] * k[t * K + d];
      }
    }
    values_back(t, error);
    std::vector<double> d_q(K), d_k(K);
    double dot_q = 0, dot_k = 0;
    for (int64_t d = 0; d < K; ++d) {
      const double decay = std::exp(g[t * K + d]);
      double sum_q = 0, sum_k = 0, sum_g = 0;
      for (int64_t e = 0; e < V; ++e) {
        double& cell = d_state[d * V + e];
        const double decayed = decay * before[d * V + e];
        sum_q += after[d * V + e] * d_o[e];
        sum_k += cell * beta[t] * error[e] - decayed * beta[t] * x[e];
        const double d_decayed = cell - k[t * K + d] * beta[t] * x[e];
        sum_g += d_decayed * decayed;
        cell = decay * d_decayed;
      }
      d_q[d] = p.scale * sum_q;
      d_k[d] = sum_k;
      dot_q += d_q[d] * q[t * K + d];
      dot_k += d_k[d] * k[t * K + d];
      gate_back(t, d, sum_g, kCrossing * d_q[d] * q[t * K + d]);
    }
    for (int64_t d = 0; d < K; ++d) {
      out.q[key_at(t) + d] = norm_q[t] * (d_q[d] - (c.fused ? q[t * K + d] * dot_q : 0));
      out.k[key_at(t) + d] = norm_k[t] * (d_k[d] - (c.fused ? k[t * K + d] * dot_k : 0));
    }
  }

  void values_back(int64_t t, const double* error) {
    double d_beta = 0, beta_size = 0;
    for (int64_t e = 0; e < V; ++e) {
      d_beta += x[e] * error[e];
      beta_size += x[e] * error[e] * x[e] * error[e];
      out.v[value_at(t) + e] = beta[t] * x[e];
    }
    const double through = c.fused ? beta[t] * (1 - beta[t]) : 1;
    out.beta[(begin + t) * c.H + head] = d_beta * through;
    sums.beta_terms += beta_size * through * through;
  }

  /// `d_g`: gradient of the log decay. `entering`: what enters for one row and leaves for the next.
  void gate_back(int64_t t, int64_t d, double d_g, double entering) {
    const double y = biased(t, d);
    double slope = 1, term = 0;
    if (c.form == GateForm::kBounded) {
      slope = p.lower_bound * logistic(a * y) * logistic(-a * y) * a;
      term = slope * d_g * y;
    } else if (c.form == GateForm::kSoftplus) {
      slope = -a * logistic(y);
      term = d_g * g[t * K + d];
    }
    const double d_z = slope * d_g, crossing = entering * slope;
    sums.a_log += term;
    a_log_sizes[d] += std::abs(term) + std::abs(crossing * y);
    sums.dt_bias[d] += d_z;
    dt_bias_sizes[d] += std::abs(crossing);
    sums.gate_terms += crossing * crossing;
    out.gate[key_at(t) + d] = d_z;
  }

  const Problem& p;
  const Case& c;
  Gradients& out;
  int64_t K, V, head, begin, T, square;
  double a;
  std::vector<double> q, k, g, beta, norm_q, norm_k;
  std::vector<double> d_state, x;  // x: gradient of beta times the error
  std::vector<double> a_log_sizes, dt_bias_sizes;
  Sums sums;
};

inline Gradients oracle(const Problem& p) {
  const Case& c = p.c;
  Gradients out;
  out.q.assign(p.N * c.H * c.K, 0);
  out.k = out.gate = out.q;
  out.v.assign(p.N * c.H * c.V, 0);
  out.beta.assign(p.N * c.H, 0);
  out.initial.assign(p.B * c.H * c.K * c.V, 0);
  out.a_log.assign(c.H, 0);
  out.dt_bias.assign(c.H * c.K, 0);
  std::vector<Sums> parts(p.B * c.H);
#pragma omp parallel for schedule(dynamic)
  for (int64_t walk = 0; walk < p.B * c.H; ++walk) parts[walk] = OracleWalk(p, walk / c.H, walk % c.H, out).run();
  for (int64_t walk = 0; walk < p.B * c.H; ++walk) {
    const Sums& part = parts[walk];
    out.a_log[walk % c.H] += part.a_log;
    out.a_log_terms += part.a_log_terms;
    out.gate_terms += part.gate_terms;
    out.dt_bias_terms += part.dt_bias_terms;
    out.beta_terms += part.beta_terms;
    for (int64_t d = 0; d < c.K; ++d) out.dt_bias[walk % c.H * c.K + d] += part.dt_bias[d];
  }
  return out;
}

// ---- central differences
// ----------------------------------------------------------------------------------------------

/// The inputs of a problem in fp64, so that they can be moved by less than their own rounding.
struct Point {
  std::vector<double> q, k, v, gate, beta, initial, a_log, dt_bias;

  explicit Point(const Problem& p) {
    const auto widen = [](const Tensor& t) { return std::vector<double>(t.values.begin(), t.values.end()); };
    q = widen(p.q), k = widen(p.k), v = widen(p.v), gate = widen(p.gate), beta = widen(p.beta);
    initial = widen(p.initial), a_log = widen(p.a_log), dt_bias = widen(p.dt_bias);
  }
};

/// What one sequence and head gives to sum(d_out out) + sum(d_final final_state).
inline double loss_of_walk(const Problem& p, const Point& x, int64_t b, int64_t h) {
  const Case& c = p.c;
  const int64_t K = c.K, V = c.V, square = (b * c.H + h) * K * V;
  std::vector<double> state(K * V, 0.0), write(V);
  if (c.states) std::copy_n(x.initial.begin() + square, K * V, state.begin());
  double loss = 0;
  for (int64_t n = p.offsets[b]; n < p.offsets[b + 1]; ++n) {
    const int64_t row = n * c.H + h;
    const double *q = x.q.data() + row * K, *k = x.k.data() + row * K, *v = x.v.data() + row * V;
    double qq = 1e-6, kk = 1e-6;
    for (int64_t d = 0; d < K; ++d) qq += q[d] * q[d], kk += k[d] * k[d];
    const double of_q = c.fused ? 1 / std::sqrt(qq) : 1, of_k = c.fused ? 1 / std::sqrt(kk) : 1;
    std::copy_n(v, V, write.begin());
    for (int64_t d = 0; d < K; ++d) {
      const double z = x.gate[row * K + d], a = std::exp(x.a_log[h]), y = z + x.dt_bias[h * K + d];
      const double decay_log = c.form == GateForm::kGiven     ? z
                               : c.form == GateForm::kBounded ? p.lower_bound / (1 + std::exp(-a * y))
                                                              : -a * std::log1p(std::exp(y));
      for (int64_t e = 0; e < V; ++e) {
        state[d * V + e] *= std::exp(decay_log);
        write[e] -= state[d * V + e] * k[d] * of_k;
      }
    }
    const double beta = c.fused ? 1 / (1 + std::exp(-x.beta[row])) : x.beta[row];
    for (int64_t d = 0; d < K; ++d) {
      for (int64_t e = 0; e < V; ++e) {
        state[d * V + e] += k[d] * of_k * beta * write[e];
        loss += p.scale * q[d] * of_q * state[d * V + e] * p.d_out.values[row * V + e];
      }
    }
  }
  if (c.states) {
    for (int64_t i = 0; i < K * V; ++i) loss += state[i] * p.d_final.values[square + i];
  }
  return loss;
}

/// Central differences at every input into the values of `out`. Only the walks that an element enters are run again.
inline void differences(const Problem& p, Gradients& out) {
  constexpr double kStep = 1e-5;  // truncation and rounding of 1e-10 each
  const Case& c = p.c;
  const Point at(p);
  const auto fill = [&](std::vector<double> Point::*part, std::vector<double>& to, auto head, auto sequence) {
    to.assign((at.*part).size(), 0);
#pragma omp parallel
    {
      Point moved = at;
#pragma omp for
      for (int64_t i = 0; i < static_cast<int64_t>(to.size()); ++i) {
        const int64_t only = sequence(i);  // -1: every sequence
        double sum = 0;
        for (int64_t b = std::max<int64_t>(only, 0); b < (only < 0 ? p.B : only + 1); ++b) {
          for (const double sign : {1.0, -1.0}) {
            (moved.*part)[i] = (at.*part)[i] + sign * kStep;
            sum += sign * loss_of_walk(p, moved, b, head(i));
          }
        }
        (moved.*part)[i] = (at.*part)[i];
        to[i] = sum / (2 * kStep);
      }
    }
  };
  const auto rows = [&](std::vector<double> Point::*part, std::vector<double>& to, int64_t last) {
    const auto sequence = [&p, &c, last](int64_t i) {
      const auto after = std::upper_bound(p.offsets.begin(), p.offsets.end(), i / (c.H * last));
      return static_cast<int64_t>(after - p.offsets.begin()) - 1;
    };
    fill(part, to, [&c, last](int64_t i) { return i / last % c.H; }, sequence);
  };
  const auto all = [](int64_t) { return int64_t{-1}; };
  rows(&Point::q, out.q, c.K);
  rows(&Point::k, out.k, c.K);
  rows(&Point::v, out.v, c.V);
  rows(&Point::gate, out.gate, c.K);
  rows(&Point::beta, out.beta, 1);
  const int64_t square = c.K * c.V;
  fill(
      &Point::initial, out.initial, [&](int64_t i) { return i / square % c.H; },
      [&](int64_t i) { return i / square / c.H; });
  fill(&Point::a_log, out.a_log, [](int64_t i) { return i; }, all);
  fill(&Point::dt_bias, out.dt_bias, [&](int64_t i) { return i / c.K; }, all);
}

}  // namespace furlong::kda::cuda::gradient_test
