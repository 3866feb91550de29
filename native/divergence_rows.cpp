// Divergence of two rows of explicit scores, and its gradients in their place: the middle of a comparison whose
// products are made elsewhere. With a = log p, b = log q of one key, P = exp a, Q = exp b, each kind is two sums
//
//                    first                second
//   forward          P (a - b)            -P
//   reverse          -Q                   Q (b - a)
//   cross entropy    -P b                 -P
//   js               beta P (a - m)       (1 - beta) Q (b - m)        m = log(beta P + (1 - beta) Q)
//   hellinger        -sqrt(P Q) / 2       the same
//
//   d / ds_j = first_j - P_j sum first        d / dt_j = second_j - Q_j sum second
#include <cmath>

#include "exp.h"
#include "kernels.h"

namespace partita {
namespace PARTITA_ISA {

namespace {

enum Kind { FORWARD, REVERSE, CROSS_ENTROPY, JS, HELLINGER };

constexpr int64_t AT_ONCE = 64;  // vectors summed by themselves: one long chain would lose digits

// log x for x in [1, 2].
PARTITA_INLINE Vec<double>::T log_one_to_two(Vec<double>::T x) { return log_above_one<double>(x); }
#if defined(__AVX512F__)
PARTITA_INLINE Vec<float>::T log_one_to_two(Vec<float>::T x) { return log_above_one<float>(x); }
#else
// The exponent is known: x or x / 2 is in [sqrt 1/2, sqrt 2).
PARTITA_INLINE Vec<float>::T log_one_to_two(Vec<float>::T x) {
  using V = Vec<float>;
  const V::T one = V::set(1.0f), root = V::set(1.41421356f), zero = V::set(0.0f);
  const V::T e = V::where_less(root, x, one, zero), r = V::sub(V::where_less(root, x, V::mul(x, V::set(0.5f)), x), one);
  return log_from_mantissa(r, e);
}
#endif

template <class A>
PARTITA_INLINE typename Vec<A>::T exponential_of(typename Vec<A>::T x) {
  using V = Vec<A>;
  return exp2_bounded<A>(bounded<A>(V::mul(x, V::set(static_cast<A>(LOG2E)))));
}

// One distribution's row: its scores, and what is known of them.
template <class A>
struct Side {
  A* score;
  A peak, log_mass, mass;  // relative to peak; 0 where no key is seen

