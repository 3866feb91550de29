// From scores to exponentials and the sums of each row over its visible keys.
//
// Sums over keys are kept one per vector lane until the row is finished. They are relative to the row's peak or, once
// it is known where most of the mass lies, to the mean of those scores.
#pragma once
#include "kernels.h"
#include "scores.h"

namespace partita {
namespace PARTITA_ISA {

template <class A>
struct RowStates {  // of the rows of one task; mass, first and second hold one number per lane
  Row* row;
  KeySpan* span;  // of each tile
  A *peak, *mass, *first, *second, *moment, *target;
  A* reference;  // what the sums are relative to: a peak while a centre is found, then the centre
  A* centre;     // what the second moment is about: the mean of the block that set it
  A* base;       // the peak when the centre was set; a peak well above it sets a new one
  A* least;
  int64_t *count, *rank, *argmax, *argmin;
  A *query, *score, *temp, *panel, *value;

  void lay_out(Arena& c, int64_t rows, int64_t D, int64_t Vp, bool pack_key, bool pack_value) {
    constexpr int W = Vec<A>::W, R = Shape<A>::ROWS, L = Shape<A>::LANES;
    row = c.take<Row>(rows);
    span = c.take<KeySpan>(rows / R + 2);
    peak = c.take<A>(rows);
    reference = c.take<A>(rows);
    centre = c.take<A>(rows);
    base = c.take<A>(rows);
    mass = c.take<A>(rows * W);
    first = c.take<A>(rows * W);
    second = c.take<A>(rows * W);
    moment = c.take<A>(rows * Vp);
    target = c.take<A>(rows);
    count = c.take<int64_t>(rows);
    rank = c.take<int64_t>(rows);
    least = c.take<A>(rows);
    argmax = c.take<int64_t>(rows);
    argmin = c.take<int64_t>(rows);
    query = c.take<A>((rows / R + 2) * D * L);
    score = c.take<A>(R * Block<A>::LD);
    temp = c.take<A>(L * D + 2 * Block<A>::KEYS + W);
    panel = c.take<A>(pack_key ? Block<A>::KEYS * D : 0);
    value = c.take<A>(pack_value ? Block<A>::KEYS * Vp : 0);
  }
};

// The three sums of a row, lane by lane, while they are being made. Where the reference is the row's centre, one
// difference serves the exponential and both moments, and a variance does not cancel. The exponentials may be above 1
// then, but not far: a mean of n scores is at most log2 n below their peak.
template <class A>
struct LaneSums {
  using T = typename Vec<A>::T;
  T reference, mass, first, second;
};

// 2^(s - reference) of one vector, in place, into the sums. BOUND where a score may be -inf; MOMENTS where first and
// second are wanted; KEPT where second has to wait for its centre, and the differences are kept for it.
template <class A, bool BOUND, bool MOMENTS, bool KEPT>
PARTITA_INLINE void exponential(A* s, A* kept, LaneSums<A>& l) {
  using V = Vec<A>;
  const typename V::T c = bounded_if<A, BOUND>(V::sub(V::load(s), l.reference)), e = exp2_bounded<A>(c);
  V::store(s, e);
  l.mass = V::add(l.mass, e);
  if (KEPT) {
    l.first = V::fma(e, c, l.first);
    V::store(kept, c);
  } else if (MOMENTS) {
    const typename V::T ec = V::mul(e, c);
    l.first = V::add(l.first, ec);
    l.second = V::fma(ec, c, l.second);
  }
}

// The same for columns [begin, end) of a row, of which those in `unmasked` are not -inf.
template <class A, bool MOMENTS, bool KEPT>
PARTITA_INLINE void exponentials(A* s, A* kept, int begin, int end, ColumnRange unmasked, LaneSums<A>& l) {
  constexpr int W = Vec<A>::W;
  int j = begin;
  for (; j < unmasked.begin; j += W) exponential<A, true, MOMENTS, KEPT>(s + j, kept + j, l);
  for (; j < unmasked.end; j += W) exponential<A, false, MOMENTS, KEPT>(s + j, kept + j, l);
  for (; j < end; j += W) exponential<A, true, MOMENTS, KEPT>(s + j, kept + j, l);
}

// sum e (s - to)^2 from the same sum about `from`, where first is sum e (s - reference), lane by lane.
template <class A>
PARTITA_INLINE typename Vec<A>::T recentre(typename Vec<A>::T second, typename Vec<A>::T first, typename Vec<A>::T mass,
                                           typename Vec<A>::T reference, typename Vec<A>::T from,
                                           typename Vec<A>::T to) {
  using V = Vec<A>;
  const typename V::T about = V::fma(V::sub(reference, from), mass, first), d = V::sub(from, to);
  return V::fma(d, V::fma(d, mass, V::add(about, about)), second);
}

// What a block adds to a row whose peak it raises: its own mean becomes the centre, since it outweighs the past. A mean
// of each lane would be had for less; but a lane of small mass says nothing of where the next block's mass will lie.
// `l` holds its mass and first, e its exponentials, kept their differences from the peak.
template <class A>
inline void centre_on_block(const A* e, const A* kept, int begin, int end, A peak, const LaneSums<A>& l, A& centre,
                            A* mass, A* first, A* second) {
  using V = Vec<A>;
  const A total = V::reduce_sum(l.mass), step = total > 0 ? V::reduce_sum(l.first) / total : A(0), here = peak + step;
  const typename V::T mean = V::set(step), old = V::load(mass), linear = V::load(first);
  typename V::T two = V::set(0), more = two;
  for (int j = begin; j < end; j += 2 * V::W) {  // a panel is two vectors
    const typename V::T a = V::sub(V::load(kept + j), mean), b = V::sub(V::load(kept + j + V::W), mean);
    two = V::fma(V::mul(V::load(e + j), a), a, two);
    more = V::fma(V::mul(V::load(e + j + V::W), b), b, more);
  }
  two = V::add(two, more);
  two = V::add(two, recentre<A>(V::load(second), linear, old, l.reference, V::set(centre), V::set(here)));
  V::store(mass, V::add(old, l.mass));
  V::store(first, V::add(linear, l.first));
  V::store(second, two);
  centre = here;
}

template <class A>
PARTITA_INLINE typename Vec<A>::T largest(const A* s, int begin, int end) {
  using V = Vec<A>;
  typename V::T a = V::set(neg_inf<A>()), b = a;
  int j = begin;
  for (; j + 2 * V::W <= end; j += 2 * V::W) {
    a = V::max(V::load(s + j), a);
    b = V::max(V::load(s + j + V::W), b);
  }
  return V::max(a, b);
}

// The smallest of a row's scores that are not -inf; +inf where there is none.
template <class A>
PARTITA_INLINE A smallest(const A* s, int begin, int end) {
  using V = Vec<A>;
  const typename V::T none = V::set(neg_inf<A>()), zero = V::set(0);
  typename V::T a = none;
  for (int j = begin; j < end; j += V::W) {
    const typename V::T x = V::load(s + j);
    a = V::max(V::where_less(none, x, V::sub(zero, x), none), a);
  }
  return -V::reduce_max(a);
}

// The ends of the m rows of a tile whose first key is `key`: a block moves an end only if it goes beyond it, so that of
// several keys that tie the first stays.
template <class A>
inline void update_extremes(RowStates<A>& t, int64_t at, int m, const VisibleColumns& c, int64_t key) {
  constexpr int LD = Block<A>::LD;
  for (int r = 0; r < m; ++r) {
    const A* s = t.score + r * LD;
    const auto first = [&](A x) {
      int j = c.begin;
      while (j < c.end && s[j] != x) ++j;
      return j < c.end ? key + j : int64_t(-1);
    };
    const A top = Vec<A>::reduce_max(largest(s, c.begin, c.end)), low = smallest(s, c.begin, c.end);
    if (top > t.peak[at + r]) t.argmax[at + r] = first(top);
    if (low < t.least[at + r]) {
      t.least[at + r] = low;
      t.argmin[at + r] = first(low);
    }
  }
}

// Sums relative to an old reference become sums relative to a new one: d = old - new, ratio = 2^d. The second moment is
// about a fixed centre, which a new reference leaves where it is.
template <class A>
PARTITA_INLINE void shift_about_centre(A d, A ratio, A* mass, A* first, A* second, int n) {
  for (int i = 0; i < n; ++i) {
    second[i] = ratio * second[i];
    first[i] = ratio * (first[i] + d * mass[i]);
    mass[i] = ratio * mass[i];
  }
}

// Long, because it is one loop over a tile's rows in three steps that share a dozen small arrays: peaks and references,
// counts, sums. Cut apart, they would be passed from one to the next.
//
// From scores to exponentials for the m rows of a tile; keep[r] is what the row's moment is multiplied by.
template <class A>
inline void online_softmax(const ScoreRule<A>& sc, RowStates<A>& t, int64_t at, int m, const VisibleColumns& c,
                           bool moments, bool rank, A* keep) {
  using V = Vec<A>;
  constexpr int LD = Block<A>::LD, W = V::W, L = Shape<A>::LANES;
  const ColumnRange unmasked =
      sc.problem->bias.data ? ColumnRange{c.end, c.end} : c.unmasked;  // a bias may mask_row any key
  const bool counted = sc.masked || sc.problem->bias.data;
  alignas(64) A top[L * W], peaks[L], bound[L], centre[L], before[L], change[L], reference[L];
  const typename V::T none = V::set(neg_inf<A>());
  for (int r = 0; r < L; ++r) V::store(top + r * W, r < m ? largest(t.score + r * LD, c.begin, c.end) : none);
  for (int r = 0; r < L; ++r) {
    const int64_t i = at + (r < m ? r : 0);
    peaks[r] = t.peak[i];
    before[r] = t.reference[i];
    centre[r] = t.centre[i];
    bound[r] = moments ? t.base[i] + 2 : neg_inf<A>();  // four times the weight: the past matters little
  }
  for (int r = 0; r < L; r += W) {
    const typename V::T old = V::load(peaks + r),
                        peak = V::max(reduce_lanes<A, false>([&](int i) { return V::load(top + (r + i) * W); }), old);
    const typename V::T finite =
        V::where_less(none, peak, peak, V::set(0));  // of an empty row: -inf - -inf would be NaN
    const typename V::T chosen = V::where_less(V::load(bound + r), finite, finite, V::load(centre + r));
    const typename V::T step = V::sub(V::load(before + r), chosen);
    V::store(peaks + r, peak);
    V::store(before + r,
             V::where_less(none, peak, chosen, none));  // -inf while a row has seen nothing: there is nothing to keep
    V::store(reference + r, chosen);
    V::store(change + r, step);
    V::store(keep + r, exp2_bounded<A>(bounded<A>(step)));
  }
  for (int r = 0; r < m; ++r) {
    t.peak[at + r] = peaks[r];
    t.reference[at + r] = before[r];
  }
  for (int r = 0; r < m && (counted || rank); ++r) {
    const A* s = t.score + r * LD;
    if (counted) {
      int64_t n = 0;
      for (int j = c.begin; j < c.end; j += W) n += V::count_greater(V::load(s + j), V::set(neg_inf<A>()));
      t.count[at + r] += n;
    }
    if (rank) {
      const typename V::T mark = V::set(t.target[at + r]);
      int64_t n = 0;
      for (int j = c.begin; j < c.end; j += W) n += V::count_greater(V::load(s + j), mark);
      t.rank[at + r] += n;
    }
  }
  // A row that needs a new centre is finished while the next one is begun: the second sum has to wait for the mean.
  LaneSums<A> fresh[2];
  int waiting = -1;
  const auto kept = [&](int r) { return t.temp + (r & 1) * Block<A>::KEYS; };
  const auto finish_waiting = [&] {
    if (waiting < 0) return;
    const int64_t lane = (at + waiting) * W;
    centre_on_block<A>(t.score + waiting * LD, kept(waiting), c.begin, c.end, reference[waiting], fresh[waiting & 1],
                       t.centre[at + waiting], t.mass + lane, t.first + lane, t.second + lane);
    waiting = -1;
  };
  for (int r = 0; r < m; ++r) {
    A* s = t.score + r * LD;
    A *mass = t.mass + (at + r) * W, *first = t.first + (at + r) * W, *second = t.second + (at + r) * W;
    if (change[r] != 0 && change[r] > neg_inf<A>()) shift_about_centre<A>(change[r], keep[r], mass, first, second, W);
    const typename V::T about = V::set(reference[r]), zero = V::set(0);
    if (moments && reference[r] > bound[r]) {
      t.base[at + r] = t.peak[at + r];  // -inf while a row has seen nothing: its first key sets it again
      LaneSums<A> l{about, zero, zero, zero};
      exponentials<A, true, true>(s, kept(r), c.begin, c.end, unmasked, l);
      finish_waiting();
      fresh[r & 1] = l;
      waiting = r;
      continue;
    }
    finish_waiting();
    // A block is summed by itself: added one by one to a large sum, what is small would be rounded away.
    LaneSums<A> l{about, zero, zero, zero};
    if (moments) {
      exponentials<A, true, false>(s, s, c.begin, c.end, unmasked, l);
      V::store(first, V::add(V::load(first), l.first));
      V::store(second, V::add(V::load(second), l.second));
    } else {
      exponentials<A, false, false>(s, s, c.begin, c.end, unmasked, l);
    }
    V::store(mass, V::add(V::load(mass), l.mass));
  }
  finish_waiting();
}

}  // namespace PARTITA_ISA
}  // namespace partita
