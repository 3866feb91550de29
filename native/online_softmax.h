// From scores to exponentials and the sums of each row over its visible keys.
//
// Where a mean value is made of pairs, the weights are rounded to bfloat16 for it: to nearest even, so that
// no sum over many keys drifts. Statistics are those of the weights before that. The mean value is divided by the mass
// of the rounded weights, so that it is a mean, with weights that sum to one: of equal values it is that value.
//
// Sums over keys are kept one per vector lane until the row is finished. They are relative to the row's peak or, once
// it is known where most of the mass is, to the mean of those scores.
#pragma once
#include "kernels.h"
#include "scores.h"

namespace partita {
namespace PARTITA_ISA {

template <class F>
struct RowStates : PackedRows<F> {  // of the rows of one task; mass, rounded, first and second hold one number per lane
  using A = Sum<F>;
  A *peak, *mass, *first, *second, *moment, *target;
  A* reference;  // what the sums are relative to: a peak while a centre is found, then the centre
  A* centre;     // what the second moment is about: the mean of the block that set it
  A* base;       // the peak when the centre was set; a peak well above it sets a new one
  A* rounded;  // the mass of the weights as the product with the values takes them, relative to the reference: of pairs
  int64_t *count, *rank, *argmax;
  F *panel, *value;
  A *score, *temp;

