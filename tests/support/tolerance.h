#pragma once

// Every tolerance of the unit tests, with its reason. Metric: max|a - b| <= tolerance * max|b| over the tensor.

namespace furlong::tolerance {

// fp32 arithmetic in another order of summation: a few ulp (1.2e-7) times the square root of a few hundred terms.
constexpr double kFp32 = 2e-6;
// The same through a recurrence over a few hundred tokens, or a gradient through several products.
constexpr double kFp32Chain = 2e-5;
// One rounding to bf16 (8 bits: 2^-9 = 2e-3) of a result that was right in fp32, plus double rounding.
constexpr double kBf16 = 8e-3;
// kda_chunk in fp32, forward, state and gradients, against the recurrence in fp64: what is promised for every input.
constexpr double kKda = 1e-5;
// Gradients of a whole model in fp32 in another order of summation: errors of all layers above add up.
constexpr double kFp32Model = 1e-4;
// One sequence whole against in pieces (chunk and step form, expanded and absorbed MLA), fp32, expert ids replayed:
// what the design asks of logits and of the final state.
constexpr double kLogitsSplit = 1e-4;
constexpr double kStateSplit = 1e-5;
// Median per-token cosine distance of logits, bf16 against fp32 forward: the released models' own runs have 1e-4 to
// 1e-3.
constexpr double kBf16ModelCosine = 2e-3;
// fp64 against fp64 in another order.
constexpr double kFp64 = 1e-12;
// fp64 gradients against central differences with a step of 1e-5: truncation and rounding of 1e-10 each, times slack.
constexpr double kFiniteDifference = 1e-7;
// bf16 through products that round their results to bf16 before and after: three roundings of 2^-9.
constexpr double kBf16Chain = 2e-2;

}  // namespace furlong::tolerance