  // log-probability of one vector; very negative and finite where a key is not visible
  PARTITA_INLINE typename Vec<A>::T log_prob(int64_t j) const {
    using V = Vec<A>;
    const typename V::T x = V::sub(V::sub(V::load(score + j), V::set(peak)), V::set(log_mass));
    return V::max(V::set(A(-1e5)), x);
  }
};

// Bias and visibility of one row of n scores, padded to whole vectors with invisible keys; its peak and its mass.
template <class A>
Side<A> prepare(A* s, const A* bias, const int32_t* start, const int32_t* stop, int64_t i, int64_t n, int64_t whole) {
  using V = Vec<A>;
  if (bias)
    for (int64_t j = 0; j < n; ++j) s[j] += bias[j];
  const int64_t lo = start && start[i] > 0 ? start[i] : 0, hi = stop && stop[i] < n ? stop[i] : n;
  for (int64_t j = 0; j < lo && j < n; ++j) s[j] = neg_inf<A>();
  for (int64_t j = hi > 0 ? hi : 0; j < whole; ++j) s[j] = neg_inf<A>();
  typename V::T top = V::set(neg_inf<A>());
  for (int64_t j = 0; j < whole; j += V::W) top = V::max(V::load(s + j), top);
  const A peak = V::reduce_max(top);
  Side<A> side{s, peak == neg_inf<A>() ? A(0) : peak, 0, 0};
  const typename V::T level = V::set(side.peak);
  typename V::T mass = V::set(0);
  for (int64_t j = 0; j < whole;) {
    typename V::T part = V::set(0);
    for (const int64_t end = j + AT_ONCE * V::W < whole ? j + AT_ONCE * V::W : whole; j < end; j += V::W)
      part = V::add(part, exponential_of<A>(V::sub(V::load(s + j), level)));
    mass = V::add(mass, part);
  }
  side.mass = V::reduce_sum(mass);
  side.log_mass = side.mass == 0 ? A(0) : std::log(side.mass);
  return side;
}

// Both sides of one vector, and the probabilities a gradient needs.
template <class A, int KIND>
PARTITA_INLINE void both_sides(typename Vec<A>::T a, typename Vec<A>::T b, A beta, A log_beta, A log_rest,
                               typename Vec<A>::T& first, typename Vec<A>::T& second) {
  using V = Vec<A>;
  using T = typename V::T;
  const T zero = V::set(0);
  if (KIND == FORWARD || KIND == CROSS_ENTROPY) {
    const T p = exponential_of<A>(a);
    first = V::mul(p, KIND == FORWARD ? V::sub(a, b) : V::sub(zero, b));
    second = V::sub(zero, p);
  } else if (KIND == REVERSE) {
    const T q = exponential_of<A>(b);
    first = V::sub(zero, q);
    second = V::mul(q, V::sub(b, a));
  } else if (KIND == HELLINGER) {
    first = second = V::mul(exponential_of<A>(V::mul(V::add(a, b), V::set(A(0.5)))), V::set(A(-0.5)));
  } else {
    const T u = V::add(a, V::set(log_beta)), v = V::add(b, V::set(log_rest)), high = V::max(u, v);
    const T gap = V::sub(V::add(V::sub(u, high), v), high);  // - |u - v|
    const T m = V::add(high, log_one_to_two(V::add(V::set(1), exponential_of<A>(gap))));
    first = V::mul(V::mul(exponential_of<A>(a), V::set(beta)), V::sub(a, m));
    second = V::mul(V::mul(exponential_of<A>(b), V::set(1 - beta)), V::sub(b, m));
  }
}

template <class A>
void fill(A* s, int64_t n, A x) {
  for (int64_t j = 0; j < n; ++j) s[j] = x;
}

template <class A, int KIND>
bool divergence_row(const PartitaDivergenceRows& d, int64_t i) {
  using V = Vec<A>;
  using T = typename V::T;
  const int64_t n = d.cols, whole = (n + V::W - 1) / V::W * V::W;
  const Side<A> p =
      prepare<A>(static_cast<A*>(d.p) + i * d.p_row, static_cast<const A*>(d.p_bias), d.p_start, d.p_stop, i, n, whole);
  const Side<A> q =
      prepare<A>(static_cast<A*>(d.q) + i * d.q_row, static_cast<const A*>(d.q_bias), d.q_start, d.q_stop, i, n, whole);
  const A beta = static_cast<A>(d.beta), log_beta = static_cast<A>(std::log(d.beta)),
          log_rest = static_cast<A>(std::log(1 - d.beta));
  const T zero = V::set(0), one = V::set(1), none = V::set(neg_inf<A>());
  T first = zero, second = zero, outside = zero;
  for (int64_t j = 0; j < whole;) {
    T some = zero, more = zero;
    for (const int64_t end = j + AT_ONCE * V::W < whole ? j + AT_ONCE * V::W : whole; j < end; j += V::W) {
      T x, y;
      both_sides<A, KIND>(p.log_prob(j), q.log_prob(j), beta, log_beta, log_rest, x, y);
      some = V::add(some, x);
      more = V::add(more, y);
      if (KIND == FORWARD || KIND == CROSS_ENTROPY || KIND == REVERSE) {
        const T here = V::load((KIND == REVERSE ? q : p).score + j),
                there = V::load((KIND == REVERSE ? p : q).score + j);
        outside = V::max(V::mul(V::where_less(none, here, one, zero), V::where_less(none, there, zero, one)), outside);
      }
    }
    first = V::add(first, some);
    second = V::add(second, more);
  }
  A sum_first = V::reduce_sum(first), sum_second = V::reduce_sum(second);
  const bool infinite = V::reduce_max(outside) > 0;
  const A probe = (p.mass + q.mass + sum_first + sum_second + p.peak + q.peak) * 0;
  if (d.weight) {
    const A w = p.mass == 0 || infinite ? A(0) : static_cast<const A*>(d.weight)[i];
    if (w == 0) {
      if (d.p_gradient) fill<A>(p.score, n, 0);
      if (d.q_gradient) fill<A>(q.score, n, 0);
    } else {
      const T by = V::set(w), level = V::set(sum_first), other = V::set(sum_second);
      for (int64_t j = 0; j < whole; j += V::W) {
        const T a = p.log_prob(j), b = q.log_prob(j);
        T x, y;
        both_sides<A, KIND>(a, b, beta, log_beta, log_rest, x, y);
        if (d.p_gradient) V::store(p.score + j, V::mul(by, V::sub(x, V::mul(exponential_of<A>(a), level))));
        if (d.q_gradient) V::store(q.score + j, V::mul(by, V::sub(y, V::mul(exponential_of<A>(b), other))));
      }
    }
  }
  if (infinite) (KIND == REVERSE ? sum_second : sum_first) += static_cast<A>(__builtin_inf());
  A* to = static_cast<A*>(d.record) + i;
  const A record[6] = {
      p.mass == 0 ? neg_inf<A>() : p.peak, p.mass, q.mass == 0 ? neg_inf<A>() : q.peak, q.mass, sum_first, sum_second};
  for (int k = 0; k < 6; ++k) to[k * d.record_row] = record[k];
  return probe == 0;
}

template <class A, int KIND>
int32_t divergence_rows_as(const PartitaDivergenceRows& d) {
  int32_t not_finite = 0;
#pragma omp parallel num_threads(d.threads) reduction(| : not_finite)
  {
    FlushDenormals flush;
#pragma omp for schedule(dynamic, 4)
    for (int64_t i = 0; i < d.rows; ++i) not_finite |= !divergence_row<A, KIND>(d, i);
  }
  return not_finite ? NOT_FINITE : FINITE;
}

template <class A>
int32_t divergence_rows_of(const PartitaDivergenceRows& d) {
  switch (d.kind) {
    case FORWARD: return divergence_rows_as<A, FORWARD>(d);
    case REVERSE: return divergence_rows_as<A, REVERSE>(d);
    case CROSS_ENTROPY: return divergence_rows_as<A, CROSS_ENTROPY>(d);
    case JS: return divergence_rows_as<A, JS>(d);
    default: return divergence_rows_as<A, HELLINGER>(d);
  }
}

}  // namespace

int32_t divergence_rows(const PartitaDivergenceRows& d) {
  return d.dtype == PARTITA_FLOAT64 ? divergence_rows_of<double>(d) : divergence_rows_of<float>(d);
}

}  // namespace PARTITA_ISA
}  // namespace partita
