// What the checks of the C interface share: random numbers, and how large an error may be.
//
// The bound is the project's own: the largest error of a result is at most twice that of the plain formula in the same
// dtype, and where that one happens to be exact, four units in the last place of the largest value. In float64, where
// twice is not promised, it is the bound of a sum: one unit in the last place per term added. An exponential
// of s - peak may be off by `reach` units more, the largest |s|: each of the two is rounded by half a unit of its size.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <random>
#include <vector>

#include "interface.h"

extern "C" {
const char* partita_isa();
int32_t partita_forward(const PartitaProblem*, const PartitaSums*);
int32_t partita_attention(const PartitaProblem*, const PartitaSums*, const PartitaAttention*);
int32_t partita_backward(const PartitaProblem*, const PartitaGradients*);
int32_t partita_softmax_rows(const PartitaSoftmaxRows*);
int32_t partita_logits(const PartitaLogits*);
int32_t partita_input_gradient(const PartitaLogits*);
int32_t partita_weight_gradient(const PartitaLogits*);
int32_t partita_received(const PartitaProblem*, const PartitaColumns*);
int32_t partita_divergence_rows(const PartitaDivergenceRows*);
int32_t partita_top(const PartitaProblem*, const PartitaTop*);
int32_t partita_gaps(const PartitaProblem*, const PartitaGaps*);
}

using Exact = long double;  // 80 bits on x86, 113 of mantissa on ARM Linux, 64 bits on macOS

inline int failures = 0;

template <class A>
struct Error {
  double ours = 0, plain = 0, largest = 0;
  void add(Exact exact, Exact got, Exact naive) {
    ours = std::max(ours, std::isnan(got) ? 1e300 : static_cast<double>(std::abs(got - exact)));
    plain = std::max(plain, static_cast<double>(std::abs(naive - exact)));
    largest = std::max(largest, static_cast<double>(std::abs(exact)));
  }
  void hold(const char* what, int64_t terms, double reach = 0) const {
    const double units = reach + (sizeof(A) == 8 ? std::max(4.0, double(terms)) : 4.0);
    const double bound = std::max(2 * plain, units * std::numeric_limits<A>::epsilon() * largest);
    const bool fine = ours <= bound;
    failures += !fine;
    std::printf("  %-34s error %.2e, plain %.2e%s\n", what, ours, plain, fine ? "" : "   TOO LARGE");
  }
};

template <class A>
std::vector<A> drawn(std::mt19937& source, size_t n) {
  std::normal_distribution<double> normal;
  std::vector<A> out(n);
  for (A& x : out) x = static_cast<A>(normal(source));
  return out;
}

inline void expect(const char* what, int64_t wrong) {
  std::printf("  %-34s %d wrong\n", what, int(wrong));
  failures += wrong > 0;
}

// More than the pass itself, each in a file of its own.
void check_supports();
void check_rows();
