// The k best scores of each row and their keys, best first, the lower key of two that tie; k is small.
#include "score_tiles.h"

namespace partita {
namespace PARTITA_ISA {

namespace {

// One row's best so far, in falling order: k scores in base 2, and their keys.
template <class A>
struct Best {
  A* score;
  int64_t* index;

  // Keys come in rising order, so a tie goes behind those that are there.
  void insert(int64_t k, A x, int64_t key) const {
    int64_t at = k - 1;
    for (; at > 0 && score[at - 1] < x; --at) {
      score[at] = score[at - 1];
      index[at] = index[at - 1];
    }
    score[at] = x;
    index[at] = key;
  }
};

// The columns of one row of a tile; gives 0 unless one of its scores is nan or inf.
template <class A>
inline A add_row(const A* s, const VisibleColumns& c, int64_t key, int64_t k, const Best<A>& best) {
  using V = Vec<A>;
  const typename V::T floor = V::set(sizeof(A) == 4 ? A(-1e38) : A(-1e300)), zero = V::set(0);
  typename V::T bad = zero;
  for (int j = c.begin; j < c.end; j += V::W) {
    const typename V::T x = V::load(s + j);
    bad = V::fma(V::max(floor, x), zero, bad);
    if (!V::count_greater(x, V::set(best.score[k - 1]))) continue;
    for (int i = j; i < j + V::W; ++i)
      if (s[i] > best.score[k - 1]) best.insert(k, s[i], key + i);
  }
  return V::reduce_sum(bad);
}

template <class F>
int32_t top_as(const PartitaProblem& p, const PartitaTop& to) {
  using A = Sum<F>;
  const ScoreRule<A> sc = make_score_rule<A>(p);
  const int64_t k = to.k;
  A* scores = static_cast<A*>(to.score);
  return for_row_parts<A, TileWorkspace<F>>(p, [&](const RowPart& part, TileWorkspace<F>& t) {
    const int64_t begin = (part.entry * p.Q + part.begin) * k, end = (part.entry * p.Q + part.end) * k;
    for (int64_t at = begin; at < end; ++at) {
      scores[at] = neg_inf<A>();
      to.index[at] = -1;
    }
    A bad = 0;
    const auto visit = [&](const Tile& tile) {
      for (int r = 0; r < tile.m; ++r) {
        const int64_t at = t.row[tile.at + r].out * k;
        bad += add_row<A>(t.score + r * Block<A>::LD, tile.c, tile.key, k, {scores + at, to.index + at});
      }
    };
    part.for_chunks(
        [&](int64_t a, int64_t n) { visit_tiles<F>(p, sc, part.entry, a, n, t, visit, [](int64_t, int64_t) {}); });
    for (int64_t at = begin; at < end; ++at)
      scores[at] = static_cast<A>(static_cast<double>(scores[at]) * LN2);  // rounds as a peak does
    return bad;
  });
}

}  // namespace

int32_t top(const PartitaProblem& p, const PartitaTop& to) {
  return with_factors(p.dtype, [&](auto f) { return top_as<decltype(f)>(p, to); });
}

}  // namespace PARTITA_ISA
}  // namespace partita