  void lay_out(Arena& c, int64_t rows, int64_t D, int64_t Vp, bool pack_key, bool pack_value) {
    constexpr int W = Vec<A>::W, KEYS = Block<A>::KEYS;
    constexpr bool pairs = Factor<F>::STEP > 1;
    PackedRows<F>::lay_out(c, rows, D, D);
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
    argmax = c.take<int64_t>(rows);
    rounded = c.take<A>(pairs && Vp ? rows * W : 0);
    score = c.take<A>(Shape<F>::ROWS * Block<A>::LD);
    temp = c.take<A>(KEYS);
    panel = c.take<F>(pack_key ? KEYS * steps<F>(D) : 0);
    value = c.take<F>(pack_value ? KEYS * Vp : 0);
  }
};

// A second moment about the peak may be this many times the one about the mean, before too many of its digits cancel.
constexpr int CANCELS = 32;

// The three sums of a row, lane by lane, while they are being made. Where the reference is the row's centre, one
// difference serves the exponential and both moments, and a variance does not cancel. The exponentials may be above 1
// then, but not far: a mean of n scores is at most log2 n below their peak.
template <class A>
struct LaneSums {
  using T = typename Vec<A>::T;
  T reference, mass, first, second;
  T rounded;  // the mass of rounded weights
  explicit LaneSums(T reference) : reference(reference) { mass = first = second = rounded = Vec<A>::set(0); }
};

// Two vectors of exponentials as weights in pairs, from `to` on.
template <class F>
PARTITA_INLINE void store_weights(typename Vec<Sum<F>>::T a, typename Vec<Sum<F>>::T b, F* to, LaneSums<Sum<F>>& l) {
  const typename Vec<F>::T pairs = Vec<F>::round(a, b);
  Vec<F>::store(to, pairs);
  l.rounded = Vec<F>::fma(pairs, Vec<F>::ones(), l.rounded);
}

// 2^(s - reference) of one vector, into the sums. BOUND where a score may be -inf; MOMENTS where first and second are
// wanted.
template <class A, bool BOUND, bool MOMENTS>
PARTITA_INLINE typename Vec<A>::T exponential(const A* s, LaneSums<A>& l) {
  using V = Vec<A>;
  const typename V::T c = bounded_if<A, BOUND>(V::sub(V::load(s), l.reference)), e = exp2_bounded<A>(c);
  l.mass = V::add(l.mass, e);
  if (MOMENTS) {
    const typename V::T ec = V::mul(e, c);
    l.first = V::add(l.first, ec);
    l.second = V::fma(ec, c, l.second);
  }
  return e;
}

// A vector of numbers of a row or, as pairs, two, in place of their scores.
template <class F, bool BOUND, bool MOMENTS>
PARTITA_INLINE void weigh(Sum<F>* s, int j, LaneSums<Sum<F>>& l) {
  using V = Vec<Sum<F>>;
  const typename V::T e = exponential<Sum<F>, BOUND, MOMENTS>(s + j, l);
  if constexpr (Factor<F>::STEP > 1)
    store_weights<F>(e, exponential<Sum<F>, BOUND, MOMENTS>(s + j + V::W, l), reinterpret_cast<F*>(s) + j / 2, l);
  else
    V::store(s + j, e);
}

// The same for columns [begin, end) of a row, of which those in `unmasked` are not -inf.
template <class F, bool MOMENTS>
PARTITA_INLINE void exponentials(Sum<F>* s, int begin, int end, ColumnRange unmasked, LaneSums<Sum<F>>& l) {
  constexpr int N = Vec<F>::W * Factor<F>::STEP;
  int j = begin;
  for (; j < unmasked.begin; j += N) weigh<F, true, MOMENTS>(s, j, l);
  for (; j + N <= unmasked.end; j += N) weigh<F, false, MOMENTS>(s, j, l);
  for (; j < end; j += N) weigh<F, true, MOMENTS>(s, j, l);
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

// sum e (s - centre)^2 of a row of scores, e = 2^(s - reference).
template <class A>
inline void add_spread(const A* s, int begin, int end, A reference, A centre, A* second) {
  using V = Vec<A>;
  const typename V::T from = V::set(reference), shift = V::set(reference - centre);
  typename V::T sum = V::set(0);
  for (int j = begin; j < end; j += V::W) {
    const typename V::T c = bounded<A>(V::sub(V::load(s + j), from)), d = V::add(c, shift);
    sum = V::fma(V::mul(exp2_bounded<A>(c), d), d, sum);
  }
  V::store(second, V::add(V::load(second), sum));
}

// What a block adds to the rows of `fresh`, whose peak it raises: its own mean becomes their centre, since it outweighs
// the past. A mean of each lane would be had for less; but a lane of small mass does not predict where the next block's
// mass will be. mass, first and second: of the block, lane by lane, relative to the peak. Gives the rows whose second
// moment about the peak is too much of the square of their mean to be what it leaves: theirs is left out.
template <class A>
inline uint32_t centre_on_block(uint32_t fresh, const A* mass, const A* first, const A* second, A* step) {
  using V = Vec<A>;
  using T = typename V::T;
  constexpr int W = V::W, L = Shape<A>::LANES;
  const T zero = V::set(0);
  uint32_t cancelled = 0;
  for (int r = 0; r < L; r += W) {
    const auto total = [&](const A* of) {
      return reduce_lanes<A, true>([&](int i) { return fresh >> (r + i) & 1 ? V::load(of + (r + i) * W) : zero; });
    };
    const T m = total(mass), f = total(first), s = total(second), mean = V::where_less(zero, m, V::div(f, m), zero);
    alignas(64) A lost[W];
    V::store(step + r, mean);
    V::store(lost, V::where_less(V::mul(V::set(CANCELS), V::sub(s, V::mul(mean, f))), s, V::set(1), zero));
    for (int i = 0; i < W; ++i) cancelled |= static_cast<uint32_t>(lost[i] > 0) << (r + i);
  }
  return cancelled;
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

// The best keys of the m rows of a tile whose first key is `key`: only a larger score replaces one, so that of several
// keys that tie the first stays.
template <class F>
inline void update_best(RowStates<F>& t, int64_t at, int m, const VisibleColumns& c, int64_t key) {
  using A = Sum<F>;
  for (int r = 0; r < m; ++r) {
    const A* s = t.score + r * Block<A>::LD;
    const A top = Vec<A>::reduce_max(largest(s, c.begin, c.end));
    if (!(top > t.peak[at + r])) continue;
    int j = c.begin;
    while (j < c.end && s[j] != top) ++j;
    t.argmax[at + r] = j < c.end ? key + j : -1;
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
// counts, sums. Split, they would be passed from one to the next.
//
// From scores to exponentials for the m rows of a tile, stored as E; keep[r] is what the row's moment is multiplied by.
// Gives the rows that need `add_spread` of this block's scores.
template <class E, class F>
inline uint32_t online_softmax(const ScoreRule<Sum<F>>& sc, RowStates<F>& t, int64_t at, int m, const VisibleColumns& c,
                               bool moments, bool rank, Sum<F>* keep) {
  using A = Sum<F>;
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
    const typename V::T old = V::load(peaks + r), past = V::load(before + r),
                        here = reduce_lanes<A, false>([&](int i) { return V::load(top + (r + i) * W); }),
                        peak = V::max(here, old);
    const typename V::T finite =
        V::where_less(none, peak, peak, V::set(0));  // of an empty row: -inf - -inf would be NaN
    // A block of which a row sees nothing, visited for its neighbours in the tile, leaves the row as it is: to the bit.
    const typename V::T kept = V::where_less(none, past, past, finite);
    const typename V::T wanted = V::where_less(V::load(bound + r), finite, finite, V::load(centre + r));
    const typename V::T chosen = V::where_less(none, here, wanted, kept);
    const typename V::T step = V::sub(past, chosen);
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
  alignas(64) A block_first[L * W], block_second[L * W], *block_mass = top;  // of rows that need a new centre
  uint32_t fresh = 0;
  for (int r = 0; r < m; ++r) {
    A* s = t.score + r * LD;
    const int64_t lane = (at + r) * W;
    A *mass = t.mass + lane, *first = t.first + lane, *second = t.second + lane;
    if (change[r] != 0 && change[r] > neg_inf<A>()) shift_about_centre<A>(change[r], keep[r], mass, first, second, W);
    LaneSums<A> l(V::set(reference[r]));
    // A block is summed by itself: added one by one to a large sum, what is small would be rounded away.
    if (moments) {
      exponentials<E, true>(s, c.begin, c.end, unmasked, l);
      if (reference[r] > bound[r]) {
        fresh |= 1u << r;
        V::store(block_mass + r * W, l.mass);
        V::store(block_first + r * W, l.first);
        V::store(block_second + r * W, l.second);
      } else {
        V::store(second, V::add(V::load(second), l.second));
        V::store(first, V::add(V::load(first), l.first));
        V::store(mass, V::add(V::load(mass), l.mass));
      }
    } else {
      exponentials<E, false>(s, c.begin, c.end, unmasked, l);
      V::store(mass, V::add(V::load(mass), l.mass));
    }
    A* rounded = t.rounded + lane;
    if (Factor<E>::STEP > 1) V::store(rounded, V::fma(V::set(keep[r]), V::load(rounded), l.rounded));
  }
  if (!fresh) return 0;
  alignas(64) A step[L];
  const uint32_t cancelled = centre_on_block<A>(fresh, block_mass, block_first, block_second, step);
  for (int r = 0; r < m; ++r) {
    if (!(fresh >> r & 1)) continue;
    const int64_t lane = (at + r) * W;
    A *mass = t.mass + lane, *first = t.first + lane, *second = t.second + lane;
    const typename V::T from = V::set(reference[r]), to = V::set(reference[r] + step[r]);
    const typename V::T m0 = V::load(mass), f0 = V::load(first), m1 = V::load(block_mass + r * W),
                        f1 = V::load(block_first + r * W);
    typename V::T two = recentre<A>(V::load(second), f0, m0, from, V::set(t.centre[at + r]), to);
    if (!(cancelled >> r & 1)) two = V::add(recentre<A>(V::load(block_second + r * W), f1, m1, from, from, to), two);
    V::store(second, two);
    V::store(first, V::add(f0, f1));
    V::store(mass, V::add(m0, m1));
    t.centre[at + r] = reference[r] + step[r];
    t.base[at + r] = t.peak[at + r];  // -inf while a row has seen nothing: its first key sets it again
  }
  return cancelled;
}

}  // namespace PARTITA_ISA
}  // namespace partita
