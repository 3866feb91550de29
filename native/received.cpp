// What each key receives from the rows: the other margin of the weights, from scores made once more.
//
//   sum_j = sum_i weight_i 2^(s_ij - peak_i)      over the rows that see key j
//
// A task is a range of rows of one entry and has sums of its own over all keys; they are added in the order of the
// tasks, so that a result does not depend on who was first.
#include <cstdlib>

#include "kernels.h"
#include "scores.h"

namespace partita {
namespace PARTITA_ISA {

namespace {

constexpr int64_t CHUNK = 1024;  // rows packed at a time
constexpr int64_t TILES = 16;    // whose sums are added up before they join the others: a longer chain loses digits

template <class A>
struct ReceivedWorkspace {  // a thread's working memory
  Row* row;
  KeySpan* span;  // of each tile
  A *peak, *weight, *query, *score, *temp, *panel, *sums;

  void lay_out(Arena& c, int64_t rows, int64_t D) {
    constexpr int W = Vec<A>::W, R = Shape<A>::ROWS, L = Shape<A>::LANES, KEYS = Block<A>::KEYS;
    row = c.take<Row>(rows);
    span = c.take<KeySpan>(rows / R + 2);
    peak = c.take<A>(rows);
    weight = c.take<A>(rows);
    query = c.take<A>((rows / R + 2) * D * L);
    score = c.take<A>(R * Block<A>::LD);
    temp = c.take<A>(L * D + 2 * KEYS + W);
    panel = c.take<A>(KEYS * D);
    sums = c.take<A>(KEYS);
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
template <class A>
void add_rows(const PartitaProblem& p, const ScoreRule<A>& sc, const PartitaColumns& c, int64_t entry, int64_t first,
              int64_t n, ReceivedWorkspace<A>& t, A* to) {
  constexpr int KEYS = Block<A>::KEYS, P = Shape<A>::PANEL, L = Shape<A>::LANES, R = Shape<A>::ROWS, LD = Block<A>::LD;
  const int64_t tiles = (n + R - 1) / R;
  KeySpan seen;
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t a = n * i / tiles, b = n * (i + 1) / tiles;
    for (int64_t r = a; r < b; ++r) {
      const Row row = t.row[r] = make_row(p, entry, first + r);
      const double peak = c.peak[row.out];
      const bool empty = peak == neg_inf<double>();  // its weight means nothing
      t.peak[r] = empty ? A(0) : static_cast<A>(peak * LOG2E);
      t.weight[r] = empty ? A(0) : static_cast<const A*>(c.weight)[row.out];
    }
    t.span[i] = key_span(t.row + a, b - a);
    seen.add(t.span[i]);
    pack_queries<A>(sc, t.row + a, static_cast<int>(b - a), t.temp, t.query + i * p.D * L);
  }
  const RowView keys{
      static_cast<const char*>(p.key.data) + p.key.offset[entry] * static_cast<int64_t>(dtype_size(p.dtype)), p.key.row,
      p.dtype};
  for (int64_t key = seen.lo / KEYS * KEYS; key < seen.hi; key += KEYS) {
    const int64_t end = key + KEYS < p.K ? key + KEYS : p.K, used = end < seen.hi ? end : seen.hi;
    pack_panels<A>(keys, p.K, p.D, key / P, (used + P - 1) / P, t.panel, t.temp);
    for (int64_t from = 0; from < tiles; from += TILES) {
      const int64_t until = from + TILES < tiles ? from + TILES : tiles;
      std::memset(t.sums, 0, sizeof(A) * KEYS);
      for (int64_t i = from; i < until; ++i) {
        const int64_t at = n * i / tiles;
        const int m = static_cast<int>(n * (i + 1) / tiles - at);
        ColumnRange runs[Block<A>::RUNS];
        const VisibleColumns v = visible_columns<A>(p, sc.masked, t.span[i], t.row + at, m, key, end, runs);
        for (int u = 0; u < v.runs; ++u)
          score<A, LD>(m, p.D, t.query + i * p.D * L, t.panel + runs[u].begin * p.D, (runs[u].end - runs[u].begin) / P,
                       t.score + runs[u].begin);
        if (!v.runs) continue;
        if (!sc.plain || !v.whole) bias_and_mask<A, LD>(sc, t.row + at, m, key, v, runs, t.score, t.temp, nullptr);
        add_tile<A>(t.score, t.peak + at, t.weight + at, m, v, t.sums);
      }
      for (int64_t j = 0; j < end - key; ++j) to[key + j] += t.sums[j];
    }
  }
}

template <class A>
int32_t received_as(const PartitaProblem& p, const PartitaColumns& c) {
  constexpr int R = Shape<A>::ROWS;
  const ScoreRule<A> sc = make_score_rule<A>(p);
  const int64_t threads = p.threads > 1 ? p.threads : 1, few = (4 * threads + p.B - 1) / p.B, most = p.Q / (4 * R);
  const int64_t cuts = few < most ? few : most > 1 ? most : 1, tasks = p.B * cuts;
  const SharedWorkspace shared(sizeof(A) * static_cast<size_t>(tasks * p.K) + 64);
  A* parts = static_cast<A*>(shared.data);
  if (!parts) return NO_MEMORY;
  const int64_t rows = p.Q < CHUNK ? p.Q : CHUNK;
  int32_t failed = 0, not_finite = 0;
#pragma omp parallel num_threads(static_cast<int>(threads)) reduction(| : failed, not_finite)
  {
    FlushDenormals flush;
    ReceivedWorkspace<A> t;
    Arena count{nullptr};
    t.lay_out(count, rows, p.D);
    Arena arena{static_cast<char*>(thread_workspace(count.used + 64))};
    failed = !arena.base;
    if (arena.base) t.lay_out(arena, rows, p.D);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = tasks - 1; i >= 0; --i) {  // where rows see what came before them, the last see most
      if (failed) continue;
      const int64_t begin = p.Q * (i % cuts) / cuts, end = p.Q * (i % cuts + 1) / cuts;
      A* to = parts + i * p.K;
      std::memset(to, 0, sizeof(A) * static_cast<size_t>(p.K));
      for (int64_t a = begin; a < end; a += CHUNK)
        add_rows<A>(p, sc, c, i / cuts, a, end - a < CHUNK ? end - a : CHUNK, t, to);
    }
    constexpr int64_t STEP = 1024;
#pragma omp for schedule(static)
    for (int64_t j = 0; j < p.K; j += STEP) {
      if (failed) continue;
      const int64_t end = j + STEP < p.K ? j + STEP : p.K;
      A* sums = static_cast<A*>(c.sums);
      for (int64_t s = 0; s < c.slots; ++s)
        std::memset(sums + s * p.K + j, 0, sizeof(A) * static_cast<size_t>(end - j));
      for (int64_t i = 0; i < tasks; ++i) {
        A* to = sums + c.slot[i / cuts] * p.K;
        for (int64_t k = j; k < end; ++k) to[k] += parts[i * p.K + k];
      }
      A probe = 0;
      for (int64_t s = 0; s < c.slots; ++s)
        for (int64_t k = j; k < end; ++k) probe += sums[s * p.K + k] * 0;
      not_finite |= probe != 0;
    }
  }
  return failed ? NO_MEMORY : not_finite ? NOT_FINITE : FINITE;
}

}  // namespace

int32_t received(const PartitaProblem& p, const PartitaColumns& c) {
  return p.dtype == PARTITA_FLOAT64 ? received_as<double>(p, c) : received_as<float>(p, c);
}

}  // namespace PARTITA_ISA
}  // namespace partita
