#include "furlong/tokenizer/reply_parser.h"

#include "furlong/tokenizer/reply_sink.h"

namespace furlong {

ReplyParser::ReplyParser(const Tokenizer& tokenizer, ChatFormat format, const ReplyOptions& options)
    : machine_(format == ChatFormat::kXtml ? xtml_machine(tokenizer, options) : turns_machine(tokenizer, options)) {}
ReplyParser::ReplyParser(ReplyParser&&) noexcept = default;
ReplyParser& ReplyParser::operator=(ReplyParser&&) noexcept = default;
ReplyParser::~ReplyParser() = default;

std::vector<ReplyEvent> ReplyParser::push(std::span<const int64_t> ids) {
  for (const int64_t id : ids) {
    if (!machine_->sink.has_ended()) machine_->push(id);
  }
  return machine_->sink.take();
}

std::vector<ReplyEvent> ReplyParser::finish() {
  if (!machine_->sink.has_ended()) machine_->finish();
  return machine_->sink.take();
}

const Reply& ReplyParser::reply() const {
  return machine_->sink.reply();
}

Reply parse_reply(const Tokenizer& tokenizer, ChatFormat format, std::span<const int64_t> ids,
                  const ReplyOptions& options) {
  ReplyParser parser(tokenizer, format, options);
  parser.push(ids);
  parser.finish();
  return parser.reply();
}

}  // namespace furlong
