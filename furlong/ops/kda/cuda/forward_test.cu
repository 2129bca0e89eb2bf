// Forward of KDA on the GPU against the recurrence in fp64; needs no torch.
//   kda_cuda_forward_test [--small] [--unset] [--json FILE]
// --small: few short cases, for compute-sanitizer; --unset: workspaces and results start as they were allocated instead
// of NaN, for its initcheck. Exit status 0: all held, 1: some failed, 77: no GPU (skipped).

#include <algorithm>

#include "furlong/ops/kda/cuda/test_device.h"

namespace furlong::kda::cuda::test {
namespace {

// fp32: products and sums of 128 terms in another order, over a recurrence that forgets.
constexpr double kFp32 = 1e-5;
// bf16: operands are rounded once (relative 2^-9 = 0.002 at most, 0.0011 on average); several independent roundings add
// up in a product of 128 terms. Repeated keys and beta near 1 multiply the error of A by the condition of I + A.
constexpr double kBf16 = 7e-3;
constexpr double kBf16Repeated = 1.5e-2;

int checks = 0, failures = 0;
std::FILE* json = nullptr;
bool first_record = true;

void record(const std::string& name, const std::string& what, double value, double limit, bool ok) {
  ++checks;
  if (!ok) ++failures;
  std::printf("%s %-44s %-12s %.3g (limit %.3g)\n", ok ? "ok  " : "FAIL", name.c_str(), what.c_str(), value, limit);
  if (json == nullptr) return;
  std::fprintf(json, "%s\n  {\"case\": \"%s\", \"what\": \"%s\", \"value\": %.6g, \"limit\": %.6g, \"ok\": %s}",
               first_record ? "" : ",", name.c_str(), what.c_str(), std::isfinite(value) ? value : 1e30, limit,
               ok ? "true" : "false");
  first_record = false;
}
void expect(const std::string& name, const std::string& what, bool ok) {
  record(name, what, ok ? 0 : 1, 0, ok);
}

float scale_of(const Case& c) {
  return 1.0f / std::sqrt(static_cast<float>(c.key_size));
}

double limit_of(const Case& c) {
  if (c.type == Element::kFloat) return kFp32;
  return c.data == Data::kRepeated ? kBf16Repeated : kBf16;
}

void against_oracle(const Case& c) {
  const HostData data = make_data(c);
  const Expected expected = oracle(c, data, scale_of(c));
  const DeviceCase device(c, data, scale_of(c));
  device.run();
  const double out = relative_error(device.output(c.type), expected.out);
  const double state = relative_error(device.final_state.download<float>(), expected.state);
  record(c.name, "out", out, limit_of(c), out <= limit_of(c));
  record(c.name, "state", state, limit_of(c), state <= limit_of(c));
  expect(c.name, "guards", device.guards_untouched());
}

Case base(const std::string& name, std::vector<int64_t> lengths) {
  Case c;
  c.name = name;
  c.lengths = std::move(lengths);
  return c;
}

std::vector<int64_t> every_length(int64_t last) {
  std::vector<int64_t> lengths(last);
  for (int64_t i = 0; i < last; ++i) lengths[i] = i + 1;
  return lengths;
}

template <typename Change>
Case with(Case c, const std::string& name, Change change) {
  change(c);
  c.name += " " + name;
  return c;
}

void gate_kinds(const Case& from) {
  const std::pair<const char*, Gates> kinds[] = {{"bound", Gates::kAtBound},
                                                 {"zero", Gates::kZero},
                                                 {"mixed", Gates::kMixed},
                                                 {"mild", Gates::kMild},
                                                 {"random", Gates::kRandom}};
  for (const auto& [name, kind] : kinds) against_oracle(with(from, name, [&](Case& c) { c.gates = kind; }));
}

void lengths_and_gates(bool small) {
  gate_kinds(base("every length", every_length(small ? 40 : 130)));
  for (const GateForm form : {GateForm::kBounded, GateForm::kSoftplus}) {
    against_oracle(with(
        base("prepared by all blocks", small ? std::vector<int64_t>{600} : std::vector<int64_t>{600, 1, 0, 2033, 31}),
        form == GateForm::kBounded ? "bounded" : "softplus", [&](Case& c) {
          c.form = form;
          c.heads = small ? 1 : 3;
          c.value_size = small ? 128 : 256;
        }));
  }
  if (small) return;
  gate_kinds(base("255, 256, 257, 1000", {255, 256, 257, 1000}));
  for (const int64_t heads : {2, 32, 64}) {
    against_oracle(with(base("4096", {4096}), std::to_string(heads) + " heads", [&](Case& c) { c.heads = heads; }));
  }
  gate_kinds(with(base("4096", {4096}), "2 heads", [](Case& c) { c.initial_state = false; }));
  against_oracle(with(base("65536", {65536}), "mild", [](Case& c) { c.gates = Gates::kMild; }));
  against_oracle(with(base("65536", {65536}), "random, 4 heads", [](Case& c) { c.heads = 4; }));
}

void forms(bool small) {
  const std::vector<int64_t> lengths = small ? std::vector<int64_t>{33, 5} : std::vector<int64_t>{1, 0, 130, 64, 700};
  for (const Element gate : {Element::kFloat, Element::kBFloat16}) {
    const std::string type = gate == Element::kFloat ? "fp32 gate" : "bf16 gate";
    for (const auto& [form, name] :
         {std::pair{GateForm::kBounded, "bounded"}, {GateForm::kSoftplus, "softplus"}, {GateForm::kGiven, "given"}}) {
      for (const auto& [kind, kind_name] :
           {std::pair{Gates::kRandom, "random"}, {Gates::kStrong, "strong"}, {Gates::kMixed, "mixed"}}) {
        if (form == GateForm::kGiven && gate == Element::kBFloat16) continue;
        against_oracle(with(base(name, lengths), type + " " + kind_name, [&](Case& c) {
          c.form = form;
          c.gate_type = gate;
          c.gates = kind;
          c.rows_past_end = 29;
          c.fused = form != GateForm::kGiven;
        }));
      }
    }
  }
  for (const Data data : {Data::kRepeated, Data::kOutliers}) {
    for (const Gates gates : {Gates::kZero, Gates::kRandom, Gates::kMild, Gates::kAtBound, Gates::kMixed}) {
      if (small && (gates == Gates::kAtBound || gates == Gates::kMixed)) continue;
      against_oracle(with(base(data == Data::kRepeated ? "repeated keys" : "outliers", lengths),
                          "gates " + std::to_string(static_cast<int>(gates)), [&](Case& c) {
                            c.data = data;
                            c.gates = gates;
                          }));
    }
  }
}

void sizes(bool small) {
  const std::vector<int64_t> lengths = small ? std::vector<int64_t>{20} : std::vector<int64_t>{0, 1, 70, 129};
  const std::pair<int64_t, int64_t> pairs[] = {{16, 16},   {60, 100},  {64, 64},   {100, 60},  {128, 64},
                                               {128, 256}, {128, 384}, {256, 128}, {256, 256}, {17, 33}};
  for (const auto& [K, V] : pairs) {
    for (const Element type : {Element::kFloat, Element::kBFloat16}) {
      const std::string name = std::to_string(K) + " x " + std::to_string(V);
      against_oracle(with(base(name, lengths), type == Element::kFloat ? "fp32" : "bf16", [&](Case& c) {
        c.key_size = K;
        c.value_size = V;
        c.type = type;
        c.gate_type = type;
      }));
    }
  }
  gate_kinds(with(base("fp32", small ? std::vector<int64_t>{33} : every_length(130)), "all sizes",
                  [](Case& c) { c.type = c.gate_type = Element::kFloat; }));
  if (small) return;
  for (const auto& lengths : {std::vector<int64_t>{255, 256, 257, 1000, 4096}, {65536}}) {
    against_oracle(with(base("fp32", lengths), std::to_string(lengths.back()), [](Case& c) {
      c.type = c.gate_type = Element::kFloat;
      c.key_size = 64;
      c.value_size = 48;
    }));
  }
}

void repeats(const Case& c) {
  const HostData data = make_data(c);
  const DeviceCase device(c, data, scale_of(c));
  device.run();
  const auto out = device.out.download<uint16_t>();
  const auto state = device.final_state.download<uint32_t>();
  bool same = true;
  for (int i = 0; i < 50 && same; ++i) {
    device.out.poison();
    device.final_state.poison();
    if (device.workspace.data() != nullptr) device.workspace.poison();
    device.run();
    same = device.out.download<uint16_t>() == out && device.final_state.download<uint32_t>() == state;
  }
  expect(c.name, "50 repeats", same);
}

/// One sequence of a pack as a pack of its own.
void neighbours(const Case& c) {
  const HostData data = make_data(c);
  const DeviceCase together(c, data, scale_of(c));
  together.run();
  const auto all_out = together.out.download<uint16_t>();
  const auto all_state = together.final_state.download<uint32_t>();
  bool same = true;
  for (int64_t b = 0; b < c.sequences(); ++b) {
    Case alone = c;
    alone.lengths = {c.lengths[b]};
    alone.rows_past_end = 0;
    HostData part = data;
    const auto cut = [&](std::vector<float>& x, int64_t per_token) {
      x = std::vector<float>(x.begin() + data.offsets[b] * per_token, x.begin() + data.offsets[b + 1] * per_token);
    };
    const int64_t H = c.heads, KV = c.key_size * c.value_size;
    cut(part.q, H * c.key_size);
    cut(part.k, H * c.key_size);
    cut(part.v, H * c.value_size);
    cut(part.gate, H * c.key_size);
    cut(part.beta, H);
    part.offsets = {0, c.lengths[b]};
    part.state = std::vector<float>(data.state.begin() + b * H * KV, data.state.begin() + (b + 1) * H * KV);
    const DeviceCase device(alone, part, scale_of(c));
    device.run();
    const auto out = device.out.download<uint16_t>();
    const auto state = device.final_state.download<uint32_t>();
    same = same && std::equal(out.begin(), out.end(), all_out.begin() + data.offsets[b] * H * c.value_size) &&
           std::equal(state.begin(), state.end(), all_state.begin() + b * H * KV);
  }
  expect(c.name, "neighbours", same);
}

/// The state carried over every cut of a sequence; at multiples of the chunk the bits are those of the whole.
void carried(bool small) {
  Case c = base("carried state", {small ? 70 : 200});
  const HostData data = make_data(c);
  const Expected expected = oracle(c, data, scale_of(c));
  const DeviceCase whole(c, data, scale_of(c));
  whole.run();
  const auto whole_out = whole.out.download<uint16_t>();
  double worst = 0;
  bool exact = true;
  for (int64_t cut = 1; cut < c.lengths[0]; cut += small ? 31 : 1) {
    std::vector<uint16_t> out = whole_out;
    const DeviceCase first(c, data, scale_of(c)), second(c, data, scale_of(c));
    ForwardArgs args = first.args;
    const Buffer head = Buffer::of(std::vector<int64_t>{0, cut});
    const Buffer tail = Buffer::of(std::vector<int64_t>{cut, c.lengths[0]});
    args.in.offsets = head.data<int64_t>();
    check(static_cast<cudaError_t>(launch_forward(args)), "first part");
    args = second.args;
    args.in.offsets = tail.data<int64_t>();
    args.initial_state_SHKV = first.final_state.data<float>();
    check(static_cast<cudaError_t>(launch_forward(args)), "second part");
    check(cudaDeviceSynchronize(), "carried");
    const auto first_out = first.out.download<uint16_t>(), second_out = second.out.download<uint16_t>();
    const int64_t row = c.heads * c.value_size;
    std::copy(first_out.begin(), first_out.begin() + cut * row, out.begin());
    std::copy(second_out.begin() + cut * row, second_out.end(), out.begin() + cut * row);
    if (cut % kChunk == 0) exact = exact && out == whole_out;
    std::vector<float> wide(out.size());
    for (size_t i = 0; i < out.size(); ++i) wide[i] = from_bf16(out[i]);
    worst = std::max({worst, relative_error(wide, expected.out),
                      relative_error(second.final_state.download<float>(), expected.state)});
  }
  record(c.name, "worst", worst, kBf16, worst <= kBf16);
  expect(c.name, "exact on the chunk grid", exact);
}

/// States saved on the way are the final states of prefixes, to the bit.
void saved_states() {
  Case c = base("saved states", {100, 0, 31, 64, 65});
  const HostData data = make_data(c);
  DeviceCase device(c, data, scale_of(c));
  const int64_t every = 2, state_size = c.heads * c.key_size * c.value_size;
  const Buffer saved(saved_rows_bound(c.tokens(), c.sequences(), every) * state_size * 4);
  device.args.saved_state_XHKV = saved.data<float>();
  device.args.saved_every = every;
  device.run();
  const auto states = saved.download<float>();
  bool same = saved.guards_untouched();
  for (int64_t b = 0; b < c.sequences(); ++b) {
    for (int64_t chunk = 0; chunk * kChunk < c.lengths[b]; chunk += every) {
      DeviceCase prefix(c, data, scale_of(c));
      std::vector<int64_t> offsets(c.sequences() + 1, data.offsets[b]);
      for (int64_t i = b + 1; i <= c.sequences(); ++i) offsets[i] = data.offsets[b] + chunk * kChunk;
      const Buffer cut = Buffer::of(offsets);
      prefix.args.in.offsets = cut.data<int64_t>();
      prefix.run();
      const auto final_state = prefix.final_state.download<float>();
      const int64_t row = saved_row(data.offsets[b], b, chunk, every);
      same = same && std::equal(final_state.begin() + b * state_size, final_state.begin() + (b + 1) * state_size,
                                states.begin() + row * state_size);
    }
  }
  expect(c.name, "equal prefixes", same);
}

/// Initial and final states in slots of a pool.
void slots() {
  const Case c = base("slots", {40, 7, 64});
  const HostData data = make_data(c);
  const DeviceCase plain(c, data, scale_of(c));
  plain.run();
  DeviceCase pooled(c, data, scale_of(c));
  const int64_t size = c.heads * c.key_size * c.value_size;
  const std::vector<int64_t> where = {4, 0, 2};
  std::vector<float> pool(5 * size, -7.0f);
  for (int b = 0; b < 3; ++b) std::copy_n(data.state.begin() + b * size, size, pool.begin() + where[b] * size);
  const Buffer device_pool = Buffer::of(pool), device_slots = Buffer::of(where);
  pooled.args.initial_state_SHKV = device_pool.data<float>();
  pooled.args.final_state_SHKV = device_pool.data<float>();
  pooled.args.initial_slots_B = pooled.args.final_slots_B = device_slots.data<int64_t>();
  pooled.run();
  const auto got = device_pool.download<float>(), expected = plain.final_state.download<float>();
  bool same = pooled.out.download<uint16_t>() == plain.out.download<uint16_t>();
  for (int b = 0; b < 3; ++b) {
    same = same &&
           std::equal(expected.begin() + b * size, expected.begin() + (b + 1) * size, got.begin() + where[b] * size);
  }
  for (const int other : {1, 3}) {
    for (int64_t i = 0; i < size; ++i) same = same && got[other * size + i] == -7.0f;
  }
  expect(c.name, "in place", same);
}

/// Rows 2^26 elements apart: offsets beyond 2^31 elements and 2^32 bytes.
void wide_strides() {
  Case c = base("strides of 2^26", {64});
  c.heads = 1;
  const HostData data = make_data(c);
  const DeviceCase plain(c, data, scale_of(c));
  plain.run();
  constexpr int64_t kStride = int64_t{1} << 26, kRow = 128 * 2;
  char* wide = nullptr;
  if (cudaMalloc(&wide, 64 * kStride * 2) != cudaSuccess) {
    cudaGetLastError();
    std::printf("SKIP %s: no 8.6 GB of device memory\n", c.name.c_str());
    return;
  }
  DeviceCase spread(c, data, scale_of(c));
  Inputs& in = spread.args.in;
  int64_t offset = 0;
  for (Rows* rows : {&in.q_NHK, &in.k_NHK, &in.v_NHV, &in.gate_NHK}) {
    char* first = wide + offset;
    check(cudaMemcpy2D(first, kStride * 2, rows->data, kRow, kRow, 64, cudaMemcpyDeviceToDevice), "spread");
    *rows = {first, kStride, 128, Element::kBFloat16};
    offset += kRow;
  }
  spread.run();
  expect(c.name, "same bits",
         spread.out.download<uint16_t>() == plain.out.download<uint16_t>() &&
             spread.final_state.download<uint32_t>() == plain.final_state.download<uint32_t>());
  cudaFree(wide);
}

int run(bool small) {
  lengths_and_gates(small);
  forms(small);
  sizes(small);
  carried(small);
  saved_states();
  slots();
  neighbours(base("pack", {1, 1, 5, 0, 77, 1, 300, 64}));
  if (!small) {
    wide_strides();
    repeats(base("tails", {1, 2, 7, 15, 33, 64, 127}));
    repeats(with(base("long", {4096, 200}), "split", [](Case& c) { c.heads = 8; }));
    neighbours(with(base("long pack", {4500, 1, 200, 4096}), "split", [](Case& c) { c.heads = 8; }));
    std::vector<int64_t> many;
    for (int64_t i = 0; i < 64; ++i) many.push_back(i % 5 == 0 ? i % 2 : (i * 37) % 150);
    against_oracle(base("64 sequences", many));
    neighbours(base("64 sequences", many));
  }
  std::printf("%d passed, %d failed\n", checks - failures, failures);
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace furlong::kda::cuda::test

int main(int argc, char** argv) {
  using namespace furlong::kda::cuda::test;
  bool small = false;
  for (int i = 1; i < argc; ++i) {
    const std::string option = argv[i];
    if (option == "--small") {
      small = true;
    } else if (option == "--unset") {
      fill_with_nan = false;
    } else if (option == "--json" && i + 1 < argc) {
      json = std::fopen(argv[++i], "w");
    } else {
      std::fprintf(stderr, "usage: kda_cuda_forward_test [--small] [--unset] [--json FILE]\n");
      return 2;
    }
  }
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("SKIP: no CUDA device\n");
    return 77;
  }
  if (json != nullptr) std::fprintf(json, "[");
  const int status = run(small);
  if (json != nullptr) {
    std::fprintf(json, "\n]\n");
    std::fclose(json);
  }
  return status;
}
