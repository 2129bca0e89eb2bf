#include "furlong/data/loader.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>

#include <algorithm>
#include <set>
#include <utility>

#include "furlong/base/error.h"
#include "furlong/base/rng.h"
#include "furlong/data/loader_state.h"

namespace furlong {

namespace {

// Open documents of a source. With one, a batch would be consecutive text of one book: correlated gradients. With very
// many, the ends of long documents would come epochs after their beginnings. Fixed, because the order of the tokens
// depends on it.
constexpr int64_t kMaxLanes = 16;

uint64_t hash_name(const std::string& name) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : name) hash = mix64(hash ^ static_cast<unsigned char>(c));
  return hash;
}

}  // namespace

/// One folder of shards and the place reached in it.
struct Loader::Source {
  Source(const SourceConfig& source, size_t index, uint64_t loader_seed)
      : name(source.name.empty() ? "source " + std::to_string(index) : source.name),
        weight(source.weight),
        shards(source.path),
        seed(loader_seed ^ hash_name(name)) {
    for (int64_t d = 0; d < shards.num_documents(); ++d) {
      if (shards.document_length(d) >= 2) usable.push_back(d);
    }
    if (usable.empty()) {
      throw UsageError(source.path + ": no document has 2 tokens or more, there is nothing to train on");
    }
    cursor.lanes.resize(static_cast<size_t>(std::min<int64_t>(kMaxLanes, static_cast<int64_t>(usable.size()))));
    shuffle();
  }

  /// Fisher-Yates over the usable documents.
  void shuffle() {
    order = usable;
    Rng rng(seed, static_cast<uint64_t>(cursor.epoch));
    for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[rng.below(i)]);
  }

  int64_t open_document() {
    if (cursor.opened == static_cast<int64_t>(order.size())) {
      ++cursor.epoch;
      cursor.opened = 0;
      shuffle();
    }
    return order[static_cast<size_t>(cursor.opened++)];
  }

  /// Takes the next piece of at most `space` tokens from the lane. Returns its length.
  int64_t take_piece(Lane& lane, int64_t space, int64_t* tokens, int64_t* targets, float* weights) {
    if (lane.document < 0) lane = {open_document(), 0};
    const int64_t length = shards.document_length(lane.document);
    const int64_t count = std::min(space, length - lane.next_token);
    const bool ends = lane.next_token + count == length;
    shards.copy_tokens(lane.document, lane.next_token, count, tokens);
    std::copy(tokens + 1, tokens + count, targets);
    if (ends) {
      targets[count - 1] = tokens[count - 1];
      weights[count - 1] = 0.0f;
      lane = {};
    } else {
      shards.copy_tokens(lane.document, lane.next_token + count, 1, targets + count - 1);
      lane.next_token += count;
    }
    return count;
  }

  Json state() const {
    Json values = cursor_to_json(cursor);
    values["documents"] = shards.num_documents();
    values["tokens"] = shards.num_tokens();
    return values;
  }

  void restore(const Json& values) {
    const std::string where = "[loader] state of source '" + name + "'";
    const int64_t documents = state_integer(values, "documents", where);
    const int64_t tokens = state_integer(values, "tokens", where);
    if (documents != shards.num_documents() || tokens != shards.num_tokens()) {
      throw UsageError(where + ": was saved over " + std::to_string(documents) + " documents of " +
                       std::to_string(tokens) + " tokens, the folder now holds " +
                       std::to_string(shards.num_documents()) + " of " + std::to_string(shards.num_tokens()));
    }
    SourceCursor saved = cursor_from_json(values, where);
    const bool counts_fit = saved.epoch >= 0 && saved.rows >= 0 && saved.opened >= 0 &&
                            saved.opened <= static_cast<int64_t>(usable.size()) &&
                            saved.lanes.size() == cursor.lanes.size();
    const bool lanes_fit = std::all_of(saved.lanes.begin(), saved.lanes.end(), [&](const Lane& lane) {
      return lane.document == -1 || (std::binary_search(usable.begin(), usable.end(), lane.document) &&
                                     lane.next_token >= 0 && lane.next_token < shards.document_length(lane.document));
    });
    if (!counts_fit || !lanes_fit) throw FormatError(where + ": points outside of the data");
    cursor = std::move(saved);
    shuffle();
  }

  std::string name;
  double weight;
  ShardSet shards;
  uint64_t seed;
  std::vector<int64_t> usable;  // documents of at least 2 tokens, ascending
  std::vector<int64_t> order;   // the same in this epoch's order
  SourceCursor cursor;
};

