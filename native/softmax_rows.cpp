// Softmax over rows of explicit logits, and its gradient in their place: the middle of a cross entropy whose products
// are made elsewhere. With p = softmax(s), for the loss sum_i weight_i (log Z_i - s_i,target)
//
//   dloss / ds_j = weight (p_j - [j = target])
#include "exp.h"
#include "kernels.h"
#include "packing.h"

namespace partita {
namespace PARTITA_ISA {

namespace {

template <class A>
struct RowSums {
  A peak, mass, target;
};

// One row: adds the bias, finds the peak, sums the exponentials; STORE leaves them in the row.
template <class A, bool STORE>
RowSums<A> sum_row(A* s, const A* bias, int64_t n, int64_t target, A* tail) {
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
  out.peak = V::reduce_max(top);
  out.target = target < 0 ? neg_inf<A>() : target < whole ? s[target] : tail[target - whole];
  const typename V::T peak = V::set(out.peak == neg_inf<A>() ? A(0) : out.peak);
  typename V::T mass = V::set(0);
  const auto step = [&](A* at) {
    const typename V::T e = exp2_bounded<A>(bounded<A>(V::mul(V::sub(V::load(at), peak), log2e)));
    mass = V::add(mass, e);
    if (STORE) V::store(at, e);
  };
  for (int64_t j = 0; j < whole; j += W) step(s + j);
  if (whole < n) step(tail);
  if (STORE || bias)
    for (int64_t j = whole; j < n; ++j) s[j] = tail[j - whole];
  out.mass = V::reduce_sum(mass);
  return out;
}

// n numbers, rounded to bfloat16, at the beginning of their row: `tail` holds a vector of pairs.
template <class A>
void round_in_place(A* s, int64_t n, A* tail) {
#if defined(PARTITA_PAIRS)
  if constexpr (sizeof(A) == 4) {
    constexpr int64_t P = 2 * Vec<A>::W;
    const int64_t whole = n / P * P;
    Pair* to = reinterpret_cast<Pair*>(s);
    for (int64_t j = 0; j < whole; j += P) round_row<Pair>(s + j, P, to + j / 2);
    for (int64_t j = whole; j < whole + P; ++j) tail[j - whole] = j < n ? s[j] : A(0);
    Pair last[P / 2];
    round_row<Pair>(tail, P, last);
    std::memcpy(to + whole / 2, last, sizeof(uint16_t) * static_cast<size_t>(n - whole));
  }
#else
  (void)s, (void)n, (void)tail;
#endif
}

template <class A>
bool softmax_row(const PartitaSoftmaxRows& r, int64_t i, A* tail) {
  A* s = static_cast<A*>(r.logits) + i * r.row;
  const A weight = r.weight ? static_cast<const A*>(r.weight)[i] : A(0);
  const int64_t target = r.target[i], kept = target >= 0 && target < r.cols ? target : -1;
  const A* bias = static_cast<const A*>(r.bias);
  const RowSums<A> sums =
      r.gradient ? sum_row<A, true>(s, bias, r.cols, kept, tail) : sum_row<A, false>(s, bias, r.cols, kept, tail);
  static_cast<A*>(r.peak)[i] = sums.peak;
  static_cast<A*>(r.mass)[i] = sums.mass;
  static_cast<A*>(r.target_score)[i] = sums.target;
  if (r.gradient) {
    const A share = 1 / sums.mass;
    if (weight == 0) {
      std::memset(s, 0, sizeof(A) * static_cast<size_t>(r.cols));
    } else {
      const A factor = weight * share;
      for (int64_t j = 0; j < r.cols; ++j) s[j] *= factor;
    }
    if (kept >= 0) s[kept] -= weight;
    if (r.gradient == 2) round_in_place(s, r.cols, tail);
  }
  return (sums.mass + (sums.peak > neg_inf<A>() ? sums.peak : A(0))) * 0 == 0;
}

template <class A>
int32_t softmax_rows_as(const PartitaSoftmaxRows& r) {
  int32_t not_finite = 0;
#pragma omp parallel num_threads(r.threads) reduction(| : not_finite)
  {
    FlushDenormals flush;
    alignas(64) A tail[32];
#pragma omp for schedule(dynamic, 4)
    for (int64_t i = 0; i < r.rows; ++i) not_finite |= !softmax_row<A>(r, i, tail);
  }
  return not_finite ? NOT_FINITE : FINITE;
}

}  // namespace

int32_t softmax_rows(const PartitaSoftmaxRows& r) {
  return r.dtype == PARTITA_FLOAT64 ? softmax_rows_as<double>(r) : softmax_rows_as<float>(r);
}

}  // namespace PARTITA_ISA
}  // namespace partita
