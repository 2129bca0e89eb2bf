#include <fmt/format.h>

#include <cstdio>
#include <iostream>
#include <iterator>
#include <memory>

#include "app/commands.h"
#include "furlong/checkpoint/run_folder.h"
#include "furlong/infer/engine.h"
#include "furlong/model/hf_folder.h"
#include "furlong/model/weights.h"
#include "furlong/tokenizer/tokenizer.h"

namespace furlong::app {

namespace {

struct Arguments {
  std::string checkpoint, prompt;
  std::string dtype = "fp32";
  GenerateRequest request;
  bool quiet = false;
};

std::string read_prompt(const std::string& prompt) {
  if (prompt != "-") return prompt;
  return {std::istreambuf_iterator<char>(std::cin), std::istreambuf_iterator<char>()};
}

void generate(Arguments& arguments) {
  const std::filesystem::path folder = find_checkpoint(arguments.checkpoint);
  const Tokenizer tokenizer = Tokenizer::load(folder);
  const auto decoder = load_decoder(folder, arguments.dtype == "bf16" ? at::kBFloat16 : at::kFloat, at::kCPU);
  const std::string prompt = read_prompt(arguments.prompt);
  arguments.request.prompt_ids = tokenizer.encode(prompt);
  arguments.request.stop_ids = stop_ids_of(folder, decoder->config().vocab_size);
  arguments.request.stop_ids.push_back(tokenizer.end_of_document());
  arguments.request.num_ids = tokenizer.vocab_size();
  if (arguments.request.prompt_ids.empty()) throw UsageError("--prompt: is empty, need some text to go on from");

  Engine engine(*decoder);
  StreamDecoder stream(tokenizer);
  const auto write = [](const std::string& bytes) {
    std::fwrite(bytes.data(), 1, bytes.size(), stdout);
    std::fflush(stdout);
  };
  engine.check(arguments.request);
  write(prompt);
  const GenerateResult result = engine.generate(arguments.request, [&](int64_t id) {
    write(stream.push(id));
    return true;
  });
  write(stream.flush() + "\n");
  if (arguments.quiet) return;
  const auto drawn = static_cast<double>(result.ids.size());
  fmt::print(stderr, "{} prompt tokens in {:.2f} s, {} tokens in {:.2f} s ({:.1f} tokens/s), {}\n",
             result.prompt_tokens, result.prefill_seconds, result.ids.size(), result.decode_seconds,
             result.decode_seconds > 0 ? drawn / result.decode_seconds : 0.0,
             result.reason == StopReason::kStopId ? "stopped at a stop id" : "stopped at --max-tokens");
}

}  // namespace

void add_generate(CLI::App& app, int&) {
  auto* command = app.add_subcommand("generate", "Continue a text with a trained or published model");
  const auto arguments = std::make_shared<Arguments>();
  SamplingOptions& sampling = arguments->request.sampling;
  sampling.temperature = 0.8;
  sampling.top_p = 0.95;
  command->add_option("--checkpoint", arguments->checkpoint, "Run, checkpoint or Hugging Face folder")->required();
  command->add_option("--prompt", arguments->prompt, "Text to go on from; - reads standard input")->required();
  command->add_option("--max-tokens", arguments->request.max_tokens, "Most tokens to draw")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 30))
      ->capture_default_str();
  command->add_option("--temperature", sampling.temperature, "0: always the most likely token")->capture_default_str();
  command->add_option("--top-p", sampling.top_p, "Draw among the most likely tokens of this mass")
      ->capture_default_str();
  command->add_option("--seed", sampling.seed, "The same seed gives the same text")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 62))
      ->capture_default_str();
  command->add_option("--compute,--dtype", arguments->dtype, "Precision of weights and activations")
      ->check(CLI::IsMember({"fp32", "bf16"}))
      ->capture_default_str();
  command->add_flag("--quiet", arguments->quiet, "No line of figures at the end");
  command->footer(
      "Examples:\n"
      "  furlong generate --checkpoint out/demo/run --prompt \"In the beginning\" --max-tokens 200\n"
      "  cat chapter.txt | furlong generate --checkpoint out/demo/run --prompt - --temperature 0");
  command->callback([arguments] { generate(*arguments); });
}

}  // namespace furlong::app
