// Times ggml's GATED_DELTA_NET in its per-channel form on the CPU: raw samples as one JSON line, in seconds.
//   ggml_kda THREADS SAMPLES HEADS T...     K = V = 128, fp32; short inputs are timed ten calls a sample
// Checks itself first against the recurrence in double; built by bench/peers/kda_cpu.sh, part of no build here.

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "ggml-cpu.h"
#include "ggml.h"

namespace {

constexpr int64_t kSize = 128;

struct Problem {
  ggml_context* context;
  ggml_tensor *q, *k, *v, *g, *beta, *state, *result;
  ggml_cgraph* graph;

  Problem(int64_t tokens, int64_t heads) {
    const size_t floats = static_cast<size_t>(heads * kSize * (5 * tokens + 2 * kSize) + heads * tokens);
    context = ggml_init({4 * floats + (16 << 20), nullptr, false});
    const auto rows = [&](int64_t columns) {
      return ggml_new_tensor_4d(context, GGML_TYPE_F32, columns, heads, tokens, 1);
    };
    q = rows(kSize), k = rows(kSize), v = rows(kSize), g = rows(kSize), beta = rows(1);
    state = ggml_new_tensor_4d(context, GGML_TYPE_F32, kSize, kSize, heads, 1);
    result = ggml_gated_delta_net(context, q, k, v, g, beta, state, 1);
    graph = ggml_new_graph(context);
    ggml_build_forward_expand(graph, result);
    fill();
  }
  ~Problem() { ggml_free(context); }

  static float* data(ggml_tensor* x) { return static_cast<float*>(x->data); }

  void fill() {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::uniform_real_distribution<float> uniform;
    for (ggml_tensor* x : {q, k, v}) {
      for (int64_t i = 0; i < ggml_nelements(x); ++i) data(x)[i] = normal(random);
    }
    for (ggml_tensor* x : {q, k}) {
      for (int64_t i = 0; i < ggml_nelements(x); i += kSize) {
        double sum = 0;
        for (int64_t d = 0; d < kSize; ++d) sum += data(x)[i + d] * data(x)[i + d];
        for (int64_t d = 0; d < kSize; ++d) data(x)[i + d] /= static_cast<float>(std::sqrt(sum));
      }
    }
    for (int64_t i = 0; i < ggml_nelements(g); ++i) data(g)[i] = -5 * uniform(random);
    for (int64_t i = 0; i < ggml_nelements(beta); ++i) data(beta)[i] = uniform(random);
    for (int64_t i = 0; i < ggml_nelements(state); ++i) data(state)[i] = 0;
  }
};

/// Largest error of the outputs of one head, against the recurrence in double.
double error_of(Problem& p, int64_t tokens) {
  std::vector<double> state(kSize * kSize, 0.0);
  double worst = 0;
  for (int64_t t = 0; t < tokens; ++t) {
    const auto row = [&](ggml_tensor* x) { return Problem::data(x) + t * kSize; };
    for (int64_t v = 0; v < kSize; ++v) {
      double recalled = 0, out = 0;
      for (int64_t d = 0; d < kSize; ++d) recalled += (state[d * kSize + v] *= std::exp(row(p.g)[d])) * row(p.k)[d];
      const double written = Problem::data(p.beta)[t] * (row(p.v)[v] - recalled);
      for (int64_t d = 0; d < kSize; ++d) out += (state[d * kSize + v] += row(p.k)[d] * written) * row(p.q)[d];
      worst = std::fmax(worst, std::fabs(row(p.result)[v] - out / std::sqrt(double(kSize))));
    }
  }
  return worst;
}

class Runner {
 public:
  explicit Runner(int threads) : threads_(threads) {
    ggml_threadpool_params params = ggml_threadpool_params_default(threads);
    pool_ = ggml_threadpool_new(&params);
  }
  ~Runner() { ggml_threadpool_free(pool_); }

  double seconds(Problem& p, int calls) {
    ggml_cplan plan = ggml_graph_plan(p.graph, threads_, pool_);
    work_.resize(plan.work_size + 64);
    plan.work_data = work_.data();
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < calls; ++i) ggml_graph_compute(p.graph, &plan);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / calls;
  }

 private:
  int threads_;
  ggml_threadpool* pool_;
  std::vector<uint8_t> work_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 5) {
    std::fputs("usage: ggml_kda THREADS SAMPLES HEADS T...\n", stderr);
    return 2;
  }
  Runner runner(std::atoi(argv[1]));
  Problem small(40, 1);
  runner.seconds(small, 1);
  const double error = error_of(small, 40);
  if (!(error < 1e-5)) {
    std::fprintf(stderr, "ggml_kda: error %g against the recurrence\n", error);
    return 1;
  }
  const char* separator = "";
  std::printf("{");
  for (int i = 4; i < argc; ++i) {
    const int64_t tokens = std::atoll(argv[i]);
    Problem problem(tokens, std::atoll(argv[3]));
    const int calls = tokens <= 64 ? 10 : 1;
    runner.seconds(problem, 1);
    std::printf("%s\"%s\": [", separator, argv[i]);
    for (int n = 0; n < std::atoi(argv[2]); ++n) std::printf("%s%.6g", n ? ", " : "", runner.seconds(problem, calls));
    std::printf("]");
    separator = ", ";
  }
  std::printf("}\n");
  return 0;
}
