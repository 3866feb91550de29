// Forward: the sums of each row over its visible keys, relative to the row's peak.
//
// A task is a block of rows against a range of keys. Key blocks are the outer loop (a block stays in L2), register tiles of
// rows the inner one (their scores stay in L1): product, softcap/bias/mask, peak, exponentials with mass, first and second,
// then the product with the values. Sums over keys are kept one per vector lane until the row is finished.
#pragma once
#include <cmath>
#include <cstdlib>
#include <limits>

#include "kernels.h"
#include "tile.h"

namespace partita {
namespace PARTITA_ISA {

template <class A>
struct Sums {  // of the rows of one task; mass, first, second and centre hold one number per lane
  Row* row;
  A *peak, *mass, *first, *second, *moment, *target;
  A* centre;  // what a lane's second moment is about: its mean in the block that set it
  A* base;    // the peak when the centre was set; a peak well above it sets a new one
  int64_t *count, *rank;
  A *query, *score, *temp, *panel, *value;

  void carve(Carver& c, int64_t rows, int64_t D, int64_t Vp, bool pack_key, bool pack_value) {
    constexpr int W = Vec<A>::W, R = Shape<A>::ROWS, L = Shape<A>::LANES;
    row = c.take<Row>(rows);
    peak = c.take<A>(rows);
    centre = c.take<A>(rows * W);
    base = c.take<A>(rows);
    mass = c.take<A>(rows * W);
    first = c.take<A>(rows * W);
    second = c.take<A>(rows * W);
    moment = c.take<A>(rows * Vp);
    target = c.take<A>(rows);
    count = c.take<int64_t>(rows);
    rank = c.take<int64_t>(rows);
    query = c.take<A>((rows / R + 2) * D * L);
    score = c.take<A>(R * Block<A>::LD);
    temp = c.take<A>(L * D + Block<A>::KEYS + W);
    panel = c.take<A>(pack_key ? Block<A>::KEYS * D : 0);
    value = c.take<A>(pack_value ? Block<A>::KEYS * Vp : 0);
  }
};

// Exponentials in place, with their sums. BOUND where a score may be -inf; MOMENTS where first and second are wanted.
// First is about the peak, so that an entropy is never negative; second about the lane's centre, so that a variance does
// not cancel.
template <class A, bool BOUND, bool MOMENTS>
PARTITA_INLINE void exponentials(A* s, int begin, int end, A peak, const A* centre, A* mass, A* first, A* second) {
  using V = Vec<A>;
  const typename V::T m = V::set(peak);
  typename V::T sum = V::load(mass), one = m, two = m, gap = m;
  if (MOMENTS) {
    one = V::load(first);
    two = V::load(second);
    gap = V::sub(m, V::load(centre));
  }
  for (int j = begin; j < end; j += V::W) {
    typename V::T c = V::sub(V::load(s + j), m);
    if (BOUND) c = bounded<A>(c);
    const typename V::T e = exp2_bounded<A>(c);
    V::store(s + j, e);
    sum = V::add(sum, e);
    if (MOMENTS) {
      const typename V::T d = V::add(c, gap);
      one = V::fma(e, c, one);
      two = V::fma(V::mul(e, d), d, two);
    }
  }
  V::store(mass, sum);
  if (MOMENTS) {
    V::store(first, one);
    V::store(second, two);
  }
}

// sum e (s - to)^2 from the same sum about `from`, where first is sum e (s - peak), lane by lane.
template <class A>
PARTITA_INLINE typename Vec<A>::T recentre(typename Vec<A>::T second, typename Vec<A>::T first, typename Vec<A>::T mass,
                                           typename Vec<A>::T peak, typename Vec<A>::T from, typename Vec<A>::T to) {
  using V = Vec<A>;
  const typename V::T about = V::fma(V::sub(peak, from), mass, first), d = V::sub(from, to);
  return V::fma(d, V::fma(d, mass, V::add(about, about)), second);
}

// The same for a block that raises the peak: its own mean, lane by lane, becomes the centre, since it outweighs the past.
template <class A>
inline void exponentials_about_new_centre(A* s, int begin, int end, A peak, A* centre, A* mass, A* first, A* second, A* kept) {
  using V = Vec<A>;
  const typename V::T m = V::set(peak);
  typename V::T sum = V::set(0), one = sum, two = sum;
  for (int j = begin; j < end; j += V::W) {
    const typename V::T c = bounded<A>(V::sub(V::load(s + j), m)), e = exp2_bounded<A>(c);
    V::store(s + j, e);
    V::store(kept + j, c);
    sum = V::add(sum, e);
    one = V::fma(e, c, one);
  }
  const typename V::T mean = V::div(one, V::max(V::set(std::numeric_limits<A>::min()), sum));
  for (int j = begin; j < end; j += V::W) {
    const typename V::T d = V::sub(V::load(kept + j), mean);
    two = V::fma(V::mul(V::load(s + j), d), d, two);
  }
  const typename V::T here = V::add(m, mean), old = V::load(mass), linear = V::load(first);
  two = V::add(two, recentre<A>(V::load(second), linear, old, m, V::load(centre), here));
  V::store(mass, V::add(old, sum));
  V::store(first, V::add(linear, one));
  V::store(second, two);
  V::store(centre, here);
}

template <class A>
PARTITA_INLINE A largest(const A* s, int begin, int end) {
  using V = Vec<A>;
  typename V::T a = V::set(neg_inf<A>()), b = a;
  int j = begin;
  for (; j + 2 * V::W <= end; j += 2 * V::W) {
    a = V::max(V::load(s + j), a);
    b = V::max(V::load(s + j + V::W), b);
  }
  return V::top(V::max(a, b));
}

// Sums relative to the old peak become sums relative to the new one: d = old - new, ratio = 2^d.
template <class A>
PARTITA_INLINE void shift(A d, A ratio, A* mass, A* first, A* second, int n) {
  for (int i = 0; i < n; ++i) {
    second[i] = ratio * (second[i] + d * (2 * first[i] + d * mass[i]));
    first[i] = ratio * (first[i] + d * mass[i]);
    mass[i] = ratio * mass[i];
  }
}

// The same for sums whose second moment is about a fixed centre, which a new peak leaves where it is.
template <class A>
PARTITA_INLINE void shift_about_centre(A d, A ratio, A* mass, A* first, A* second, int n) {
  for (int i = 0; i < n; ++i) {
    second[i] = ratio * second[i];
    first[i] = ratio * (first[i] + d * mass[i]);
    mass[i] = ratio * mass[i];
  }
}

// From scores to exponentials for the m rows of a tile; keep[r] is what the row's moment is multiplied by.
template <class A>
inline void soften(const Scores<A>& sc, Sums<A>& t, int64_t at, int m, const Cover& c, bool moments, bool rank, A* keep) {
  using V = Vec<A>;
  constexpr int LD = Block<A>::LD, W = V::W;
  const bool bound = !c.whole || sc.problem->bias.data;
  const bool counted = sc.masked || sc.problem->bias.data;
  A change[Shape<A>::LANES];
  A reference[Shape<A>::LANES];
  for (int r = 0; r < m; ++r) {
    A* s = t.score + r * LD;
    const A old = t.peak[at + r], top = largest(s, c.begin, c.end);
    const A peak = top > old ? top : old;
    t.peak[at + r] = peak;
    reference[r] = peak == neg_inf<A>() ? A(0) : peak;  // an empty row: -inf - -inf would be NaN
    change[r] = old == neg_inf<A>() ? neg_inf<A>() : old - reference[r];
    if (counted) {
      int64_t n = 0;
      for (int j = c.begin; j < c.end; j += W) n += V::above(V::load(s + j), V::set(neg_inf<A>()));
      t.count[at + r] += n;
    }
    if (rank) {
      const typename V::T mark = V::set(t.target[at + r]);
      int64_t n = 0;
      for (int j = c.begin; j < c.end; j += W) n += V::above(V::load(s + j), mark);
      t.rank[at + r] += n;
    }
  }
  for (int r = m; r < Shape<A>::LANES; ++r) change[r] = 0;
  for (int r = 0; r < Shape<A>::LANES; r += W) V::store(keep + r, exp2_bounded<A>(bounded<A>(V::load(change + r))));
  for (int r = 0; r < m; ++r) {
    A* s = t.score + r * LD;
    A *mass = t.mass + (at + r) * W, *first = t.first + (at + r) * W, *second = t.second + (at + r) * W;
    if (change[r] < 0 && change[r] > neg_inf<A>()) shift_about_centre<A>(change[r], keep[r], mass, first, second, W);
    A* centre = t.centre + (at + r) * W;
    if (moments && reference[r] > t.base[at + r] + 2) {  // four times the weight: the past matters little
      t.base[at + r] = t.peak[at + r];  // -inf while a row has seen nothing: its first key sets it again
      exponentials_about_new_centre<A>(s, c.begin, c.end, reference[r], centre, mass, first, second, t.temp);
      continue;
    }
    if (bound)
      moments ? exponentials<A, true, true>(s, c.begin, c.end, reference[r], centre, mass, first, second)
              : exponentials<A, true, false>(s, c.begin, c.end, reference[r], centre, mass, first, second);
    else
      moments ? exponentials<A, false, true>(s, c.begin, c.end, reference[r], centre, mass, first, second)
              : exponentials<A, false, false>(s, c.begin, c.end, reference[r], centre, mass, first, second);
  }
}

// The score of one row's target with the roundings of the tile, so that a copy of the target's key ties with it.
template <class A>
inline A target_score(const Scores<A>& sc, const Row& row, const Rows& keys, const A* query, int64_t step, A* temp) {
  using V = Vec<A>;
  const PartitaProblem& p = *sc.problem;
  const int64_t j = row.target;
  if (j < 0 || j >= p.K || !visible(p, row, j)) return neg_inf<A>();
  convert_row<A>(keys.data, j * keys.row, keys.dtype, p.D, p.D, A(1), temp);
  typename V::T total = V::set(0);
  for (int64_t k = 0; k < p.D; k += CHAIN) {
    typename V::T acc = V::set(0);
    for (int64_t i = k; i < p.D && i < k + CHAIN; ++i) acc = V::fma(V::set(query[i * step]), V::set(temp[i]), acc);
    total = k ? V::add(total, acc) : acc;
  }
  alignas(64) A s[16], bias[16];
  V::store(s, total);
  const Run runs[2] = {{0, V::W}, {V::W, V::W}};
  Cover c;
  c.runs = 1;
  c.end = V::W;
  c.whole = true;
  finish_scores<A, Vec<A>::W>(sc, &row, 1, j, c, runs, s, bias, nullptr);
  return s[0];
}

// One finished row, in natural units; the spread is about the row's mean. The peak is given in double: backward must find
// the very number again that the sums are relative to.
template <class A>
inline bool finish_row(const PartitaProblem& p, const PartitaSums& to, const Row& row, A peak, A mass, A first, A spread,
                       const A* moment, int64_t count, int64_t rank, A target) {
  using V = Vec<A>;
  const A ln2 = static_cast<A>(LN2);
  const double natural = static_cast<double>(peak) * LN2;
  first *= ln2;
  spread *= ln2 * ln2;
  const int64_t i = row.out;
  static_cast<double*>(to.peak)[i] = natural;
  static_cast<A*>(to.mass)[i] = mass;
  if (to.first) static_cast<A*>(to.first)[i] = first;
  if (to.second) static_cast<A*>(to.second)[i] = spread;
  if (to.count) static_cast<A*>(to.count)[i] = static_cast<A>(count);
  if (to.rank) to.rank[i] = rank;
  if (to.target_score) static_cast<A*>(to.target_score)[i] = static_cast<A>(static_cast<double>(target) * LN2);  // rounds as the peak does
  if (to.stats) {
    A* out = static_cast<A*>(to.stats) + i;
    const int64_t rows = p.B * p.Q;
    const A top = static_cast<A>(natural), log_mass = mass > 0 ? std::log(mass) : A(0);
    const A mean = mass > 0 ? first / mass : A(0);
    out[0] = top + log_mass;
    out[rows] = log_mass - mean;
    out[2 * rows] = mass > 0 ? top + mean : A(0);
    out[3 * rows] = mass > 0 ? spread / mass : A(0);
    out[4 * rows] = top;
  }
  A probe = mass * 0 + first * 0 + spread * 0;
  if (peak > neg_inf<A>()) probe += peak * 0;
  if (to.moment) {
    A* out = static_cast<A*>(to.moment) + i * p.V;
    const A divisor = to.mean && mass > 0 ? mass : A(1);
    const typename V::T zero = V::set(0), by = V::set(A(1) / divisor);
    typename V::T bad = zero;
    int64_t v = 0;
    for (; v + V::W <= p.V; v += V::W) {
      const typename V::T x = V::mul(V::load(moment + v), by);
      bad = V::fma(x, zero, bad);
      V::store(out + v, x);
    }
    probe += V::sum(bad);
    for (; v < p.V; ++v) probe += (out[v] = moment[v] * (A(1) / divisor)) * 0;
  }
  return probe == 0;
}

}  // namespace PARTITA_ISA
}  // namespace partita
