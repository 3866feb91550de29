// What each key receives from the rows: column sums of the weights, from scores made once more.
//
//   sum_j = sum_i weight_i 2^(s_ij - peak_i)      over the rows that see key j
//
// A part of the rows has sums of its own over all keys; they are added in the order of the parts, so that a result does
// not depend on who was first.
#include "score_tiles.h"

namespace partita {
namespace PARTITA_ISA {

namespace {

constexpr int64_t TILES = 16;  // whose sums are added up before they join the others: a longer chain loses digits

template <class F>
struct ReceivedWorkspace : TileWorkspace<F> {
  using A = Sum<F>;
  A *peak, *weight, *sums;

  void lay_out(Arena& c, int64_t rows, int64_t D) {
    TileWorkspace<F>::lay_out(c, rows, D);
    peak = c.take<A>(rows);
    weight = c.take<A>(rows);
    sums = c.take<A>(Block<A>::KEYS);
  }
};

// weight_r 2^(s_rj - peak_r) of the m rows of a tile, added to the sums of columns [c.begin, c.end).
template <class A>
inline void add_tile(const A* s, const A* peak, const A* weight, int m, const VisibleColumns& c, A* sums) {
  using V = Vec<A>;
  constexpr int LD = Block<A>::LD;
  for (int j = c.begin; j < c.end; j += V::W) {
    typename V::T total = V::set(0);
    for (int r = 0; r < m; ++r) {
      const typename V::T d = bounded<A>(V::sub(V::load(s + r * LD + j), V::set(peak[r])));
      total = V::fma(exp2_bounded<A>(d), V::set(weight[r]), total);
    }
    V::store(sums + j, V::add(V::load(sums + j), total));
  }
}

// Rows [first, first + n) of an entry, at most a chunk of them, against all keys they see.
template <class F>
void add_rows(const PartitaProblem& p, const ScoreRule<Sum<F>>& sc, const PartitaColumns& c, int64_t entry,
              int64_t first, int64_t n, ReceivedWorkspace<F>& t, Sum<F>* to) {
  using A = Sum<F>;
  for (int64_t r = 0; r < n; ++r) {
    const int64_t out = entry * p.Q + first + r;
    const bool empty = c.peak[out] == neg_inf<double>();  // its weight means nothing
    t.peak[r] = empty ? A(0) : static_cast<A>(c.peak[out] * LOG2E);
    t.weight[r] = empty ? A(0) : static_cast<const A*>(c.weight)[out];
  }
  std::memset(t.sums, 0, sizeof(A) * Block<A>::KEYS);
  const auto flush = [&](int64_t key, int64_t end) {
    for (int64_t j = 0; j < end - key; ++j) to[key + j] += t.sums[j];
    std::memset(t.sums, 0, sizeof(A) * Block<A>::KEYS);
  };
  const auto visit = [&](const Tile& tile) {
    if (tile.i && tile.i % TILES == 0)
      flush(tile.key, tile.key + Block<A>::KEYS < p.K ? tile.key + Block<A>::KEYS : p.K);
    add_tile<A>(t.score, t.peak + tile.at, t.weight + tile.at, tile.m, tile.c, t.sums);
  };
  visit_tiles<F>(p, sc, entry, first, n, t, visit, flush);
}

// The parts' sums over all keys, added into the slots of their entries, a range of keys at a time.
template <class A>
int32_t add_parts(const PartitaProblem& p, const PartitaColumns& c, int64_t cuts, const A* parts) {
  constexpr int64_t STEP = 1024;
  A* sums = static_cast<A*>(c.sums);
  int32_t not_finite = 0;
#pragma omp parallel num_threads(p.threads) reduction(| : not_finite)
  {
    FlushDenormals flush;
#pragma omp for schedule(static)
    for (int64_t j = 0; j < p.K; j += STEP) {
      const int64_t end = j + STEP < p.K ? j + STEP : p.K;
      for (int64_t s = 0; s < c.slots; ++s)
        std::memset(sums + s * p.K + j, 0, sizeof(A) * static_cast<size_t>(end - j));
      for (int64_t i = 0; i < p.B * cuts; ++i) {
        A* to = sums + c.slot[i / cuts] * p.K;
        for (int64_t k = j; k < end; ++k) to[k] += parts[i * p.K + k];
      }
      A probe = 0;
      for (int64_t s = 0; s < c.slots; ++s)
        for (int64_t k = j; k < end; ++k) probe += sums[s * p.K + k] * 0;
      not_finite |= probe != 0;
    }
  }
  return not_finite ? NOT_FINITE : FINITE;
}

template <class F>
int32_t received_as(const PartitaProblem& p, const PartitaColumns& c) {
  using A = Sum<F>;
  const ScoreRule<A> sc = make_score_rule<A>(p);
  const int64_t cuts = row_cuts<A>(p);
  const SharedWorkspace shared(sizeof(A) * static_cast<size_t>(p.B * cuts * p.K) + 64);
  A* parts = static_cast<A*>(shared.data);
  if (!parts) return NO_MEMORY;
  const int32_t made = for_row_parts<A, ReceivedWorkspace<F>>(p, [&](const RowPart& part, ReceivedWorkspace<F>& t) {
    A* to = parts + part.i * p.K;
    std::memset(to, 0, sizeof(A) * static_cast<size_t>(p.K));
    part.for_chunks([&](int64_t a, int64_t n) { add_rows<F>(p, sc, c, part.entry, a, n, t, to); });
    return A(0);  // the sums are looked at when they are complete
  });
  return made == NO_MEMORY ? made : add_parts<A>(p, c, cuts, parts);
}

}  // namespace

int32_t received(const PartitaProblem& p, const PartitaColumns& c) {
  return with_factors(p.dtype, [&](auto f) { return received_as<decltype(f)>(p, c); });
}

}  // namespace PARTITA_ISA
}  // namespace partita
