// tokenizer_bench TOKENIZER FILE...: seconds of encoding and decoding each file on one thread, the least of several
// runs, one JSON line a file. bench/peers/tokenizer_speed.sh runs it beside tiktoken.

#include <algorithm>
#include <cstdio>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "furlong/base/clock.h"
#include "furlong/base/error.h"
#include "furlong/base/file.h"
#include "furlong/base/json.h"
#include "furlong/base/sha256.h"
#include "furlong/tokenizer/tokenizer.h"

namespace {

constexpr int kRuns = 5;

template <typename Work>
double least_seconds(const Work& work) {
  double least = std::numeric_limits<double>::infinity();
  for (int run = 0; run < kRuns; ++run) {
    const furlong::Stopwatch watch;
    work();
    least = std::min(least, watch.seconds());
  }
  return least;
}

void measure(const furlong::Tokenizer& tokenizer, const std::string& path) {
  const std::string text = furlong::read_file(path);
  std::vector<int64_t> ids;
  std::string back;
  const double encode = least_seconds([&] { ids = tokenizer.encode(text); });
  const double decode = least_seconds([&] { back = tokenizer.decode(ids); });
  if (back != text) throw furlong::FormatError(path + ": the text does not come back");
  const std::vector<int32_t> narrow(ids.begin(), ids.end());
  const std::string_view bytes(reinterpret_cast<const char*>(narrow.data()), narrow.size() * sizeof(int32_t));
  const furlong::OrderedJson line = {{"file", path},         {"bytes", text.size()},
                                     {"tokens", ids.size()}, {"encode_s", encode},
                                     {"decode_s", decode},   {"ids_sha256", furlong::sha256_hex(bytes)}};
  std::puts(line.dump().c_str());
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fputs("usage: tokenizer_bench TOKENIZER FILE...\n", stderr);
    return 2;
  }
  try {
    const auto tokenizer = furlong::Tokenizer::load(argv[1]);
    for (int i = 2; i < argc; ++i) measure(tokenizer, argv[i]);
  } catch (const furlong::Error& error) {
    std::fprintf(stderr, "tokenizer_bench: %s\n", error.what());
    return error.exit_code();
  }
  return 0;
}
