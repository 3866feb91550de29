// Softmax over rows of explicit logits, and its gradient in their place: the middle of a cross entropy whose products are
// made elsewhere. With c = s - peak, p = softmax(s), H = entropy, for the loss
//
//   loss_i = nll_i (log Z - s_target) + square_i log^2 Z + spread_i H
//   dloss / ds_j = p_j (nll + 2 square log Z - spread (c_j - E[c])) - nll [j = target]
#include <cmath>

#include "exp.h"
#include "kernels.h"

namespace partita {
namespace PARTITA_ISA {

namespace {

template <class A>
struct RowSums {
  A peak, mass, first, second, target;
  int64_t rank;
};

// One row: adds the bias, finds the peak, sums the exponentials; STORE leaves them in the row.
template <class A, bool STORE>
RowSums<A> sum_row(A* s, const A* bias, int64_t n, int64_t target, bool rank, A* tail) {
  using V = Vec<A>;
  constexpr int W = V::W;
  const typename V::T log2e = V::set(static_cast<A>(LOG2E));
  const int64_t whole = n / W * W;
  typename V::T top = V::set(neg_inf<A>());
  // The last, short vector is worked on in `tail`, padded with -inf.
  for (int64_t j = whole; j < whole + W; ++j) tail[j - whole] = j < n ? s[j] + (bias ? bias[j] : A(0)) : neg_inf<A>();
  for (int64_t j = 0; j < whole; j += W) {
    typename V::T x = V::load(s + j);
    if (bias) V::store(s + j, x = V::add(x, V::load(bias + j)));
    top = V::max(x, top);
  }
  top = V::max(V::load(tail), top);
  RowSums<A> out;
  out.peak = V::top(top);
  out.target = target < 0 ? neg_inf<A>() : target < whole ? s[target] : tail[target - whole];
  out.rank = 0;
  if (rank) {
    for (int64_t j = 0; j < whole; j += W) out.rank += V::above(V::load(s + j), V::set(out.target));
    out.rank += V::above(V::load(tail), V::set(out.target));
  }
  const typename V::T peak = V::set(out.peak == neg_inf<A>() ? A(0) : out.peak);
  typename V::T mass = V::set(0), first = mass, second = mass;
  const auto step = [&](A* at) {
    const typename V::T c = V::sub(V::load(at), peak), e = exp2_bounded<A>(bounded<A>(V::mul(c, log2e)));
    const typename V::T ec = V::mul(e, V::max(V::set(V::FLOOR), c));
    mass = V::add(mass, e);
    first = V::add(first, ec);
    second = V::fma(ec, V::max(V::set(V::FLOOR), c), second);
    if (STORE) V::store(at, e);
  };
  for (int64_t j = 0; j < whole; j += W) step(s + j);
  if (whole < n) step(tail);
  if (STORE || bias)
    for (int64_t j = whole; j < n; ++j) s[j] = tail[j - whole];
  out.mass = V::sum(mass);
  out.first = V::sum(first);
  out.second = V::sum(second);
  return out;
}

template <class A>
bool do_row(const PartitaRows& r, int64_t i, A* tail) {
  A* s = static_cast<A*>(r.logits) + i * r.ld;
  const auto given = [&](const void* x) { return x ? static_cast<const A*>(x)[i] : A(0); };
  const A nll = given(r.nll), square = given(r.square), spread = given(r.spread);
  const int64_t target = r.target ? r.target[i] : -1, kept = target >= 0 && target < r.cols ? target : -1;
  const A* bias = static_cast<const A*>(r.bias);
  const RowSums<A> sums = r.gradient && spread == 0 ? sum_row<A, true>(s, bias, r.cols, kept, r.rank, tail)
                                                    : sum_row<A, false>(s, bias, r.cols, kept, r.rank, tail);
  static_cast<A*>(r.peak)[i] = sums.peak;
  static_cast<A*>(r.mass)[i] = sums.mass;
  static_cast<A*>(r.first)[i] = sums.first;
  static_cast<A*>(r.second)[i] = sums.second;
  static_cast<A*>(r.target_score)[i] = sums.target;
  if (r.rank) r.rank[i] = sums.rank;
  if (r.gradient) {
    const A log_z = sums.peak + static_cast<A>(std::log(static_cast<double>(sums.mass)));
    const A level = square == 0 ? nll : nll + 2 * square * log_z, share = 1 / sums.mass;
    if (level == 0 && spread == 0) {
      std::memset(s, 0, sizeof(A) * static_cast<size_t>(r.cols));
    } else if (spread == 0) {
      const A factor = level * share;
      for (int64_t j = 0; j < r.cols; ++j) s[j] *= factor;
    } else {
      using V = Vec<A>;
      const A mean = sums.first * share;
      const auto slope = [&](const A* from, A* to) {
        const typename V::T c = V::sub(V::load(from), V::set(sums.peak));
        const typename V::T e = exp2_bounded<A>(bounded<A>(V::mul(c, V::set(static_cast<A>(LOG2E)))));
        const typename V::T near = V::max(V::set(V::FLOOR), c);
        V::store(to, V::mul(V::mul(e, V::set(share)), V::fma(V::set(-spread), near, V::set(level + spread * mean))));
      };
      int64_t j = 0;
      for (; j + V::W <= r.cols; j += V::W) slope(s + j, s + j);
      for (int64_t k = 0; k < V::W; ++k) tail[k] = j + k < r.cols ? s[j + k] : neg_inf<A>();
      slope(tail, tail);
      for (int64_t k = 0; j + k < r.cols; ++k) s[j + k] = tail[k];
    }
    if (kept >= 0) s[kept] -= nll;
  }
  return (sums.mass + sums.first + sums.second + (sums.peak > neg_inf<A>() ? sums.peak : A(0))) * 0 == 0;
}

template <class A>
int32_t rows_as(const PartitaRows& r) {
  int32_t odd = 0;
#pragma omp parallel num_threads(r.threads) reduction(| : odd)
  {
    FlushDenormals flush;
    alignas(64) A tail[16];
#pragma omp for schedule(dynamic, 4)
    for (int64_t i = 0; i < r.rows; ++i) odd |= !do_row<A>(r, i, tail);
  }
  return odd ? NOT_FINITE : FINITE;
}

}  // namespace

int32_t rows(const PartitaRows& r) { return r.dtype == PARTITA_FLOAT64 ? rows_as<double>(r) : rows_as<float>(r); }

}  // namespace PARTITA_ISA
}  // namespace partita
