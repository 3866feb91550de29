// How many keys of each row score within each edge of its largest score. The keys are walked through twice, first for
// the largest, then for the counts: both times with the same operations, so that the largest is within 0 of itself.
#include <limits>

#include "score_tiles.h"

namespace partita {
namespace PARTITA_ISA {

namespace {

// The largest of a row's scores and of what was known; `bad` is 0 unless one of them is nan or inf.
template <class A>
inline A largest(const A* s, const VisibleColumns& c, A known, A& bad) {
  using V = Vec<A>;
  const typename V::T floor = V::set(sizeof(A) == 4 ? A(-1e38) : A(-1e300)), zero = V::set(0);
  typename V::T top = V::set(known), probe = zero;
  for (int j = c.begin; j < c.end; j += V::W) {
    const typename V::T x = V::load(s + j);
    probe = V::fma(V::max(floor, x), zero, probe);
    top = V::max(top, x);
  }
  bad += V::reduce_sum(probe);
  return V::reduce_max(top);
}

// The columns of one row of a tile, counted for each edge: edges rise, so what is outside one was outside the last.
template <class A>
inline void count_row(const A* s, const VisibleColumns& c, A peak, const A* edge, int64_t edges, int64_t* to) {
  using V = Vec<A>;
  const typename V::T high = V::set(peak), none = V::set(neg_inf<A>());
  for (int j = c.begin; j < c.end; j += V::W) {
    const typename V::T x = V::load(s + j), gap = V::sub(high, x);  // +inf where x is invisible
    for (int64_t e = edges - 1; e >= 0; --e) {
      const bool all = edge[e] == std::numeric_limits<A>::infinity();
      const int inside = all ? V::count_greater(x, none) : V::W - V::count_greater(gap, V::set(edge[e]));
      if (!inside) break;
      to[e] += inside;
    }
  }
}

template <class F>
struct GapWorkspace : TileWorkspace<F> {
  using A = Sum<F>;
  A* peak;

  void lay_out(Arena& c, int64_t rows, int64_t D) {
    TileWorkspace<F>::lay_out(c, rows, D);
    peak = c.take<A>(rows);
  }
};

template <class F>
int32_t gaps_as(const PartitaProblem& p, const PartitaGaps& g) {
  using A = Sum<F>;
  const ScoreRule<A> sc = make_score_rule<A>(p, 1.0);
  const A* edge = static_cast<const A*>(g.edge);
  const auto leave = [](int64_t, int64_t) {};
  return for_row_parts<A, GapWorkspace<F>>(p, [&](const RowPart& part, GapWorkspace<F>& t) {
    A bad = 0;
    const auto find = [&](const Tile& tile) {
      for (int r = 0; r < tile.m; ++r) {
        A& peak = t.peak[tile.at + r];
        peak = largest<A>(t.score + r * Block<A>::LD, tile.c, peak, bad);
      }
    };
    const auto add = [&](const Tile& tile) {
      for (int r = 0; r < tile.m; ++r) {
        const A peak = t.peak[tile.at + r];
        int64_t* to = g.count + t.row[tile.at + r].out * g.edges;
        if (peak > neg_inf<A>()) count_row<A>(t.score + r * Block<A>::LD, tile.c, peak, edge, g.edges, to);
      }
    };
    part.for_chunks([&](int64_t a, int64_t n) {
      for (int64_t r = 0; r < n; ++r) t.peak[r] = neg_inf<A>();
      std::memset(g.count + (part.entry * p.Q + a) * g.edges, 0, sizeof(int64_t) * static_cast<size_t>(n * g.edges));
      visit_tiles<F>(p, sc, part.entry, a, n, t, find, leave);
      visit_tiles<F>(p, sc, part.entry, a, n, t, add, leave);
    });
    return bad;
  });
}

}  // namespace

int32_t gaps(const PartitaProblem& p, const PartitaGaps& g) {
  return with_factors(p.dtype, [&](auto f) { return gaps_as<decltype(f)>(p, g); });
}

}  // namespace PARTITA_ISA
}  // namespace partita
