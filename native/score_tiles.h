// The scores of some rows of one entry against all keys they see, register tile by register tile: for what needs the
// scores themselves, once more, and no products after them.
#pragma once
#include <cstdlib>

#include "kernels.h"
#include "scores.h"

namespace partita {
namespace PARTITA_ISA {

constexpr int64_t ROW_CHUNK = 1024;  // rows packed at a time

template <class F>
struct TileWorkspace : PackedRows<F> {  // a thread's working memory
  using A = Sum<F>;
  F* panel;
  A *score, *temp;

  void lay_out(Arena& c, int64_t rows, int64_t D) {
    constexpr int KEYS = Block<A>::KEYS;
    PackedRows<F>::lay_out(c, rows, D, D);
    score = c.take<A>(Shape<F>::ROWS * Block<A>::LD);
    temp = c.take<A>(KEYS);
    panel = c.take<F>(KEYS * steps<F>(D));
  }
};

// Rows [at, at + m) of the chunk against columns [c.begin, c.end) of the key block that begins at `key`; tile number i.
struct Tile {
  int64_t i, at, key;
  int m;
  VisibleColumns c;
};

// Rows [first, first + n) of an entry, at most a chunk of them. `visit` gets each tile that sees something, its scores
// in t.score; `leave` the first key of a key block and its end, when all tiles have seen it.
template <class F, class Visit, class Leave>
inline void visit_tiles(const PartitaProblem& p, const ScoreRule<Sum<F>>& sc, int64_t entry, int64_t first, int64_t n,
                        TileWorkspace<F>& t, const Visit& visit, const Leave& leave) {
  using A = Sum<F>;
  constexpr int KEYS = Block<A>::KEYS, P = Shape<F>::PANEL, L = Shape<F>::LANES, R = Shape<F>::ROWS, LD = Block<A>::LD;
  const int64_t tiles = (n + R - 1) / R, depth = steps<F>(p.D);
  KeySpan seen;
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t a = n * i / tiles, b = n * (i + 1) / tiles;
    for (int64_t r = a; r < b; ++r) t.row[r] = make_row(p, entry, first + r);
    pack_queries<F>(sc, t, i, a, b);
    seen.add(t.span[i]);
  }
  const RowView keys = view_of(p.key, p.dtype, entry);
  for (int64_t key = seen.lo / KEYS * KEYS; key < seen.hi; key += KEYS) {
    const int64_t end = key + KEYS < p.K ? key + KEYS : p.K, used = end < seen.hi ? end : seen.hi;
    pack_panels<F>(keys, p.K, p.D, key / P, (used + P - 1) / P, t.panel, t.row_temp);
    for (int64_t i = 0; i < tiles; ++i) {
      Tile tile;
      tile.i = i;
      tile.at = n * i / tiles;
      tile.key = key;
      tile.m = static_cast<int>(n * (i + 1) / tiles - tile.at);
      ColumnRange runs[Block<A>::RUNS];
      const Row* rows = t.row + tile.at;
      tile.c = visible_columns<A>(p, sc.masked, t.span[i], rows, tile.m, key, end, runs);
      for (int u = 0; u < tile.c.runs; ++u)
        score<F, LD>(tile.m, depth, t.query + i * depth * L, t.panel + runs[u].begin * depth,
                     (runs[u].end - runs[u].begin) / P, t.score + runs[u].begin, t.factor + tile.at);
      if (!tile.c.runs) continue;
      if (!sc.plain || !tile.c.whole)
        bias_and_mask<A, LD>(sc, rows, tile.m, key, tile.c, runs, t.score, t.temp, nullptr);
      visit(tile);
    }
    leave(key, end);
  }
}

// How many parts the rows of each entry are cut into, so that every thread has a few.
template <class A>
inline int64_t row_cuts(const PartitaProblem& p) {
  const int64_t threads = p.threads > 1 ? p.threads : 1, few = (4 * threads + p.B - 1) / p.B,
                most = p.Q / (4 * Shape<A>::ROWS);
  return few < most ? few : most > 1 ? most : 1;
}

// Rows [begin, end) of an entry; part number i of all.
struct RowPart {
  int64_t i, entry, begin, end;

  // `work` gets the first row of each chunk, and how many there are.
  template <class Work>
  void for_chunks(const Work& work) const {
    for (int64_t a = begin; a < end; a += ROW_CHUNK) work(a, end - a < ROW_CHUNK ? end - a : ROW_CHUNK);
  }
};

// All parts of the rows of all entries, by all threads. `work` gets a part and the thread's workspace, and answers with
// a number that is 0 unless it met a nan or inf.
template <class A, class Workspace, class Work>
inline int32_t for_row_parts(const PartitaProblem& p, const Work& work) {
  const int64_t cuts = row_cuts<A>(p), rows = p.Q < ROW_CHUNK ? p.Q : ROW_CHUNK;
  int32_t failed = 0, not_finite = 0;
#pragma omp parallel num_threads(p.threads) reduction(| : failed, not_finite)
  {
    FlushDenormals flush;
    Workspace t;
    Arena count{nullptr};
    t.lay_out(count, rows, p.D);
    Arena arena{static_cast<char*>(thread_workspace(count.used + 64))};
    failed = !arena.base;
    if (arena.base) t.lay_out(arena, rows, p.D);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = p.B * cuts - 1; i >= 0; --i) {  // where rows see what came before them, the last see most
      if (failed) continue;
      const A bad = work(RowPart{i, i / cuts, p.Q * (i % cuts) / cuts, p.Q * (i % cuts + 1) / cuts}, t);
      not_finite |= bad != 0;
    }
  }
  return failed ? NO_MEMORY : not_finite ? NOT_FINITE : FINITE;
}

}  // namespace PARTITA_ISA
}  // namespace partita
