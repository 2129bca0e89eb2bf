// Tests of the CUDA gradient of kda_chunk, free of torch, against the recurrence and its adjoint token by token in
// fp64. Without nvcc the kernels run on the CPU through cuda/emulation.h.
//
//   kda_cuda_backward_test [--small] [--unset] [--case TEXT] [--most N] [--repeats N]
//
// --case runs only cases whose name holds TEXT; --most leaves out cases of more than N tokens times heads; --unset
// leaves workspaces and results as they were allocated instead of NaN, for compute-sanitizer's initcheck.
//
// Exit code 77: no GPU.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#if defined(__CUDACC__)
#include <cuda_runtime.h>
#endif
#include "furlong/ops/kda/cuda/backward_args.h"
#include "furlong/ops/kda/cuda/backward_test_case.h"

namespace furlong::kda::cuda {
namespace {

using namespace gradient_test;

// ---- memory -----------------------------------------------------------------------------------------------------

#if defined(__CUDACC__)
void check(int error, const char* what) {
  if (error != 0) {
    std::printf("%s: %s\n", what, cudaGetErrorString(static_cast<cudaError_t>(error)));
    std::exit(1);
  }
}
void* reserve(size_t bytes) {
  void* p = nullptr;
  check(cudaMalloc(&p, std::max<size_t>(bytes, 16)), "cudaMalloc");
  return p;
}
void release(void* p) {
  cudaFree(p);
}
void upload(void* to, const void* from, size_t bytes) {
  if (bytes > 0) check(cudaMemcpy(to, from, bytes, cudaMemcpyDefault), "copy");
}
void fill(void* p, int byte, size_t bytes) {
  if (bytes > 0) check(cudaMemset(p, byte, bytes), "memset");
}
void synchronise() {
  check(cudaDeviceSynchronize(), "kernel");
}
bool has_device() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}
#else
void check(int error, const char*) {
  if (error != 0) std::exit(1);
}
void* reserve(size_t bytes) {
  return std::aligned_alloc(256, (bytes + 511) / 256 * 256);
}
void release(void* p) {
  std::free(p);
}
void upload(void* to, const void* from, size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}
void fill(void* p, int byte, size_t bytes) {
  std::memset(p, byte, bytes);
}
void synchronise() {}
bool has_device() {
  return true;
}
#endif

/// Without it, memory that a kernel has to write first stays as it was allocated: for initcheck.
bool fill_with_nan = true;

/// Device memory between two guard zones of NaN; starts as NaN.
class Buffer {
 public:
  explicit Buffer(size_t bytes) : bytes_(bytes), base_(static_cast<char*>(reserve(bytes + 2 * kGuard))) {
    fill(base_, 0xff, kGuard);
    fill(base_ + kGuard + bytes, 0xff, kGuard);
    poison();
  }
  ~Buffer() { release(base_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  template <typename T = void>
  T* get() const {
    return reinterpret_cast<T*>(base_ + kGuard);
  }
  void poison() {
    if (fill_with_nan) fill(get(), 0xff, bytes_);
  }
  std::vector<unsigned char> download() const {
    std::vector<unsigned char> host(bytes_);
    upload(host.data(), get(), bytes_);
    return host;
  }
  bool guards_intact() const {
    std::vector<unsigned char> zones(2 * kGuard);
    upload(zones.data(), base_, kGuard);
    upload(zones.data() + kGuard, base_ + kGuard + bytes_, kGuard);
    return std::all_of(zones.begin(), zones.end(), [](unsigned char c) { return c == 0xff; });
  }

 private:
  static constexpr size_t kGuard = 256;
  size_t bytes_;
  char* base_;
};

// ---- the kernels ----------------------------------------------------------------------------------------------------

struct Run {
  Gradients grad;
  std::vector<unsigned char> bits;  // all outputs, for comparison of runs
  bool guards = true;
};

void append(std::vector<double>& to, const std::vector<unsigned char>& bytes, size_t count, Element type) {
  for (size_t i = 0; i < count; ++i) {
    if (type == Element::kFloat) {
      float x;
      std::memcpy(&x, bytes.data() + 4 * i, 4);
      to.push_back(x);
    } else {
      uint16_t x;
      std::memcpy(&x, bytes.data() + 2 * i, 2);
      to.push_back(test::from_bf16(x));
    }
  }
}

class Device {
 public:
  explicit Device(const Problem& p) : p_(p) {
    const Case& c = p.c;
    args_.in.q_NHK = rows(p.q, c.K);
    args_.in.k_NHK = rows(p.k, c.K);
    args_.in.v_NHV = rows(p.v, c.V);
    args_.in.gate_NHK = rows(p.gate, c.K);
    args_.in.beta_NH = rows(p.beta, 1);
    args_.d_out_NHV = rows(p.d_out, c.V);
    args_.in.gate_form = c.form;
    args_.in.beta_is_logit = args_.in.l2_norm = c.fused;
    args_.in.lower_bound = p.lower_bound;
    args_.in.a_log_H = static_cast<const float*>(put(p.a_log));
    args_.in.dt_bias_HK = static_cast<const float*>(put(p.dt_bias));
    args_.in.scale = p.scale;
    auto* offsets = new Buffer(p.offsets.size() * 8);
    upload(offsets->get(), p.offsets.data(), p.offsets.size() * 8);
    inputs_.emplace_back(offsets);
    args_.in.offsets = offsets->get<int64_t>();
    args_.in.tokens = p.N;
    args_.in.sequences = p.B;
    args_.in.heads = c.H;
    args_.in.key_size = c.K;
    args_.in.value_size = c.V;
    if (c.states) {
      args_.initial_state_BHKV = static_cast<const float*>(put(p.initial));
      args_.d_final_state_BHKV = static_cast<const float*>(put(p.d_final));
    }
    tensor_cores_ = c.fused || has_tensor_core_backward(args_);
    if (c.fused && !has_tensor_core_backward(args_)) {
      std::printf("fused cases need the tensor-core kernels\n");
      std::exit(1);
    }
  }

  Run run() const {
    const Case& c = p_.c;
    const size_t element = c.bf16 ? 2 : 4, gate = p_.gate.type == Element::kFloat ? 4 : 2;
    const int64_t keys = p_.N * c.H * c.K;
    Buffer q(keys * element), k(keys * element), v(p_.N * c.H * c.V * element), g(keys * gate);
    Buffer beta(p_.N * c.H * (p_.beta.type == Element::kFloat ? 4 : 2)), initial(p_.initial.values.size() * 4);
    Buffer a_log(c.H * 4), dt_bias(c.H * c.K * 4);
    Buffer early(tensor_cores_ ? backward_early_bytes(args_.in) : 0);
    Buffer kept(tensor_cores_ ? backward_kept_bytes(args_.in) : backward_any_bytes(args_.in));
    BackwardArgs args = args_;
    args.d_q_NHK = q.get();
    args.d_k_NHK = k.get();
    args.d_v_NHV = v.get();
    args.d_gate_NHK = g.get();
    args.d_beta_NH = beta.get();
    args.d_initial_state_BHKV = initial.get<float>();
    args.d_a_log_H = a_log.get<float>();
    args.d_dt_bias_HK = dt_bias.get<float>();
    args.early = early.get();
    args.kept = kept.get();
    if (tensor_cores_) {
      check(launch_backward_walk(args), "walk");
      synchronise();
      early.poison();
      check(launch_backward_finish(args), "finish");
    } else {
      check(launch_backward_any(args), "any");
    }
    synchronise();
    Run result;
    const auto take = [&](std::vector<double>& to, const Buffer& from, size_t count, Element type) {
      const auto bytes = from.download();
      append(to, bytes, count, type);
      result.bits.insert(result.bits.end(), bytes.begin(), bytes.end());
      result.guards = result.guards && from.guards_intact();
    };
    const Element type = c.bf16 ? Element::kBFloat16 : Element::kFloat;
    take(result.grad.q, q, keys, type);
    take(result.grad.k, k, keys, type);
    take(result.grad.v, v, p_.N * c.H * c.V, type);
    take(result.grad.gate, g, keys, p_.gate.type);
    take(result.grad.beta, beta, p_.N * c.H, p_.beta.type);
    take(result.grad.initial, initial, p_.initial.values.size(), Element::kFloat);
    if (c.form != GateForm::kGiven) {
      take(result.grad.a_log, a_log, c.H, Element::kFloat);
      take(result.grad.dt_bias, dt_bias, c.H * c.K, Element::kFloat);
    }
    result.guards = result.guards && early.guards_intact() && kept.guards_intact();
    for (const auto& input : inputs_) result.guards = result.guards && input->guards_intact();
    return result;
  }
  bool tensor_cores() const { return tensor_cores_; }

 private:
  void* put(const Tensor& t) {
    const auto raw = t.raw();
    inputs_.emplace_back(new Buffer(raw.size()));
    upload(inputs_.back()->get(), raw.data(), raw.size());
    return inputs_.back()->get();
  }
  Rows rows(const Tensor& t, int64_t last) { return {put(t), p_.c.H * last, last, t.type}; }

  const Problem& p_;
  BackwardArgs args_;
  bool tensor_cores_ = false;
  std::vector<std::unique_ptr<Buffer>> inputs_;
};

/// Root mean square of the difference relative to that of the reference (1e-30 at least); rows past the last sequence
/// left out.
double error_of(const std::vector<double>& got, const std::vector<double>& want, size_t count, double size = 0) {
  double difference = 0;
  for (size_t i = 0; i < count; ++i) {
    const double e = got[i] - want[i];
    difference += std::isfinite(got[i]) ? e * e : INFINITY;
    size += want[i] * want[i];
  }
  return count == 0 ? 0 : std::sqrt(difference / std::max(size, 1e-60));
}

// bf16: operands of all products carry 2^-9 relative rounding, a gradient passes through four of them, outputs are
// rounded once more: 0.6 % for independent errors; 1.2 % for the gate, whose gradient sums over the rows of a chunk.
// Keys that are nearly parallel make I + A ill-conditioned: roundings grow by its condition number.
// d_beta of a token is a sum of V terms of either sign, and few tokens may carry it: errors are relative to the terms.
// d_a_log sums over tokens and channels whose errors are not independent along a channel: its error is measured against
// the root over channels of (sum over tokens of the terms' sizes)^2.
constexpr double kBf16Limit = 0.008, kBf16GateLimit = 0.012, kFp32Limit = 1e-5, kAlikeGrowth = 3;

// Central differences in fp64 against the adjoint in fp64, RMS: 1e-10 each of truncation and rounding, times slack.
constexpr double kDifferenceLimit = 1e-7;

/// Compares part by part; prints one line.
class Comparison {
 public:
  explicit Comparison(std::string name) : name_(std::move(name)) {}
  void add(const char* part, const std::vector<double>& got, const std::vector<double>& want, size_t count,
           double limit, double size = 0) {
    if (got.empty()) return;
    const double error = error_of(got, want, count, size);
    const bool ok = error <= limit;
    good_ = good_ && ok;
    char text[64];
    std::snprintf(text, sizeof(text), " %s %.1e%s", part, error, ok ? "" : "!");
    line_ += text;
  }
  bool print(bool guards) const {
    const bool good = good_ && guards;
    std::printf("%s %-34s%s%s\n", good ? "ok  " : "FAIL", name_.c_str(), line_.c_str(), guards ? "" : " guard");
    std::fflush(stdout);
    return good;
  }

 private:
  std::string name_, line_;
  bool good_ = true;
};

bool compare_run(const Problem& p, const Gradients& want) {
  const Case& c = p.c;
  const Device device(p);
  const Run run = device.run();
  const Gradients& got = run.grad;
  const bool exact = !device.tensor_cores() && !c.bf16;
  const double growth = c.data == Data::kAlike ? kAlikeGrowth : 1;
  const double limit = exact ? kFp32Limit : kBf16Limit * growth;
  const double gate_limit = exact ? kFp32Limit : kBf16GateLimit * growth;
  const int64_t heads = p.offsets.back() * c.H;
  Comparison comparison(c.name);
  comparison.add("q", got.q, want.q, heads * c.K, limit);
  comparison.add("k", got.k, want.k, heads * c.K, limit);
  comparison.add("v", got.v, want.v, heads * c.V, limit);
  comparison.add("gate", got.gate, want.gate, heads * c.K, gate_limit, exact ? 0 : want.gate_terms);
  comparison.add("beta", got.beta, want.beta, heads, limit, exact ? 0 : want.beta_terms);
  comparison.add("S0", got.initial, want.initial, want.initial.size(), limit);
  comparison.add("a_log", got.a_log, want.a_log, want.a_log.size(), gate_limit, want.a_log_terms);
  comparison.add("bias", got.dt_bias, want.dt_bias, want.dt_bias.size(), gate_limit, want.dt_bias_terms);
  return comparison.print(run.guards);
}

/// The oracle, then the kernels, against central differences of the recurrence.
bool compare_with_differences(const Problem& p, const Gradients& adjoint) {
  const Case& c = p.c;
  Gradients numeric = adjoint;  // with its sizes of terms
  differences(p, numeric);
  const int64_t heads = p.offsets.back() * c.H;
  Comparison comparison(c.name + ", oracle");
  const auto compare = [&](const char* part, std::vector<double> Gradients::*values, size_t count) {
    comparison.add(part, adjoint.*values, numeric.*values, count, kDifferenceLimit);
  };
  compare("q", &Gradients::q, heads * c.K);
  compare("k", &Gradients::k, heads * c.K);
  compare("v", &Gradients::v, heads * c.V);
  compare("gate", &Gradients::gate, heads * c.K);
  compare("beta", &Gradients::beta, heads);
  compare("S0", &Gradients::initial, numeric.initial.size());
  if (c.form != GateForm::kGiven) {
    compare("a_log", &Gradients::a_log, numeric.a_log.size());
    compare("bias", &Gradients::dt_bias, numeric.dt_bias.size());
  }
  const bool oracle_good = comparison.print(true);
  return compare_run(p, numeric) && oracle_good;
}

bool run_case(const Case& c, unsigned seed) {
  const Problem p = make(c, seed);
  return c.differences ? compare_with_differences(p, oracle(p)) : compare_run(p, oracle(p));
}

/// Sequence b of a problem as a pack of its own.
Problem alone(const Problem& p, int64_t b) {
  const Case& c = p.c;
  Problem one = p;
  one.c.lengths = {c.lengths[b]};
  one.c.spare_rows = 0;
  one.offsets = {0, c.lengths[b]};
  one.N = c.lengths[b];
  one.B = 1;
  const auto cut = [](Tensor& t, int64_t first, int64_t last, int64_t row) {
    t.values = std::vector<float>(t.values.begin() + first * row, t.values.begin() + last * row);
  };
  for (Tensor* t : {&one.q, &one.k, &one.gate}) cut(*t, p.offsets[b], p.offsets[b + 1], c.H * c.K);
  for (Tensor* t : {&one.v, &one.d_out}) cut(*t, p.offsets[b], p.offsets[b + 1], c.H * c.V);
  cut(one.beta, p.offsets[b], p.offsets[b + 1], c.H);
  for (Tensor* t : {&one.initial, &one.d_final}) cut(*t, b, b + 1, c.H * c.K * c.V);
  return one;
}

/// Bit-identical over repeats, and every sequence of a pack as if it were alone.
bool run_identity(const Case& c, int repeats) {
  const Problem p = make(c, 77);
  const Device device(p);
  const Run first = device.run();
  bool same = true, neighbours = true;
  for (int i = 1; i < repeats; ++i) same = same && device.run().bits == first.bits;
  for (int64_t b = 0; b < p.B; ++b) {
    const Problem one = alone(p, b);
    const Run single = Device(one).run();
    const auto equal = [&](std::vector<double> Gradients::*part, int64_t from) {
      const std::vector<double>&got = single.grad.*part, &all = first.grad.*part;
      return std::equal(got.begin(), got.end(), all.begin() + from);
    };
    const int64_t row = p.offsets[b] * c.H;
    neighbours = neighbours && equal(&Gradients::q, row * c.K) && equal(&Gradients::k, row * c.K) &&
                 equal(&Gradients::v, row * c.V) && equal(&Gradients::gate, row * c.K) &&
                 equal(&Gradients::beta, row) && equal(&Gradients::initial, b * c.H * c.K * c.V);
  }
  std::printf("%s %d repeats of %s: %s; beside other sequences: %s\n", same && neighbours ? "ok  " : "FAIL", repeats,
              c.name.c_str(), same ? "same bits" : "DIFFER", neighbours ? "same bits" : "DIFFER");
  return same && neighbours;
}

std::vector<Case> difference_cases() {
  using F = GateForm;
  std::vector<Case> cases{
      {"differences, fp32 7 x 5", {5, 1, 0, 3}, 2, 7, 5, F::kGiven, Gates::kRandom, Data::kGaussian, false, false},
      {"differences, fp32 alike keys 16 x 24",
       {9, 2},
       1,
       16,
       24,
       F::kGiven,
       Gates::kRandom,
       Data::kAlike,
       false,
       false},
      {"differences, given, D 64", {5}, 1, 64, 64, F::kGiven, Gates::kRandom, Data::kGaussian, true, false},
      {"differences, bounded, D 64", {4, 1}, 1, 64, 64, F::kBounded},
      {"differences, softplus, D 64", {5}, 1, 64, 64, F::kSoftplus},
  };
  for (Case& c : cases) c.differences = true;
  return cases;
}

std::vector<Case> small_cases() {
  using F = GateForm;
  std::vector<Case> cases{
      {"one chunk", {64}, 1},
      {"tail, two sequences, D 64", {70, 1, 0, 3}, 2, 64, 64},
      {"three chunks", {150}, 1},
      {"bound, D 64", {100}, 1, 64, 64, F::kBounded, Gates::kBound},
      {"mixed, alike keys, D 64", {130}, 1, 64, 64, F::kBounded, Gates::kMixed, Data::kAlike},
      {"softplus wild, D 64", {100}, 1, 64, 64, F::kSoftplus, Gates::kWild},
      {"given wild, D 64", {100}, 1, 64, 64, F::kGiven, Gates::kWild, Data::kGaussian, true, false},
      {"given random", {80, 5}, 1, 128, 128, F::kGiven, Gates::kRandom, Data::kGaussian, true, false, false, 7},
      {"no sequence", {}, 1, 64, 64, F::kBounded, Gates::kRandom, Data::kGaussian, true, true, true, 70},
      {"empty sequences", {0, 0}, 1, 64, 64},
      {"fp32 17 x 40", {70, 3}, 1, 17, 40, F::kGiven, Gates::kRandom, Data::kGaussian, false, false},
      {"fp32 wild 32 x 16", {90}, 1, 32, 16, F::kGiven, Gates::kWild, Data::kGaussian, false, false},
      {"bf16 48 x 80", {66}, 1, 48, 80, F::kGiven, Gates::kRandom, Data::kGaussian, true, false},
  };
  for (Case& c : difference_cases()) cases.push_back(std::move(c));
  return cases;
}

std::vector<Case> all_cases() {
  using F = GateForm;
  std::vector<Case> cases = small_cases();
  for (int64_t T = 1; T <= 130; ++T) {
    cases.push_back({"T " + std::to_string(T),
                     {T},
                     2,
                     128,
                     128,
                     F::kBounded,
                     static_cast<Gates>(T % 4),
                     T % 3 == 0 ? Data::kAlike : Data::kGaussian});
  }
  for (int64_t T : {255, 256, 257, 1000, 4096}) {
    for (F form : {F::kBounded, F::kSoftplus}) {
      cases.push_back(
          {"T " + std::to_string(T) + (form == F::kBounded ? " bounded" : " softplus"), {T}, 4, 128, 128, form});
    }
  }
  cases.push_back({"T 65536", {65536}, 2});
  const auto fp32 = [&](const std::string& name, std::vector<int64_t> lengths, int64_t K, int64_t V, Gates gates) {
    cases.push_back({name, std::move(lengths), 1, K, V, F::kGiven, gates, Data::kGaussian, false, false});
  };
  std::vector<int64_t> every_length(130);
  std::iota(every_length.begin(), every_length.end(), 1);
  for (Gates gates : {Gates::kRandom, Gates::kBound, Gates::kZero, Gates::kMixed, Gates::kWild}) {
    fp32("fp32 every length, gates " + std::to_string(static_cast<int>(gates)), every_length, 32, 48, gates);
  }
  fp32("fp32 255, 256, 257, 1000, 4096", {255, 256, 257, 1000, 4096}, 32, 32, Gates::kRandom);
  fp32("fp32 T 65536", {65536}, 16, 16, Gates::kRandom);
  for (Gates gates : {Gates::kRandom, Gates::kBound, Gates::kZero, Gates::kMixed, Gates::kWild}) {
    for (Data data : {Data::kGaussian, Data::kAlike, Data::kOutliers}) {
      for (int64_t D : {64, 128}) {
        const std::string name = "gates " + std::to_string(static_cast<int>(gates)) + " data " +
                                 std::to_string(static_cast<int>(data)) + " D " + std::to_string(D);
        cases.push_back({name + " given", {300, 64, 1, 0, 33}, 3, D, D, F::kGiven, gates, data, true, false});
        cases.push_back({name + " softplus", {300, 64, 1, 0, 33}, 3, D, D, F::kSoftplus, gates, data});
        cases.push_back({name + " bounded", {300, 64, 1, 0, 33}, 3, D, D, F::kBounded, gates, data});
        cases.push_back({name + " fp32", {300, 64, 1, 0, 33}, 3, D, D, F::kGiven, gates, data, false, false});
      }
    }
  }
  std::vector<int64_t> pack;
  for (int64_t i = 0; i < 64; ++i) pack.push_back(i * 37 % 101 * (i % 5 != 0) + (i % 7 == 0));
  cases.push_back({"64 sequences", pack, 4});
  cases.push_back({"64 sequences, 24 heads", pack, 24});
  cases.push_back(
      {"without states", {200, 65}, 4, 128, 128, F::kBounded, Gates::kRandom, Data::kGaussian, true, true, false});
  for (int64_t K : {16, 24, 80, 256}) {
    for (int64_t V : {16, 72, 256}) {
      cases.push_back({"fp32 " + std::to_string(K) + " x " + std::to_string(V),
                       {130, 7},
                       2,
                       K,
                       V,
                       F::kGiven,
                       Gates::kRandom,
                       Data::kGaussian,
                       false,
                       false});
    }
  }
  return cases;
}

struct Options {
  bool small = false;
  int repeats = 50;
  int64_t most = int64_t{1} << 40;
  std::string only;
};

Options read_options(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const bool has_value = i + 1 < argc;
    if (std::strcmp(argv[i], "--small") == 0) options.small = true;
    if (std::strcmp(argv[i], "--unset") == 0) fill_with_nan = false;
    if (std::strcmp(argv[i], "--case") == 0 && has_value) options.only = argv[i + 1];
    if (std::strcmp(argv[i], "--most") == 0 && has_value) options.most = std::atoll(argv[i + 1]);
    if (std::strcmp(argv[i], "--repeats") == 0 && has_value) options.repeats = std::atoi(argv[i + 1]);
  }
  return options;
}

int run_all(const Options& options) {
  if (!has_device()) {
    std::printf("SKIP: no GPU\n");
    return 77;
  }
  int passed = 0, failed = 0;
  const auto count = [&](bool good) { ++(good ? passed : failed); };
  unsigned seed = 1;
  for (const Case& c : options.small ? small_cases() : all_cases()) {
    int64_t tokens = 0;
    for (int64_t length : c.lengths) tokens += length;
    if (tokens * c.H <= options.most && c.name.find(options.only) != std::string::npos) count(run_case(c, seed));
    ++seed;
  }
  if (!options.only.empty()) {
    std::printf("identity of runs not tested: --case\n");
  } else if (options.small || options.most < 100000) {
    count(run_identity({"pack, D 64", {70, 20}, 1, 64, 64}, std::min(options.repeats, 2)));
  } else {
    count(run_identity({"pack", {200, 64, 77, 1}, 8}, options.repeats));
    count(run_identity({"wide pack", {150, 65, 1}, 96}, options.repeats));
    count(run_identity({"softplus pack", {130, 64}, 4, 64, 64, GateForm::kSoftplus, Gates::kWild}, options.repeats));
    count(run_identity(
        {"fp32 pack", {70, 64, 1}, 3, 48, 80, GateForm::kGiven, Gates::kRandom, Data::kGaussian, false, false},
        options.repeats));
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace furlong::kda::cuda

int main(int argc, char** argv) {
  using namespace furlong::kda::cuda;
  return run_all(read_options(argc, argv));
}