Loader::Loader(const std::vector<SourceConfig>& sources, int64_t context, uint64_t seed)
    : context_(context), seed_(seed) {
  if (context < 2) throw UsageError("[loader] context: got " + std::to_string(context) + ", need 2 or more");
  double total = 0.0;
  std::set<std::string> names;
  for (const SourceConfig& config : sources) {
    sources_.push_back(std::make_shared<Source>(config, sources_.size(), seed));
    const Source& source = *sources_.back();
    if (!names.insert(source.name).second) {
      throw UsageError("[loader] sources: got the name '" + source.name + "' twice, need different names");
    }
    if (!(source.weight >= 0.0)) throw UsageError("[loader] weight of '" + source.name + "': need 0 or more");
    if (source.shards.tokenizer_sha256() != sources_[0]->shards.tokenizer_sha256() ||
        source.shards.vocab_size() != sources_[0]->shards.vocab_size()) {
      throw UsageError(config.path + ": was made with another tokenizer than " + sources[0].path);
    }
    total += source.weight;
  }
  if (!(total > 0.0)) throw UsageError("[loader] sources: need at least one with a weight above 0");
}

/// Draw number d looks up the point frac(offset + d / golden ratio) in the cumulated weights. The sequence is spread so
/// evenly that after n draws each source is within about log n rows of its share; its whole state is d.
Loader::Source& Loader::draw_source() {
  const uint64_t point = mix64(seed_) + draws_++ * 0x9e3779b97f4a7c15u;
  double total = 0.0;
  for (const auto& source : sources_) total += source->weight;
  double left = static_cast<double>(point >> 11) * 0x1.0p-53 * total;
  Source* chosen = nullptr;
  for (const auto& source : sources_) {
    if (source->weight <= 0.0) continue;
    chosen = source.get();
    if (left < source->weight) break;
    left -= source->weight;
  }
  return *chosen;
}

Batch Loader::next(int64_t rows) {
  if (rows < 1) throw UsageError("[loader] rows: got " + std::to_string(rows) + ", need 1 or more");
  Batch batch;
  batch.tokens_N = at::empty({rows * context_}, at::kLong);
  batch.targets_N = at::empty({rows * context_}, at::kLong);
  batch.weight_N = at::ones({rows * context_}, at::kFloat);
  auto* tokens = batch.tokens_N.mutable_data_ptr<int64_t>();
  auto* targets = batch.targets_N.mutable_data_ptr<int64_t>();
  auto* weights = batch.weight_N.mutable_data_ptr<float>();
  std::vector<int64_t> lengths;
  for (int64_t row = 0; row < rows; ++row) {
    Source& source = draw_source();
    SourceCursor& cursor = source.cursor;
    Lane& lane = cursor.lanes[static_cast<size_t>(cursor.rows++) % cursor.lanes.size()];
    const int64_t end = (row + 1) * context_;
    for (int64_t n = row * context_; n < end; n += lengths.back()) {
      lengths.push_back(source.take_piece(lane, end - n, tokens + n, targets + n, weights + n));
    }
  }
  batch.num_targets = std::count(weights, weights + rows * context_, 1.0f);
  batch.layout = SequenceLayout::from_lengths(lengths);
  return batch;
}

LoaderState Loader::state() const {
  Json cursors = absent_;
  for (const auto& source : sources_) cursors[source->name] = source->state();
  return {{{"seed", seed_}, {"draws", draws_}, {"sources", cursors}}};
}

void Loader::restore(const LoaderState& state) {
  const Json& values = state.values;
  const std::string where = "[loader] state";
  if (!values.is_object() || !values.contains("sources") || !values["sources"].is_object() ||
      !values.contains("seed") || !values["seed"].is_number_integer()) {
    throw FormatError(where + ": has no 'seed' or no table 'sources'");
  }
  if (values["seed"].get<uint64_t>() != seed_) {
    throw UsageError(where + ": was saved under seed " + values["seed"].dump() + ", got " + std::to_string(seed_));
  }
  draws_ = static_cast<uint64_t>(state_integer(values, "draws", where));
  absent_ = values["sources"];
  for (const auto& source : sources_) {
    if (!absent_.contains(source->name)) continue;
    source->restore(absent_[source->name]);
    absent_.erase(source->name);
  }
}

int64_t Loader::vocab_size() const {
  return sources_[0]->shards.vocab_size();
}

int64_t Loader::num_tokens() const {
  int64_t total = 0;
  for (const auto& source : sources_) total += source->shards.num_tokens();
  return total;
}

}  // namespace furlong
